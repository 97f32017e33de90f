//! Large buffers that are used again and again, outside the allocator.
//!
//! The allocator keeps freed megabytes in arenas of many threads, where they count against the memory ceiling and
//! serve nobody, and pages that it gives back must be cleared again on the next use. Buffers of the pool's one size
//! are kept and handed out again; other large ones are mapped alone, to the page, and unmapped when they are dropped.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;
use memmap2::{Advice, MmapMut};
use parking_lot::Mutex;

/// Below this the allocator serves well; the same bound from which glibc maps a block alone.
const LARGE: usize = 128 << 10;
/// From this size on huge pages save most of the page faults.
const HUGE: usize = 2 << 20;

/// Buffers of one size. Cheap to clone; clones share the buffers.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    bytes: usize,
    keep: usize,
    free: Mutex<Vec<MmapMut>>,
}

/// Bytes to write into, which hold anything at first. Dropped, or frozen and no longer referred to, they go back.
#[derive(Debug)]
pub struct Buffer(Memory);

#[derive(Debug)]
enum Memory {
    Heap(Vec<u8>),
    Mapped(MmapMut),
    /// A mapping of the pool's size, always `Some` until drop, and how much of it is used.
    Pooled(Option<MmapMut>, usize, Arc<Inner>),
}

/// From this share of the pool's size on a buffer is worth one of its mappings: writes from memory that is not
/// aligned to pages come a few bytes short.
const POOLED_SHARE: usize = 16;

impl Pool {
    /// A pool of buffers of `bytes` each; at most `keep` unused ones stay.
    pub fn new(bytes: usize, keep: usize) -> Self {
        Self(Arc::new(Inner { bytes, keep, free: Mutex::default() }))
    }

    /// A buffer of `length` bytes, from the pool when that is the pool's size or a sixteenth less.
    pub fn take(&self, length: usize) -> Buffer {
        let bytes = self.0.bytes;
        self.take_mapped(length, length <= bytes && bytes - length <= bytes / POOLED_SHARE)
    }

    fn take_mapped(&self, length: usize, pooled: bool) -> Buffer {
        let kept = if pooled { self.0.free.lock().pop() } else { None };
        let memory = match kept.or_else(|| map(if pooled { self.0.bytes } else { length })) {
            Some(map) if pooled => Memory::Pooled(Some(map), length, self.0.clone()),
            Some(map) => Memory::Mapped(map),
            None => Memory::Heap(vec![0; length]),
        };
        Buffer(memory)
    }

    /// As [`Pool::take`], from the pool whatever the length, up to its size: for bytes that are soon let go of again.
    pub fn lend(&self, length: usize) -> Buffer {
        match length <= self.0.bytes {
            true => self.take_mapped(length, true),
            false => self.take(length),
        }
    }

    /// A buffer with a copy of `data`.
    pub fn copy(&self, data: &[u8]) -> Bytes {
        if data.len() < LARGE {
            return Bytes::copy_from_slice(data);
        }
        let mut buffer = self.take(data.len());
        buffer.copy_from_slice(data);
        buffer.freeze()
    }

    /// Unused buffers.
    #[cfg(test)]
    fn unused(&self) -> usize {
        self.0.free.lock().len()
    }
}

/// Memory of its own for a large buffer; `None` for small ones, and when the process has too many mappings already.
fn map(length: usize) -> Option<MmapMut> {
    let map = (length >= LARGE).then(|| MmapMut::map_anon(length).ok()).flatten()?;
    if length >= HUGE {
        // A wish: a refusal changes nothing but speed.
        let _ = map.advise(Advice::HugePage);
    }
    Some(map)
}

impl Buffer {
    /// The bytes, from now on shared and unchanging.
    pub fn freeze(mut self) -> Bytes {
        match &mut self.0 {
            Memory::Heap(heap) => std::mem::take(heap).into(),
            _ => Bytes::from_owner(self),
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Memory::Heap(heap) => heap.as_slice(),
            Memory::Mapped(map) => map,
            Memory::Pooled(map, length, _) => map.as_deref().map_or(&[], |map| &map[..*length]),
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Heap(heap) => heap.as_mut_slice(),
            Memory::Mapped(map) => map,
            Memory::Pooled(map, length, _) => map.as_deref_mut().map_or(&mut [], |map| &mut map[..*length]),
        }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Memory::Pooled(map, _, pool) = &mut self.0
            && let Some(map) = map.take()
        {
            let mut free = pool.free.lock();
            if free.len() < pool.keep {
                free.push(map);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_nobody_refers_to_it() {
        let pool = Pool::new(1 << 20, 2);
        let mut buffer = pool.take(1 << 20);
        buffer.fill(7);
        let address = buffer.as_ptr();
        let bytes = buffer.freeze();
        let part = bytes.slice(5..9);
        drop(bytes);
        assert_eq!((part.as_ref(), pool.unused()), ([7; 4].as_slice(), 0));
        drop(part);
        assert_eq!(pool.unused(), 1);
        assert_eq!(pool.take(1 << 20).as_ptr(), address, "it is used again");
        let many: Vec<Buffer> = (0..5).map(|_| pool.take(1 << 20)).collect();
        drop(many);
        assert_eq!(pool.unused(), 2, "no more than it may keep");
        let shorter = pool.take((1 << 20) - 16);
        assert_eq!(
            (shorter.len(), pool.unused()),
            ((1 << 20) - 16, 1),
            "a little less is served from it too"
        );
        let lent = pool.lend(5);
        assert_eq!((lent.len(), pool.unused()), (5, 0), "for a moment, any length is");
        drop((shorter, lent));
        assert_eq!(pool.unused(), 2);
    }

    #[test]
    fn every_length_is_served_exactly() {
        let pool = Pool::new(1 << 20, 2);
        for length in
            [0, 1, 15 << 16, (15 << 16) - 1, LARGE - 1, LARGE, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5 << 20]
        {
            let data = vec![3; length];
            assert_eq!(pool.copy(&data), data, "{length}");
            let mut buffer = pool.take(length);
            buffer.fill(9);
            assert_eq!(buffer.freeze().len(), length, "{length}");
        }
    }
}
