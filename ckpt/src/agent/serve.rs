//! The agent's life: it serves one trainer, and ends when the trainer is gone and nothing is left to bring home.
//!
//! One thread reads requests; one task flushes, a save at a time, in the order of sealing. A trainer that was
//! superseded commits nothing more. Once the trainer is dead, no step can follow the sealed ones, and they are
//! finished even so: they were promised.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::mem::SharedMemory;
use forebay_io::net::FdStream;
use forebay_io::object::{Bucket, BucketUrl, StoreSettings};
use forebay_io::task::TaskGroup;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::flush::flush;
use super::{Hello, Reply, Request, Seal};
use crate::arena::SLOTS;
use crate::catalog::{Run, begin_run, retain, superseded_by};

/// Saves under way at most: two slots of the present arena, two of the one before.
const MAX_SAVES: usize = 2 * SLOTS;
/// How long a save is tried again while the store cannot be reached.
const GIVE_UP_AFTER: Duration = Duration::from_secs(600);
/// The longest pause between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(20);

/// A sealed snapshot and the memory that holds it.
struct Save {
    seal: Box<Seal>,
    slot: Bytes,
}

/// The way back to the trainer, shared by the reader and the flusher.
#[derive(Clone)]
struct Trainer {
    stream: Arc<Mutex<FdStream>>,
    gone: Arc<AtomicBool>,
}

impl Trainer {
    /// Tells the trainer, if it still listens.
    fn tell(&self, reply: &Reply) {
        let sent = serde_json::to_vec(reply).map(|frame| self.stream.lock().send(&frame, None));
        if !matches!(sent, Ok(Ok(()))) {
            self.gone.store(true, Ordering::Release);
        }
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

/// Serves the trainer at the other end of `stream` until it is gone and every sealed save is settled.
pub fn serve(mut stream: FdStream) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let trainer =
        Trainer { stream: Arc::new(Mutex::new(stream.try_clone()?)), gone: Arc::new(AtomicBool::new(false)) };
    let Some((frame, _)) = stream.receive()? else { return Ok(()) };
    let Request::Hello(hello) = parse(&frame)? else {
        return Err(Error::invalid("an agent is greeted first"));
    };
    let (saves, queue) = mpsc::channel(MAX_SAVES);
    let tasks = TaskGroup::new("agent");
    let flusher = {
        let _context = runtime.enter();
        tasks.spawn("flush", flush_all(hello, trainer.clone(), queue))
    };
    let read = read_requests(&mut stream, &trainer, &saves);
    trainer.gone.store(true, Ordering::Release);
    drop(saves);
    runtime.block_on(flusher)?;
    read
}

fn parse(frame: &[u8]) -> Result<Request> {
    serde_json::from_slice(frame)
        .map_err(|error| Error::invalid(format!("a request does not parse: {error}")))
}

/// Takes requests until the trainer is gone.
fn read_requests(stream: &mut FdStream, trainer: &Trainer, saves: &mpsc::Sender<Save>) -> Result<()> {
    // The present arena and the one before it, by number: older ones have no save under way.
    let mut arenas: HashMap<u64, Vec<Bytes>> = HashMap::new();
    while let Some((frame, fd)) = stream.receive()? {
        match parse(&frame)? {
            Request::Hello(_) => return Err(Error::invalid("an agent is greeted once")),
            Request::Arena { arena, slot_bytes } => {
                let fd = fd.ok_or_else(|| Error::invalid("an arena came without its descriptor"))?;
                let memory = SharedMemory::from_fd(fd)?;
                let slot = |slot| -> Result<Bytes> {
                    Ok(Bytes::from_owner(memory.map_read(slot * slot_bytes..(slot + 1) * slot_bytes)?))
                };
                arenas.retain(|number, _| number + 1 == arena);
                arenas.insert(arena, (0..SLOTS).map(slot).collect::<Result<_>>()?);
            }
            Request::Seal(seal) => {
                let slot = arenas.get(&seal.arena).and_then(|slots| slots.get(seal.slot));
                let slot = slot.filter(|slot| seal.header <= seal.size && seal.size <= slot.len() as u64);
                let slot =
                    slot.ok_or_else(|| Error::invalid("a seal of a slot that does not exist"))?.clone();
                let save = seal.save;
                saves.blocking_send(Save { seal, slot }).map_err(|_| Error::bug("the flusher is gone"))?;
                trainer.tell(&Reply::Sealed { save });
            }
        }
    }
    Ok(())
}

/// Settles every save that arrives, in order.
async fn flush_all(hello: Hello, trainer: Trainer, mut queue: mpsc::Receiver<Save>) {
    // The incarnation is taken at once, so that starts are ordered as they happened; what fails here fails again,
    // and is told, at the first save.
    let mut target = open(&hello, &trainer).await.ok();
    let clock = Clock::system();
    while let Some(sealed) = queue.recv().await {
        let settled = flush_until_settled(&clock, &hello, &trainer, &mut target, &sealed).await;
        let save = sealed.seal.save;
        drop(sealed);
        trainer.tell(&match settled {
            Ok(()) => Reply::Durable { save },
            Err(error) => Reply::Failed { save, error: (&error).into() },
        });
        if let Some((bucket, run)) = &target {
            clean_up(bucket, run, hello.keep, &trainer).await;
        }
    }
}

/// Tries a save until it is committed, refused, or the store stayed away too long.
async fn flush_until_settled(
    clock: &Clock,
    hello: &Hello,
    trainer: &Trainer,
    target: &mut Option<(Bucket, Run)>,
    save: &Save,
) -> Result<()> {
    let deadline = clock.now() + GIVE_UP_AFTER;
    let mut pause = Duration::from_millis(500);
    loop {
        let error = match try_flush(hello, trainer, target, save).await {
            Err(error) if error.kind() == ErrorKind::Unavailable => error,
            settled => return settled,
        };
        if clock.now() + pause > deadline {
            return Err(error);
        }
        trainer.tell(&Reply::Warning { message: format!("step {}: {error}; trying again", save.seal.step) });
        clock.sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

async fn try_flush(
    hello: &Hello,
    trainer: &Trainer,
    target: &mut Option<(Bucket, Run)>,
    save: &Save,
) -> Result<()> {
    let (bucket, run) = match target {
        Some(target) => target,
        None => target.insert(open(hello, trainer).await?),
    };
    if !trainer.is_gone() {
        refuse_if_superseded(bucket, run).await?;
    }
    flush(bucket, run, &save.seal, &save.slot).await
}

/// Opens the bucket and takes an incarnation.
async fn open(hello: &Hello, trainer: &Trainer) -> Result<(Bucket, Run)> {
    let url: BucketUrl = hello.url.parse()?;
    let bucket = Bucket::open(&url, &StoreSettings::default()).await?;
    let run = begin_run(&bucket, hello.start.clone()).await?;
    if !run.conditional {
        let message = format!("{url} ignores conditional puts: make sure that only one job saves there");
        trainer.tell(&Reply::Warning { message });
    }
    Ok((bucket, run))
}

async fn refuse_if_superseded(bucket: &Bucket, run: &Run) -> Result<()> {
    let Some(newer) = superseded_by(bucket, run).await? else { return Ok(()) };
    let (number, host, pid) = (newer.incarnation, newer.start.host, newer.start.pid);
    let message =
        format!("a later start of this run (incarnation {number}, process {pid} on {host}) took over");
    Err(Error::new(ErrorKind::Stale, message)
        .with_hint("end this trainer, or give it a bucket prefix of its own"))
}

/// Deletes old steps, and steps that a later incarnation saved again. A failure costs space, not data: it is told,
/// and the next save tries again.
async fn clean_up(bucket: &Bucket, run: &Run, keep: Option<usize>, trainer: &Trainer) {
    let cleaned = async {
        match superseded_by(bucket, run).await? {
            Some(_) => Ok(()),
            None => retain(bucket, keep.unwrap_or(usize::MAX)).await.map(drop),
        }
    };
    if let Err(error) = cleaned.await {
        trainer.tell(&Reply::Warning { message: format!("old steps were not deleted: {error}") });
    }
}

#[cfg(test)]
mod tests;
