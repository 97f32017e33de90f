//! The manifest as bytes: one JSON document whose head carries a checksum of the rest.
//!
//! ```text
//! {"format":"forebay-checkpoint","version":1,"blake3":"<64 hex>","body":{...}}\n
//! ```
//! A rank's index is the same with the format `forebay-checkpoint-rank`, an intent with `forebay-checkpoint-intent`, what
//! is on a host's own disk with `forebay-checkpoint-local`.
//! The head is fixed to the byte, and the hash covers the body from its `{` to its `}` as written: whatever byte is
//! changed, added or lost, the manifest is refused.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Fault, Identity, Manifest};

const HEAD: &str = r#"{"format":"forebay-checkpoint","version":"#;
const INDEX_HEAD: &str = r#"{"format":"forebay-checkpoint-rank","version":"#;
const INTENT_HEAD: &str = r#"{"format":"forebay-checkpoint-intent","version":"#;
const LOCAL_HEAD: &str = r#"{"format":"forebay-checkpoint-local","version":"#;
const VERSION: &str = "1";
const HASH: &str = r#","blake3":""#;
const BODY: &str = r#"","body":"#;
const COMMIT: &str = r#"{"commit":""#;
const TAIL: &str = "}\n";

/// The longest manifest that is read, in bytes: over a million tensors, and no surprise for the reader's memory.
pub(super) const MAX_MANIFEST: usize = 256 << 20;
/// What helps where there would be more.
pub(super) const LESS_TEXT: &str = "save fewer and larger tensors, or from fewer ranks; long lists of numbers are text in a state: \
     keep them as tensors";
/// More than what stands around a body.
pub(super) const FRAMING_MAX: usize = 1024;

impl Manifest {
    /// The version of the format that this code writes.
    pub const VERSION: &'static str = VERSION;

    /// The first bytes of a manifest, up to the end of its `commit`.
    pub(crate) const HEAD_BYTES: usize =
        HEAD.len() + VERSION.len() + HASH.len() + 64 + BODY.len() + COMMIT.len() + 32;

    /// The `commit` in the [first bytes](Self::HEAD_BYTES) of a manifest, which are not checked; `None` for those of
    /// anything else.
    pub(crate) fn commit_at_head(head: &[u8]) -> Option<&str> {
        let rest = std::str::from_utf8(head).ok()?.strip_prefix(HEAD)?.strip_prefix(VERSION)?;
        let (_, rest) = rest.strip_prefix(HASH)?.split_at_checked(64)?;
        rest.strip_prefix(BODY)?.strip_prefix(COMMIT)?.get(..32)
    }

    /// The bytes of a manifest that holds together.
    ///
    /// # Errors
    /// `Bug` when it does not: nothing wrong is ever written. `TooLarge` when nobody could read it.
    pub fn encode(&self) -> Result<Bytes> {
        self.check().and_then(|()| self.check_identities()).map_err(|fault| refused(&fault))?;
        write(HEAD, self)
    }

    /// As [`Manifest::encode`], of what one rank stored: others hold the rest of its tensors.
    pub fn encode_index(&self) -> Result<Bytes> {
        self.check_part().and_then(|()| self.check_identities()).map_err(|fault| refused(&fault))?;
        write(INDEX_HEAD, self)
    }

    /// Reads and checks a manifest.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn decode(data: &[u8]) -> Result<Self, Fault> {
        let manifest: Self = read(data, HEAD)?;
        manifest.check()?;
        manifest.check_identities()?;
        Ok(manifest)
    }

    /// Reads and checks what one rank stored.
    pub fn decode_index(data: &[u8]) -> Result<Self, Fault> {
        let index: Self = read(data, INDEX_HEAD)?;
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
        write(INTENT_HEAD, self)
    }

    /// Reads one.
    pub fn decode(data: &[u8]) -> Result<Self, Fault> {
        read(data, INTENT_HEAD)
    }
}

/// The bytes of something on a host's own disk.
pub(crate) fn write_local(body: &impl Serialize) -> Result<Bytes> {
    write(LOCAL_HEAD, body)
}

/// Reads it.
pub(crate) fn read_local<T: DeserializeOwned>(data: &[u8]) -> Result<T, Fault> {
    read(data, LOCAL_HEAD)
}

fn write(head: &str, body: &impl Serialize) -> Result<Bytes> {
    let body = serde_json::to_string(body).map_err(|error| refused(&error))?;
    check_length(body.len() + FRAMING_MAX)?;
    let hash = blake3::hash(body.as_bytes()).to_hex();
    Ok(Bytes::from([head, VERSION, HASH, &hash, BODY, &body, TAIL].concat()))
}

/// Refuses what nobody could read again.
///
/// # Errors
/// `TooLarge`.
fn check_length(bytes: usize) -> Result<()> {
    if bytes <= MAX_MANIFEST {
        return Ok(());
    }
    let message = format!("what a step says of itself takes {bytes} bytes of text, more than {MAX_MANIFEST}");
    Err(Error::new(ErrorKind::TooLarge, message).with_hint(LESS_TEXT))
}

fn read<T: DeserializeOwned>(data: &[u8], head: &str) -> Result<T, Fault> {
    if data.len() > MAX_MANIFEST {
        return Err(Fault::TooLong { bytes: data.len() });
    }
    let text = std::str::from_utf8(data).map_err(|_| Fault::Framing)?;
    let rest = text.strip_prefix(head).ok_or(Fault::Framing)?;
    let (version, rest) = rest.split_once(',').ok_or(Fault::Framing)?;
    if version != VERSION {
        return Err(Fault::Version(version.chars().take(20).collect()));
    }
    let rest = rest.strip_prefix(&HASH[1..]).ok_or(Fault::Framing)?;
    let (expected, rest) = rest.split_at_checked(64).ok_or(Fault::Framing)?;
    let body = rest.strip_prefix(BODY).and_then(|rest| rest.strip_suffix(TAIL)).ok_or(Fault::Framing)?;
    let got = Identity::of(body.as_bytes());
    if got.to_string() != expected {
        return Err(Fault::Hash { expected: expected.to_owned(), got });
    }
    serde_json::from_str(body).map_err(Fault::Body)
}

fn refused(fault: &dyn std::fmt::Display) -> Error {
    Error::bug(format!("refuse to write a manifest: {fault}"))
}
