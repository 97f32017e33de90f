//! The file of one block on disk. Blocking, but for what says otherwise: called from threads that may wait.
//!
//! ```text
//! 0            data        D bytes, as they are in the blob
//! D            identity    I bytes, `VolumeBlob::identity`
//! D+I          magic       8 bytes, "FBBLOCK1"
//! D+I+8        index       u64, which block of the blob
//! D+I+16       D           u32
//! D+I+20       I           u32
//! D+I+24       data CRC    u32, CRC-32C of the data
//! D+I+28       tail CRC    u32, CRC-32C of everything from D to here
//! ```
//! Numbers are little-endian. The data comes first, so that the file of a one-block blob is that blob to whoever is
//! told its length. A file cut short by a crash lacks its tail; nothing else is needed to recognise it.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use forebay_core::{BlockKey, crc32c};
use forebay_io::disk::{
    ALIGNMENT, is_at_hand, is_local, open_at_hand, open_direct, pass_cache, read_at_hand, write_direct,
};
use forebay_io::mem::Buffer;

use crate::block::Block;

const MAGIC: [u8; 8] = *b"FBBLOCK1";
const FOOTER: usize = 32;

/// Least block that is written and read past the page cache, in bytes: for a small one the wait for the disk costs more than a copy.
const DIRECT_BYTES: usize = 1 << 20;

/// Why a block could not be read from its file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error("the file is gone")]
    Gone,
    #[error("the file is damaged: {0}")]
    Damaged(&'static str),
    #[error(transparent)]
    Io(std::io::Error),
}

impl From<std::io::Error> for ReadError {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == ErrorKind::NotFound { Self::Gone } else { Self::Io(error) }
    }
}

/// Bytes that the file of `key` takes.
pub(crate) fn size(key: &BlockKey) -> u32 {
    let tail = key.blob.identity().len() + FOOTER;
    u32::try_from(key.len() as usize + tail).expect("a block of 4 MiB and its names are less than 4 GiB")
}

/// Writes a block's file, which must not exist; a large one past the page cache of a disk of this host, if it `may` go there
/// and its bytes are aligned. A failed write leaves a file to be removed.
pub(crate) fn write(path: &Path, key: &BlockKey, block: &Block, may_pass_cache: bool) -> std::io::Result<()> {
    let (file, data) = (File::options().write(true).create_new(true).open(path)?, &block.bytes);
    let may_pass_cache = may_pass_cache && data.len() >= DIRECT_BYTES && is_local(&file);
    let passed = match may_pass_cache.then(|| open_direct(path)).flatten() {
        Some(direct) => write_direct(&direct, data, 0)?,
        None => 0,
    };
    file.write_all_at(&data[passed..], passed as u64)?;
    file.write_all_at(&tail(key, block.crc), data.len() as u64)
}

/// Bytes to be read into for a file of `size` bytes: one more shows a file that is too long, and whole pages are read past the page
/// cache.
pub(crate) fn room(size: u32) -> usize {
    (size as usize + 1).next_multiple_of(ALIGNMENT)
}

/// Reads and checks the file of `key`, which is `size` bytes long, into a buffer of [`room`] for it. What is returned
/// keeps the whole buffer.
pub(crate) fn read(path: &Path, key: &BlockKey, size: u32, buffer: Buffer) -> Result<Block, ReadError> {
    read_opened(File::open(path)?, key, size, buffer)
}

/// The same of a file that was just opened.
pub(crate) fn read_opened(
    mut file: File,
    key: &BlockKey,
    size: u32,
    mut buffer: Buffer,
) -> Result<Block, ReadError> {
    let got = fill(&mut file, size as usize, &mut buffer)?;
    check(key, size, buffer, got)
}

/// What came of opening a block's file.
pub(crate) enum Opened {
    /// All of it was in the kernel's memory.
    Read(Block),
    /// It is to be read, into a buffer for it.
    File(File, Buffer),
    /// It is to be opened by who may wait.
    Closed(Buffer),
}

/// Opens the file of a small block, and reads what the kernel has in memory, as far as that needs no wait for the disk; `None` where
/// nobody can tell whether it does.
pub(crate) fn open_now(
    path: &Path,
    key: &BlockKey,
    size: u32,
    mut buffer: Buffer,
) -> Result<Option<Opened>, ReadError> {
    if key.len() >= DIRECT_BYTES as u64 {
        return Ok(Some(Opened::Closed(buffer)));
    }
    let mut look = || -> std::io::Result<_> {
        let Some(file) = open_at_hand(path)? else { return Ok(None) };
        let got = read_at_hand(&file, &mut buffer)?;
        Ok(Some((file, got)))
    };
    match look() {
        Ok(None) => Ok(Some(Opened::Closed(buffer))),
        Ok(Some((_, Some(got)))) if got == size as usize => {
            check(key, size, buffer, got).map(|block| Some(Opened::Read(block)))
        }
        Ok(Some((file, _))) => Ok(Some(Opened::File(file, buffer))),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Opens the file of a block to be read by the kernel while no thread waits: that of a large one past the page cache, unless it has
/// all of it. What a warmup fetched lies there; what was read from the disk is in memory here, and in the page cache of the file that
/// was read.
pub(crate) fn open(path: &Path, key: &BlockKey, size: u32, buffer: Buffer) -> Result<Opened, ReadError> {
    let file = File::open(path)?;
    if key.len() < DIRECT_BYTES as u64 {
        return Ok(Opened::File(file, buffer));
    }
    if is_at_hand(&file, size as usize) {
        return read_opened(file, key, size, buffer).map(Opened::Read);
    }
    pass_cache(&file);
    Ok(Opened::File(file, buffer))
}

/// The block in the `got` bytes of its file that `buffer` begins with.
pub(crate) fn check(key: &BlockKey, size: u32, buffer: Buffer, got: usize) -> Result<Block, ReadError> {
    let (bytes, length) = (&buffer[..got], key.len() as usize);
    if got != size as usize || got < length + FOOTER {
        return Err(ReadError::Damaged("it has another length than it was written with"));
    }
    let crc = crc32c(&bytes[..length]);
    let end = bytes.len();
    let stored = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    if stored(end - 4) != crc32c(&bytes[length..end - 4]) {
        return Err(ReadError::Damaged("its tail fails its checksum"));
    }
    if stored(end - 8) != crc {
        return Err(ReadError::Damaged("its data fails its checksum"));
    }
    if bytes[length..] != tail(key, crc) {
        return Err(ReadError::Damaged("it holds another block"));
    }
    Ok(Block { bytes: buffer.freeze().slice(..length), crc })
}

/// Reads until the file ends, or all of its `size` is there, and more if it is longer: nearly always in one call.
fn fill(file: &mut File, size: usize, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut got = 0;
    while got < size {
        match file.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(count) => got += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

fn tail(key: &BlockKey, crc: u32) -> Vec<u8> {
    let mut tail = key.blob.identity();
    let identity = tail.len() as u32;
    tail.extend_from_slice(&MAGIC);
    tail.extend_from_slice(&key.index.to_le_bytes());
    for number in [key.len() as u32, identity, crc] {
        tail.extend_from_slice(&number.to_le_bytes());
    }
    let tail_crc = crc32c(&tail);
    tail.extend_from_slice(&tail_crc.to_le_bytes());
    tail
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use forebay_core::{Blob, ObjectKey, Version, VolumeBlob, VolumeId};
    use forebay_io::mem::Pool;

    use super::*;

    fn read(path: &Path, key: &BlockKey, size: u32) -> Result<Block, ReadError> {
        super::read(path, key, size, Pool::new(4096, 1).lend(room(size)))
    }

    fn key(name: &str) -> BlockKey {
        let blob = Blob { key: ObjectKey::new(name), version: Version::new("\"v\""), size: 5 };
        VolumeBlob::new(VolumeId(0x1122_3344_5566_7788), blob).block(0)
    }

    #[test]
    fn the_format_stays_as_it_is() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("block");
        write(&path, &key("k"), &Block::new(Bytes::from_static(b"hello")), false).expect("write");
        let written = std::fs::read(&path).expect("read");
        let golden = b"hello\
            \x88\x77\x66\x55\x44\x33\x22\x11\x05\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k\"v\"\
            FBBLOCK1\0\0\0\0\0\0\0\0\x05\0\0\0\x1c\0\0\0\x4c\xbb\x71\x9a\xa7\x90\x26\x21";
        assert_eq!(written, golden);
        assert_eq!(written.len() as u32, size(&key("k")));
    }

    /// Every single flipped bit, every shorter and a longer file, and another block's file are told from the block.
    #[test]
    fn no_damage_goes_unseen() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("block");
        let (key, other) = (key("k"), key("l"));
        write(&path, &key, &Block::new(Bytes::from_static(b"hello")), false).expect("write");
        assert_eq!(read(&path, &key, size(&key)).expect("read").bytes, "hello");
        let written = std::fs::read(&path).expect("read");
        let check_damaged = |bytes: &[u8], key: &BlockKey, what: &str| {
            std::fs::write(&path, bytes).expect("write");
            let error = read(&path, key, size(key)).expect_err(what);
            assert!(matches!(error, ReadError::Damaged(_)), "{what}: {error}");
        };
        for bit in 0..written.len() * 8 {
            let mut flipped = written.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            check_damaged(&flipped, &key, &format!("bit {bit}"));
        }
        for length in 0..written.len() {
            check_damaged(&written[..length], &key, &format!("{length} bytes"));
        }
        check_damaged(&[&written[..], b"x"].concat(), &key, "one byte more");
        check_damaged(&written, &other, "another block");
        std::fs::remove_file(&path).expect("remove");
        assert!(matches!(read(&path, &key, size(&key)), Err(ReadError::Gone)));
    }
}
