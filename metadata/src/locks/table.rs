//! Who has locked what, and who waits for it: data, which waits for nothing and tells nobody.
//!
//! Whoever waits has a place in a file's queue. When a lock is taken away the first who can have theirs are *offered* them: nobody else
//! is let in between until they have come and taken them, or said nothing for too long. So what a session holds changes in answers to
//! its own requests alone, and nothing has to be taken back from who gave up waiting in that moment.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use forebay_core::InodeId;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::RENEW;
use super::ranges::{Held, LockKind, LockRange, Ranges};

/// Locks of one session: more than any program has, and 64 MiB of memory.
const MOST_LOCKS: usize = 1 << 20;
/// Waits of one session; as many as its kernel has threads that may wait.
const MOST_WAITS: usize = 1024;
/// Owners that are looked at for a circle of those that wait for each other.
const MOST_LOOKED_AT: usize = 1024;
/// Who waits, and has not asked for so long, is gone: it asks every [`RENEW`].
const LAPSE: Duration = Duration::from_secs(3 * RENEW.as_secs());

/// A lock as it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// Whose it is, as its mount tells owners apart: a process, or an open file.
    pub owner: u64,
    /// The process that asks, as its host counts them.
    pub pid: u32,
    /// Its bytes.
    pub range: LockRange,
    /// Whether others may lock them as well.
    pub kind: LockKind,
}

/// How a lock is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Asking {
    /// Nothing is set.
    Look,
    /// It is set now or not at all.
    Try,
    /// With a number of the session's own, under which it waits if it has to.
    Wait(u64),
}

/// A lock that is in the way of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocker {
    /// Its bytes.
    pub range: LockRange,
    /// Whether it is for reading.
    pub kind: LockKind,
    /// The process that set it; 0 where that is on another host.
    pub pid: u32,
}

/// What comes of asking for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockAnswer {
    /// It was looked for: nothing is in the way.
    Free,
    /// It is set.
    Granted,
    /// This one is in the way.
    Held(Blocker),
    /// It has a place in the queue now, until it is asked for no more.
    Waits,
    /// It would wait for one who waits for it.
    Deadlock,
    /// The session has too many.
    Full,
    /// The process that served the tree before was lost, and mounts have still to say what they have locked.
    Unsure,
}

/// Who has a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Owner {
    session: u64,
    number: u64,
}

/// That a wait may be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) session: u64,
    pub(super) ticket: u64,
}

#[derive(Debug)]
struct Wait {
    session: u64,
    ticket: u64,
    lock: Lock,
    asked: Instant,
    is_offered: bool,
}

impl Wait {
    fn owner(&self) -> Owner {
        Owner { session: self.session, number: self.lock.owner }
    }

    fn is(&self, session: u64, ticket: u64) -> bool {
        (self.session, self.ticket) == (session, ticket)
    }
}

#[derive(Debug, Default)]
struct Locked {
    owners: BTreeMap<Owner, Ranges>,
    /// In the order in which they came.
    waits: Vec<Wait>,
}

impl Locked {
    /// Those who have something that cannot be beside `lock`.
    fn holders(&self, owner: Owner, lock: &Lock) -> impl Iterator<Item = (Owner, &Held)> {
        let (range, kind) = (lock.range, lock.kind);
        let others = self.owners.iter().filter(move |(holder, _)| **holder != owner);
        others.filter_map(move |(holder, ranges)| Some((*holder, ranges.blocker(range, kind)?)))
    }

    /// What is in the way of a lock: what others have, or were offered. Of several the one that begins first.
    fn blocker(&self, owner: Owner, lock: &Lock) -> Option<Blocker> {
        let pid_of = |holder: Owner, pid| if holder.session == owner.session { pid } else { 0 };
        let held = self.holders(owner, lock).map(|(holder, held)| Blocker {
            range: held.range,
            kind: held.kind,
            pid: pid_of(holder, held.pid),
        });
        let first = held.min_by_key(|blocker| blocker.range.first);
        first.or_else(|| {
            let is_in_the_way = |wait: &&Wait| {
                let other = &wait.lock;
                let meets = other.range.meets(lock.range) && other.kind.excludes(lock.kind);
                wait.is_offered && wait.owner() != owner && meets
            };
            let wait = self.waits.iter().find(is_in_the_way)?;
            let Lock { range, kind, pid, .. } = wait.lock;
            Some(Blocker { range, kind, pid: pid_of(wait.owner(), pid) })
        })
    }

    /// Offers what is free to those who wait for it, first come first served.
    fn offer(&mut self) -> Vec<Offer> {
        let mut offers = Vec::new();
        for place in 0..self.waits.len() {
            let wait = &self.waits[place];
            if !wait.is_offered && self.blocker(wait.owner(), &wait.lock).is_none() {
                offers.push(Offer { session: wait.session, ticket: wait.ticket });
                self.waits[place].is_offered = true;
            }
        }
        offers
    }
}

/// All locks of a tree.
#[derive(Debug, Default)]
pub(super) struct Table {
    files: HashMap<InodeId, Locked>,
    /// How many each session has.
    counts: HashMap<u64, usize>,
    /// On which files each owner waits, once for each of its waits.
    waiting: HashMap<Owner, Vec<InodeId>>,
}

impl Table {
    /// What comes of asking for a lock, and whose waits may be over by that.
    pub(super) fn ask(
        &mut self,
        session: u64,
        ino: InodeId,
        lock: Lock,
        asking: Asking,
        now: Instant,
    ) -> (LockAnswer, Vec<Offer>) {
        self.end_waits(ino, |wait| now.duration_since(wait.asked) >= LAPSE);
        let owner = Owner { session, number: lock.owner };
        let blocker = self.files.get(&ino).and_then(|file| file.blocker(owner, &lock));
        let answer = match (blocker, asking) {
            (None, Asking::Look) => LockAnswer::Free,
            (Some(blocker), Asking::Look | Asking::Try) => LockAnswer::Held(blocker),
            (None, Asking::Try | Asking::Wait(_)) => {
                if let Asking::Wait(ticket) = asking {
                    self.end_waits(ino, |wait| wait.is(session, ticket));
                }
                match self.counts.get(&session).is_some_and(|count| *count >= MOST_LOCKS) {
                    true => LockAnswer::Full,
                    false => {
                        self.set(ino, owner, lock.range, Some(lock.kind), lock.pid);
                        LockAnswer::Granted
                    }
                }
            }
            (Some(_), Asking::Wait(ticket)) => self.wait(session, ino, lock, ticket, now),
        };
        (answer, self.offer(ino))
    }

    /// Takes locks of an owner away.
    pub(super) fn unlock(&mut self, session: u64, ino: InodeId, number: u64, range: LockRange) -> Vec<Offer> {
        self.set(ino, Owner { session, number }, range, None, 0);
        self.offer(ino)
    }

    /// A session gives up waiting.
    pub(super) fn leave(&mut self, session: u64, ino: InodeId, ticket: u64) -> Vec<Offer> {
        self.end_waits(ino, |wait| wait.is(session, ticket));
        self.offer(ino)
    }

    /// Sets what a session had before, and nothing else. Returns the files and owners of which others have something by now.
    pub(super) fn relock(
        &mut self,
        session: u64,
        locks: Vec<(InodeId, Lock)>,
    ) -> (Vec<(InodeId, u64)>, Vec<Offer>) {
        let mut changed = self.unlock_all(session);
        let mut lost = Vec::new();
        for (ino, lock) in locks {
            let owner = Owner { session, number: lock.owner };
            let is_full = self.counts.get(&session).is_some_and(|count| *count >= MOST_LOCKS);
            let is_taken =
                self.files.get(&ino).is_some_and(|file| file.holders(owner, &lock).next().is_some());
            match is_full || is_taken {
                true => lost.push((ino, lock.owner)),
                false => self.set(ino, owner, lock.range, Some(lock.kind), lock.pid),
            }
        }
        for (ino, number) in &lost {
            // All that it has there, or nothing.
            self.set(*ino, Owner { session, number: *number }, LockRange::ALL, None, 0);
            changed.push(*ino);
        }
        (lost, changed.into_iter().flat_map(|ino| self.offer(ino)).collect())
    }

    /// A session has ended.
    pub(super) fn end(&mut self, session: u64) -> Vec<Offer> {
        let mut changed = self.unlock_all(session);
        let is_its = |wait: &Wait| wait.session == session;
        let waits = self.files.iter().filter(|(_, file)| file.waits.iter().any(is_its));
        let waits: Vec<InodeId> = waits.map(|(ino, _)| *ino).collect();
        waits.iter().for_each(|ino| self.end_waits(*ino, is_its));
        changed.extend(waits);
        changed.into_iter().flat_map(|ino| self.offer(ino)).collect()
    }

    /// Takes all locks of a session away, and says on which files it had any.
    fn unlock_all(&mut self, session: u64) -> Vec<InodeId> {
        let own = Owner { session, number: 0 }..=Owner { session, number: u64::MAX };
        let mut changed = Vec::new();
        for (ino, file) in &mut self.files {
            let had: Vec<Owner> = file.owners.range(own.clone()).map(|(owner, _)| *owner).collect();
            had.iter().for_each(|owner| drop(file.owners.remove(owner)));
            changed.extend((!had.is_empty()).then_some(*ino));
        }
        self.counts.remove(&session);
        changed
    }

    fn set(&mut self, ino: InodeId, owner: Owner, range: LockRange, kind: Option<LockKind>, pid: u32) {
        let file = self.files.entry(ino).or_default();
        let ranges = file.owners.entry(owner).or_default();
        let before = ranges.len();
        ranges.set(range, kind, pid);
        let count = self.counts.entry(owner.session).or_default();
        *count = *count + ranges.len() - before;
        if *count == 0 {
            self.counts.remove(&owner.session);
        }
        if ranges.is_empty() {
            file.owners.remove(&owner);
        }
    }

    /// Has a lock wait, as it may have before.
    fn wait(&mut self, session: u64, ino: InodeId, lock: Lock, ticket: u64, now: Instant) -> LockAnswer {
        let owner = Owner { session, number: lock.owner };
        if self.is_circle(ino, owner, &lock) {
            self.end_waits(ino, |wait| wait.is(session, ticket));
            return LockAnswer::Deadlock;
        }
        let Some(file) = self.files.get_mut(&ino) else { return LockAnswer::Deadlock };
        if let Some(wait) = file.waits.iter_mut().find(|wait| wait.is(session, ticket)) {
            (wait.asked, wait.is_offered) = (now, false);
            return LockAnswer::Waits;
        }
        let of_session = |(waiter, files): (&Owner, &Vec<InodeId>)| {
            if waiter.session == session { files.len() } else { 0 }
        };
        if self.waiting.iter().map(of_session).sum::<usize>() >= MOST_WAITS {
            return LockAnswer::Full;
        }
        file.waits.push(Wait { session, ticket, lock, asked: now, is_offered: false });
        self.waiting.entry(owner).or_default().push(ino);
        LockAnswer::Waits
    }

    /// Whether a lock would wait for its own owner, by way of others who wait.
    fn is_circle(&self, ino: InodeId, owner: Owner, lock: &Lock) -> bool {
        let mut next: Vec<Owner> = self
            .files
            .get(&ino)
            .into_iter()
            .flat_map(|file| file.holders(owner, lock))
            .map(|(holder, _)| holder)
            .collect();
        let mut seen = HashSet::new();
        while let Some(holder) = next.pop() {
            if holder == owner {
                return true;
            }
            if seen.len() >= MOST_LOOKED_AT || !seen.insert(holder) {
                continue;
            }
            let files = self.waiting.get(&holder).into_iter().flatten().filter_map(|ino| self.files.get(ino));
            for file in files {
                let waits = file.waits.iter().filter(|wait| wait.owner() == holder && !wait.is_offered);
                next.extend(
                    waits.flat_map(|wait| file.holders(holder, &wait.lock)).map(|(holder, _)| holder),
                );
            }
        }
        false
    }

    fn end_waits(&mut self, ino: InodeId, is_over: impl Fn(&Wait) -> bool) {
        let Some(file) = self.files.get_mut(&ino) else { return };
        for wait in file.waits.extract_if(.., |wait| is_over(wait)) {
            let Some(files) = self.waiting.get_mut(&wait.owner()) else { continue };
            if let Some(place) = files.iter().position(|waited| *waited == ino) {
                files.swap_remove(place);
            }
            if files.is_empty() {
                self.waiting.remove(&wait.owner());
            }
        }
    }

    /// Offers what is free of a file, of which nothing is kept where nobody has, or wants, anything of it.
    fn offer(&mut self, ino: InodeId) -> Vec<Offer> {
        let Some(file) = self.files.get_mut(&ino) else { return Vec::new() };
        let offers = file.offer();
        if file.owners.is_empty() && file.waits.is_empty() {
            self.files.remove(&ino);
        }
        offers
    }
}

#[cfg(test)]
mod tests;
