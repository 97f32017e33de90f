//! What one owner has locked of one file: set, taken away, split and merged as fcntl(2) says.

use serde::{Deserialize, Serialize};

/// Whether others may lock the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LockKind {
    /// Others may, as well for reading.
    Read,
    /// Nobody else may.
    Write,
}

impl LockKind {
    /// Whether two owners cannot have both.
    pub(crate) fn excludes(self, other: Self) -> bool {
        self == Self::Write || other == Self::Write
    }
}

/// A run of bytes, by its first and last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LockRange {
    /// The first.
    pub first: u64,
    /// The last, no less than the first.
    pub last: u64,
}

impl LockRange {
    /// All that a file may ever have.
    pub const ALL: Self = Self { first: 0, last: u64::MAX };

    /// Whether two runs have a byte in common.
    pub(crate) fn meets(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// One lock: its owner is known by where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) range: LockRange,
    pub(crate) kind: LockKind,
    /// Who set it, as its own host counts processes.
    pub(crate) pid: u32,
}

/// The locks of one owner on one file, in order: no two have a byte in common, and neighbours of one kind are one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<Held>);

impl Ranges {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Held> {
        self.0.iter()
    }

    /// Sets a lock in the place of what the run had, or none.
    pub(crate) fn set(&mut self, range: LockRange, kind: Option<LockKind>, pid: u32) {
        let LockRange { first, last } = range;
        let mut parts = Vec::with_capacity(self.0.len() + 2);
        for held in self.0.drain(..) {
            if held.range.first < first {
                let before = LockRange { last: held.range.last.min(first - 1), ..held.range };
                parts.push(Held { range: before, ..held });
            }
            if held.range.last > last {
                let behind = LockRange { first: held.range.first.max(last + 1), ..held.range };
                parts.push(Held { range: behind, ..held });
            }
        }
        parts.extend(kind.map(|kind| Held { range, kind, pid }));
        parts.sort_by_key(|held| held.range.first);
        for held in parts {
            match self.0.last_mut() {
                Some(before) if before.kind == held.kind && before.range.last + 1 == held.range.first => {
                    before.range.last = held.range.last;
                    before.pid = held.pid;
                }
                _ => self.0.push(held),
            }
        }
    }

    /// The first lock that another owner's would meet and cannot be beside.
    pub(crate) fn blocker(&self, range: LockRange, kind: LockKind) -> Option<&Held> {
        self.0.iter().find(|held| held.range.meets(range) && held.kind.excludes(kind))
    }

    /// Whether anything of a run is locked.
    pub(crate) fn meets(&self, range: LockRange) -> bool {
        self.0.iter().any(|held| held.range.meets(range))
    }

    /// What a run has, piece by piece, from its first byte to its last.
    pub(crate) fn pieces(&self, range: LockRange) -> Vec<(LockRange, Option<LockKind>)> {
        let (mut pieces, mut next) = (Vec::new(), Some(range.first));
        for held in self.0.iter().filter(|held| held.range.meets(range)) {
            let Some(from) = next else { break };
            let (first, last) = (held.range.first.max(range.first), held.range.last.min(range.last));
            if from < first {
                pieces.push((LockRange { first: from, last: first - 1 }, None));
            }
            pieces.push((LockRange { first, last }, Some(held.kind)));
            next = last.checked_add(1).filter(|next| *next <= range.last);
        }
        pieces.extend(next.map(|first| (LockRange { first, last: range.last }, None)));
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Chance, rounds};

    const BYTES: u64 = 24;

    /// A few bytes, some of them the last that there are.
    fn run(chance: &mut Chance) -> LockRange {
        let (one, other) = (chance.below(BYTES), chance.below(BYTES));
        let place = |at: u64| if at >= BYTES / 2 { u64::MAX - (BYTES - 1 - at) } else { at };
        LockRange { first: place(one.min(other)), last: place(one.max(other)) }
    }

    #[test]
    fn each_byte_has_what_was_set_last_and_neighbours_are_one() {
        let all: Vec<u64> = (0..BYTES / 2).chain(u64::MAX - (BYTES / 2 - 1)..=u64::MAX).collect();
        for _ in 0..rounds(200) {
            let mut chance = Chance::fresh();
            let (mut ranges, mut model) = (Ranges::default(), vec![None; all.len()]);
            // What lies between the first bytes and the last is like one more.
            let mut between = None;
            for _ in 0..40 {
                let range = run(&mut chance);
                let kind = [None, Some(LockKind::Read), Some(LockKind::Write)][chance.below(3) as usize];
                ranges.set(range, kind, 1);
                let covers = |at: u64| (range.first..=range.last).contains(&at);
                all.iter().zip(&mut model).filter(|(at, _)| covers(**at)).for_each(|(_, has)| *has = kind);
                between = if covers(1 << 40) { kind } else { between };
                let has =
                    |at: u64| ranges.iter().find(|held| (held.range.first..=held.range.last).contains(&at));
                for (at, wanted) in all.iter().zip(&model).chain([(&(1 << 40), &between)]) {
                    assert_eq!(has(*at).map(|held| held.kind), *wanted, "byte {at}: {ranges:?} {chance:?}");
                }
                for pair in ranges.0.windows(2) {
                    let (one, other) = (pair[0], pair[1]);
                    assert!(one.range.last < other.range.first, "{ranges:?} {chance:?}");
                    let are_neighbours = one.range.last + 1 == other.range.first;
                    assert!(!are_neighbours || one.kind != other.kind, "{ranges:?} {chance:?}");
                }
                let looked = run(&mut chance);
                let mut next = looked.first;
                for (piece, kind) in ranges.pieces(looked) {
                    assert_eq!(piece.first, next, "{ranges:?} {looked:?} {chance:?}");
                    assert!(
                        [piece.first, piece.last].iter().all(|at| has(*at).map(|held| held.kind) == kind)
                    );
                    next = piece.last.wrapping_add(1);
                }
                assert_eq!(next, looked.last.wrapping_add(1), "{ranges:?} {looked:?} {chance:?}");
            }
        }
    }
}
