//! What a writer does to its directory.

use std::fmt;
use std::ops::{Deref, Range};

use forebay_tests::noise;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use super::state::NAMES;

/// Most descriptors that a writer keeps open.
pub(crate) const HELD: usize = 3;
/// Lengths of what leaves for the store before it is synced.
const STREAMED: Range<usize> = 8 << 20..10 << 20;

/// Bytes, which people are told the number of.
#[derive(Clone)]
pub(crate) struct Noise(Vec<u8>);

impl fmt::Debug for Noise {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} bytes", self.len())
    }
}

impl Deref for Noise {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

#[derive(Debug)]
pub(crate) enum Operation {
    Replace(&'static str, Noise),
    Write(&'static str, usize, Noise),
    Truncate(&'static str, usize),
    /// Writes to the end through a descriptor that was opened for that.
    Append(&'static str, Noise),
    /// Stores into a mapping of what the file has, and msync.
    Map(&'static str, Part),
    /// Makes a hole.
    Punch(&'static str, Range<usize>),
    /// copy_file_range of a whole file to an offset of another one.
    Copy(&'static str, &'static str, usize),
    /// `forebay clone` of a file to a name that is free.
    Clone(&'static str, &'static str),
    Rename(&'static str, &'static str),
    /// Two names change places.
    Exchange(&'static str, &'static str),
    /// The directories change places: the first is moved over the second where that is empty.
    Turn,
    Link(&'static str, &'static str),
    Unlink(&'static str),
    Sync(&'static str),
    /// Writes, syncs through the same descriptor, writes more, and does not close.
    Hold(&'static str, Part, Part),
    /// The same of a new content, front to back.
    Begin(&'static str, Noise, Noise),
    /// Writes through a descriptor that is open, and does not sync.
    Add(usize, Part),
    /// Closes a descriptor that is open.
    Close(usize),
}

impl Operation {
    /// Whether an fsync has returned when it has.
    pub(crate) fn is_synced(&self) -> bool {
        matches!(self, Self::Sync(_) | Self::Hold(..) | Self::Begin(..) | Self::Map(..))
    }
}

/// Bytes, and the offset that they are written to.
pub(crate) type Part = (usize, Noise);

/// Of each length enough for files to be in memory, on their way and in the bucket.
fn bytes(rng: &mut StdRng) -> Noise {
    let length = match rng.random_range(0..20) {
        0..11 => rng.random_range(1..20_000),
        11..17 => rng.random_range(20_000..400_000),
        _ => rng.random_range(5 << 20..9 << 20),
    };
    some_bytes(rng, length..length + 1)
}

fn some_bytes(rng: &mut StdRng, lengths: Range<usize>) -> Noise {
    let length = rng.random_range(lengths);
    Noise(noise(rng, length))
}

pub(crate) fn operation(rng: &mut StdRng) -> Operation {
    let name = |rng: &mut dyn Rng| NAMES[rng.next_u32() as usize % NAMES.len()];
    let part = |rng: &mut StdRng| (rng.random_range(0..300_000), bytes(rng));
    match rng.random_range(0..100) {
        0..14 => Operation::Replace(name(rng), bytes(rng)),
        14..23 => Operation::Write(name(rng), rng.random_range(0..300_000), bytes(rng)),
        23..28 => Operation::Append(name(rng), bytes(rng)),
        28..30 => Operation::Map(name(rng), (rng.random_range(0..300_000), some_bytes(rng, 1..200_000))),
        30..31 => Operation::Clone(name(rng), name(rng)),
        31..34 => Operation::Truncate(name(rng), rng.random_range(0..300_000)),
        34..39 => {
            let start = rng.random_range(0..300_000);
            Operation::Punch(name(rng), start..start + rng.random_range(1..100_000))
        }
        39..44 => Operation::Copy(name(rng), name(rng), rng.random_range(0..3) * 70_000),
        44..51 => Operation::Rename(name(rng), name(rng)),
        51..55 => Operation::Exchange(name(rng), name(rng)),
        55..58 => Operation::Turn,
        58..64 => Operation::Link(name(rng), name(rng)),
        64..70 => Operation::Unlink(name(rng)),
        70..78 => Operation::Hold(name(rng), part(rng), part(rng)),
        78..83 if rng.random_range(0..8) == 0 => {
            Operation::Begin(name(rng), some_bytes(rng, STREAMED), bytes(rng))
        }
        78..83 => Operation::Begin(name(rng), bytes(rng), bytes(rng)),
        83..87 => Operation::Add(rng.random_range(0..HELD), part(rng)),
        87..91 => Operation::Close(rng.random_range(0..HELD)),
        _ => Operation::Sync(name(rng)),
    }
}
