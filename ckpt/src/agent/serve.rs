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
use crate::catalog::{Keep, Run, begin_run, put_failed, retain, superseded_by};

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

/// What the flusher is to do, in order.
enum Work {
    Save(Save),
    GiveUp { step: u64, reason: String },
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
fn read_requests(stream: &mut FdStream, trainer: &Trainer, saves: &mpsc::Sender<Work>) -> Result<()> {
    // The present arena and the one before it, by number: older ones have no save under way.
    let mut arenas: HashMap<u64, Vec<Bytes>> = HashMap::new();
    let pass_on = |work| saves.blocking_send(work).map_err(|_| Error::bug("the flusher is gone"));
    loop {
        let (frame, fd) = match stream.receive() {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(()),
            // It ended without having heard everything that it was told.
            Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(()),
            Err(error) => return Err(error),
        };
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
                pass_on(Work::Save(Save { seal, slot }))?;
                trainer.tell(&Reply::Sealed { save });
            }
            Request::GiveUp { step, reason } => pass_on(Work::GiveUp { step, reason })?,
        }
    }
}

/// Settles every save that arrives, in order.
async fn flush_all(hello: Hello, trainer: Trainer, mut queue: mpsc::Receiver<Work>) {
    // The incarnation is taken at once, so that starts are ordered as they happened; what fails here fails again,
    // and is told, at the first save.
    let mut target = open(&hello, &trainer).await.ok();
    let clock = Clock::system();
    while let Some(work) = queue.recv().await {
        match work {
            Work::GiveUp { step, reason } => give_up(&hello, &mut target, &trainer, step, &reason).await,
            Work::Save(sealed) => {
                let settled = flush_until_settled(&clock, &hello, &trainer, &mut target, &sealed).await;
                let (save, step) = (sealed.seal.save, sealed.seal.step);
                drop(sealed);
                if let Err(error) = &settled {
                    give_up(&hello, &mut target, &trainer, step, &error.to_string()).await;
                }
                trainer.tell(&match settled {
                    Ok(()) => Reply::Durable { save },
                    Err(error) => Reply::Failed { save, error: (&error).into() },
                });
            }
        }
        // Of a job's agents one is enough.
        let is_first = hello.member.as_ref().is_none_or(|member| member.rank == 0);
        if let Some((bucket, run)) = target.as_ref().filter(|_| is_first) {
            clean_up(bucket, run, hello.keep, &trainer).await;
        }
    }
}

/// Tells the job's other ranks that this one's part of a step will never be there. Where that fails, they find out by
/// themselves, later.
async fn give_up(
    hello: &Hello,
    target: &mut Option<(Bucket, Run)>,
    trainer: &Trainer,
    step: u64,
    reason: &str,
) {
    let (Some(member), Some((bucket, _))) = (&hello.member, target) else { return };
    if let Err(error) = put_failed(bucket, member.save(step), member.rank, reason).await {
        trainer.tell(&Reply::Warning { message: format!("the other ranks were not told: {error}") });
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
        let error = match try_flush(clock, hello, trainer, target, save).await {
            Err(error) if error.kind() == ErrorKind::Unavailable => error,
            Err(error) => return Err(error),
            Ok(settled) => return settled,
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
    clock: &Clock,
    hello: &Hello,
    trainer: &Trainer,
    target: &mut Option<(Bucket, Run)>,
    save: &Save,
) -> Result<Result<()>> {
    let (bucket, run) = match target {
        Some(target) => target,
        None => target.insert(open(hello, trainer).await?),
    };
    if !trainer.is_gone() {
        refuse_if_superseded(bucket, run).await?;
    }
    flush(clock, bucket, run, hello.member.as_ref(), (&save.seal, &save.slot)).await
}

/// Opens the bucket and takes an incarnation.
async fn open(hello: &Hello, trainer: &Trainer) -> Result<(Bucket, Run)> {
    let url: BucketUrl = hello.url.parse()?;
    let bucket = Bucket::open(&url, &StoreSettings::default()).await?;
    let run = match &hello.member {
        Some(member) => member.run.clone(),
        None => begin_run(&bucket, hello.start.clone()).await?,
    };
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
async fn clean_up(bucket: &Bucket, run: &Run, keep: Keep, trainer: &Trainer) {
    let cleaned = async {
        match superseded_by(bucket, run).await? {
            Some(_) => Ok(()),
            None => retain(bucket, keep).await.map(drop),
        }
    };
    if let Err(error) = cleaned.await {
        trainer.tell(&Reply::Warning { message: format!("old steps were not deleted: {error}") });
    }
}

#[cfg(test)]
mod tests;
