//! What ranks of other hosts have this host hold.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::mem::{self, SharedMemory};
use forebay_io::net::{BulkReceiver, Door, FdStream, Message, Rdma, wait_readable};
use forebay_io::rng::Rng;
use parking_lot::Mutex;

use super::super::inspect::{expect_no_gaps, slices_of};
use super::super::pace::Pace;
use super::{Answer, Offer, PATIENCE, VERSION, parse, say};
use crate::agent::Seal;
use crate::arena::{Held, HeldStep, LEFT, populate_copy};

/// Agents that bring copies at once at most: there is one for each rank of another host.
const MAX_VISITORS: usize = 64;
/// The longest that nothing happens before the door is looked at.
const TICK: Duration = Duration::from_secs(3600);
/// What memory for a copy is a multiple of: a huge page.
const ALIGNMENT: usize = 2 << 20;

/// A part of a step of another host's rank, in memory that holds nothing else, from its first byte on.
#[derive(Debug, Clone)]
pub(crate) struct Replica {
    pub(crate) held: Held,
    pub(crate) memory: Arc<SharedMemory>,
    /// Whether others may be reading it: then its memory is not written again.
    is_shared: bool,
}

/// Those that are whole, the oldest first.
#[derive(Default)]
struct Kept {
    replicas: Vec<Replica>,
    /// Nothing more is kept.
    is_over: bool,
    /// Those who bring some.
    visitors: Vec<FdStream>,
}

/// What is kept, to be read.
#[derive(Clone)]
pub(crate) struct Shelf(Arc<Mutex<Kept>>);

impl Shelf {
    /// The parts of a step.
    pub(crate) fn parts(&self, step: &HeldStep) -> Vec<Replica> {
        let kept = self.0.lock();
        kept.replicas.iter().filter(|replica| replica.held.name() == *step).cloned().collect()
    }
}

/// Keeps copies until it is dropped, for whoever knows the secret.
pub(crate) struct Keeper {
    kept: Arc<Mutex<Kept>>,
    port: u16,
    secret: String,
    /// Its end ends the thread.
    stop: FdStream,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Opens a port. Bytes come by the card, if there is one.
    pub(crate) fn open(pace: &Arc<Pace>, rdma: Option<Arc<Rdma>>) -> Result<Self> {
        let secret = secret();
        let door = Door::open(secret.clone())?;
        let port = door.port()?;
        let (stop, end) = FdStream::pair()?;
        let kept = Arc::<Mutex<Kept>>::default();
        let (of_thread, pace) = (kept.clone(), pace.clone());
        let run = move || {
            pace.join();
            if let Err(error) = welcome(&door, &end, &of_thread, (&pace, rdma.as_ref())) {
                tracing::warn!(%error, "no more copies of other hosts' steps are taken");
            }
        };
        let thread = std::thread::Builder::new().name("forebay-keeper".into()).spawn(run)?;
        Ok(Self { kept, port, secret, stop, thread: Some(thread) })
    }

    /// Its port, and what others are to say there.
    pub(crate) fn address(&self) -> (u16, String) {
        (self.port, self.secret.clone())
    }

    /// Takes over what an agent before this one kept.
    ///
    /// # Errors
    /// `Invalid` where that does not fit its memory.
    pub(crate) fn inherit(&self, held: Held, fd: Option<OwnedFd>) -> Result<()> {
        let fd = fd.ok_or_else(|| Error::invalid("a copy came without its memory"))?;
        let memory = SharedMemory::from_fd(fd)?;
        if held.seal.size > memory.len() as u64 {
            return Err(Error::invalid("a copy that is longer than its memory"));
        }
        self.kept.lock().replicas.push(Replica { held, memory: Arc::new(memory), is_shared: true });
        Ok(())
    }

    /// Lets go of what no start can use any more. A step wants all ranks' parts, and those of this one are gone but for what
    /// `is_held`, and what is still to come of the `start` that goes on.
    pub(crate) fn retain(&self, start: &str, is_held: impl Fn(&HeldStep) -> bool) {
        self.retain_steps(|step| step.start == start || is_held(step));
    }

    /// Lets go of all other steps.
    pub(crate) fn retain_steps(&self, is_wanted: impl Fn(&HeldStep) -> bool) {
        self.kept.lock().replicas.retain(|replica| is_wanted(&replica.held.name()));
    }

    /// Lets everything go.
    pub(crate) fn clear(&self) {
        self.kept.lock().replicas.clear();
    }

    /// What it has, the oldest first, for others to read.
    pub(crate) fn show(&self) -> Vec<Replica> {
        let mut kept = self.kept.lock();
        kept.replicas.iter_mut().for_each(|replica| replica.is_shared = true);
        kept.replicas.clone()
    }

    /// What it has, for who stores the parts of ranks that are gone, whatever becomes of this.
    pub(crate) fn shelf(&self) -> Shelf {
        Shelf(self.kept.clone())
    }

    /// The steps that it has parts of.
    pub(crate) fn steps(&self) -> Vec<HeldStep> {
        self.kept.lock().replicas.iter().map(|replica| replica.held.name()).collect()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        {
            let mut kept = self.kept.lock();
            kept.is_over = true;
            for visitor in &mut kept.visitors {
                // What is left of the job does without.
                say(visitor, &Answer::Over).ok();
                visitor.shutdown();
            }
        }
        self.stop.shutdown();
        if let Some(thread) = self.thread.take() {
            // It does not panic; and if it did, nothing is lost by it.
            thread.join().ok();
        }
    }
}

/// One that nobody guesses.
fn secret() -> String {
    let rng = Rng::system();
    (0..4).map(|_| format!("{:016x}", rng.u64())).collect()
}

/// Serves whoever comes to the door, each on a thread, until `end` ends.
fn welcome(
    door: &Door,
    end: &FdStream,
    kept: &Arc<Mutex<Kept>>,
    (pace, rdma): (&Arc<Pace>, Option<&Arc<Rdma>>),
) -> Result<()> {
    loop {
        if wait_readable(&[end.as_fd(), door.as_fd()], TICK)?.contains(&0) {
            return Ok(());
        }
        let Some(visitor) = door.welcome()? else { continue };
        visitor.set_patience(PATIENCE)?;
        {
            let mut kept = kept.lock();
            kept.visitors.retain(|visitor| !visitor.is_left());
            if kept.visitors.len() >= MAX_VISITORS {
                tracing::warn!("an agent of another host was turned away: too many bring copies");
                continue;
            }
            kept.visitors.push(visitor.share());
        }
        let (kept, pace, rdma) = (kept.clone(), pace.clone(), rdma.cloned());
        let serve = move || {
            pace.join();
            let shared = visitor.share();
            if let Err(error) = serve(visitor, &kept, rdma.as_ref()) {
                tracing::warn!(%error, "a copy of another host's step did not come");
            }
            shared.shutdown();
        };
        std::thread::Builder::new().name("forebay-keep".into()).spawn(serve)?;
    }
}

/// Takes the copy that an agent brings.
fn serve(mut stream: FdStream, kept: &Mutex<Kept>, rdma: Option<&Arc<Rdma>>) -> Result<()> {
    let Some((frame, _)) = stream.receive()? else { return Ok(()) };
    let refuse = |stream: &mut FdStream, reason: String| say(stream, &Answer::Refused { reason });
    // What another build says beside its version may be anything.
    let Ok(Offer { version: VERSION, steps, held }) = parse(&frame) else {
        return refuse(&mut stream, "the agents are of different builds".to_owned());
    };
    let memory = match expect_sound(&held).and_then(|()| make_room(kept, &held, steps)) {
        Ok(memory) => memory,
        Err(error) => return refuse(&mut stream, error.to_string()),
    };
    let secret = secret();
    let door = Door::open(secret.clone())?;
    say(&mut stream, &Answer::Ready { port: door.port()?, secret })?;
    let came = BulkReceiver::welcome(&door, 1, PATIENCE, rdma)?.pop();
    let (_, mut way) = came.ok_or_else(|| Error::invalid("its bytes did not come to their port"))?;
    if !receive(&mut way, &memory, &held.seal, rdma)? {
        return refuse(&mut stream, "it was given up, or changed on its way".to_owned());
    }
    let Held { rank, seal: Seal { step, size, .. }, .. } = held;
    put(kept, Replica { held, memory: Arc::new(memory), is_shared: false }, steps);
    tracing::info!(step, rank, bytes = size, by_card = way.is_direct(), "keeps a copy for another host");
    say(&mut stream, &Answer::Kept)
}

/// That a copy of it can be checked, to its last byte.
fn expect_sound(held: &Held) -> Result<()> {
    held.expect_sound()?;
    expect_no_gaps(&held.seal)
}

/// Memory for a copy, beside which one less than `steps` are kept of the rank: the oldest goes, and its memory is used again,
/// unless others may be reading it.
fn make_room(kept: &Mutex<Kept>, held: &Held, steps: usize) -> Result<SharedMemory> {
    let size = usize::try_from(held.seal.size).map_err(|_| Error::invalid("a copy larger than memory"))?;
    let length = size.next_multiple_of(ALIGNMENT);
    let mut used = None;
    {
        let mut kept = kept.lock();
        kept.replicas.retain(|old| (old.held.rank, old.held.name()) != (held.rank, held.name()));
        for old in trim(&mut kept.replicas, held.rank, steps.max(1) - 1) {
            let fits = !old.is_shared && (length..=2 * length).contains(&old.memory.len());
            used = used.or(Arc::try_unwrap(old.memory).ok().filter(|_| fits));
        }
    }
    let memory = match used {
        Some(memory) => memory,
        // What is left is the trainer's.
        None if mem::available().is_some_and(|left| left < length as u64 + LEFT) => {
            let message = format!("its host has no memory for a copy of {size} bytes");
            return Err(Error::new(ErrorKind::NoSpace, message));
        }
        None => SharedMemory::create("forebay-replica", length)?,
    };
    populate_copy(&mut memory.map_write(0..length)?)?;
    Ok(memory)
}

/// Takes out all but the newest `most` of a rank.
fn trim(replicas: &mut Vec<Replica>, rank: u32, most: usize) -> Vec<Replica> {
    let is_its = |replica: &Replica| replica.held.rank == rank;
    let mut many = replicas.iter().filter(|replica| is_its(replica)).count().saturating_sub(most);
    let (old, stay) = std::mem::take(replicas).into_iter().partition(|replica| {
        let goes = many > 0 && is_its(replica);
        many -= usize::from(goes);
        goes
    });
    *replicas = stay;
    old
}

fn put(kept: &Mutex<Kept>, replica: Replica, steps: usize) {
    let mut kept = kept.lock();
    if !kept.is_over {
        let rank = replica.held.rank;
        kept.replicas.push(replica);
        drop(trim(&mut kept.replicas, rank, steps.max(1)));
    }
}

/// Takes the bytes of a shard; whether they are those that were sealed.
///
/// # Errors
/// Where the way is lost, or what comes is no part of it.
fn receive(
    way: &mut BulkReceiver,
    memory: &SharedMemory,
    seal: &Seal,
    rdma: Option<&Arc<Rdma>>,
) -> Result<bool> {
    let size = seal.size as usize;
    let mut mapping = memory.map_write(0..memory.len())?;
    let lent = [&mut mapping[..size]];
    let lending = rdma.filter(|_| way.is_direct()).map(|rdma| rdma.lend(&lent));
    if let Some(Err(error)) = &lending {
        tracing::warn!(%error, "a copy comes over TCP");
    }
    let mut left = size;
    while left > 0 {
        match way.hear()? {
            Message::Piece([low, high, ..], length) => {
                let at = usize::try_from(u64::from(high) << 32 | u64::from(low)).unwrap_or(usize::MAX);
                let end = at.checked_add(length).filter(|end| *end <= size && length > 0);
                let end = end.ok_or_else(|| Error::corrupt("a piece that lies outside of its shard"))?;
                if way.fill(&mut lent[0][at..end])? {
                    // One that came twice leaves another one out, which is found below.
                    left = left.saturating_sub(length);
                }
            }
            Message::Beat => {}
            Message::GaveUp(_) => return Ok(false),
        }
    }
    drop(lending);
    Ok(is_whole(seal, lent[0]))
}

/// Whether a shard is what was sealed.
fn is_whole(seal: &Seal, shard: &[u8]) -> bool {
    seal.has_header(shard)
        && slices_of(seal).all(|(_, slice)| {
            forebay_core::crc32c(&shard[slice.start as usize..slice.end as usize]) == slice.crc32c.0
        })
}

#[cfg(test)]
impl Shelf {
    /// These parts, in memory, of those ranks.
    pub(in crate::agent) fn of<'a>(parts: impl Iterator<Item = (u32, &'a Held, &'a [u8])>) -> Self {
        let replica = |(rank, held, shard): (u32, &Held, &[u8])| {
            let memory = SharedMemory::create("forebay-replica", shard.len().next_multiple_of(ALIGNMENT))?;
            memory.map_write(0..shard.len())?.copy_from_slice(shard);
            let held = Held::new(held.start.clone(), rank, held.world_size, held.seal.clone());
            Ok(Replica { held, memory: Arc::new(memory), is_shared: false })
        };
        let replicas = parts.map(replica).collect::<Result<_>>().expect("memory");
        Self(Arc::new(Mutex::new(Kept { replicas, ..Kept::default() })))
    }
}

#[cfg(test)]
impl Keeper {
    /// What it has, as long as nobody else looks.
    pub(super) fn kept(&self) -> Vec<Replica> {
        self.kept.lock().replicas.clone()
    }
}
