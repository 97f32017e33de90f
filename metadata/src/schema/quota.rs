//! `Q`: what may lie below a directory, and what does.

use std::ops::{Add, Neg, Sub};

use bytes::Bytes;
use forebay_core::Result;
use serde::{Deserialize, Serialize};

use super::codec::{Decoder, Encoder};

/// What lies below a directory, or how much more than before. While a directory is being counted it may be negative: what
/// left it was there before the count began. Sums that no number holds stay at the largest: files of earlier versions may
/// be so large.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// Inodes, the directory itself not among them.
    pub inodes: i64,
    /// Sizes of files, summed up.
    pub bytes: i64,
}

impl Usage {
    /// So many bytes, and no inode.
    pub(crate) fn of_bytes(bytes: u64) -> Self {
        Self { inodes: 0, bytes: i64::try_from(bytes).unwrap_or(i64::MAX) }
    }
}

impl Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            inodes: self.inodes.saturating_add(other.inodes),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl Neg for Usage {
    type Output = Self;

    fn neg(self) -> Self {
        Self { inodes: self.inodes.saturating_neg(), bytes: self.bytes.saturating_neg() }
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

/// What may lie below a directory; `None` sets no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaLimits {
    /// Sizes of files, summed up.
    pub bytes: Option<u64>,
    /// Inodes.
    pub inodes: Option<u64>,
}

/// `Q ino`: the quota of a directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quota {
    /// What may lie below it. Without any limit the record is there only for a rename that needs the count.
    pub limits: QuotaLimits,
    /// Whether `usage` is all that is there; else only what came and went since the record was made.
    pub is_counted: bool,
    /// What lies below it.
    pub usage: Usage,
}

impl Quota {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        for limit in [self.limits.bytes, self.limits.inodes] {
            out.optional(limit.as_ref(), |out, limit| out.number(*limit));
        }
        out.byte(u8::from(self.is_counted));
        out.signed(self.usage.bytes);
        out.signed(self.usage.inodes);
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "quota")?;
        let limits =
            QuotaLimits { bytes: from.optional(Decoder::number)?, inodes: from.optional(Decoder::number)? };
        let is_counted = from.flag()?;
        let usage = Usage { bytes: from.signed()?, inodes: from.signed()? };
        from.finish()?;
        Ok(Self { limits, is_counted, usage })
    }
}
