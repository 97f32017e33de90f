//! What this rank stored of saves that came to nothing: refused by others, or given up.
//!
//! Another rank's agent may still make a step of it, until it is past that save as well: once a later save of the start is
//! committed, all are. A request of theirs may be on its way for as long as the store is waited for.

use forebay_io::clock::Moment;

use super::patience::GIVE_UP_AFTER;
use crate::catalog::Part;

/// Parts remembered at most; garbage collection takes older ones.
const MOST: usize = 100;

/// Them, oldest first.
#[derive(Default)]
pub(super) struct Remains(Vec<Remain>);

struct Remain {
    part: Part,
    /// When all ranks were known to be past it.
    passed: Option<Moment>,
}

impl Remains {
    /// Remembers one.
    pub(super) fn keep(&mut self, part: Part) {
        self.push(part, None);
    }

    /// A later save than all of them was committed.
    pub(super) fn pass(&mut self, now: Moment) {
        for remain in &mut self.0 {
            remain.passed.get_or_insert(now);
        }
    }

    /// Gives those of which nobody can make a step any more.
    pub(super) fn take(&mut self, now: Moment) -> Vec<Part> {
        let is_over =
            |remain: &Remain| remain.passed.is_some_and(|passed| now.since(passed) >= GIVE_UP_AFTER);
        let (over, left) = std::mem::take(&mut self.0).into_iter().partition(is_over);
        self.0 = left;
        let over: Vec<Remain> = over;
        over.into_iter().map(|remain| remain.part).collect()
    }

    /// Takes back one that could not be deleted: it is tried again later.
    pub(super) fn put_off(&mut self, part: Part, now: Moment) {
        self.push(part, Some(now));
    }

    fn push(&mut self, part: Part, passed: Option<Moment>) {
        if self.0.len() == MOST {
            self.0.remove(0);
        }
        self.0.push(Remain { part, passed });
    }
}
