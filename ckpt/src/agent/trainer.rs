//! The way back to whoever is to hear what becomes of the saves: the trainer, or the one that came after it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_core::Result;
use forebay_io::net::FdStream;
use parking_lot::Mutex;

use super::Reply;
use super::pace::Pace;

/// Shared by the thread that reads requests and the task that flushes.
#[derive(Clone)]
pub(super) struct Trainer {
    link: Arc<Mutex<Link>>,
    gone: Arc<AtomicBool>,
    pace: Arc<Pace>,
}

struct Link {
    stream: FdStream,
    /// Saves whose slots are still needed.
    unsettled: BTreeSet<u64>,
    /// Saves that are committed, as far as they are still held.
    durable: BTreeSet<u64>,
}

impl Trainer {
    pub(super) fn new(stream: FdStream, pace: Arc<Pace>) -> Self {
        let link = Link { stream, unsettled: BTreeSet::new(), durable: BTreeSet::new() };
        Self { link: Arc::new(Mutex::new(link)), gone: Arc::new(AtomicBool::new(false)), pace }
    }

    /// It waits until a save is settled.
    pub(super) fn await_save(&self, save: u64) {
        self.pace.await_save(save);
    }

    /// Notes a save that is to be flushed, one of those that are `held`.
    pub(super) fn begin(&self, save: u64, held: &[u64]) {
        let mut link = self.link.lock();
        link.durable.retain(|save| held.contains(save));
        link.unsettled.insert(save);
    }

    /// Notes that a save that is held is committed.
    pub(super) fn set_durable(&self, save: u64) {
        self.link.lock().durable.insert(save);
    }

    /// Whether a save that is held is committed.
    pub(super) fn is_durable(&self, save: u64) -> bool {
        self.link.lock().durable.contains(&save)
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
        if let Reply::Durable { save, .. } | Reply::Failed { save, .. } = reply {
            self.pace.settled(*save);
        }
        let sent = serde_json::to_vec(reply).map(|frame| link.stream.send(&frame, None));
        if !matches!(sent, Ok(Ok(()))) {
            self.set_gone();
        }
    }

    /// Whether the trainer whose saves these are has ended.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(super) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
        self.pace.set_gone();
    }

    /// From now on `successor` hears what becomes of the saves under way, and first which these are.
    pub(super) fn hand_over(&self, mut successor: FdStream) -> Result<()> {
        let mut link = self.link.lock();
        let numbers = |saves: &BTreeSet<u64>| saves.iter().copied().collect();
        let reply = Reply::Unsettled { saves: numbers(&link.unsettled), durable: numbers(&link.durable) };
        let frame = serde_json::to_vec(&reply)
            .map_err(|error| forebay_core::Error::bug(format!("encode a reply: {error}")))?;
        successor.send(&frame, None)?;
        link.stream = successor;
        Ok(())
    }
}
