//! Which keys are claimed, in the order of the keys. The records have them by their hashes, which says nothing of what is
//! claimed below a path.
//!
//! In memory only, and learned from the records when somebody asks. It holds every key that is claimed, and some that were:
//! who asks looks at the record. Nothing leaves when a claim goes, since the transaction in which it goes may come to nothing.

use std::collections::BTreeSet;
use std::ops::Bound;

use parking_lot::Mutex;

/// Keys that are remembered; where more are claimed, something may be below each path.
pub(super) const MOST_CLAIMED: usize = 1 << 18;
/// Keys below which it is not worth the while to look which are claimed still.
const FEW: usize = 4096;
/// Questions after which it is looked anew whether there are few enough.
const REST: usize = 1024;

#[derive(Debug)]
pub(crate) struct Claimed(Mutex<State>);

#[derive(Debug)]
enum State {
    /// It is to be learned, once that many were told that they may be claimed.
    Unknown { rest: usize },
    /// It is to be learned anew once there are that many.
    Known { keys: BTreeSet<String>, most: usize },
}

/// What is claimed below a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Below {
    Nothing,
    /// This key, if it is still.
    Key(String),
    /// Too much is claimed to tell.
    Unknown,
}

impl Default for Claimed {
    fn default() -> Self {
        Self(Mutex::new(State::Unknown { rest: 0 }))
    }
}

impl Claimed {
    /// Notes that `key` is about to be claimed.
    pub(super) fn note(&self, key: &str) {
        let mut state = self.0.lock();
        if let State::Known { keys, .. } = &mut *state {
            keys.insert(key.to_owned());
            if keys.len() > MOST_CLAIMED {
                *state = State::Unknown { rest: 0 };
            }
        }
    }

    /// Whether it has to learn which keys are claimed before it is asked.
    pub(super) fn asks(&self) -> bool {
        match &mut *self.0.lock() {
            State::Unknown { rest } if *rest > 0 => {
                *rest -= 1;
                false
            }
            State::Unknown { .. } => true,
            State::Known { keys, most } => keys.len() > *most,
        }
    }

    /// Learns the keys that are claimed, of which `None` were too many. To be called by a transaction that has changed none.
    pub(super) fn learn(&self, keys: Option<BTreeSet<String>>) {
        *self.0.lock() = match keys {
            None => State::Unknown { rest: REST },
            Some(keys) => State::Known { most: FEW.max(2 * keys.len()), keys },
        };
    }

    /// The first key below `prefix`.
    pub(super) fn below(&self, prefix: &str) -> Below {
        let state = self.0.lock();
        let State::Known { keys, .. } = &*state else { return Below::Unknown };
        let next = keys.range::<str, _>((Bound::Included(prefix), Bound::Unbounded)).next();
        match next.filter(|key| key.starts_with(prefix)) {
            None => Below::Nothing,
            Some(key) => Below::Key(key.clone()),
        }
    }

    /// Forgets a key that is claimed no more. As [`Self::learn`].
    pub(super) fn forget(&self, key: &str) {
        if let State::Known { keys, .. } = &mut *self.0.lock() {
            keys.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(keys: &[&str]) -> Option<BTreeSet<String>> {
        Some(keys.iter().map(|&key| key.to_owned()).collect())
    }

    #[test]
    fn what_lies_below_a_prefix_is_found_and_nothing_beside_it() {
        let claimed = Claimed::default();
        claimed.note("a/too-early");
        assert!(claimed.asks() && claimed.below("a/") == Below::Unknown);
        claimed.learn(keys(&["a", "a-b/c", "a/", "b/c/d"]));
        claimed.note("e/f");
        assert!(!claimed.asks());
        for (prefix, found) in
            [("a/", "a/"), ("a-b/", "a-b/c"), ("b/", "b/c/d"), ("b/c/", "b/c/d"), ("e/", "e/f")]
        {
            assert_eq!(claimed.below(prefix), Below::Key(found.to_owned()), "{prefix}");
        }
        claimed.forget("b/c/d");
        for prefix in ["b/", "b/c/", "c/", "e/f/", "f/"] {
            assert_eq!(claimed.below(prefix), Below::Nothing, "{prefix}");
        }
    }

    #[test]
    fn it_learns_anew_when_much_may_be_gone_and_after_a_while_when_too_much_was_there() {
        let claimed = Claimed::default();
        claimed.learn(keys(&["a"]));
        (0..FEW).for_each(|key| claimed.note(&key.to_string()));
        assert!(claimed.asks());
        claimed.learn(keys(&["a"]));
        assert!(!claimed.asks() && claimed.below("1") == Below::Nothing);
        (0..=MOST_CLAIMED).for_each(|key| claimed.note(&key.to_string()));
        assert!(claimed.asks() && claimed.below("1") == Below::Unknown);
        claimed.learn(None);
        assert_eq!((0..=REST).filter(|_| claimed.asks()).count(), 1);
        assert_eq!(claimed.below("1"), Below::Unknown);
    }
}
