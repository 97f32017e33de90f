//! Bytes read out of another host's memory by its network card (RDMA), over InfiniBand or RoCE.
//!
//! Processes lend memory to each other ([`Rdma::lend`]); one that knows where something lies there reads it into memory of its own
//! ([`Way::read`]) without that process doing anything. What lies where, and when it may be changed again, they tell each other over a
//! connection that they have anyway; that is also how a way is made. A host without a card, or without the library, has none.
#![allow(unsafe_code)]

mod choice;
mod verbs;
mod way;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use choice::Port;
pub use choice::Wanted;
use verbs::{Context, Domain, Owned, Region, Verbs};
pub(super) use way::{ENDPOINT, Offer, Place, Way};

/// A port of a network card of this host, and the memory that is lent through it.
#[derive(Debug)]
pub struct Rdma {
    // In this order: each is made of the next.
    lent: Mutex<Vec<Lent>>,
    domain: Owned<Domain>,
    context: Owned<Context>,
    verbs: Verbs,
    name: String,
    port: Port,
    numbers: AtomicU64,
    bytes_read: AtomicU64,
}

/// Memory that is lent.
#[derive(Debug)]
struct Lent {
    lending: u64,
    start: usize,
    length: usize,
    region: Owned<Region>,
}

/// Bytes of memory that is lent, as this host's card knows them.
#[derive(Debug, Clone, Copy)]
struct Known {
    address: usize,
    local_key: u32,
    remote_key: u32,
}

/// Memory that is lent until this is dropped.
#[derive(Debug)]
pub struct Lending<'m> {
    rdma: Arc<Rdma>,
    number: u64,
    _memory: std::marker::PhantomData<&'m ()>,
}

/// The ports of a host that are wanted and up.
struct Survey {
    // In this order: each is made of the next.
    devices: Vec<(String, Owned<Context>)>,
    verbs: Verbs,
    /// The place of each one's device, and the port.
    ports: Vec<(usize, Port)>,
}

impl Survey {
    fn new(wanted: &Wanted) -> Result<Self> {
        let verbs = Verbs::load().map_err(|error| {
            error.with_hint("install libibverbs1 and ibverbs-providers, or set FOREBAY_RDMA=off")
        })?;
        let devices = verbs.open_all();
        let mut ports = Vec::new();
        for (at, (name, context)) in devices.iter().enumerate() {
            let found = (1..=2).filter_map(|port| choice::look(&verbs, name, context, port));
            ports.extend(found.filter_map(|port| Some((at, wanted.choose(name, port)?))));
        }
        if ports.is_empty() && matches!(wanted, Wanted::Named(_)) {
            let there: Vec<&str> = devices.iter().map(|(name, _)| name.as_str()).collect();
            let fact = format!("no port that FOREBAY_RDMA={wanted} names is up; devices here: {there:?}");
            return Err(Error::new(ErrorKind::Unavailable, fact).with_hint("see `rdma link`"));
        }
        Ok(Self { devices, verbs, ports })
    }
}

impl Rdma {
    /// The ports of this host that are wanted and up, for people.
    ///
    /// # Errors
    /// `Unavailable` where some are wanted by name and none of these is up; `Unsupported` where the library is missing.
    pub fn ports(wanted: &Wanted) -> Result<Vec<String>> {
        let survey = Survey::new(wanted)?;
        Ok(survey.ports.iter().map(|(at, port)| port.of(&survey.devices[*at].0)).collect())
    }

    /// One of the ports that are wanted and up: of several the one whose turn `number` is, so that the ranks of a host use all
    /// of its cards. None where none is wanted, or this host has none.
    ///
    /// # Errors
    /// As [`Self::ports`], where some are wanted by name.
    pub fn open(wanted: &Wanted, number: usize) -> Result<Option<Arc<Self>>> {
        if *wanted == Wanted::None {
            return Ok(None);
        }
        let survey = Survey::new(wanted);
        if *wanted == Wanted::Any && survey.is_err() {
            return Ok(None);
        }
        let Survey { devices, verbs, mut ports } = survey?;
        if ports.is_empty() {
            return Ok(None);
        }
        let (at, port) = ports.swap_remove(number % ports.len());
        let chosen = devices.into_iter().nth(at).ok_or_else(|| Error::bug("a device that is not there"))?;
        let (name, context) = chosen;
        let domain = verbs.make_domain(&context)?;
        let (lent, numbers, bytes_read) = Default::default();
        Ok(Some(Arc::new(Self { lent, domain, context, verbs, name, port, numbers, bytes_read })))
    }

    /// Lends `memory`: ways of this port may read into it, and other hosts out of it.
    ///
    /// # Errors
    /// `Unavailable` where the card takes no more, or the process may lock no more memory.
    pub fn lend<'m>(self: &Arc<Self>, memory: &[&'m mut [u8]]) -> Result<Lending<'m>> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let lending = Lending { rdma: self.clone(), number, _memory: std::marker::PhantomData };
        for piece in memory.iter().filter(|piece| !piece.is_empty()) {
            let (start, length) = (piece.as_ptr() as usize, piece.len());
            // SAFETY: the memory is borrowed for as long as the lending lives, which ends the registration. What is read into it
            // is read by a way that has it borrowed.
            let region = unsafe { self.verbs.register(&self.domain, start, length) };
            let region = region.map_err(|error| {
                error.with_hint(
                    "lift the limit of locked memory (`ulimit -l unlimited`, LimitMEMLOCK=infinity)",
                )
            })?;
            self.lent.lock().push(Lent { lending: number, start, length, region });
        }
        Ok(lending)
    }

    /// Bytes that were read out of other processes' memory so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// How the card knows these bytes, if they are lent.
    fn find(&self, bytes: &[u8]) -> Option<Known> {
        let address = bytes.as_ptr() as usize;
        let lent = self.lent.lock();
        let holds = |lent: &&Lent| lent.start <= address && address + bytes.len() <= lent.start + lent.length;
        let (local_key, remote_key) = lent.iter().find(holds)?.region.keys();
        Some(Known { address, local_key, remote_key })
    }
}

impl std::fmt::Display for Rdma {
    /// For people: device, port and kind of link.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.port.of(&self.name))
    }
}

impl Drop for Lending<'_> {
    fn drop(&mut self) {
        self.rdma.lent.lock().retain(|lent| lent.lending != self.number);
    }
}
