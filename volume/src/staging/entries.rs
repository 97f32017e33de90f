//! What is known of each staged blob, and which are in what state.
//!
//! There may be millions, and with each fsync some are asked for, while readers wait for the same lock: there are lists by what
//! is asked for, and totals, so that nobody looks at all of them. Entries change in one place ([`Entries::change`]), which
//! takes them off their lists and puts them back, so that these say what the entries do. Deliberately knows no file of theirs
//! and no clock.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use forebay_core::{InodeId, ObjectKey};

use super::file::Tail;

/// One staged blob.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: ObjectKey,
    pub(super) tail: Arc<Tail>,
    /// Seconds of the wall clock when it was written, to show.
    pub(super) since: i64,
    pub(super) on_disk: OnDisk,
    pub(super) state: State,
    /// No commit that would refer to it is on its way.
    pub(super) is_settled: bool,
    /// Failed reads since the disk did not make it durable.
    pub(super) failed_reads: u32,
    /// Whoever writes the file knows that its bytes are lost.
    pub(super) is_told: bool,
}

/// What the disk makes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum OnDisk {
    /// It has the bytes.
    Written,
    /// They survive a failure of power.
    Durable,
    /// It could not make them durable.
    Refused,
    /// Nor does it give them back.
    Lost,
}

/// How far a blob is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    /// It is about to be referred to by a commit.
    Fresh,
    /// It is to be uploaded if a layout refers to it.
    Ready,
    /// Nothing refers to it; its file goes once that is durable.
    Done,
    /// Its file is damaged or cannot be read, which was logged.
    Damaged,
}

/// The staged blobs. Each has a number: that of one staged later is higher.
#[derive(Debug)]
pub(super) struct Entries {
    all: BTreeMap<u64, Entry>,
    numbers: BTreeMap<ObjectKey, u64>,
    states: BTreeSet<(State, u64)>,
    files: BTreeSet<(InodeId, State, u64)>,
    /// Those for which something is to be done: [`OnDisk::Written`] and [`OnDisk::Refused`].
    disk: BTreeSet<(OnDisk, u64)>,
    damaged: u64,
    /// Of those that can be uploaded, by the [`Self::mark`] that they come after, as a number.
    waiting: BTreeMap<u64, Waiting>,
    /// The number of the next one.
    next: u64,
    /// Entries that were looked at: what tests count.
    #[cfg(test)]
    looks: std::cell::Cell<u64>,
}

/// How much can be uploaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) blobs: u64,
    pub(super) bytes: u64,
    /// Those whose first such blob is among these.
    pub(super) files: u64,
}

impl State {
    const ALL: [Self; 4] = [Self::Fresh, Self::Ready, Self::Done, Self::Damaged];
    /// Of those that can be uploaded, now or after a commit.
    const WAITING: [Self; 2] = [Self::Fresh, Self::Ready];
}

impl Default for Entries {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            numbers: BTreeMap::new(),
            states: BTreeSet::new(),
            files: BTreeSet::new(),
            disk: BTreeSet::new(),
            damaged: 0,
            waiting: BTreeMap::from([(0, Waiting::default())]),
            next: 0,
            #[cfg(test)]
            looks: std::cell::Cell::new(0),
        }
    }
}

impl Entries {
    /// Adds a blob that was just written, or is found.
    pub(super) fn add(&mut self, key: ObjectKey, tail: Tail, since: i64, state: State) {
        let (number, on_disk, is_settled) = (self.next, OnDisk::Written, state != State::Fresh);
        self.next += 1;
        let before = self.numbers.insert(key.clone(), number);
        debug_assert!(before.is_none(), "{key} is staged twice");
        let tail = Arc::new(tail);
        let entry = Entry { key, tail, since, on_disk, state, is_settled, failed_reads: 0, is_told: false };
        self.put(number, entry);
    }

    pub(super) fn remove(&mut self, key: &ObjectKey) -> Option<Entry> {
        let number = self.numbers.remove(key)?;
        self.take(number)
    }

    /// Changes what is known of a blob; `None` where it is not here.
    pub(super) fn change<T>(&mut self, key: &ObjectKey, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let number = *self.numbers.get(key)?;
        let mut entry = self.take(number)?;
        let changed = change(&mut entry);
        self.put(number, entry);
        Some(changed)
    }

    fn put(&mut self, number: u64, entry: Entry) {
        self.list(number, &entry, true);
        self.all.insert(number, entry);
    }

    fn take(&mut self, number: u64) -> Option<Entry> {
        let entry = self.all.remove(&number)?;
        self.looked();
        self.list(number, &entry, false);
        Some(entry)
    }

    /// Puts an entry on its lists and into the totals, or takes it out of them.
    fn list(&mut self, number: u64, entry: &Entry, is_in: bool) {
        let ino = entry.tail.ino;
        let first = self.first_waiting(ino);
        toggle(&mut self.states, (entry.state, number), is_in);
        toggle(&mut self.files, (ino, entry.state, number), is_in);
        if matches!(entry.on_disk, OnDisk::Written | OnDisk::Refused) {
            toggle(&mut self.disk, (entry.on_disk, number), is_in);
        }
        if entry.state == State::Damaged {
            count(&mut self.damaged, 1, is_in);
        }
        if State::WAITING.contains(&entry.state) {
            let waiting = self.waiting_with(number);
            count(&mut waiting.blobs, 1, is_in);
            count(&mut waiting.bytes, entry.tail.size, is_in);
        }
        let now_first = self.first_waiting(ino);
        if first != now_first {
            first.into_iter().for_each(|number| count(&mut self.waiting_with(number).files, 1, false));
            now_first.into_iter().for_each(|number| count(&mut self.waiting_with(number).files, 1, true));
        }
    }

    /// The totals that a blob belongs to: the same ones for as long as it can be uploaded.
    fn waiting_with(&mut self, number: u64) -> &mut Waiting {
        let (_, waiting) = self.waiting.range_mut(..=number).next_back().expect("the first mark is 0");
        waiting
    }

    /// The first blob of a file that can be uploaded.
    fn first_waiting(&self, ino: InodeId) -> Option<u64> {
        State::WAITING.into_iter().filter_map(|state| self.numbers_of(ino, state).next()).min()
    }

    fn numbers_of(&self, ino: InodeId, state: State) -> impl Iterator<Item = u64> {
        self.files.range((ino, state, 0)..=(ino, state, u64::MAX)).map(|(.., number)| *number)
    }

    fn numbers_in(&self, state: State) -> impl Iterator<Item = u64> {
        self.states.range((state, 0)..=(state, u64::MAX)).map(|(_, number)| *number)
    }

    fn look(&self, number: u64) -> Option<&Entry> {
        self.looked();
        self.all.get(&number)
    }

    fn looked(&self) {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
    }
}

impl Entries {
    pub(super) fn get(&self, key: &ObjectKey) -> Option<&Entry> {
        self.look(*self.numbers.get(key)?)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.numbers.keys()
    }

    /// The files with bytes here.
    pub(super) fn inodes(&self) -> Vec<InodeId> {
        let mut inodes: Vec<_> = self.files.iter().map(|(ino, ..)| *ino).collect();
        inodes.dedup();
        inodes
    }

    pub(super) fn in_state(&self, state: State) -> impl Iterator<Item = &Entry> {
        self.numbers_in(state).filter_map(|number| self.look(number))
    }

    /// Those of a file.
    pub(super) fn of(&self, ino: InodeId, state: State) -> impl Iterator<Item = &Entry> {
        self.numbers_of(ino, state).filter_map(|number| self.look(number))
    }

    /// The first of a file that was staged, whatever became of it.
    pub(super) fn first_of(&self, ino: InodeId) -> Option<&Entry> {
        let first = State::ALL.into_iter().filter_map(|state| self.numbers_of(ino, state).next()).min();
        self.look(first?)
    }

    /// Those that are to be made durable.
    pub(super) fn written(&self) -> impl Iterator<Item = &Entry> {
        self.on_disk(OnDisk::Written)
    }

    /// Those that could not be, and whose bytes may still be read.
    pub(super) fn refused(&self) -> impl Iterator<Item = &Entry> {
        self.on_disk(OnDisk::Refused).filter(|entry| entry.state != State::Damaged)
    }

    fn on_disk(&self, on_disk: OnDisk) -> impl Iterator<Item = &Entry> {
        let numbers = self.disk.range((on_disk, 0)..=(on_disk, u64::MAX));
        numbers.filter_map(|(_, number)| self.look(*number))
    }

    /// How often an entry was looked at.
    #[cfg(test)]
    pub(super) fn looks(&self) -> u64 {
        self.looks.get()
    }

    /// How many are damaged.
    pub(super) fn damaged(&self) -> u64 {
        self.damaged
    }

    /// The number of the next one: all that there are now have lower ones.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The same, to ask for [`Self::waiting`] below it.
    pub(super) fn mark(&mut self) -> u64 {
        // Nothing is going to belong to these: what comes has higher numbers, and what cannot be uploaded never can again.
        self.waiting.retain(|mark, waiting| *mark == 0 || waiting.blobs > 0);
        self.waiting.entry(self.next).or_default();
        self.next
    }

    /// How much can be uploaded of what has numbers below `end`, which is a [`Self::mark`], or above all numbers.
    pub(super) fn waiting(&self, end: u64) -> Waiting {
        self.waiting.range(..end).fold(Waiting::default(), |sum, (_, waiting)| Waiting {
            blobs: sum.blobs + waiting.blobs,
            bytes: sum.bytes + waiting.bytes,
            files: sum.files + waiting.files,
        })
    }

    /// The first that can be uploaded.
    pub(super) fn oldest_waiting(&self) -> Option<&Entry> {
        let first = State::WAITING.into_iter().filter_map(|state| self.numbers_in(state).next()).min();
        self.look(first?)
    }
}

fn toggle<T: Ord>(list: &mut BTreeSet<T>, item: T, is_in: bool) {
    let is_changed = if is_in { list.insert(item) } else { list.remove(&item) };
    debug_assert!(is_changed, "an entry is on each list once");
}

fn count(total: &mut u64, more: u64, is_in: bool) {
    *total = if is_in { *total + more } else { *total - more };
}
