//! A way to another host's memory: a connected queue pair, and its completions.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};

use super::Rdma;
use super::choice::Kind;
use super::verbs::{
    self, Channel, Completion, Gid, LENT, Owned, Pair, PairAttributes, Path, Queue, set, state,
};
use crate::clock::Clock;
use crate::net::wait_readable;
use crate::rng::Rng;

/// A packet that is not acknowledged is sent again after 4.096 us times two to this power (0.5 s), so often.
const TIMEOUT: u8 = 17;
const RETRIES: u8 = 7;
/// Reads on their way at once.
const READS: u8 = 1;
/// Bytes of an endpoint.
pub(in crate::net) const ENDPOINT: usize = 32;

/// Where one end of a way is, for the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Endpoint {
    /// Of its queue pair.
    number: u32,
    /// Of the first packet that it says.
    first: u32,
    mtu: u32,
    lid: u16,
    is_global: bool,
    gid: Gid,
}

impl Endpoint {
    fn encode(&self) -> [u8; ENDPOINT] {
        let mut bytes = [0; ENDPOINT];
        bytes[..4].copy_from_slice(&self.number.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.first.to_le_bytes());
        bytes[8] = self.mtu as u8;
        bytes[9] = u8::from(self.is_global);
        bytes[10..12].copy_from_slice(&self.lid.to_le_bytes());
        bytes[16..].copy_from_slice(&self.gid.0);
        bytes
    }

    /// None of one that has no way.
    fn decode(bytes: &[u8; ENDPOINT]) -> Option<Self> {
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut gid = Gid::default();
        gid.0.copy_from_slice(&bytes[16..]);
        let lid = u16::from_le_bytes([bytes[10], bytes[11]]);
        let endpoint = Self {
            number: number(0),
            first: number(4),
            mtu: u32::from(bytes[8]),
            lid,
            is_global: bytes[9] != 0,
            gid,
        };
        (endpoint.number != 0).then_some(endpoint)
    }
}

/// Bytes of another host's memory that it lends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::net) struct Place {
    pub(in crate::net) address: u64,
    pub(in crate::net) key: u32,
}

/// One end of a way that is not made yet.
#[derive(Debug)]
pub(in crate::net) struct Offer {
    way: Way,
    own: Endpoint,
}

/// A way to another host's memory.
#[derive(Debug)]
pub(in crate::net) struct Way {
    // In this order: each is made of the next.
    pair: Owned<Pair>,
    queue: Owned<Queue>,
    channel: Owned<Channel>,
    rdma: Arc<Rdma>,
}

impl Offer {
    /// One end, of this host.
    ///
    /// # Errors
    /// `Unavailable` where the card has no room for it.
    pub(in crate::net) fn new(rdma: &Arc<Rdma>) -> Result<Self> {
        let Rdma { verbs, context, domain, port, .. } = &**rdma;
        let channel = verbs.make_channel(context)?;
        let queue = verbs.make_queue(context, &channel, 16)?;
        let pair = verbs.make_pair(domain, &queue)?;
        let initial = PairAttributes {
            state: state::INIT,
            port: port.number,
            access: LENT as u32,
            ..PairAttributes::default()
        };
        let kinds = set::STATE | set::PARTITION | set::PORT | set::ACCESS;
        verbs.change_pair("prepare a queue pair", &pair, initial, kinds)?;
        let own = Endpoint {
            number: pair.number(),
            first: Rng::system().u64() as u32 & 0xff_ffff,
            mtu: port.mtu,
            lid: port.lid,
            is_global: port.kind == Kind::Ethernet,
            gid: port.gid,
        };
        Ok(Self { way: Way { pair, queue, channel, rdma: rdma.clone() }, own })
    }

    /// What the other end has to know of it.
    pub(in crate::net) fn endpoint(&self) -> [u8; ENDPOINT] {
        self.own.encode()
    }

    /// The way, once the other end has told where it is; none where that has none.
    ///
    /// # Errors
    /// `Unavailable` where there is no way there.
    pub(in crate::net) fn connect(self, other: &[u8; ENDPOINT]) -> Result<Option<Way>> {
        let Self { way, own } = self;
        let Some(other) = Endpoint::decode(other) else { return Ok(None) };
        let port = &way.rdma.port;
        let path = Path {
            gid: other.gid,
            own_gid: port.index,
            hops: 64,
            lid: other.lid,
            // On InfiniBand, too, where it is in another subnet.
            is_global: u8::from(own.is_global || other.lid == 0),
            port: port.number,
            ..Path::default()
        };
        let hearing = PairAttributes {
            state: state::READY_TO_RECEIVE,
            mtu: own.mtu.min(other.mtu),
            other: other.number,
            first_heard: other.first,
            reads_of_other: READS,
            not_ready_timer: 12,
            path,
            ..PairAttributes::default()
        };
        let kinds = set::STATE | set::PATH | set::MTU | set::OTHER | set::FIRST_HEARD;
        let kinds = kinds | set::READS_OF_OTHER | set::NOT_READY_TIMER;
        way.rdma.verbs.change_pair("find the other host", &way.pair, hearing, kinds)?;
        let saying = PairAttributes {
            state: state::READY_TO_SEND,
            first_said: own.first,
            timeout: TIMEOUT,
            retries: RETRIES,
            retries_not_ready: RETRIES,
            reads: READS,
            ..PairAttributes::default()
        };
        let kinds = set::STATE | set::FIRST_SAID | set::TIMEOUT | set::RETRIES;
        let kinds = kinds | set::RETRIES_NOT_READY | set::READS;
        way.rdma.verbs.change_pair("connect to the other host", &way.pair, saying, kinds)?;
        Ok(Some(way))
    }
}

impl Way {
    /// Where these bytes lie for the other end, if they are lent.
    pub(in crate::net) fn place(&self, bytes: &[u8]) -> Option<Place> {
        let known = self.rdma.find(bytes)?;
        Some(Place { address: known.address as u64, key: known.remote_key })
    }

    /// Reads bytes of the other end's memory into `memory`, which is lent, within `patience`: cards give up by themselves after some
    /// seconds. A way that failed is given back to nobody: the card is
    /// done with the memory then.
    ///
    /// # Errors
    /// `Unavailable` where the other end is not reached or does not lend them (any more), or this end does not lend `memory`.
    pub(in crate::net) fn read(self, place: Place, memory: &mut [u8], patience: Duration) -> Result<Self> {
        let own = self.rdma.find(memory);
        let own =
            own.ok_or_else(|| Error::new(ErrorKind::Unavailable, "memory that is not lent is read into"))?;
        let length = u32::try_from(memory.len()).map_err(|_| Error::invalid("a read of 4 GiB or more"))?;
        let into = verbs::Place { address: own.address as u64, length, key: own.local_key };
        // SAFETY: `memory` is borrowed until this returns: after its completion, or after the pair was ended, as `self` is dropped
        // where it fails.
        unsafe { self.rdma.verbs.read(&self.pair, into, place.address, place.key) }?;
        let completion = self.wait(patience)?;
        match completion.status {
            0 => {
                self.rdma.bytes_read.fetch_add(memory.len() as u64, Ordering::Relaxed);
                Ok(self)
            }
            _ => {
                let status = self.rdma.verbs.status(&completion);
                Err(Error::new(ErrorKind::Unavailable, format!("a read of another host's memory: {status}")))
            }
        }
    }

    /// Waits for the next completion.
    fn wait(&self, patience: Duration) -> Result<Completion> {
        let (verbs, clock) = (&self.rdma.verbs, Clock::system());
        let deadline = clock.now() + patience;
        loop {
            if let Some(completion) = verbs.poll(&self.queue)? {
                return Ok(completion);
            }
            verbs.request_notice(&self.queue)?;
            // What was completed before the request gives no notice.
            if let Some(completion) = verbs.poll(&self.queue)? {
                return Ok(completion);
            }
            let left = deadline.since(clock.now());
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "a read of another host's memory takes too long",
                ));
            }
            // SAFETY: the channel has its descriptor for as long as it lives.
            let fd = unsafe { BorrowedFd::borrow_raw(self.channel.fd()) };
            if !wait_readable(&[fd], left)?.is_empty() {
                verbs.take_notice(&self.channel)?;
            }
        }
    }
}
