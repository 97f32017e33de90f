//! A bounded memory of values that the engine holds, for engines whose reads may wait on a network.
//!
//! The owner keeps it true: every change that reaches the engine is put here too. Scans do not use it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

/// Rough bytes that an entry costs beyond its key and value: map and queue slots, and two handles.
const ENTRY_OVERHEAD: usize = 160;

/// What the engine holds for recently used keys, absence included. Entries leave by second chance.
#[derive(Debug, Default)]
pub(super) struct Hot {
    entries: HashMap<Bytes, Entry>,
    /// Every key once, in the order in which they are looked at for eviction.
    queue: VecDeque<Bytes>,
    bytes: usize,
    most_bytes: usize,
}

#[derive(Debug)]
struct Entry {
    value: Option<Bytes>,
    used: AtomicBool,
}

impl Entry {
    fn bytes(&self, key: &Bytes) -> usize {
        key.len() + self.value.as_ref().map_or(0, Bytes::len) + ENTRY_OVERHEAD
    }
}

impl Hot {
    /// A memory of at most `most_bytes`; zero keeps nothing.
    pub(super) fn new(most_bytes: usize) -> Self {
        Self { most_bytes, ..Self::default() }
    }

    /// `Some` when it is known what the engine holds for `key`.
    pub(super) fn get(&self, key: &[u8]) -> Option<Option<Bytes>> {
        let entry = self.entries.get(key)?;
        entry.used.store(true, Ordering::Relaxed);
        Some(entry.value.clone())
    }

    /// Notes what the engine holds now.
    pub(super) fn put(&mut self, key: Bytes, value: Option<Bytes>) {
        if self.most_bytes == 0 {
            return;
        }
        let entry = Entry { value, used: AtomicBool::new(false) };
        self.bytes += entry.bytes(&key);
        match self.entries.insert(key.clone(), entry) {
            Some(before) => self.bytes -= before.bytes(&key),
            None => self.queue.push_back(key),
        }
        while self.bytes > self.most_bytes {
            let Some(oldest) = self.queue.pop_front() else { break };
            let entry = self.entries.get(&oldest).expect("every queued key has an entry");
            if entry.used.swap(false, Ordering::Relaxed) {
                self.queue.push_back(oldest);
                continue;
            }
            self.bytes -= entry.bytes(&oldest);
            self.entries.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stays_within_its_bytes_and_keeps_what_is_used() {
        let mut hot = Hot::new(100 * (ENTRY_OVERHEAD + 8));
        hot.put(Bytes::from_static(b"kept"), None);
        for number in 0..10_000u64 {
            assert_eq!(hot.get(b"kept"), Some(None));
            hot.put(Bytes::copy_from_slice(&number.to_be_bytes()), Some(Bytes::new()));
            assert!(hot.bytes <= hot.most_bytes);
            assert_eq!(hot.entries.len(), hot.queue.len());
        }
        assert_eq!(hot.get(&9_999u64.to_be_bytes()), Some(Some(Bytes::new())));
        assert_eq!(hot.get(&0u64.to_be_bytes()), None);
        hot.put(Bytes::from_static(b"kept"), Some(Bytes::from_static(b"new")));
        assert_eq!(hot.get(b"kept"), Some(Some(Bytes::from_static(b"new"))));
        let counted: usize = hot.entries.iter().map(|(key, entry)| entry.bytes(key)).sum();
        assert_eq!(hot.bytes, counted);
    }
}
