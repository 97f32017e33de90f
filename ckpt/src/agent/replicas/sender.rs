//! The way of a rank's sealed parts to the agent of another host.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::mem::SharedMemory;
use forebay_io::net::{BulkSender, FdStream, Rdma, come};
use parking_lot::Mutex;

use super::super::copy::{Copy, Health, Ticket, copy};
use super::super::pace::Pace;
use super::super::protocol::now_us;
use super::super::trainer::Trainer;
use super::{Answer, Offer, PATIENCE, VERSION, parse, say, without_copies};
use crate::agent::Reply;
use crate::arena::{Held, slot_range};
use crate::local::patience;
use crate::restore::Address;

/// Copies that wait at most: of two slots of the present arena and two of the one before.
const MOST_WAITING: usize = 8;
/// How long an agent that takes no more bytes may take to say why.
const GLANCE: Duration = Duration::from_secs(1);
/// Bytes of a piece.
const PIECE: usize = 4 << 20;

/// A sealed part that is to be copied, and where it lies.
struct Work {
    held: Arc<Held>,
    memory: Arc<SharedMemory>,
    ticket: Ticket,
}

/// What is to be copied, and where to.
#[derive(Clone)]
pub(crate) struct Outbox {
    queue: SyncSender<Work>,
    to: Arc<Mutex<Option<Address>>>,
    health: Health,
}

impl Outbox {
    /// What follows goes to the agent at this address.
    pub(crate) fn set_address(&self, address: Address) {
        *self.to.lock() = Some(address);
        // It is another one, which may be there.
        self.health.set(false);
    }

    /// Has a part copied; nothing where it is not known where to, or what is there hangs.
    pub(crate) fn copy(&self, held: Arc<Held>, memory: Arc<SharedMemory>) -> Option<Copy> {
        if self.to.lock().is_none() || self.health.hangs() {
            return None;
        }
        let (copy, ticket) = copy(&self.health, held.seal.size);
        self.queue.try_send(Work { held, memory, ticket }).ok().map(|()| copy)
    }
}

/// What came of a copy.
enum Copied {
    Kept,
    /// There is nobody any more to keep it, as the job ends there.
    Over,
}

/// Copies parts, one after another, on a thread of its own.
pub(crate) struct Sender {
    to: Arc<Mutex<Option<Address>>>,
    health: Health,
    /// Steps that the other host keeps at most.
    steps: usize,
    trainer: Trainer,
    rdma: Option<Arc<Rdma>>,
    is_told: bool,
}

impl Sender {
    /// Begins; it ends once nobody has the outbox. Where it hangs, it does not keep the process.
    pub(crate) fn begin(
        steps: usize,
        trainer: &Trainer,
        pace: &Arc<Pace>,
        rdma: Option<Arc<Rdma>>,
    ) -> Result<Outbox> {
        let (queue, work) = mpsc::sync_channel(MOST_WAITING);
        let (to, health) = (Arc::default(), Health::default());
        let outbox = Outbox { queue, to: Arc::clone(&to), health: health.clone() };
        let mut sender = Self { to, health, steps, trainer: trainer.clone(), rdma, is_told: false };
        let pace = pace.clone();
        let run = move || {
            pace.join();
            sender.copy_all(&work);
        };
        std::thread::Builder::new().name("forebay-replica".into()).spawn(run)?;
        Ok(outbox)
    }

    fn copy_all(&mut self, queue: &Receiver<Work>) {
        while let Ok(Work { held, memory, ticket }) = queue.recv() {
            if !ticket.is_wanted() {
                continue;
            }
            let copied = self.copy(&held, &memory, &ticket);
            let save = held.seal.save;
            // Whoever gave it up has told that.
            if ticket.settle() {
                self.trainer.tell(&match copied {
                    Ok(Copied::Kept) => Reply::Replicated { save, at_us: now_us(&Clock::system()) },
                    Ok(Copied::Over) | Err(_) => Reply::NotReplicated { save },
                });
            }
            drop(ticket);
            self.health.set(false);
            self.tell(copied);
        }
    }

    /// Copies one; the other host has checked what it keeps.
    fn copy(&self, held: &Held, memory: &SharedMemory, ticket: &Ticket) -> Result<Copied> {
        let Address { addresses, port, secret } =
            self.to.lock().clone().ok_or_else(|| Error::bug("a copy for nobody"))?;
        let away = || unavailable(format!("{} (port {port}) is not reached", addresses.join(", ")));
        let mut stream = come(&addresses, port, &secret, PATIENCE).ok_or_else(away)?;
        // Room is made, and the copy checked, by a host that trains.
        stream.set_patience(patience(held.seal.size))?;
        say(&mut stream, &Offer { version: VERSION, steps: self.steps, held: held.clone() })?;
        let (port, secret) = match hear(&mut stream)? {
            Answer::Ready { port, secret } => (port, secret),
            answer => return outcome(answer),
        };
        let sent = BulkSender::connect(&addresses, port, &secret, held.rank, PATIENCE, self.rdma.as_ref())
            .ok_or_else(away)
            .and_then(|way| self.send(&way, held, memory, ticket));
        let Err(error) = sent else { return outcome(hear(&mut stream)?) };
        // It may have said why.
        stream.set_patience(GLANCE)?;
        match hear(&mut stream) {
            Ok(answer @ (Answer::Refused { .. } | Answer::Over)) => outcome(answer),
            Ok(Answer::Ready { .. } | Answer::Kept) | Err(_) => Err(error),
        }
    }

    fn send(&self, way: &BulkSender, held: &Held, memory: &SharedMemory, ticket: &Ticket) -> Result<()> {
        // To be lent, memory has to be writable; nothing is written.
        let mut mapping = memory.map_write(slot_range(memory, held.seal.slot))?;
        let lent = [&mut mapping[..held.seal.size as usize]];
        let lending = self.rdma.as_ref().filter(|_| way.is_direct()).map(|rdma| rdma.lend(&lent));
        if let Some(Err(error)) = &lending {
            tracing::warn!(%error, "a copy goes over TCP");
        }
        let mut sending = way.sending();
        for (number, piece) in lent[0].chunks(PIECE).enumerate() {
            if !ticket.is_wanted() {
                way.give_up([0; 4])?;
                return Err(unavailable("it took too long"));
            }
            let at = (number * PIECE) as u64;
            sending.send([at as u32, (at >> 32) as u32, 0, 0], piece)?;
        }
        sending.end()
    }

    /// A failure is told once, until it works again.
    fn tell(&mut self, copied: Result<Copied>) {
        let Err(error) = copied else {
            self.is_told = false;
            return;
        };
        tracing::warn!(%error, "no copy in another host's memory");
        if !std::mem::replace(&mut self.is_told, true) {
            self.trainer.tell(&without_copies(&error));
        }
    }
}

fn hear(stream: &mut FdStream) -> Result<Answer> {
    let (frame, _) = stream.receive()?.ok_or_else(|| unavailable("its agent is gone"))?;
    parse(&frame)
}

/// What came of a copy, as the other agent tells.
fn outcome(answer: Answer) -> Result<Copied> {
    match answer {
        Answer::Kept => Ok(Copied::Kept),
        Answer::Over => Ok(Copied::Over),
        Answer::Refused { reason } => Err(unavailable(format!("its agent keeps none: {reason}"))),
        Answer::Ready { .. } => Err(Error::invalid("an answer out of turn")),
    }
}

fn unavailable(fact: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, fact)
}
