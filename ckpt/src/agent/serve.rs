//! The agent's life: it serves one trainer, and ends when that is done, or when it was killed, nothing is left to bring
//! home, and another one took over what is in memory, or did not come in time.
//!
//! One thread reads requests, and afterwards receives successors; one task flushes, a save at a time, in the order of
//! sealing. A trainer that was superseded commits nothing more. Once the trainer is dead, no step can follow the
//! sealed ones, and they are finished even so: they were promised.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::net::FdStream;
use forebay_io::object::{Bucket, BucketUrl, StoreSettings};
use forebay_io::task::TaskGroup;
use tokio::sync::mpsc;

use super::door::Door;
use super::flush::{discard, publish, settle, store};
use super::holdings::Holdings;
use super::trainer::Trainer;
use super::{Hello, Reply, Request, Seal, VISIT_VERSION, Visit};
use crate::arena::SLOTS;
use crate::catalog::{Keep, Run, begin_run, put_failed, refuse_if_superseded, retain, superseded_by};
use crate::manifest::Manifest;

/// Saves under way at most: two slots of the present arena, two of the one before.
const MAX_SAVES: usize = 2 * SLOTS;
/// How long a save is tried again while the store cannot be reached.
const GIVE_UP_AFTER: Duration = Duration::from_secs(600);
/// The longest pause between two tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(20);

/// A sealed snapshot and the memory that holds it.
struct Save {
    seal: Arc<Seal>,
    slot: Bytes,
}

/// How far a save has come.
#[derive(Default)]
struct Progress {
    /// What was stored, once it is.
    part: Option<Manifest>,
    is_published: bool,
}

/// What the flusher is to do, in order.
enum Work {
    Save(Save),
    GiveUp { step: u64, reason: String },
}

/// Serves the trainer at the other end of `stream` until it is gone, every sealed save is settled, and nobody is to come
/// for what is in memory.
pub fn serve(mut stream: FdStream) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let trainer = Trainer::new(stream.try_clone()?);
    let Some((frame, _)) = stream.receive()? else { return Ok(()) };
    let Request::Hello(hello) = parse(&frame)? else {
        return Err(Error::invalid("an agent is greeted first"));
    };
    let (saves, queue) = mpsc::channel(MAX_SAVES);
    let tasks = TaskGroup::new("agent");
    let mut desk = Desk::new(&hello, trainer.clone(), saves);
    let flusher = {
        let _context = runtime.enter();
        tasks.spawn("flush", flush_all(*hello, trainer, queue))
    };
    let served = desk.serve(&mut stream);
    drop(desk);
    runtime.block_on(flusher)?;
    served
}

/// As replies have it.
fn now_us(clock: &Clock) -> u64 {
    clock.now().since_boot().as_micros().min(u128::from(u64::MAX)) as u64
}

fn parse(frame: &[u8]) -> Result<Request> {
    serde_json::from_slice(frame)
        .map_err(|error| Error::invalid(format!("a request does not parse: {error}")))
}

/// The thread that hears the trainer, and those that come after it.
struct Desk {
    start: String,
    linger: Duration,
    trainer: Trainer,
    saves: mpsc::Sender<Work>,
    holdings: Holdings,
    door: Door,
}

impl Desk {
    fn new(hello: &Hello, trainer: Trainer, saves: mpsc::Sender<Work>) -> Self {
        let linger = hello.linger.as_ref();
        let door = Door::new(linger.map(|linger| linger.place.clone()));
        let linger = Duration::from_millis(linger.map_or(0, |linger| linger.for_ms));
        let start = hello.start.nonce.clone();
        Self { start, linger, trainer, saves, holdings: Holdings::default(), door }
    }

    fn serve(&mut self, stream: &mut FdStream) -> Result<()> {
        let heard = self.hear(stream);
        self.trainer.set_gone();
        heard?;
        self.await_successor()
    }

    /// Takes requests until the trainer is gone.
    fn hear(&mut self, stream: &mut FdStream) -> Result<()> {
        loop {
            self.door.wait_for(stream)?;
            let (frame, fd) = match stream.receive() {
                Ok(Some(request)) => request,
                Ok(None) => return Ok(()),
                // It ended without having heard everything that it was told.
                Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(()),
                Err(error) => return Err(error),
            };
            self.take(parse(&frame)?, fd)?;
        }
    }

    fn take(&mut self, request: Request, fd: Option<OwnedFd>) -> Result<()> {
        match request {
            Request::Hello(_) => return Err(Error::invalid("an agent is greeted once")),
            Request::Arena { arena, slot_bytes } => self.holdings.announce(arena, slot_bytes, fd)?,
            Request::Seal(held) => {
                let seal = Arc::new(held.seal.clone());
                let (save, slot) = (seal.save, self.holdings.hold(*held)?);
                self.trainer.begin(save);
                self.pass_on(Work::Save(Save { seal, slot }))?;
                self.trainer.tell(&Reply::Sealed { save, at_us: now_us(&Clock::system()) });
            }
            Request::Hold(held) => drop(self.holdings.hold(*held)?),
            Request::Forget(step) => self.holdings.forget(&step),
            Request::GiveUp { step, reason } => self.pass_on(Work::GiveUp { step, reason })?,
            Request::Bye => self.holdings.clear(),
        }
        Ok(())
    }

    fn pass_on(&self, work: Work) -> Result<()> {
        self.saves.blocking_send(work).map_err(|_| Error::bug("the flusher is gone"))
    }

    /// Holds what there is until another trainer has it, or none came for long enough.
    fn await_successor(&mut self) -> Result<()> {
        if self.holdings.is_empty() || self.linger.is_zero() || !self.door.open() {
            return Ok(());
        }
        let clock = Clock::system();
        let mut deadline = clock.now() + self.linger;
        loop {
            let left = deadline.since(clock.now());
            if left.is_zero() {
                return Ok(());
            }
            match self.door.next(left)? {
                Some((Visit::Look { version }, mut visitor)) if version == VISIT_VERSION => {
                    if self.holdings.show(&self.start, &mut visitor).is_ok() {
                        self.door.keep(visitor);
                        deadline = clock.now() + self.linger;
                    }
                }
                Some((Visit::Succeed, visitor)) => {
                    // The successor's own agent has the place from now on.
                    self.door.close();
                    return self.trainer.hand_over(visitor);
                }
                Some((Visit::Look { .. }, _)) | None => {}
            }
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
                let begun = clock.now();
                let settled = flush_until_settled(&clock, &hello, &trainer, &mut target, &sealed).await;
                let (save, step, size) = (sealed.seal.save, sealed.seal.step, sealed.seal.size);
                drop(sealed);
                log_flush(&hello, step, size, clock.now().since(begun), &settled);
                if let Err(error) = &settled {
                    give_up(&hello, &mut target, &trainer, step, &error.to_string()).await;
                }
                trainer.tell(&match settled {
                    Ok(()) => Reply::Durable { save, at_us: now_us(&clock) },
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

/// The agent's log has a line for each save.
fn log_flush(hello: &Hello, step: u64, bytes: u64, took: Duration, settled: &Result<()>) {
    let rank = hello.member.as_ref().map_or(0, |member| member.rank);
    let seconds = took.as_secs_f64();
    match settled {
        Ok(()) => tracing::info!(step, rank, bytes, seconds, "durable"),
        Err(error) => tracing::error!(step, rank, bytes, seconds, %error, "not saved"),
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
    let mut progress = Progress::default();
    loop {
        let error = match try_flush(clock, hello, trainer, target, save, &mut progress).await {
            Err(error) if error.kind() == ErrorKind::Unavailable => error,
            Err(error) => {
                let found = (target.as_ref(), &progress.part);
                if let (ErrorKind::Conflict, (Some((bucket, _)), Some(part))) = (error.kind(), found) {
                    discard(bucket, part).await;
                }
                return Err(error);
            }
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
    progress: &mut Progress,
) -> Result<Result<()>> {
    let (bucket, run) = match target {
        Some(target) => target,
        None => target.insert(open(hello, trainer).await?),
    };
    if !trainer.is_gone() {
        refuse_if_superseded(bucket, run).await?;
    }
    let member = hello.member.as_ref();
    let part = match &mut progress.part {
        Some(part) => part,
        part => part.insert(store(bucket, run, member, (&save.seal, &save.slot)).await?),
    };
    if !progress.is_published {
        publish(bucket, run, member, part).await?;
        progress.is_published = true;
        trainer.tell(&Reply::Stored { save: save.seal.save, at_us: now_us(clock) });
    }
    settle(clock, bucket, run, member, part).await
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
