//! How the files of blocks are read: at once where the kernel has them in memory, small ones by their callers' threads as far as few of
//! these wait, all others by the kernel's ring, or by threads where there is none.

use std::path::{Path, PathBuf};

use forebay_core::{BLOCK_SIZE, BlockKey};
use forebay_io::disk::Ring;
use forebay_io::mem::{Buffer, Pool};
use forebay_io::task::blocking;
use tokio::sync::Semaphore;

use crate::block::Block;
use crate::tier::file::{self, Opened, ReadError};

/// Largest block that a caller's own thread reads, in bytes: a switch to another thread and back costs as much.
const NEAR_BYTES: u64 = 256 << 10;
/// Callers that wait for the disk on their own threads at once, at most.
const MOST_NEAR: usize = 12;
/// The threads that a mount has at least unless told otherwise, and one a core where that is more.
const LEAST_THREADS: usize = 8;
/// Those of them that a disk which hangs leaves.
const FREE_THREADS: usize = 2;
/// What the names beside a block take at most, with room to spare: a key is 1 KiB at most.
const NAMES_BYTES: u64 = 4 << 10;
/// Buffers of whole blocks that stay unused, as the origin has them.
const UNUSED_BUFFERS: usize = 8;

/// The ways to read, and memory for what is read.
#[derive(Debug)]
pub(crate) struct Reader {
    /// None where threads read.
    ring: Option<Ring>,
    near: Semaphore,
    /// For small blocks, lent for as long as one is looked at; and for large ones, which stay in them.
    small: Pool,
    large: Pool,
}

impl Reader {
    /// One that asks by io_uring if it may, and the kernel lets this process have it.
    pub(crate) fn new(may_use_ring: bool) -> Self {
        let told =
            |error: &_| tracing::info!(%error, "no io_uring here: threads wait for the disk of the cache");
        Self {
            ring: may_use_ring.then(|| Ring::of_process().inspect_err(told).ok()).flatten(),
            near: Semaphore::new(near_at_once()),
            small: Pool::new((NEAR_BYTES + NAMES_BYTES) as usize, near_at_once()),
            large: Pool::new((BLOCK_SIZE + NAMES_BYTES) as usize, UNUSED_BUFFERS),
        }
    }

    /// Reads the file of a small block on the calling thread: what the kernel has in memory, and what it has not if that `may_wait`,
    /// for which there are few turns; `None` elsewhere. What is wrong with the file is found where it is read from the disk.
    pub(crate) fn read_near(&self, path: &Path, key: &BlockKey, size: u32, may_wait: bool) -> Option<Block> {
        if key.len() > NEAR_BYTES {
            return None;
        }
        let opened = file::open_now(path, key, size, self.buffer(key, size)).ok()?;
        if let Some(Opened::Read(block)) = opened {
            return Some(block);
        }
        // Nothing ends the wait of a thread.
        let _turn = self.near.try_acquire().ok().filter(|_| may_wait)?;
        match opened {
            Some(Opened::File(file, buffer)) => file::read_opened(file, key, size, buffer).ok(),
            _ => file::read(path, key, size, self.buffer(key, size)).ok(),
        }
    }

    /// Reads the file of a block.
    pub(crate) async fn read(&self, path: PathBuf, key: &BlockKey, size: u32) -> Result<Block, ReadError> {
        let buffer = self.buffer(key, size);
        let Some(ring) = &self.ring else { return on_a_thread(path, key, size, buffer, file::read).await };
        let opened = file::open_now(&path, key, size, buffer)?;
        let mut opened = opened.unwrap_or_else(|| Opened::Closed(self.buffer(key, size)));
        if let Opened::Closed(buffer) = opened {
            opened = on_a_thread(path.clone(), key, size, buffer, file::open).await?;
        }
        let (file, buffer) = match opened {
            Opened::Read(block) => return Ok(block),
            Opened::File(file, buffer) => (file, buffer),
            Opened::Closed(_) => return Err(ReadError::Gone),
        };
        match ring.read(file, buffer).await {
            Ok((got, buffer)) if got == size as usize => file::check(key, size, buffer, got),
            // Whether that is the file's fault, or the ring's, or the file system does not read so, a plain read tells.
            _ => on_a_thread(path, key, size, self.buffer(key, size), file::read).await,
        }
    }

    fn buffer(&self, key: &BlockKey, size: u32) -> Buffer {
        match key.len() <= NEAR_BYTES {
            true => self.small.lend(file::room(size)),
            false => self.large.take(file::room(size)),
        }
    }
}

/// Does what may wait for the disk with the file of a block.
async fn on_a_thread<T: Send + 'static>(
    path: PathBuf,
    key: &BlockKey,
    size: u32,
    buffer: Buffer,
    act: fn(&Path, &BlockKey, u32, Buffer) -> Result<T, ReadError>,
) -> Result<T, ReadError> {
    let key = key.clone();
    let done = blocking(move || act(&path, &key, size, buffer)).await;
    done.unwrap_or_else(|error| Err(ReadError::Io(std::io::Error::other(error))))
}

/// Fewer than a mount has threads, so that disks which hang leave some.
fn near_at_once() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores.max(LEAST_THREADS) - FREE_THREADS).min(MOST_NEAR)
}
