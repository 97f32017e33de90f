//! The file of one staged blob. Blocking: called from threads that may wait.
//!
//! ```text
//! 0            data        D bytes, as they are in the blob
//! D            sums        u32 for each 64 KiB of the data, the last may be shorter: its CRC-32C
//! D+4N         magic       8 bytes, "FBSTAGE1"
//! D+4N+8       inode       u64, the file that the bytes were written to
//! D+4N+16      D           u64
//! D+4N+24      tail CRC    u32, CRC-32C of everything from D to here
//! ```
//! Numbers are little-endian. A file cut short by a crash lacks its tail, and is no blob.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use forebay_core::units::KIB;
use forebay_core::{Blob, Error, InodeId, ObjectKey, crc32c};

const MAGIC: [u8; 8] = *b"FBSTAGE1";
/// Bytes under one checksum: little more than a reader asks for is read.
const PIECE: u64 = 64 * KIB;
/// The tail after the sums.
const FOOTER: u64 = 28;

/// What the tail says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tail {
    /// The file that the bytes were written to.
    pub(super) ino: InodeId,
    /// Length of the blob.
    pub(super) size: u64,
    /// One for each piece of the data.
    sums: Box<[u32]>,
}

/// Bytes that the file of a blob of `size` bytes takes.
pub(super) fn file_bytes(size: u64) -> u64 {
    size + 4 * size.div_ceil(PIECE) + FOOTER
}

/// What that takes of the disk, as most count it: by blocks. It also bounds what is kept in memory of each.
pub(super) fn room(size: u64) -> u64 {
    file_bytes(size).next_multiple_of(4 * KIB)
}

/// Bytes of the blob whose file takes so many; of one that was cut short, about what is there.
pub(super) fn data_bytes(length: u64) -> u64 {
    let rest = length.saturating_sub(FOOTER);
    rest.saturating_sub(4 * rest.div_ceil(PIECE + 4))
}

/// Writes the file of a blob, which must not exist. A failed write leaves a file to be removed.
pub(super) fn write(path: &Path, ino: InodeId, data: &Bytes) -> io::Result<Tail> {
    let sums: Box<[u32]> = data.chunks(PIECE as usize).map(crc32c).collect();
    let tail = Tail { ino, size: data.len() as u64, sums };
    let mut file = File::options().write(true).create_new(true).open(path)?;
    file.write_all(data)?;
    file.write_all(&tail.encode())?;
    Ok(tail)
}

/// Reads the tail of a file.
///
/// # Errors
/// `InvalidData` when it is no whole file of a staged blob; those of the disk.
pub(super) fn read_tail(path: &Path) -> io::Result<Tail> {
    let damaged = |why: &str| {
        io::Error::new(io::ErrorKind::InvalidData, format!("staged file {}: {why}", path.display()))
    };
    let found = fs::metadata(path)?;
    // Before it is opened: a pipe would have to be written by somebody.
    if !found.is_file() {
        return Err(damaged("it is no file"));
    }
    let (file, length) = (File::open(path)?, found.len());
    let mut footer = [0; FOOTER as usize];
    let start = length.checked_sub(FOOTER).ok_or_else(|| damaged("it was cut short"))?;
    file.read_exact_at(&mut footer, start)?;
    let number = |at: usize| u64::from_le_bytes(footer[at..at + 8].try_into().expect("8 bytes"));
    let (ino, size) = (InodeId(number(8)), number(16));
    if footer[..8] != MAGIC || size > length || file_bytes(size) != length {
        return Err(damaged("it was cut short"));
    }
    let mut tail = vec![0; (length - size) as usize];
    file.read_exact_at(&mut tail, size)?;
    let (covered, crc) = tail.split_at(tail.len() - 4);
    if crc32c(covered).to_le_bytes() != *crc {
        return Err(damaged("its tail fails its checksum"));
    }
    let sums = &covered[..covered.len() + 4 - FOOTER as usize];
    let sums = sums.chunks(4).map(|sum| u32::from_le_bytes(sum.try_into().expect("4 bytes"))).collect();
    Ok(Tail { ino, size, sums })
}

/// Reads `range` of the blob, checked.
///
/// # Errors
/// `InvalidData` when its bytes fail their checksum or are not all there; those of the disk.
pub(super) fn read(path: &Path, tail: &Tail, range: Range<u64>) -> io::Result<Bytes> {
    let damaged = |why: &str| {
        io::Error::new(io::ErrorKind::InvalidData, format!("staged file {} {why}", path.display()))
    };
    let (start, end) = (range.start / PIECE * PIECE, range.end.next_multiple_of(PIECE).min(tail.size));
    let mut data = vec![0; (end - start) as usize];
    File::open(path)?.read_exact_at(&mut data, start).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => damaged("was cut short"),
        _ => error,
    })?;
    let first = (start / PIECE) as usize;
    for (piece, sum) in data.chunks(PIECE as usize).zip(&tail.sums[first..]) {
        if crc32c(piece) != *sum {
            return Err(damaged("fails its checksum"));
        }
    }
    let data = Bytes::from(data);
    Ok(data.slice((range.start - start) as usize..(range.end - start) as usize))
}

/// A failed [`read`] as it leaves here.
pub(super) fn told(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::InvalidData => Error::corrupt(error.to_string()),
        _ => error.into(),
    }
}

impl Tail {
    /// That of a file that has none: nobody's, of nothing.
    pub(super) fn missing() -> Self {
        Self { ino: InodeId(0), size: 0, sums: Box::default() }
    }

    /// Whether it is that.
    pub(super) fn is_missing(&self) -> bool {
        self.ino == InodeId(0)
    }

    fn encode(&self) -> Vec<u8> {
        let mut tail: Vec<u8> = self.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        tail.extend_from_slice(&MAGIC);
        tail.extend_from_slice(&self.ino.0.to_le_bytes());
        tail.extend_from_slice(&self.size.to_le_bytes());
        tail.extend_from_slice(&crc32c(&tail).to_le_bytes());
        tail
    }
}

/// The file of the blob at `key`; `None` for keys that are not owned.
pub(super) fn name_of(key: &ObjectKey) -> Option<String> {
    let (session, name) = key.as_str().strip_prefix(Blob::OWNED_PREFIX)?.split_once('/')?;
    (!name.contains('/')).then(|| format!("{session}-{name}"))
}

/// The key of the blob in the file `name`.
pub(super) fn key_of(name: &str) -> Option<ObjectKey> {
    let (session, name) = name.split_once('-')?;
    let is_session = session.len() == 16 && session.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_session.then(|| ObjectKey::new(format!("{}{session}/{name}", Blob::OWNED_PREFIX)))
}

#[cfg(test)]
mod tests {
    use forebay_core::ErrorKind;

    use super::*;

    #[test]
    fn the_format_stays_as_it_is() {
        let folder = tempfile::tempdir().expect("scratch");
        let path = folder.path().join("blob");
        write(&path, InodeId(7), &Bytes::from_static(b"hello")).expect("write");
        let golden = b"hello\x4c\xbb\x71\x9aFBSTAGE1\x07\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0";
        let written = std::fs::read(&path).expect("read");
        assert_eq!(written[..written.len() - 4], golden[..]);
        assert_eq!(written[written.len() - 4..], crc32c(&golden[5..]).to_le_bytes());
        assert_eq!(written.len() as u64, file_bytes(5));
    }

    #[test]
    fn any_range_is_read_back() {
        let folder = tempfile::tempdir().expect("scratch");
        assert_eq!([0, FOOTER, FOOTER + 1].map(data_bytes), [0; 3], "of torn files");
        for size in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let path = folder.path().join(size.to_string());
            let data: Bytes = (0..size).map(|at| (at / 7) as u8).collect();
            let tail = write(&path, InodeId(1), &data).expect("write");
            assert_eq!(read_tail(&path).expect("tail"), tail);
            assert_eq!(data_bytes(file_bytes(size)), size);
            for start in [0, size / 2, size.saturating_sub(1), size] {
                for end in [start, (start + 1).min(size), size] {
                    let got = read(&path, &tail, start..end).expect("read");
                    assert!(got == data.slice(start as usize..end as usize), "{start}..{end} of {size}");
                }
            }
        }
    }

    /// Every flipped bit and every shorter or longer file is told from the blob.
    #[test]
    fn no_damage_goes_unseen() {
        let folder = tempfile::tempdir().expect("scratch");
        let path = folder.path().join("blob");
        write(&path, InodeId(7), &Bytes::from_static(b"hello")).expect("write");
        let written = std::fs::read(&path).expect("read");
        let check_damaged = |bytes: &[u8], what: &str| {
            std::fs::write(&path, bytes).expect("write");
            let got = read_tail(&path).and_then(|tail| read(&path, &tail, 0..tail.size)).map_err(told);
            assert_eq!(got.expect_err(what).kind(), ErrorKind::Corrupt, "{what}");
        };
        for bit in 0..written.len() * 8 {
            let mut flipped = written.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            check_damaged(&flipped, &format!("bit {bit}"));
        }
        for length in 0..written.len() {
            check_damaged(&written[..length], &format!("{length} bytes"));
        }
        check_damaged(&[&written[..], b"x"].concat(), "one byte more");
        std::fs::remove_file(&path).expect("remove");
        assert_eq!(read_tail(&path).expect_err("gone").kind(), io::ErrorKind::NotFound);
    }
}
