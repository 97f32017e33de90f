//! All records but inodes and intents.

use bytes::Bytes;
use forebay_core::{Blob, FileKind, InodeId, ObjectKey, Result, Timestamp};
use serde::{Deserialize, Serialize};

use super::codec::{Decoder, Encoder, kind_byte};

/// `D parent name`: what a name leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dentry {
    /// The inode.
    pub ino: InodeId,
    /// Its type.
    pub kind: FileKind,
}

impl Dentry {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.byte(kind_byte(self.kind));
        out.number(self.ino.0);
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "directory entry")?;
        let kind = from.kind()?;
        let ino = from.ino()?;
        from.finish()?;
        Ok(Self { ino, kind })
    }
}

/// Why a key is not simply the file at that path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HolderState {
    /// It holds bytes of an inode whose path is another one.
    Held(InodeId),
    /// An inode is about to write there; its `W` record says what was there before.
    Intended(InodeId),
    /// Its object, or what lies below a removed directory, is to be deleted; the time is the one in the `G` record's key.
    Doomed {
        /// Milliseconds since 1970.
        due_ms: u64,
    },
    /// A prefix, with its slash: all below it belongs to the tree under a directory that was renamed.
    Subtree(InodeId),
}

/// `C hash`: the claim on a key or prefix. Listings pass over it, and no other file is placed there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// The key or prefix in full.
    pub key: ObjectKey,
    /// Whose it is.
    pub state: HolderState,
}

impl Claim {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.bytes(self.key.as_str().as_bytes());
        let (tag, number) = match &self.state {
            HolderState::Held(ino) => (0, ino.0),
            HolderState::Intended(ino) => (1, ino.0),
            HolderState::Doomed { due_ms } => (2, *due_ms),
            HolderState::Subtree(ino) => (3, ino.0),
        };
        out.byte(tag);
        out.number(number);
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "claim")?;
        let key = from.object_key()?;
        let state = match (from.byte()?, from.number()?) {
            (0, ino) => HolderState::Held(InodeId(ino)),
            (1, ino) => HolderState::Intended(InodeId(ino)),
            (2, due_ms) => HolderState::Doomed { due_ms },
            (3, ino) => HolderState::Subtree(InodeId(ino)),
            (other, _) => return Err(from.bad(&format!("has the state {other}"))),
        };
        from.finish()?;
        Ok(Self { key, state })
    }
}

/// `B hash`: how many inodes refer to an owned blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct References {
    /// The blob's key.
    pub key: ObjectKey,
    /// Inodes whose layouts name it.
    pub count: u64,
}

impl References {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.bytes(self.key.as_str().as_bytes());
        out.number(self.count);
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "blob reference")?;
        let record = Self { key: from.object_key()?, count: from.number()? };
        from.finish()?;
        Ok(record)
    }
}

/// `R hash ino`: an inode whose layout names a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// The segment's key.
    pub key: ObjectKey,
}

impl Member {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.bytes(self.key.as_str().as_bytes());
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "segment member")?;
        let record = Self { key: from.object_key()? };
        from.finish()?;
        Ok(record)
    }
}

/// `F hash`: a segment that is new, or that a file gave up bytes of, since compaction looked at it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loose {
    /// The segment.
    pub blob: Blob,
    /// How often a file gave up bytes of it since: what was looked at stays what it was while this does.
    pub changes: u64,
}

impl Loose {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.blob(&self.blob);
        out.number(self.changes);
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "loose segment")?;
        let record = Self { blob: from.blob()?, changes: from.number()? };
        from.finish()?;
        Ok(record)
    }
}

/// `L hash`: a plain object that files other than its own refer to. It is not destroyed before it was moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loan {
    /// The object, as layouts name it.
    pub blob: Blob,
    /// Inodes other than the object's own whose layouts name it.
    pub count: u64,
    /// The owned copy that is meant instead, once there is one.
    pub moved: Option<Blob>,
}

impl Loan {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.blob(&self.blob);
        out.number(self.count);
        out.optional(self.moved.as_ref(), Encoder::blob);
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "loan")?;
        let record = Self { blob: from.blob()?, count: from.number()?, moved: from.optional(Decoder::blob)? };
        from.finish()?;
        Ok(record)
    }
}

/// `G time hash`: an object that nothing refers to any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deletion {
    /// The object; a plain key is deleted only while it holds this version.
    pub blob: Blob,
    /// Of an owned blob that was placed and may not be committed yet: who placed it. It is left alone while that
    /// session lives.
    pub session: Option<u64>,
}

impl Deletion {
    /// The time in the key of a blob that was placed and is not referred to yet.
    pub const UNCOMMITTED_MS: u64 = 0;

    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.blob(&self.blob);
        out.optional(self.session.as_ref(), |out, session| out.number(*session));
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "deletion")?;
        let blob = from.blob()?;
        let session = from.optional(Decoder::number)?;
        from.finish()?;
        Ok(Self { blob, session })
    }
}

/// `J ino`: bytes to be brought to the key that the path spells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Move {
    /// Those of one file.
    File,
    /// Those of every file below a directory, which claims these prefixes.
    Subtree {
        /// The prefixes, with their slashes, oldest first.
        prefixes: Vec<String>,
    },
}

impl Move {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        match self {
            Self::File => out.byte(0),
            Self::Subtree { prefixes } => {
                out.byte(1);
                out.number(prefixes.len() as u64);
                prefixes.iter().for_each(|prefix| out.bytes(prefix.as_bytes()));
            }
        }
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "move")?;
        let record = match from.flag()? {
            false => Self::File,
            true => {
                let count = from.number()?;
                let prefixes = (0..count).map(|_| from.text()).collect::<Result<_>>()?;
                Self::Subtree { prefixes }
            }
        };
        from.finish()?;
        Ok(record)
    }
}

/// `M ino`: where a directory's objects are.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportState {
    /// The prefix that is listed for it, without a slash at the end (the root's is empty). `None` while that key
    /// space belongs to something else, or cannot be spelled.
    pub prefix: Option<String>,
    /// When a listing was last taken over whole; by the local clock, for people.
    pub listed: Option<Timestamp>,
}

impl ImportState {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.optional(self.prefix.as_ref(), |out, prefix| out.bytes(prefix.as_bytes()));
        out.optional(self.listed.as_ref(), |out, time| out.time(*time));
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "import state")?;
        let record = Self { prefix: from.optional(Decoder::text)?, listed: from.optional(Decoder::time)? };
        from.finish()?;
        Ok(record)
    }
}

/// `O session ino`: an inode without names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orphan {
    /// The session has it open.
    Open {
        /// For how many milliseconds it is kept in the trash once it is open no more, 0: not at all. `None` in records of before
        /// this was kept.
        kept_ms: Option<u64>,
    },
    /// It is a directory that a clone of the session builds, with all below it.
    Unfinished,
}

impl Orphan {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        match self {
            Self::Open { kept_ms: None } => {}
            Self::Unfinished => out.byte(1),
            Self::Open { kept_ms: Some(kept_ms) } => {
                out.byte(2);
                out.number(*kept_ms);
            }
        }
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let is_marked = value.len() > 1;
        let mut from = Decoder::new(value, "orphan")?;
        let record = match is_marked.then(|| from.byte()).transpose()? {
            None => Self::Open { kept_ms: None },
            Some(1) => Self::Unfinished,
            Some(2) => Self::Open { kept_ms: Some(from.number()?) },
            Some(_) => return Err(from.bad("has an unknown mark")),
        };
        from.finish()?;
        Ok(record)
    }

    /// Whether a clone builds it.
    pub fn is_unfinished(self) -> bool {
        self == Self::Unfinished
    }
}

/// `S session`: a mount that may hold files open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionRecord {
    /// When it began, by its own clock.
    pub started: Timestamp,
    /// Whether another process serves the tree to it: one that takes that over gives it time to come.
    #[serde(default)]
    pub is_guest: bool,
}

impl SessionRecord {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.time(self.started);
        if self.is_guest {
            out.byte(1);
        }
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "session")?;
        let started = from.time()?;
        let is_guest = from.has_more();
        if is_guest && !from.flag()? {
            return Err(from.bad("has a flag that nobody sets"));
        }
        from.finish()?;
        Ok(Self { started, is_guest })
    }
}

/// `S session hash`: an upload in parts that a session has begun and not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadRecord {
    /// The key that the object will have.
    pub key: ObjectKey,
    /// What the store calls it.
    pub id: String,
}

impl UploadRecord {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.bytes(self.key.as_str().as_bytes());
        out.bytes(self.id.as_bytes());
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "upload")?;
        let record = Self { key: from.object_key()?, id: from.text()? };
        from.finish()?;
        Ok(record)
    }
}

/// `Z`: the tree is not whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Partial {
    /// A dump is being loaded.
    Loading,
    /// Versions of objects are being replaced by those of a copy.
    Adopting {
        /// The plain objects that were replaced before the bucket was copied: they keep theirs.
        replaced: Vec<Blob>,
    },
}

impl Partial {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        if let Self::Adopting { replaced } = self {
            out.byte(1);
            out.number(replaced.len() as u64);
            replaced.iter().for_each(|blob| out.blob(blob));
        }
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let is_loading = value.len() <= 1;
        let mut from = Decoder::new(value, "mark")?;
        if is_loading {
            return from.finish().map(|()| Self::Loading);
        }
        if from.byte()? != 1 {
            return Err(from.bad("is of an unknown type"));
        }
        let count = from.number()?;
        let replaced = (0..count).map(|_| from.blob()).collect::<Result<_>>()?;
        from.finish()?;
        Ok(Self::Adopting { replaced })
    }
}

/// `y`: what the tree that a read-only mount follows has under a key; nothing, or that record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beneath(pub Option<Bytes>);

impl Beneath {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.optional(self.0.as_ref(), |out, value| out.bytes(value));
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "what lies beneath")?;
        let value = from.optional(Decoder::bytes)?;
        from.finish()?;
        Ok(Self(value))
    }
}

/// `N`: what a whole volume counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counters {
    /// The next inode number that no directory has been given.
    pub next_ino: u64,
    /// Inodes.
    pub inodes: u64,
    /// Bytes of all files.
    pub bytes: u64,
}

impl Counters {
    /// The record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.number(self.next_ino);
        out.number(self.inodes);
        out.number(self.bytes);
        out.finish()
    }

    /// Reads the record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "counters")?;
        let record = Self { next_ino: from.number()?, inodes: from.number()?, bytes: from.number()? };
        from.finish()?;
        Ok(record)
    }
}
