//! The manifest's fields, in the order in which they are written.

use std::fmt;

use forebay_core::ObjectKey;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Everything that one step holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// 32 hex digits that no other commit has: tells a writer whether a manifest found in place is its own.
    pub commit: String,
    /// 32 hex digits, the same for all incarnations of a run.
    pub run: String,
    /// Which start of the run wrote it, from 1; the higher one supersedes.
    pub incarnation: u64,
    /// The step.
    pub step: u64,
    /// Milliseconds since 1970 by the trainer's clock; shown to people, never compared.
    pub created_ms: u64,
    /// Ranks that saved together.
    pub world_size: u32,
    /// Steps whose shards this one refers to, ascending.
    pub parents: Vec<u64>,
    /// The files that hold the bytes.
    pub shards: Vec<Shard>,
    /// The tensors, in the order in which the trainer named them.
    pub tensors: Vec<Tensor>,
    /// Everything that is no tensor.
    pub extras: Vec<Extra>,
}

/// An immutable file of tensor bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// Its key, as [`super::ShardKey`] spells it.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// Bytes before the first tensor.
    pub header: u64,
    /// CRC-32C of the whole file.
    pub crc32c: Checksum,
    /// The rank that wrote it.
    pub rank: u32,
    /// The step that wrote it: this one, or one of `parents`.
    pub step: u64,
}

/// A tensor and its slices, which together hold each element exactly once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Its name, unique in the manifest.
    pub name: String,
    /// The name of its element type, see [`crate::dtype`].
    pub dtype: String,
    /// Its dimensions over all ranks.
    pub shape: Vec<u64>,
    /// Where its elements lie; all of one kind.
    pub slices: Vec<Slice>,
}

/// What `offsets` and `lengths` of a slice count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SliceKind {
    /// One entry a dimension: a box of the tensor.
    Box,
    /// One entry: a range of the tensor's elements in row-major order.
    Flat,
}

/// A part of a tensor, dense and row-major in one byte range of one shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// What the next two fields count.
    pub kind: SliceKind,
    /// First element.
    pub offsets: Vec<u64>,
    /// Elements.
    pub lengths: Vec<u64>,
    /// Which of the manifest's shards, from 0.
    pub shard: u32,
    /// First byte in the shard file.
    pub start: u64,
    /// First byte past the slice.
    pub end: u64,
    /// CRC-32C of the slice's bytes.
    pub crc32c: Checksum,
    /// BLAKE3 of the slice's bytes; [`Identity::UNKNOWN`] until they were hashed, which is left out, and in no manifest.
    #[serde(default, skip_serializing_if = "Identity::is_unknown")]
    pub blake3: Identity,
}

/// How an extra is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// JSON text.
    Json,
}

/// A named piece of state that is no tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extra {
    /// Its name, unique in the manifest.
    pub name: String,
    /// How `data` is written.
    pub encoding: Encoding,
    /// The content.
    pub data: String,
}

impl Tensor {
    /// Whether another one is cut as this one is and holds the same, by checksums, and by hashes where both have them.
    pub fn holds_what(&self, other: &Self) -> bool {
        let are_alike = (&self.dtype, &self.shape) == (&other.dtype, &other.shape);
        are_alike
            && self.slices.len() == other.slices.len()
            && self.slices.iter().zip(&other.slices).all(|(one, two)| one.holds_what(two))
    }
}

impl Slice {
    fn holds_what(&self, other: &Self) -> bool {
        let is_hashed = !self.blake3.is_unknown() && !other.blake3.is_unknown();
        (self.kind, &self.offsets, &self.lengths, self.len(), self.crc32c)
            == (other.kind, &other.offsets, &other.lengths, other.len(), other.crc32c)
            && (!is_hashed || self.blake3 == other.blake3)
    }

    /// Bytes in the shard.
    pub fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Shard {
    /// Its key.
    pub fn object(&self) -> ObjectKey {
        ObjectKey::new(&self.key)
    }
}

/// A BLAKE3 hash, written as 64 lowercase hex digits.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Identity(pub [u8; 32]);

impl Identity {
    /// Stands for that of bytes that nobody hashed yet.
    pub const UNKNOWN: Self = Self([0; 32]);

    fn is_unknown(&self) -> bool {
        *self == Self::UNKNOWN
    }

    /// That of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

/// A CRC-32C, written as 8 lowercase hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Checksum(pub u32);

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Identity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Identity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let hash = is_lower_hex(&text).then(|| blake3::Hash::from_hex(&text).ok()).flatten();
        let wrong = || de::Error::invalid_value(de::Unexpected::Str(&text), &"64 lowercase hex digits");
        Ok(Self(*hash.ok_or_else(wrong)?.as_bytes()))
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let fits = text.len() == 8 && is_lower_hex(&text);
        let value = fits.then(|| u32::from_str_radix(&text, 16).ok()).flatten();
        let wrong = || de::Error::invalid_value(de::Unexpected::Str(&text), &"8 lowercase hex digits");
        value.map(Self).ok_or_else(wrong)
    }
}

/// Whether `text` is all digits and a to f: one value has one spelling.
pub(super) fn is_lower_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
