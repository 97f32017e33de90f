//! The byte encoding that all values share: a version byte, then fields in order.
//!
//! Integers are LEB128 (7 bits a byte, least first), signed ones zigzag before; byte strings carry their length.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use forebay_core::{Blob, Error, FileKind, InodeId, ObjectKey, Result, Timestamp, Version};

/// The first byte of every value.
pub const FORMAT: u8 = 1;

/// Writes one value.
pub(super) struct Encoder(BytesMut);

impl Encoder {
    pub(super) fn new() -> Self {
        let mut out = BytesMut::with_capacity(128);
        out.put_u8(FORMAT);
        Self(out)
    }

    pub(super) fn finish(self) -> Bytes {
        self.0.freeze()
    }

    pub(super) fn byte(&mut self, value: u8) {
        self.0.put_u8(value);
    }

    pub(super) fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.put_u8(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.put_u8(value as u8);
    }

    pub(super) fn signed(&mut self, value: i64) {
        self.number(((value << 1) ^ (value >> 63)) as u64);
    }

    pub(super) fn bytes(&mut self, value: &[u8]) {
        self.number(value.len() as u64);
        self.0.put_slice(value);
    }

    pub(super) fn time(&mut self, value: Timestamp) {
        self.signed(value.seconds);
        self.number(u64::from(value.nanos));
    }

    pub(super) fn blob(&mut self, value: &Blob) {
        self.bytes(value.key.as_str().as_bytes());
        self.bytes(value.version.as_str().as_bytes());
        self.number(value.size);
    }

    /// A byte that tells whether the field follows, and the field.
    pub(super) fn optional<T>(&mut self, value: Option<&T>, encode: impl FnOnce(&mut Self, &T)) {
        self.byte(u8::from(value.is_some()));
        if let Some(value) = value {
            encode(self, value);
        }
    }
}

/// Reads one value; every method fails with `Corrupt` where the bytes cannot have been written by [`Encoder`].
pub(super) struct Decoder {
    rest: Bytes,
    what: &'static str,
}

impl Decoder {
    /// Starts on `value`, which `what` names in errors.
    pub(super) fn new(value: Bytes, what: &'static str) -> Result<Self> {
        let mut decoder = Self { rest: value, what };
        match decoder.byte()? {
            FORMAT => Ok(decoder),
            other => Err(decoder.bad(&format!("has format {other}, this program knows {FORMAT}"))),
        }
    }

    pub(super) fn bad(&self, why: &str) -> Error {
        Error::corrupt(format!("{} record {why}", self.what))
    }

    /// Whether a field follows that not every record has.
    pub(super) fn has_more(&self) -> bool {
        !self.rest.is_empty()
    }

    /// Ends the value; bytes left over are damage.
    pub(super) fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(self.bad(&format!("has {more} bytes too many"))),
        }
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        // Not `split_to`, which counts references, for every byte of a record.
        let Some(byte) = self.rest.first().copied() else {
            return Err(self.bad("is cut short"));
        };
        self.rest.advance(1);
        Ok(byte)
    }

    pub(super) fn flag(&mut self) -> Result<bool> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.bad(&format!("has the flag {other}"))),
        }
    }

    pub(super) fn number(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.bad("has a number past 64 bits"))
    }

    pub(super) fn signed(&mut self) -> Result<i64> {
        let value = self.number()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// A number that must fit a smaller type.
    pub(super) fn small<T: TryFrom<u64>>(&mut self) -> Result<T> {
        let value = self.number()?;
        T::try_from(value).map_err(|_| self.bad(&format!("has {value} in a smaller field")))
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes> {
        // A copy, so that a small field kept in memory does not hold a whole page of the engine.
        self.field(Bytes::copy_from_slice)
    }

    pub(super) fn text(&mut self) -> Result<String> {
        let text = self.field(|bytes| std::str::from_utf8(bytes).map(str::to_owned))?;
        text.map_err(|_| self.bad("has text that is not UTF-8"))
    }

    /// What `take` makes of a byte string.
    fn field<T>(&mut self, take: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let length = self.small::<usize>()?;
        let Some(bytes) = self.rest.get(..length) else {
            return Err(self.bad("is cut short"));
        };
        let taken = take(bytes);
        self.rest.advance(length);
        Ok(taken)
    }

    pub(super) fn ino(&mut self) -> Result<InodeId> {
        self.number().map(InodeId)
    }

    pub(super) fn object_key(&mut self) -> Result<ObjectKey> {
        self.text().map(ObjectKey::new)
    }

    pub(super) fn version(&mut self) -> Result<Version> {
        self.text().map(Version::new)
    }

    pub(super) fn blob(&mut self) -> Result<Blob> {
        Ok(Blob { key: self.object_key()?, version: self.version()?, size: self.number()? })
    }

    pub(super) fn time(&mut self) -> Result<Timestamp> {
        let time = Timestamp { seconds: self.signed()?, nanos: self.small()? };
        if time.nanos >= 1_000_000_000 {
            return Err(self.bad("has a second of more than 10^9 nanoseconds"));
        }
        Ok(time)
    }

    pub(super) fn optional<T>(&mut self, decode: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.flag()? { decode(self).map(Some) } else { Ok(None) }
    }

    pub(super) fn kind(&mut self) -> Result<FileKind> {
        let byte = self.byte()?;
        KINDS.get(usize::from(byte)).copied().ok_or_else(|| self.bad(&format!("has the file type {byte}")))
    }
}

/// A value that is nothing but its version byte and `bytes`.
pub fn encode_plain(bytes: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(1 + bytes.len());
    out.put_u8(FORMAT);
    out.put_slice(bytes);
    out.freeze()
}

/// Reads such a value; `what` names it in errors.
pub fn decode_plain(value: Bytes, what: &'static str) -> Result<Bytes> {
    Decoder::new(value, what).map(|decoder| decoder.rest)
}

/// File types by their byte.
const KINDS: [FileKind; 7] = [
    FileKind::File,
    FileKind::Directory,
    FileKind::Symlink,
    FileKind::Fifo,
    FileKind::Socket,
    FileKind::CharDevice,
    FileKind::BlockDevice,
];

/// The byte of a file type.
pub(super) fn kind_byte(kind: FileKind) -> u8 {
    match kind {
        FileKind::File => 0,
        FileKind::Directory => 1,
        FileKind::Symlink => 2,
        FileKind::Fifo => 3,
        FileKind::Socket => 4,
        FileKind::CharDevice => 5,
        FileKind::BlockDevice => 6,
    }
}
