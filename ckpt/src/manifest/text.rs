//! The manifest as bytes: one JSON document whose head carries a checksum of the rest.
//!
//! ```text
//! {"format":"forebay-checkpoint","version":1,"blake3":"<64 hex>","body":{...}}\n
//! ```
//! Where the body is long, the head is a line of its own, with what is looked for without the rest, and the body behind it packed,
//! as one zstd stream:
//! ```text
//! {"format":"forebay-checkpoint","version":2,"blake3":"<64 hex>","commit":"<32 hex>"}\n...
//! ```
//! A rank's index is the same with the format `forebay-checkpoint-rank`, an intent with `forebay-checkpoint-intent`, what
//! is on a host's own disk with `forebay-checkpoint-local`, all of them without a `commit` there.
//! The head is fixed to the byte, and the hash covers the body as written, from its `{` to its `}` or as it is packed: whatever
//! byte is changed, added or lost, the manifest is refused.

use std::io::{self, BufReader, BufWriter, Read, Write};

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::codec::{Compressor, Decompressor};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Fault, Identity, Manifest};

const HEAD: &str = r#"{"format":"forebay-checkpoint","version":"#;
const INDEX_HEAD: &str = r#"{"format":"forebay-checkpoint-rank","version":"#;
const INTENT_HEAD: &str = r#"{"format":"forebay-checkpoint-intent","version":"#;
const LOCAL_HEAD: &str = r#"{"format":"forebay-checkpoint-local","version":"#;
const VERSION: &str = "1";
/// Of what has a packed body.
const PACKED_VERSION: &str = "2";
const HASH: &str = r#","blake3":""#;
const BODY: &str = r#"","body":"#;
const COMMIT: &str = r#"{"commit":""#;
const TAIL: &str = "}\n";
/// Between a packed manifest's hash and its commit.
const LABEL: &str = r#"","commit":""#;
/// What ends the line before a packed body.
const PACKED: &str = "\"}\n";

/// The longest text that a manifest has, in bytes: some ten million slices, and no surprise for the reader's memory.
pub(super) const MAX_MANIFEST: usize = if cfg!(test) { 16 << 20 } else { 2 << 30 };
/// The longest body that is not packed: those of smaller jobs can be read by people, and by earlier builds.
pub(super) const MAX_PLAIN: usize = 256 << 10;
/// What helps where there would be more.
pub(super) const LESS_TEXT: &str = "save fewer and larger tensors, or from fewer ranks; long lists of numbers are text in a state: \
     keep them as tensors";
/// More than what stands around a body.
pub(super) const FRAMING_MAX: usize = 1024;

impl Manifest {
    /// The newest version of the format that this code writes.
    pub const VERSION: &'static str = PACKED_VERSION;

    /// The first bytes of a manifest, up to the end of its `commit`, wherever that is.
    pub(crate) const HEAD_BYTES: usize =
        HEAD.len() + VERSION.len() + HASH.len() + 64 + BODY.len() + COMMIT.len() + 32;

    /// The `commit` in the [first bytes](Self::HEAD_BYTES) of a manifest, which are not checked; `None` for those of
    /// anything else.
    pub(crate) fn commit_at_head(head: &[u8]) -> Option<&str> {
        // What is packed is no text.
        let line = head.split(|byte| *byte == b'\n').next()?;
        let (version, rest) = std::str::from_utf8(line).ok()?.strip_prefix(HEAD)?.split_once(',')?;
        let (_, rest) = rest.strip_prefix(&HASH[1..])?.split_at_checked(64)?;
        let rest = match version {
            VERSION => rest.strip_prefix(BODY)?.strip_prefix(COMMIT)?,
            PACKED_VERSION => rest.strip_prefix(LABEL)?,
            _ => return None,
        };
        rest.get(..32)
    }

    /// The bytes of a manifest that holds together.
    ///
    /// # Errors
    /// `Bug` when it does not: nothing wrong is ever written. `TooLarge` when nobody could read it.
    pub fn encode(&self) -> Result<Bytes> {
        self.check().and_then(|()| self.check_identities()).map_err(|fault| refused(&fault))?;
        write(HEAD, Some(&self.commit), self)
    }

    /// As [`Manifest::encode`], of what one rank stored: others hold the rest of its tensors.
    pub fn encode_index(&self) -> Result<Bytes> {
        self.check_part().and_then(|()| self.check_identities()).map_err(|fault| refused(&fault))?;
        write(INDEX_HEAD, None, self)
    }

    /// Reads and checks a manifest.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn decode(data: &[u8]) -> Result<Self, Fault> {
        let (manifest, label): (Self, _) = read(data, HEAD)?;
        if label.is_some_and(|label| label != manifest.commit) {
            return Err(Fault::Framing);
        }
        manifest.check()?;
        manifest.check_identities()?;
        Ok(manifest)
    }

    /// Reads and checks what one rank stored.
    pub fn decode_index(data: &[u8]) -> Result<Self, Fault> {
        let index: Self = read_unlabelled(data, INDEX_HEAD)?;
        index.check_part()?;
        index.check_identities()?;
        Ok(index)
    }
}

/// What a save under way refers to, told before it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Intent {
    /// Keys of shards that earlier steps wrote.
    pub shards: Vec<String>,
}

impl Intent {
    /// Its bytes.
    pub fn encode(&self) -> Result<Bytes> {
        write(INTENT_HEAD, None, self)
    }

    /// Reads one.
    pub fn decode(data: &[u8]) -> Result<Self, Fault> {
        read_unlabelled(data, INTENT_HEAD)
    }
}

/// The bytes of something on a host's own disk.
pub(crate) fn write_local(body: &impl Serialize) -> Result<Bytes> {
    write(LOCAL_HEAD, None, body)
}

/// Reads it.
pub(crate) fn read_local<T: DeserializeOwned>(data: &[u8]) -> Result<T, Fault> {
    read_unlabelled(data, LOCAL_HEAD)
}

/// A body as it is written: packed from where it is long.
struct Text {
    out: Out,
    length: usize,
}

enum Out {
    Plain(Vec<u8>),
    Packed(Compressor<Vec<u8>>),
}

impl Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.length += bytes.len();
        if self.length + FRAMING_MAX > MAX_MANIFEST {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if let Out::Plain(begun) = &self.out
            && self.length > MAX_PLAIN
        {
            let mut packed = Compressor::new(Vec::new())?;
            packed.write_all(begun)?;
            self.out = Out::Packed(packed);
        }
        match &mut self.out {
            Out::Plain(plain) => plain.write_all(bytes)?,
            Out::Packed(packed) => packed.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// # Errors
/// `TooLarge` for what nobody could read again.
fn write(head: &str, label: Option<&str>, body: &impl Serialize) -> Result<Bytes> {
    let mut text = BufWriter::new(Text { out: Out::Plain(Vec::new()), length: 0 });
    serde_json::to_writer(&mut text, body).map_err(|error| match error.io_error_kind() {
        Some(kind) => unwritten(kind.into()),
        None => refused(&error),
    })?;
    let text = text.into_inner().map_err(|error| unwritten(error.into_error()))?;
    let bytes = match text.out {
        Out::Plain(body) => {
            let hash = blake3::hash(&body).to_hex();
            [[head, VERSION, HASH, &hash, BODY].concat().as_bytes(), &body, TAIL.as_bytes()].concat()
        }
        Out::Packed(packed) => {
            let body = packed.finish().map_err(unwritten)?;
            let hash = blake3::hash(&body).to_hex();
            let line =
                [head, PACKED_VERSION, HASH, &hash, label.map_or("", |_| LABEL), label.unwrap_or(""), PACKED];
            [line.concat().as_bytes(), &body].concat()
        }
    };
    Ok(Bytes::from(bytes))
}

fn unwritten(error: io::Error) -> Error {
    if error.kind() != io::ErrorKind::FileTooLarge {
        return refused(&error);
    }
    let message = format!("what a step says of itself takes more than {MAX_MANIFEST} bytes of text");
    Error::new(ErrorKind::TooLarge, message).with_hint(LESS_TEXT)
}

/// As [`read`], of what has no label.
fn read_unlabelled<T: DeserializeOwned>(data: &[u8], head: &str) -> Result<T, Fault> {
    match read(data, head)? {
        (value, None) => Ok(value),
        (_, Some(_)) => Err(Fault::Framing),
    }
}

/// What was written, and its label where it is packed and has one.
fn read<'a, T: DeserializeOwned>(data: &'a [u8], head: &str) -> Result<(T, Option<&'a str>), Fault> {
    if data.len() > MAX_MANIFEST {
        return Err(Fault::TooLong { bytes: data.len() });
    }
    let rest = data.strip_prefix(head.as_bytes()).ok_or(Fault::Framing)?;
    let at = rest.iter().position(|byte| *byte == b',').ok_or(Fault::Framing)?;
    let (version, rest) = rest.split_at(at);
    let rest = rest.strip_prefix(HASH.as_bytes());
    let hashed = |rest: Option<&'a [u8]>| -> Result<_, Fault> {
        let (hash, rest) = rest.and_then(|rest| rest.split_at_checked(64)).ok_or(Fault::Framing)?;
        Ok((std::str::from_utf8(hash).map_err(|_| Fault::Framing)?, rest))
    };
    if version == VERSION.as_bytes() {
        let (hash, rest) = hashed(rest)?;
        let body = rest.strip_prefix(BODY.as_bytes()).and_then(|rest| rest.strip_suffix(TAIL.as_bytes()));
        let body = body.ok_or(Fault::Framing)?;
        expect_hash(body, hash)?;
        return serde_json::from_slice(body).map(|value| (value, None)).map_err(Fault::Body);
    }
    if version == PACKED_VERSION.as_bytes() {
        let (hash, rest) = hashed(rest)?;
        let (label, rest) = match rest.strip_prefix(LABEL.as_bytes()) {
            None => (None, rest),
            Some(rest) => {
                let (label, rest) = rest.split_at_checked(32).ok_or(Fault::Framing)?;
                (Some(std::str::from_utf8(label).map_err(|_| Fault::Framing)?), rest)
            }
        };
        let body = rest.strip_prefix(PACKED.as_bytes()).ok_or(Fault::Framing)?;
        expect_hash(body, hash)?;
        return unpack(body).map(|value| (value, label));
    }
    Err(Fault::Version(String::from_utf8_lossy(version).chars().take(20).collect()))
}

fn expect_hash(body: &[u8], expected: &str) -> Result<(), Fault> {
    let got = Identity::of(body);
    match got.to_string() == expected {
        true => Ok(()),
        false => Err(Fault::Hash { expected: expected.to_owned(), got }),
    }
}

/// Reads a packed body as it is unpacked: its text is never there as a whole.
fn unpack<T: DeserializeOwned>(packed: &[u8]) -> Result<T, Fault> {
    let body = |error| Fault::Body(serde_json::Error::io(error));
    let mut text = Decompressor::new(packed).map_err(body)?.take(MAX_MANIFEST as u64);
    // Read a byte at a time, which is as good as free from a buffer alone.
    let parsed = serde_json::from_reader(BufReader::new(&mut text)).map_err(Fault::Body);
    match text.limit() {
        0 => Err(Fault::TooLong { bytes: MAX_MANIFEST }),
        _ => parsed,
    }
}

fn refused(fault: &dyn std::fmt::Display) -> Error {
    Error::bug(format!("refuse to write a manifest: {fault}"))
}
