//! The text of `.forebay/volume.json`.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, VolumeId, crc32c};
use serde::{Deserialize, Serialize};

/// Which engine keeps the volume's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// Inside the bucket, under `.forebay/tree/`.
    SlateDb,
    /// On a local disk; for `file://`, inside the bucket's directory.
    Lmdb,
}

/// Who may write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseRecord {
    /// Host, process and a random number: never the same for two openings.
    pub holder: String,
    /// Where the holder can be reached, when it serves others.
    pub address: Option<String>,
    /// Raised by the holder while it lives. Only its changing means anything.
    pub renewed: u64,
    /// How long the counter must stand still before another may take the lease, in milliseconds.
    pub duration_ms: u64,
    /// Whether the holder closes the volume, and is about to give the lease back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ending: bool,
}

/// What a volume is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeRecord {
    /// Version of this format: [`VolumeRecord::FORMAT`].
    pub format: u32,
    /// The volume's name in keys, 16 hexadecimal digits in the file.
    #[serde(with = "hexadecimal")]
    pub volume: VolumeId,
    /// When it was created, in seconds since 1970 by its creator's clock; for people only.
    pub created: i64,
    /// What keeps its tree.
    pub engine: EngineKind,
    /// Leases granted so far; the current holder's number.
    pub epoch: u64,
    /// The lease, if it is not released.
    pub lease: Option<LeaseRecord>,
}

/// The record as it is stored: with the CRC32C of its compact JSON, in hexadecimal.
#[derive(Serialize, Deserialize)]
struct Stored {
    #[serde(flatten)]
    record: VolumeRecord,
    crc32c: String,
}

impl VolumeRecord {
    /// Where the record lies below the bucket's prefix.
    pub const KEY: &'static str = ".forebay/volume.json";
    /// The longest text of one that is read, in bytes: hundreds of times what one has.
    pub(super) const MAX_BYTES: u64 = 1 << 20;
    /// The format that this code writes.
    pub const FORMAT: u32 = 1;

    /// The record's text.
    pub fn encode(&self) -> Bytes {
        let stored = Stored { record: self.clone(), crc32c: self.checksum() };
        let mut text = serde_json::to_vec_pretty(&stored).expect("a plain record always serializes");
        text.push(b'\n');
        text.into()
    }

    /// Reads a record's text.
    ///
    /// # Errors
    /// `Corrupt` when it is damaged, `Unsupported` when a newer Forebay wrote it.
    pub fn decode(text: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let Format { format } = serde_json::from_slice(text).map_err(damaged)?;
        if format > Self::FORMAT {
            let message = format!("{} has format {format}, this is {}", Self::KEY, Self::FORMAT);
            return Err(Error::new(ErrorKind::Unsupported, message).with_hint("use a newer Forebay"));
        }
        let stored: Stored = serde_json::from_slice(text).map_err(damaged)?;
        let expected = stored.record.checksum();
        match stored.crc32c == expected {
            true => Ok(stored.record),
            false => Err(damaged(format!("its checksum is {}, expected {expected}", stored.crc32c))),
        }
    }

    fn checksum(&self) -> String {
        let compact = serde_json::to_vec(self).expect("a plain record always serializes");
        format!("{:08x}", crc32c(&compact))
    }
}

pub(super) fn damaged(why: impl std::fmt::Display) -> Error {
    Error::corrupt(format!("{} is damaged: {why}", VolumeRecord::KEY)).with_hint(
        "restore it from an earlier version of the object or a backup; without it a mount starts a new, empty \
         tree over the same objects",
    )
}

mod hexadecimal {
    use forebay_core::VolumeId;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(volume: &VolumeId, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(volume)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<VolumeId, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(VolumeId).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> VolumeRecord {
        VolumeRecord {
            format: 1,
            volume: VolumeId(0xfeed_0000_0000_0001),
            created: 1_800_000_000,
            engine: EngineKind::SlateDb,
            epoch: 3,
            lease: Some(LeaseRecord {
                holder: "host-7-0123456789abcdef".into(),
                address: None,
                renewed: 17,
                duration_ms: 15_000,
                ending: false,
            }),
        }
    }

    #[test]
    fn the_text_is_pinned() {
        let golden = r#"{
  "format": 1,
  "volume": "feed000000000001",
  "created": 1800000000,
  "engine": "slatedb",
  "epoch": 3,
  "lease": {
    "holder": "host-7-0123456789abcdef",
    "address": null,
    "renewed": 17,
    "duration_ms": 15000
  },
  "crc32c": "CRC"
}
"#
        .replace("CRC", &sample().checksum());
        assert_eq!(std::str::from_utf8(&sample().encode()).expect("text"), golden);
        assert_eq!(VolumeRecord::decode(golden.as_bytes()).expect("record"), sample());
        let lease = sample().lease.map(|lease| LeaseRecord { ending: true, ..lease });
        let ending = VolumeRecord { lease, ..sample() };
        let text = ending.encode();
        assert!(std::str::from_utf8(&text).is_ok_and(|text| text.contains("15000,\n    \"ending\": true\n")));
        assert_eq!(VolumeRecord::decode(&text).expect("record"), ending);
        let released = VolumeRecord { lease: None, ..sample() };
        assert_eq!(VolumeRecord::decode(&released.encode()).expect("record"), released);
    }

    #[test]
    fn damage_is_corrupt_and_a_newer_format_unsupported() {
        let text = sample().encode();
        let check = |text: &[u8], kind: ErrorKind| {
            let error = VolumeRecord::decode(text).expect_err("refused");
            assert_eq!((error.kind(), error.hint().is_some()), (kind, true), "{error}");
        };
        for cut in 0..text.len() - 2 {
            check(&text[..cut], ErrorKind::Corrupt);
        }
        let text = String::from_utf8(text.to_vec()).expect("text");
        check(text.replace("17", "18").as_bytes(), ErrorKind::Corrupt);
        check(text.replace("slatedb", "lmdb").as_bytes(), ErrorKind::Corrupt);
        check(text.replace("\"format\": 1", "\"format\": 2").as_bytes(), ErrorKind::Unsupported);
        check(b"{\"format\": 2, \"else\": []}", ErrorKind::Unsupported);
    }
}
