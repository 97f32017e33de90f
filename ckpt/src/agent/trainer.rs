//! The way back to whoever is to hear what becomes of the saves: the trainer, or the one that came after it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay_core::Result;
use forebay_io::mem::Lease;
use forebay_io::net::FdStream;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::pace::Pace;
use super::protocol::WireError;
use super::{LostRanks, Reply};
use crate::arena::HeldStep;

/// Warnings kept for a successor at most; later ones are dropped.
const MAX_UNHEARD: usize = 16;

/// Shared by the thread that reads requests and the task that flushes.
#[derive(Clone)]
pub(super) struct Trainer {
    link: Arc<Mutex<Link>>,
    gone: Arc<AtomicBool>,
    pace: Arc<Pace>,
    /// Saves of steps that the job went back from.
    abandoned: Arc<watch::Sender<BTreeSet<u64>>>,
    /// The last save of the starts before the one that saves now.
    left: Arc<AtomicU64>,
}

struct Link {
    stream: FdStream,
    /// Saves whose slots are still needed, and what says so to all that have the memory.
    unsettled: BTreeMap<u64, Option<Lease>>,
    /// Saves of which nobody knows yet whether they will be committed.
    open: BTreeSet<u64>,
    /// Saves that are committed, as far as they are still held.
    durable: BTreeSet<u64>,
    /// Saves that will not be committed, as far as they are still held: a successor may go on from one.
    failed: BTreeMap<u64, WireError>,
    /// What nobody was there to be warned of.
    unheard: Vec<String>,
    /// What a successor knows of ranks that store nothing more.
    lost: LostRanks,
}

impl Trainer {
    pub(super) fn new(stream: FdStream, pace: Arc<Pace>) -> Self {
        let (unsettled, open, durable, failed) = Default::default();
        let (unheard, lost) = (Vec::new(), LostRanks::default());
        let link = Link { stream, unsettled, open, durable, failed, unheard, lost };
        let (link, abandoned) = (Arc::new(Mutex::new(link)), Arc::new(watch::Sender::default()));
        Self { link, gone: Arc::default(), pace, abandoned, left: Arc::default() }
    }

    #[cfg(test)]
    pub(super) fn pace(&self) -> Arc<Pace> {
        self.pace.clone()
    }

    /// It waits until a save is settled.
    pub(super) fn await_save(&self, save: u64) {
        self.pace.await_save(save);
    }

    /// Notes a save that is to be flushed, one of those that are `held`, and the lease of its slot.
    pub(super) fn begin(&self, save: u64, held: &[u64], lease: Option<Lease>) {
        let mut link = self.link.lock();
        link.durable.retain(|save| held.contains(save));
        link.failed.retain(|save, _| held.contains(save));
        link.unsettled.insert(save, lease);
        link.open.insert(save);
    }

    /// Notes that a save that is held is committed.
    pub(super) fn set_durable(&self, save: u64) {
        self.link.lock().durable.insert(save);
    }

    /// Whether a save that is held is committed.
    pub(super) fn is_durable(&self, save: u64) -> bool {
        self.link.lock().durable.contains(&save)
    }

    /// The trainer went back, and what it saves next is another start's: what is not settled of these saves nobody wants.
    pub(super) fn begin_anew(&self, saves: &[u64]) {
        let link = self.link.lock();
        self.left.fetch_max(link.open.last().copied().unwrap_or(0), Ordering::SeqCst);
        self.abandoned.send_modify(|abandoned| {
            abandoned.retain(|save| link.open.contains(save));
            abandoned.extend(saves.iter().filter(|save| link.open.contains(save)));
        });
    }

    /// Whether a save is one of an earlier start, which its own trainer left for another one.
    pub(super) fn has_left(&self, save: u64) -> bool {
        save <= self.left.load(Ordering::SeqCst)
    }

    /// Whether nobody wants a save any more.
    pub(super) fn is_abandoned(&self, save: u64) -> bool {
        self.abandoned.borrow().contains(&save)
    }

    /// Waits until nobody wants one of the saves any more that this `is`.
    pub(super) async fn abandoned(&self, is: impl Fn(u64) -> bool) {
        let mut abandoned = self.abandoned.subscribe();
        // Whoever waits has the other end.
        abandoned.wait_for(|abandoned| abandoned.iter().any(|save| is(*save))).await.ok();
    }

    /// Tells whoever listens, if anybody still does.
    pub(super) fn tell(&self, reply: &Reply) {
        let mut link = self.link.lock();
        if let Reply::Stored { save, .. } | Reply::Failed { save, .. } = reply {
            link.unsettled.remove(save);
        }
        if let Reply::Durable { save, .. } = reply {
            link.durable.insert(*save);
        }
        if let Reply::Failed { save, error } = reply {
            link.failed.insert(*save, error.clone());
        }
        if let Reply::Durable { save, .. } | Reply::Failed { save, .. } = reply {
            link.open.remove(save);
            self.pace.settled(*save);
        }
        let sent = serde_json::to_vec(reply).map(|frame| link.stream.send(&frame, None));
        if !matches!(sent, Ok(Ok(()))) {
            self.set_gone();
            if let Reply::Warning { message } = reply {
                link.keep_unheard(message);
            }
        }
    }

    /// Notes the ranks of the job that store nothing more, as a successor knows.
    pub(super) fn set_lost(&self, lost: LostRanks) {
        self.link.lock().lost = lost;
    }

    /// Whether a rank stores nothing more.
    pub(super) fn is_lost(&self, rank: u32) -> bool {
        self.link.lock().lost.ranks.contains(&rank)
    }

    /// The first rank that stores nothing more, and whose part of a step nobody keeps, of those that `lacks` something there.
    pub(super) fn lost_rank(&self, step: &HeldStep, lacks: impl Fn(u32) -> bool) -> Option<u32> {
        let LostRanks { ranks, kept } = &self.link.lock().lost;
        let is_kept = |rank| kept.iter().any(|kept| kept.rank == rank && kept.step == *step);
        ranks.iter().copied().find(|rank| lacks(*rank) && !is_kept(*rank))
    }

    /// Whether nobody knows yet whether a save will be committed.
    pub(super) fn is_open(&self, save: u64) -> bool {
        self.link.lock().open.contains(&save)
    }

    /// Whether there are saves of which nobody knows yet whether they will be committed.
    pub(super) fn has_open(&self) -> bool {
        !self.link.lock().open.is_empty()
    }

    /// Whether the trainer whose saves these are has ended, known as soon as it has: the thread that hears it may be held up.
    pub(super) fn is_gone(&self) -> bool {
        if !self.gone.load(Ordering::Acquire) && self.link.lock().stream.is_left() {
            self.set_gone();
        }
        self.gone.load(Ordering::Acquire)
    }

    pub(super) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
        self.pace.set_gone();
    }

    /// From now on `successor` hears what becomes of the saves under way, and first which these are.
    pub(super) fn hand_over(&self, mut successor: FdStream) -> Result<()> {
        let mut link = self.link.lock();
        let unsettled = Reply::Unsettled {
            saves: link.unsettled.keys().copied().collect(),
            durable: link.durable.iter().copied().collect(),
            failed: link.failed.iter().map(|(save, error)| (*save, error.clone())).collect(),
        };
        let unheard = link.unheard.iter().map(|message| Reply::Warning { message: message.clone() });
        for reply in std::iter::once(unsettled).chain(unheard) {
            let frame = serde_json::to_vec(&reply)
                .map_err(|error| forebay_core::Error::bug(format!("encode a reply: {error}")))?;
            successor.send(&frame, None)?;
        }
        link.stream = successor;
        Ok(())
    }
}

impl Link {
    /// Each once: a store that is away is told of again and again.
    fn keep_unheard(&mut self, message: &String) {
        if self.unheard.len() < MAX_UNHEARD && !self.unheard.contains(message) {
            self.unheard.push(message.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::{Error, ErrorKind};

    use super::*;

    #[test]
    fn a_successor_hears_what_nobody_was_there_to_hear() {
        let (near, far) = FdStream::pair().expect("pair");
        let trainer = Trainer::new(near, Arc::new(Pace::new(None)));
        let warn = |text: &str| trainer.tell(&Reply::Warning { message: text.to_owned() });
        warn("heard");
        drop(far);
        for number in 0..MAX_UNHEARD {
            warn("the store is away");
            warn(&format!("warning {number}"));
        }
        for save in [1, 2, 3, 4] {
            trainer.begin(save, &[2, 3, 4], None);
        }
        let error = Error::new(ErrorKind::Unavailable, "the store stayed away");
        trainer.tell(&Reply::Failed { save: 2, error: (&error).into() });
        trainer.tell(&Reply::Durable { save: 3, at_us: 0 });
        assert!(trainer.has_open(), "1 and 4");
        let (successor, mut hears) = FdStream::pair().expect("pair");
        trainer.hand_over(successor).expect("hand over");
        let mut hear = || -> Reply {
            let (frame, _) = hears.receive().expect("receive").expect("a frame");
            serde_json::from_slice(&frame).expect("parses")
        };
        let Reply::Unsettled { saves, durable, failed } = hear() else { panic!("that comes first") };
        assert_eq!((saves, durable), (vec![1, 3, 4], vec![3]));
        let [(2, error)] = &failed[..] else { panic!("{failed:?}") };
        assert!(Error::from(error.clone()).message().contains("stayed away"));
        for number in 0..MAX_UNHEARD {
            let Reply::Warning { message } = hear() else { panic!("{number}") };
            let expected =
                if number == 0 { "the store is away".to_owned() } else { format!("warning {}", number - 1) };
            assert_eq!(message, expected, "each once, and no more than so many");
        }
        assert!(!hears.readable(std::time::Duration::ZERO).expect("readable"));
    }
}
