//! The keys: volume id (8 bytes, big-endian), a tag byte, then what the tag says.
//!
//! Numbers in keys are big-endian, so that byte order is number order. Object keys appear as their BLAKE3-128,
//! because they may be longer than an engine's keys; the value repeats them in full.

use bytes::{BufMut, Bytes, BytesMut};
use forebay_core::{Blob, Error, ErrorKind, InodeId, Result, VolumeId};

/// The byte that tells record families apart. `K`, `U` and `V` are reserved (locks, sharded directory
/// deltas, invalidation log).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Tag {
    /// `D parent name`: a directory entry.
    Dentry = b'D',
    /// `I ino`: attributes and the head of the layout.
    Inode = b'I',
    /// `E ino n`: further extents.
    Extents = b'E',
    /// `P ino parent name`: a name of the inode beside the one in its `I`.
    Link = b'P',
    /// `X ino name`: an extended attribute.
    Xattr = b'X',
    /// `W ino`: a write to a plain object that may or may not have happened.
    Intent = b'W',
    /// `C hash`: a key or key prefix that is not simply the file at that path.
    Claim = b'C',
    /// `B hash`: how many inodes refer to an owned blob.
    References = b'B',
    /// `R hash ino`: an inode whose layout names a segment.
    Member = b'R',
    /// `F hash`: a segment that compaction is to look at.
    Loose = b'F',
    /// `L hash`: a plain object that files other than its own refer to.
    Loan = b'L',
    /// `O session ino`: an inode without names that the session has open.
    Orphan = b'O',
    /// `S session`: a session, and `S session hash`: an upload that it has begun.
    Session = b'S',
    /// `A session`: a session that this tree has or had. What another one put into the bucket is another tree's.
    Known = b'A',
    /// `Q ino`: what may lie below a directory, and what does.
    Quota = b'Q',
    /// `T time ino`: a deleted inode that can be brought back until the time.
    Trash = b'T',
    /// `G time hash`: an object to delete, not before the time.
    Deletion = b'G',
    /// `J ino`: bytes that lie at another key than the path spells.
    Move = b'J',
    /// `M ino`: where a directory's objects are listed from.
    Import = b'M',
    /// `N`: the volume's counters.
    Counters = b'N',
    /// `Z`: the tree is being loaded or adopted, and is not whole.
    Loading = b'Z',
    /// `H`: the URL under which the objects were found to be those that the tree names.
    Home = b'H',
    /// `Y`: the tree is a read-only mount's copy of another mount's, whole or not.
    Copied = b'Y',
    /// `y key`: what the tree that a read-only mount follows has where listings changed a record.
    Beneath = b'y',
}

impl Tag {
    /// The family of a tag byte.
    fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            b'D' => Self::Dentry,
            b'I' => Self::Inode,
            b'E' => Self::Extents,
            b'P' => Self::Link,
            b'X' => Self::Xattr,
            b'W' => Self::Intent,
            b'C' => Self::Claim,
            b'B' => Self::References,
            b'R' => Self::Member,
            b'F' => Self::Loose,
            b'O' => Self::Orphan,
            b'S' => Self::Session,
            b'A' => Self::Known,
            b'Q' => Self::Quota,
            b'T' => Self::Trash,
            b'G' => Self::Deletion,
            b'J' => Self::Move,
            b'M' => Self::Import,
            b'N' => Self::Counters,
            b'L' => Self::Loan,
            b'Z' => Self::Loading,
            b'H' => Self::Home,
            b'Y' => Self::Copied,
            b'y' => Self::Beneath,
            _ => return None,
        })
    }
}

impl Tag {
    /// Whether such records say something of names, attributes and bytes, and not of who is at work on them.
    pub(crate) fn is_of_the_tree(self) -> bool {
        !matches!(
            self,
            Self::Session
                | Self::Known
                | Self::Orphan
                | Self::Intent
                | Self::Counters
                | Self::Loading
                | Self::Home
                | Self::Copied
                | Self::Beneath
        )
    }
}

/// The first 128 bits of the BLAKE3 of an object key or, with a slash at its end, of a key prefix.
pub fn hash_of(object_key: &str) -> [u8; 16] {
    let mut short = [0; 16];
    short.copy_from_slice(&blake3::hash(object_key.as_bytes()).as_bytes()[..16]);
    short
}

/// Builds and takes apart the keys of one volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys(pub VolumeId);

/// Bytes before the part that a tag defines.
const HEAD: usize = 9;

impl Keys {
    fn start(self, tag: Tag, rest: usize) -> BytesMut {
        let mut key = BytesMut::with_capacity(HEAD + rest);
        key.put_u64(self.0.0);
        key.put_u8(tag as u8);
        key
    }

    fn with_number(self, tag: Tag, number: u64) -> Bytes {
        let mut key = self.start(tag, 8);
        key.put_u64(number);
        key.freeze()
    }

    fn with_name(self, tag: Tag, number: u64, name: &[u8]) -> Bytes {
        let mut key = self.start(tag, 8 + name.len());
        key.put_u64(number);
        key.put_slice(name);
        key.freeze()
    }

    fn with_hash(self, tag: Tag, object_key: &str) -> Bytes {
        let mut key = self.start(tag, 16);
        key.put_slice(&hash_of(object_key));
        key.freeze()
    }

    /// `D parent name`.
    pub fn dentry(self, parent: InodeId, name: &[u8]) -> Bytes {
        self.with_name(Tag::Dentry, parent.0, name)
    }

    /// `I ino`.
    pub fn inode(self, ino: InodeId) -> Bytes {
        self.with_number(Tag::Inode, ino.0)
    }

    /// `E ino n`.
    pub fn extents(self, ino: InodeId, n: u32) -> Bytes {
        let mut key = self.start(Tag::Extents, 12);
        key.put_u64(ino.0);
        key.put_u32(n);
        key.freeze()
    }

    /// `P ino parent name`.
    pub fn link(self, ino: InodeId, parent: InodeId, name: &[u8]) -> Bytes {
        let mut key = self.start(Tag::Link, 16 + name.len());
        key.put_u64(ino.0);
        key.put_u64(parent.0);
        key.put_slice(name);
        key.freeze()
    }

    /// `X ino name`.
    pub fn xattr(self, ino: InodeId, name: &[u8]) -> Bytes {
        self.with_name(Tag::Xattr, ino.0, name)
    }

    /// `W ino`.
    pub fn intent(self, ino: InodeId) -> Bytes {
        self.with_number(Tag::Intent, ino.0)
    }

    /// `C hash` of an object key, or of a prefix that ends with a slash.
    pub fn claim(self, object_key: &str) -> Bytes {
        self.with_hash(Tag::Claim, object_key)
    }

    /// `B hash` of an owned blob's key.
    pub fn references(self, object_key: &str) -> Bytes {
        self.with_hash(Tag::References, object_key)
    }

    /// `R hash ino` of a segment's key.
    pub fn member(self, object_key: &str, ino: InodeId) -> Bytes {
        let mut key = self.start(Tag::Member, 24);
        key.put_slice(&hash_of(object_key));
        key.put_u64(ino.0);
        key.freeze()
    }

    /// The range of the `R` keys of a segment: start and excluded end.
    pub fn members(self, object_key: &str) -> (Bytes, Bytes) {
        let start = self.with_hash(Tag::Member, object_key);
        let end = after_prefix(&start);
        (start, end)
    }

    /// The inode of an `R` key.
    pub fn member_in(self, key: &Bytes) -> Result<InodeId> {
        number_at(key, HEAD + 16).map(InodeId)
    }

    /// `F hash` of a segment's key.
    pub fn loose(self, object_key: &str) -> Bytes {
        self.with_hash(Tag::Loose, object_key)
    }

    /// `L hash` of a plain object's key and version.
    pub fn loan(self, blob: &Blob) -> Bytes {
        // Object keys hold no NUL, so that no two objects have the same text.
        self.with_hash(Tag::Loan, &format!("{}\0{}", blob.key, blob.version))
    }

    fn with_number_and_ino(self, tag: Tag, number: u64, ino: InodeId) -> Bytes {
        let mut key = self.start(tag, 16);
        key.put_u64(number);
        key.put_u64(ino.0);
        key.freeze()
    }

    /// `O session ino`.
    pub fn orphan(self, session: u64, ino: InodeId) -> Bytes {
        self.with_number_and_ino(Tag::Orphan, session, ino)
    }

    /// `T time ino`; the time in milliseconds since 1970.
    pub fn trash(self, due_ms: u64, ino: InodeId) -> Bytes {
        self.with_number_and_ino(Tag::Trash, due_ms, ino)
    }

    /// `S session`.
    pub fn session(self, session: u64) -> Bytes {
        self.with_number(Tag::Session, session)
    }

    /// `A session`.
    pub fn known(self, session: u64) -> Bytes {
        self.with_number(Tag::Known, session)
    }

    /// `S session hash` of an upload's id.
    pub fn upload(self, session: u64, id: &str) -> Bytes {
        let mut key = self.start(Tag::Session, 24);
        key.put_u64(session);
        key.put_slice(&hash_of(id));
        key.freeze()
    }

    /// Whether an `S` key is one of an upload.
    pub fn is_upload(self, key: &Bytes) -> bool {
        key.len() > HEAD + 8
    }

    /// `G time hash`; the time in milliseconds since 1970.
    pub fn deletion(self, due_ms: u64, object_key: &str) -> Bytes {
        let mut key = self.start(Tag::Deletion, 24);
        key.put_u64(due_ms);
        key.put_slice(&hash_of(object_key));
        key.freeze()
    }

    /// `J ino`.
    pub fn movement(self, ino: InodeId) -> Bytes {
        self.with_number(Tag::Move, ino.0)
    }

    /// `M ino`.
    pub fn import(self, directory: InodeId) -> Bytes {
        self.with_number(Tag::Import, directory.0)
    }

    /// `Q ino`.
    pub fn quota(self, directory: InodeId) -> Bytes {
        self.with_number(Tag::Quota, directory.0)
    }

    /// `N`.
    pub fn counters(self) -> Bytes {
        self.start(Tag::Counters, 0).freeze()
    }

    /// `Z`.
    pub fn loading(self) -> Bytes {
        self.start(Tag::Loading, 0).freeze()
    }

    /// `H`.
    pub fn home(self) -> Bytes {
        self.start(Tag::Home, 0).freeze()
    }

    /// `Y`.
    pub fn copied(self) -> Bytes {
        self.start(Tag::Copied, 0).freeze()
    }

    /// `y` and the key of the record that it is about, without the volume.
    pub fn beneath(self, key: &[u8]) -> Bytes {
        let rest = key.get(HEAD - 1..).unwrap_or_default();
        let mut beneath = self.start(Tag::Beneath, rest.len());
        beneath.put_slice(rest);
        beneath.freeze()
    }

    /// The key that a `y` key is about.
    pub fn above(self, beneath: &[u8]) -> Bytes {
        let mut key = BytesMut::with_capacity(beneath.len());
        key.put_u64(self.0.0);
        key.put_slice(beneath.get(HEAD..).unwrap_or_default());
        key.freeze()
    }

    /// The range of all keys of the volume: start and excluded end.
    pub fn all(self) -> (Bytes, Bytes) {
        let start = Bytes::copy_from_slice(&self.0.0.to_be_bytes());
        let end = after_prefix(&start);
        (start, end)
    }

    /// The family of a key.
    ///
    /// # Errors
    /// `Unsupported` for one that this program does not know.
    pub fn tag_in(self, key: &Bytes) -> Result<Tag> {
        let byte = key.get(HEAD - 1).copied();
        byte.and_then(Tag::of).ok_or_else(|| {
            let shown = byte.map_or("nothing".to_owned(), |byte| format!("`{}`", byte.escape_ascii()));
            Error::new(ErrorKind::Unsupported, format!("the tree has records with the tag {shown}"))
                .with_hint("use a newer Forebay")
        })
    }

    /// The range of all keys of a family: start and excluded end.
    pub fn family(self, tag: Tag) -> (Bytes, Bytes) {
        let start = self.start(tag, 0).freeze();
        let end = after_prefix(&start);
        (start, end)
    }

    /// The range of a family's keys that go on with `number` (a directory's entries, an inode's links).
    pub fn below(self, tag: Tag, number: u64) -> (Bytes, Bytes) {
        let start = self.with_number(tag, number);
        let end = after_prefix(&start);
        (start, end)
    }

    /// What follows the tag and one number: the name of `D` and `X` keys.
    pub fn name_in(self, key: &Bytes) -> Result<Bytes> {
        tail(key, HEAD + 8)
    }

    /// Parent and name of a `P` key.
    pub fn link_in(self, key: &Bytes) -> Result<(InodeId, Bytes)> {
        Ok((InodeId(number_at(key, HEAD + 8)?), tail(key, HEAD + 16)?))
    }

    /// The number right after the tag: the inode of `I`, `W`, `J`, `M` and `Q`, the time of `G`.
    pub fn number_in(self, key: &Bytes) -> Result<u64> {
        number_at(key, HEAD)
    }

    /// Inode and number of an `E` key.
    pub fn extents_in(self, key: &Bytes) -> Result<(InodeId, u32)> {
        let n = key.get(HEAD + 8..).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
        let cut = || Error::corrupt(format!("a key of {} bytes has no number of extents", key.len()));
        Ok((InodeId(number_at(key, HEAD)?), n.ok_or_else(cut)?))
    }

    /// Session and inode of an `O` key, time and inode of a `T` key.
    pub fn number_and_ino_in(self, key: &Bytes) -> Result<(u64, InodeId)> {
        Ok((number_at(key, HEAD)?, InodeId(number_at(key, HEAD + 8)?)))
    }
}

/// The first key after all that start with `prefix`; empty, which is no bound, after a volume id of all ones.
fn after_prefix(prefix: &[u8]) -> Bytes {
    let mut end = BytesMut::from(prefix);
    while let Some(last) = end.last_mut() {
        if *last < u8::MAX {
            *last += 1;
            break;
        }
        end.truncate(end.len() - 1);
    }
    end.freeze()
}

fn tail(key: &Bytes, at: usize) -> Result<Bytes> {
    match key.len() > at {
        true => Ok(Bytes::copy_from_slice(&key[at..])),
        false => Err(Error::corrupt(format!("a key of {} bytes has no name", key.len()))),
    }
}

fn number_at(key: &Bytes, at: usize) -> Result<u64> {
    let bytes = key.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    let bytes = bytes.ok_or_else(|| Error::corrupt(format!("a key of {} bytes is cut short", key.len())))?;
    Ok(u64::from_be_bytes(bytes))
}
