//! Open handles by number, and a bounded map for what is kept open without one.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::errno::{Errno, FsResult};

/// Names an open file or directory to the kernel. 0 stands for "none": mounts that answer no OPEN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

impl Handle {
    /// What the kernel sends where OPEN is not answered.
    pub const NONE: Self = Self(0);
}

/// Open things by handle. Numbers are never reused.
#[derive(Debug)]
pub(crate) struct HandleTable<T> {
    open: RwLock<HashMap<u64, T>>,
    next: AtomicU64,
    limit: usize,
}

impl<T: Clone> HandleTable<T> {
    /// A table of at most `limit` open things.
    pub(crate) fn new(limit: usize) -> Self {
        Self { open: RwLock::default(), next: AtomicU64::new(1), limit }
    }

    /// Gives `value` a handle, or gives it back when the table is full (ENFILE).
    pub(crate) fn insert(&self, value: T) -> Result<Handle, T> {
        let mut open = self.open.write();
        if open.len() >= self.limit {
            return Err(value);
        }
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        open.insert(handle, value);
        Ok(Handle(handle))
    }

    /// What `handle` names, or EBADF.
    pub(crate) fn get(&self, handle: Handle) -> FsResult<T> {
        self.open.read().get(&handle.0).cloned().ok_or(Errno(libc::EBADF))
    }

    /// Takes `handle` out, or EBADF.
    pub(crate) fn remove(&self, handle: Handle) -> FsResult<T> {
        self.open.write().remove(&handle.0).ok_or(Errno(libc::EBADF))
    }

    /// Takes everything out.
    pub(crate) fn drain(&self) -> Vec<T> {
        self.open.write().drain().map(|(_, value)| value).collect()
    }

    /// Handles open now.
    pub(crate) fn len(&self) -> usize {
        self.open.read().len()
    }
}

/// A bounded map that drops what was not asked for lately: two generations, of which the older is given up whole
/// when the younger is full. Constant time, and no list to keep in order.
#[derive(Debug)]
pub(crate) struct RecentMap<K, V> {
    generations: Mutex<Generations<K, V>>,
    half: usize,
}

#[derive(Debug)]
struct Generations<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
}

impl<K: Eq + Hash + Copy, V: Clone> RecentMap<K, V> {
    /// A map of at most `limit` entries.
    pub(crate) fn new(limit: usize) -> Self {
        let generations = Generations { young: HashMap::new(), old: HashMap::new() };
        Self { generations: Mutex::new(generations), half: limit.div_ceil(2) }
    }

    /// The value of `key`, which is young again.
    pub(crate) fn get(&self, key: K) -> Option<V> {
        let mut generations = self.generations.lock();
        if let Some(value) = generations.young.get(&key) {
            return Some(value.clone());
        }
        let value = generations.old.get(&key)?.clone();
        // Stays in the old generation too when the young one is full: reading must not drop anything.
        if generations.young.len() < self.half {
            generations.old.remove(&key);
            generations.young.insert(key, value.clone());
        }
        Some(value)
    }

    /// Keeps `value` unless `key` has one already; returns the one kept and all that were given up for it.
    pub(crate) fn insert(&self, key: K, value: V) -> (V, Vec<V>) {
        let mut generations = self.generations.lock();
        let kept = generations.young.get(&key).or_else(|| generations.old.get(&key)).cloned();
        if let Some(kept) = kept {
            return (kept, vec![value]);
        }
        let mut dropped = Vec::new();
        if generations.young.len() >= self.half {
            let young = std::mem::take(&mut generations.young);
            let old = std::mem::replace(&mut generations.old, young);
            dropped.extend(old.into_values());
        }
        generations.young.insert(key, value.clone());
        (value, dropped)
    }

    /// Takes `key` out.
    pub(crate) fn remove(&self, key: K) -> Option<V> {
        let mut generations = self.generations.lock();
        let young = generations.young.remove(&key);
        generations.old.remove(&key).or(young)
    }

    /// Takes everything out.
    pub(crate) fn drain(&self) -> Vec<V> {
        let mut generations = self.generations.lock();
        let young = std::mem::take(&mut generations.young);
        std::mem::take(&mut generations.old).into_values().chain(young.into_values()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_bounded_and_never_reused() {
        let table = HandleTable::new(2);
        let first = table.insert("a").expect("room");
        let second = table.insert("b").expect("room");
        assert_eq!(table.insert("c"), Err("c"));
        assert_eq!(table.remove(first), Ok("a"));
        assert_eq!(table.get(first), Err(Errno(libc::EBADF)));
        let third = table.insert("c").expect("room again");
        assert_ne!(first, third);
        assert_eq!((table.get(second), table.get(third)), (Ok("b"), Ok("c")));
        assert_eq!(table.get(Handle::NONE), Err(Errno(libc::EBADF)));
    }

    #[test]
    fn a_recent_map_stays_bounded_and_keeps_what_is_asked_for() {
        let map = RecentMap::new(8);
        let mut dropped = Vec::new();
        for key in 0..100_u32 {
            dropped.extend(map.insert(key, key).1);
            assert_eq!(map.get(key), Some(key));
        }
        assert!(map.get(0).is_none());
        let mut all = map.drain();
        assert!(all.len() <= 8, "{all:?}");
        all.extend(dropped);
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>(), "every value is either kept or given back, once");
    }

    #[test]
    fn the_first_value_of_a_key_stays() {
        let map = RecentMap::new(8);
        assert_eq!(map.insert(1, "first"), ("first", vec![]));
        assert_eq!(map.insert(1, "second"), ("first", vec!["second"]));
        assert_eq!(map.remove(1), Some("first"));
        assert_eq!(map.remove(1), None);
    }
}
