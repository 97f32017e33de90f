//! Where a reader stands in a directory that changes under it.
//!
//! The tree lists by name and the kernel resumes by number. A cursor numbers the names that it hands out, 3 for the
//! first (1 and 2 are `.` and `..`), and finds the name again when the kernel resumes after a number: exactly for the
//! latest `RECENT` names, so that a reader which deletes as it reads misses nothing; for older ones by counting on
//! from a checkpoint, which is exact while nothing before them changed. Memory is bounded for any directory.

use std::collections::VecDeque;

use bytes::Bytes;

/// Number of `.`.
pub(super) const DOT: u64 = 1;
/// Number of `..`.
pub(super) const DOT_DOT: u64 = 2;
/// Names kept exactly: more than fit the largest reply that programs ask for (32 KiB, 1,365 names).
const RECENT: usize = 2048;
/// Checkpoints kept; when they are too many, every second one goes.
const CHECKPOINTS: usize = 1024;
/// Names between checkpoints at first.
const STRIDE: u64 = 1024;

/// The position of a reader in a directory.
#[derive(Debug)]
pub(super) struct Cursor {
    /// The latest names handed out; the first has number `first`, the others follow without gaps.
    recent: VecDeque<Bytes>,
    first: u64,
    /// Numbers and names, ascending, `stride` apart.
    checkpoints: Vec<(u64, Bytes)>,
    stride: u64,
}

/// Where to go on.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Resume {
    /// The listing goes on after this name.
    pub(super) after: Option<Bytes>,
    /// The number of that name.
    pub(super) number: u64,
}

impl Default for Cursor {
    fn default() -> Self {
        Self { recent: VecDeque::new(), first: DOT_DOT + 1, checkpoints: Vec::new(), stride: STRIDE }
    }
}

impl Cursor {
    /// The nearest known name at or before `number`. Entries between its number and `number` are to be skipped.
    pub(super) fn resume(&self, number: u64) -> Resume {
        let recent = number.checked_sub(self.first).and_then(|index| self.recent.get(index as usize));
        if let Some(name) = recent {
            return Resume { after: Some(name.clone()), number };
        }
        let later = self.checkpoints.partition_point(|(checkpoint, _)| *checkpoint <= number);
        match later.checked_sub(1).map(|index| &self.checkpoints[index]) {
            Some((checkpoint, name)) => Resume { after: Some(name.clone()), number: *checkpoint },
            None => Resume { after: None, number: DOT_DOT },
        }
    }

    /// Notes that `name` was handed out under `number`. What was known of later numbers is void.
    pub(super) fn note(&mut self, number: u64, name: Bytes) {
        match number.checked_sub(self.first) {
            Some(index) if index <= self.recent.len() as u64 => self.recent.truncate(index as usize),
            _ => {
                self.recent.clear();
                self.first = number;
            }
        }
        let known = self.checkpoints.partition_point(|(checkpoint, _)| *checkpoint < number);
        self.checkpoints.truncate(known);
        if number.is_multiple_of(self.stride) {
            self.checkpoints.push((number, name.clone()));
            self.thin_out();
        }
        self.recent.push_back(name);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
            self.first += 1;
        }
    }

    fn thin_out(&mut self) {
        if self.checkpoints.len() > CHECKPOINTS {
            self.stride *= 2;
            let stride = self.stride;
            self.checkpoints.retain(|(number, _)| number.is_multiple_of(stride));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u64) -> Bytes {
        format!("{number:09}").into()
    }

    fn filled(count: u64) -> Cursor {
        let mut cursor = Cursor::default();
        for number in 3..3 + count {
            cursor.note(number, name(number));
        }
        cursor
    }

    #[test]
    fn a_new_cursor_starts_behind_dot_dot() {
        assert_eq!(Cursor::default().resume(DOT_DOT), Resume { after: None, number: DOT_DOT });
    }

    #[test]
    fn recent_names_are_found_exactly() {
        let cursor = filled(5000);
        for number in [5002, 4000, 5003 - RECENT as u64] {
            assert_eq!(cursor.resume(number), Resume { after: Some(name(number)), number });
        }
    }

    #[test]
    fn old_names_are_found_from_a_checkpoint() {
        let cursor = filled(5000);
        assert_eq!(cursor.resume(2050), Resume { after: Some(name(2048)), number: 2048 });
        assert_eq!(cursor.resume(1000), Resume { after: None, number: DOT_DOT });
    }

    #[test]
    fn a_reader_that_starts_over_voids_what_came_later() {
        let mut cursor = filled(5000);
        cursor.note(3, "other".into());
        assert_eq!(cursor.resume(3), Resume { after: Some("other".into()), number: 3 });
        assert_eq!(cursor.resume(4), Resume { after: None, number: DOT_DOT });
    }

    #[test]
    fn memory_is_bounded_for_any_directory() {
        let cursor = filled(5_000_000);
        assert!(cursor.checkpoints.len() <= CHECKPOINTS + 1 && cursor.recent.len() <= RECENT);
        let Resume { number, .. } = cursor.resume(2_500_000);
        assert!(2_500_000 - number < cursor.stride);
    }
}
