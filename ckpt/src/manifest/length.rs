//! How much text a manifest takes, told before anything that it names is there: what would be too long is refused before a
//! byte of it is copied or sent.
//!
//! What is known by then counts to the byte: names, shapes, values, how tensors are cut. Of the rest the longest counts: where
//! a slice lies, since what did not change may lie in files of earlier steps, and how many of those there are. Hence a
//! manifest is never longer than it was told to be, and where it is long, by about a tenth shorter.

use std::iter::Sum;
use std::ops::Add;

use forebay_core::{Error, ErrorKind, Result};

use super::SliceKind;
use super::text::{FRAMING_MAX, LESS_TEXT, MAX_MANIFEST};

/// Around the lists: two names of 32 digits, the numbers and the names of all fields.
const FIELDS: u64 = 512;
/// Digits of a place in a shard file: no store and no file system takes objects of a petabyte.
const PLACE_DIGITS: u64 = 15;
/// Digits of a shard's number: ten million files.
const SHARD_DIGITS: u64 = 7;
/// Files that a rank's part may lie in at most, its own among them; then it is stored whole again.
pub(crate) const MAX_FILES: usize = 64;
/// A shard with the longest name and numbers, and its step among the parents.
const SHARD: u64 = 272;
/// The names of a slice's fields, both of its checksums and the comma after it.
const SLICE: u64 =
    r#"{"kind":"","offsets":[],"lengths":[],"shard":,"start":,"end":,"crc32c":"","blake3":""},"#.len() as u64
        + 8
        + 64;
/// The names of a tensor's fields.
const TENSOR: u64 = r#"{"name":,"dtype":"","shape":[],"slices":[]},"#.len() as u64;
/// The names of an extra's fields.
const EXTRA: u64 = r#"{"name":,"encoding":"json","data":},"#.len() as u64;

/// Text that a manifest takes at most for what it says, and of how many slices that tells.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextLength {
    /// Slices.
    pub slices: u64,
    /// Bytes.
    pub bytes: u64,
}

impl TextLength {
    /// The longest manifest.
    pub const MOST: u64 = MAX_MANIFEST as u64;

    /// That of a value that is no tensor.
    pub fn of_extra(name: &str, data: &str) -> Self {
        Self { slices: 0, bytes: EXTRA + quoted(name) + quoted(data) }
    }

    /// That of a tensor without its slices.
    pub fn of_tensor(name: &str, dtype: &str, shape: &[u64]) -> Self {
        Self { slices: 0, bytes: TENSOR + quoted(name) + dtype.len() as u64 + listed(shape) }
    }

    /// That of a slice, wherever it will lie.
    pub fn of_slice(kind: SliceKind, offsets: &[u64], lengths: &[u64]) -> Self {
        let kind = match kind {
            SliceKind::Box => "box".len() as u64,
            SliceKind::Flat => "flat".len() as u64,
        };
        let numbers = listed(offsets) + listed(lengths) + SHARD_DIGITS + 2 * PLACE_DIGITS;
        Self { slices: 1, bytes: SLICE + kind + numbers }
    }

    /// That of the files that hold so many slices of one rank.
    pub fn of_files(slices: u64) -> Self {
        Self { slices: 0, bytes: (1 + slices.min(MAX_FILES as u64 - 1)) * SHARD }
    }

    /// What this one has more than another, which is a part of it.
    pub fn less(self, part: Self) -> Self {
        Self { slices: self.slices.saturating_sub(part.slices), bytes: self.bytes.saturating_sub(part.bytes) }
    }

    /// Refuses a manifest of all this that would be longer than `most` bytes.
    ///
    /// # Errors
    /// `TooLarge`.
    pub fn expect_within(self, most: u64) -> Result<()> {
        let Self { slices, bytes } = self;
        if bytes.saturating_add(FIELDS + FRAMING_MAX as u64) <= most {
            return Ok(());
        }
        let message = format!(
            "no manifest can say what the step holds: {slices} slices of tensors, and all other values, take up to {bytes} \
             bytes of text, more than {most}"
        );
        Err(Error::new(ErrorKind::TooLarge, message).with_hint(LESS_TEXT))
    }
}

impl Add for TextLength {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            slices: self.slices.saturating_add(other.slices),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl Sum for TextLength {
    fn sum<I: Iterator<Item = Self>>(lengths: I) -> Self {
        lengths.fold(Self::default(), Self::add)
    }
}

/// Bytes of a text as JSON has it, quotes and all.
fn quoted(text: &str) -> u64 {
    let escape = |byte: &u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 1,
        0..0x20 => 5,
        _ => 0u8,
    };
    // Summed in single bytes, many at a time: the text may be long.
    let escapes = |run: &[u8]| u64::from(run.iter().map(escape).sum::<u8>());
    2 + text.len() as u64 + text.as_bytes().chunks(32).map(escapes).sum::<u64>()
}

/// Bytes of numbers as JSON has them in a list, without its brackets.
fn listed(numbers: &[u64]) -> u64 {
    let digits = |number: &u64| u64::from(number.checked_ilog10().unwrap_or(0)) + 1;
    numbers.iter().map(digits).sum::<u64>() + (numbers.len() as u64).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use forebay_io::rng::Rng;

    use super::*;
    use crate::manifest::{Checksum, Encoding, Extra, Identity, Manifest, Shard, ShardKey, Slice, Tensor};
    use crate::testing::{chance, rounds};

    /// A manifest that need not hold together: `longest` has the most digits that anything may have.
    fn manifest(rng: &Rng, ranks: u32, tensors: u64, longest: bool) -> Manifest {
        let number = |most: u64| if longest { most } else { rng.below(1_000_000).min(most) };
        let most = number(u64::MAX);
        let text = |start: &str| {
            let signs = ["a", "\"", "\\", "\n", "\u{1}", "\u{7f}", "é", "\u{1f600}", "layers.0.weight"];
            (0..rng.below(8)).fold(start.to_owned(), |text, _| text + signs[rng.below(9) as usize])
        };
        let files = if longest { MAX_FILES as u32 } else { 1 };
        let shard = |(rank, file): (u32, u32)| {
            let (attempt, layout) = ("0a1b2c3d".into(), "ffffffff".into());
            let step = most - u64::from(file);
            let rank = if longest { u32::MAX - rank } else { rank };
            let key = ShardKey { step, incarnation: most, attempt, rank, save: most, layout };
            let key = key.object().as_str().to_owned();
            Shard { key, size: most, header: most, crc32c: Checksum(7), rank, step }
        };
        let slice = |_| {
            let dimensions = rng.below(4);
            let numbers = || (0..dimensions).map(|_| number(u64::MAX)).collect::<Vec<_>>();
            let (offsets, lengths) = (numbers(), numbers());
            let kind = if rng.below(2) == 0 { SliceKind::Box } else { SliceKind::Flat };
            let place = number(999_999_999_999_999);
            let (crc32c, blake3) = (Checksum(1), Identity([0xab; 32]));
            let shard = number(9_999_999) as u32;
            Slice { kind, offsets, lengths, shard, start: place, end: place, crc32c, blake3 }
        };
        let tensor = |index: u64| {
            let (dtype, shape) = ("bfloat16".to_owned(), vec![number(u64::MAX); rng.below(4) as usize]);
            // Enough for the files that there may be.
            let slices =
                (0..1 + rng.below(8) + u64::from(ranks * files) / tensors.max(1)).map(slice).collect();
            Tensor { name: text(&index.to_string()), dtype, shape, slices }
        };
        let extra = |index: u64| Extra {
            name: text(&index.to_string()),
            encoding: Encoding::Json,
            data: (0..rng.below(50)).map(|_| text("[1, 2]")).collect(),
        };
        Manifest {
            commit: "c0".repeat(16),
            run: "c1".repeat(16),
            incarnation: most,
            step: most,
            created_ms: most,
            world_size: number(u64::from(u32::MAX)) as u32,
            parents: (1..u64::from(ranks * files)).map(|step| most - step).collect(),
            shards: (0..ranks).flat_map(|rank| (0..files).map(move |file| (rank, file))).map(shard).collect(),
            tensors: (0..tensors).map(tensor).collect(),
            extras: (0..rng.below(4)).map(extra).collect(),
        }
    }

    fn told(manifest: &Manifest, ranks: u64) -> TextLength {
        let tensors = manifest.tensors.iter().map(|tensor| {
            let slices = tensor.slices.iter();
            let slices = slices.map(|slice| TextLength::of_slice(slice.kind, &slice.offsets, &slice.lengths));
            TextLength::of_tensor(&tensor.name, &tensor.dtype, &tensor.shape) + slices.sum()
        });
        let tensors: TextLength = tensors.sum();
        let files = TextLength::of_files(tensors.slices / ranks);
        let files = (0..ranks).map(|_| files).sum::<TextLength>();
        let extras = manifest.extras.iter().map(|extra| TextLength::of_extra(&extra.name, &extra.data));
        tensors + files + extras.sum()
    }

    #[test]
    fn a_manifest_is_never_longer_than_told_and_not_much_shorter() {
        for seed in rounds(20) {
            let rng = chance(seed);
            for (ranks, tensors, longest) in [(1, 0, false), (1, 1, false), (3, 400, false), (2, 200, true)] {
                let manifest = manifest(&rng, ranks, tensors, longest);
                let text = serde_json::to_string(&manifest).expect("encode").len() as u64;
                let told = told(&manifest, u64::from(ranks)).bytes;
                assert!(text <= told + FIELDS, "{text} bytes, told {told}");
                let spare = if tensors > 1 { told / 5 } else { 1024 + MAX_FILES as u64 * SHARD };
                assert!(text + spare >= told, "{text} bytes, told {told}");
            }
        }
    }

    #[test]
    fn what_is_exactly_as_long_as_it_may_be_passes() {
        let text = TextLength { slices: 3, bytes: 5000 };
        let most = 5000 + FIELDS + FRAMING_MAX as u64;
        text.expect_within(most).expect("it fits");
        let error = text.expect_within(most - 1).expect_err("one byte too many");
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        assert!(error.message().contains("3 slices") && error.message().contains("5000 bytes"), "{error}");
        let much = TextLength { slices: u64::MAX, bytes: u64::MAX };
        (much + much).expect_within(u64::MAX - 1).expect_err("no sum overflows");
    }
}
