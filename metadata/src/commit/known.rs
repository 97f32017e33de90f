//! Ranges of keys of which it is known which keys there are, so that absence is told without asking the engine.
//!
//! A range is known once a transaction has seen all of it, or that it is empty, and stays so because every change after
//! that passes through here. Bounded: ranges leave by second chance, and one that alone takes half of the room at once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

/// Rough bytes that a key costs beyond its own: its place in the set, and a handle.
const KEY_OVERHEAD: usize = 64;
/// Rough bytes that a range costs beyond its keys.
const RANGE_OVERHEAD: usize = 256;

/// A range as a transaction saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Whole {
    pub(super) start: Bytes,
    pub(super) end: Bytes,
    /// The keys that the newest state has in it.
    pub(super) keys: Vec<Bytes>,
}

#[derive(Debug)]
struct Range {
    end: Bytes,
    keys: BTreeSet<Bytes>,
    bytes: usize,
    used: AtomicBool,
}

/// The known ranges, none of which overlap.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// By their starts.
    ranges: BTreeMap<Bytes, Range>,
    /// Every start once, in the order in which they are looked at for eviction.
    queue: VecDeque<Bytes>,
    bytes: usize,
    most_bytes: usize,
}

impl Known {
    /// A memory of at most `most_bytes`; zero keeps nothing.
    pub(super) fn new(most_bytes: usize) -> Self {
        Self { most_bytes, ..Self::default() }
    }

    /// Whether the newest state surely does not have `key`.
    pub(super) fn is_absent(&self, key: &[u8]) -> bool {
        self.range_of(key).is_some_and(|range| !range.keys.contains(key))
    }

    /// Whether the newest state surely has nothing with `start <= key < end`.
    pub(super) fn is_empty(&self, start: &[u8], end: &[u8]) -> bool {
        let bounds = (Bound::Included(start), Bound::Excluded(end));
        self.range_of(start).is_some_and(|range| {
            !end.is_empty() && end <= &range.end[..] && range.keys.range::<[u8], _>(bounds).next().is_none()
        })
    }

    #[cfg(test)]
    fn covers(&self, key: &[u8]) -> bool {
        self.range_of(key).is_some()
    }

    /// Notes that `key` was put, or deleted.
    pub(super) fn change(&mut self, key: &Bytes, is_put: bool) {
        let Some((start, range)) = self.ranges.range_mut::<[u8], _>(up_to(key)).next_back() else { return };
        if range.end <= *key {
            return;
        }
        let cost = key.len() + KEY_OVERHEAD;
        let changed = match is_put {
            true => range.keys.insert(key.clone()),
            false => range.keys.remove(key),
        };
        match (changed, is_put) {
            (false, _) => return,
            (true, true) => (range.bytes, self.bytes) = (range.bytes + cost, self.bytes + cost),
            (true, false) => (range.bytes, self.bytes) = (range.bytes - cost, self.bytes - cost),
        }
        if range.bytes > self.most_bytes / 2 {
            let start = start.clone();
            self.forget(&start);
        }
        self.make_room();
    }

    /// Notes what there is in a range; one that overlaps another is left unknown.
    pub(super) fn learn(&mut self, whole: Whole) {
        let Whole { start, end, keys } = whole;
        let bytes = keys.iter().map(|key| key.len() + KEY_OVERHEAD).sum::<usize>() + RANGE_OVERHEAD;
        let before = self.ranges.range::<[u8], _>((Bound::Unbounded, Bound::Excluded(&end[..]))).next_back();
        let overlaps = before.is_some_and(|(_, range)| range.end > start);
        if start >= end || overlaps || bytes > self.most_bytes / 2 {
            return;
        }
        self.bytes += bytes;
        self.queue.push_back(start.clone());
        let keys = keys.into_iter().collect();
        self.ranges.insert(start, Range { end, keys, bytes, used: AtomicBool::new(false) });
        self.make_room();
    }

    fn range_of(&self, key: &[u8]) -> Option<&Range> {
        let (_, range) = self.ranges.range::<[u8], _>(up_to(key)).next_back()?;
        if &range.end[..] <= key {
            return None;
        }
        range.used.store(true, Ordering::Relaxed);
        Some(range)
    }

    fn make_room(&mut self) {
        while self.bytes > self.most_bytes {
            let Some(start) = self.queue.pop_front() else { break };
            let range = self.ranges.get(&start).expect("every queued start has a range");
            match range.used.swap(false, Ordering::Relaxed) {
                true => self.queue.push_back(start),
                false => self.remove(&start),
            }
        }
    }

    fn forget(&mut self, start: &Bytes) {
        self.queue.retain(|queued| queued != start);
        self.remove(start);
    }

    fn remove(&mut self, start: &Bytes) {
        if let Some(range) = self.ranges.remove(start) {
            self.bytes -= range.bytes;
        }
    }
}

fn up_to(key: &[u8]) -> (Bound<&[u8]>, Bound<&[u8]>) {
    (Bound::Unbounded, Bound::Included(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(start: &'static str, end: &'static str, keys: &[&'static str]) -> Whole {
        let keys = keys.iter().map(|key| Bytes::from_static(key.as_bytes())).collect();
        Whole { start: start.into(), end: end.into(), keys }
    }

    #[test]
    fn absence_is_known_inside_of_ranges_only() {
        let mut known = Known::new(1 << 20);
        known.learn(whole("b", "d", &["b1", "c"]));
        for (key, is_absent) in
            [("a", false), ("b", true), ("b1", false), ("b2", true), ("c", false), ("d", false)]
        {
            assert_eq!(known.is_absent(key.as_bytes()), is_absent, "{key}");
        }
        for (start, end, is_empty) in [
            ("b", "b1", true),
            ("b", "b2", false),
            ("b2", "c", true),
            ("c1", "d", true),
            ("c1", "e", false),
            ("a", "b", false),
            ("b2", "", false),
        ] {
            assert_eq!(known.is_empty(start.as_bytes(), end.as_bytes()), is_empty, "{start}..{end}");
        }
        known.change(&"b2".into(), true);
        known.change(&"c".into(), false);
        known.change(&"e".into(), true);
        assert!(!known.is_absent(b"b2") && known.is_absent(b"c") && !known.is_absent(b"e"));
        // What overlaps is left as it was.
        known.learn(whole("a", "c", &[]));
        known.learn(whole("c1", "e", &[]));
        assert!(!known.covers(b"a") && !known.covers(b"d") && !known.is_absent(b"b2"));
    }

    #[test]
    fn it_stays_within_its_bytes_and_keeps_what_is_used() {
        let mut known = Known::new(40 * RANGE_OVERHEAD);
        let learn = |known: &mut Known, number: u32| {
            let start = Bytes::from(format!("d{number:06}"));
            let end = Bytes::from(format!("d{number:06}~"));
            known.learn(Whole { start, end, keys: Vec::new() });
        };
        known.learn(whole("c", "d", &[]));
        for number in 0..1000 {
            assert!(known.is_absent(b"c1"));
            learn(&mut known, number);
            known.change(&Bytes::from(format!("d{number:06}/name")), true);
            assert!(known.bytes <= known.most_bytes);
            assert_eq!(known.ranges.len(), known.queue.len());
        }
        assert!(known.covers(b"d000999") && !known.covers(b"d000000"));
        // One that alone takes half of the room goes, even though it is used.
        for number in 0..1000 {
            known.change(&Bytes::from(format!("c{number}")), true);
            assert!(known.bytes <= known.most_bytes);
        }
        assert!(!known.covers(b"c1"));
        let counted: usize = known.ranges.values().map(|range| range.bytes).sum();
        assert_eq!((known.bytes, known.ranges.len()), (counted, known.queue.len()));
    }
}
