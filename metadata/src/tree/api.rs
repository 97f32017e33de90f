//! The `Tree` trait and the values it speaks. No behaviour.

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Attributes, FileKind, FileLayout, InodeId, ObjectKey, Result, Timestamp, Version};
use serde::{Deserialize, Serialize};

use super::{Blocker, Cloned, Lock, LockAnswer, LockRange, OutsideChanges, Removed, SegmentPin};
use crate::schema::Quota;

/// Outcome of looking a name up; a miss is expected and no error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lookup {
    /// The name exists.
    Found(Attributes),
    /// It does not.
    Miss,
}

/// One name in a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryEntry {
    /// The name as bytes, 1 to 255, without `/` and NUL.
    pub name: Bytes,
    /// What it names.
    pub attributes: Attributes,
}

/// Part of a directory, in name order, `.` and `..` left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryPage {
    /// The entries.
    pub entries: Vec<DirectoryEntry>,
    /// Whether nothing follows the last entry.
    pub complete: bool,
}

/// What a new inode starts with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewInode {
    /// Its type.
    pub kind: FileKind,
    /// Permission, set-id and sticky bits.
    pub mode: u16,
    /// Permission bits that are left out, unless the directory has a default access control list.
    pub umask: u16,
    /// Owner.
    pub uid: u32,
    /// Group; a set-gid parent overrides it.
    pub gid: u32,
    /// Device number of a device node, else 0.
    pub rdev: u32,
    /// Target of a symlink, else empty.
    pub target: Bytes,
}

/// A file that was opened by its name, and made if it was not there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Created {
    /// Its attributes.
    pub attributes: Attributes,
    /// Whether it is new.
    pub is_new: bool,
    /// Where its bytes are.
    pub layout: FileLayout,
    /// The content generation they belong to.
    pub generation: u64,
}

/// What `create` does when the name exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Existing {
    /// Fail with `Exists` (O_EXCL, mkdir, mknod, symlink).
    Refuse,
    /// Return the existing inode (open with O_CREAT); anything but a file fails with `Exists`.
    Accept,
}

/// The flags of renameat2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RenameMode {
    /// Replace the target if it exists.
    Replace,
    /// RENAME_NOREPLACE.
    NoReplace,
    /// RENAME_EXCHANGE.
    Exchange,
    /// RENAME_WHITEOUT: what moves leaves a character device 0/0 behind, by which an overlay knows that the name is gone.
    Whiteout {
        /// Owner of what is left behind.
        uid: u32,
        /// Its group, as [`NewInode::gid`].
        gid: u32,
        /// Whether the target is replaced if it exists: not with RENAME_NOREPLACE.
        may_replace: bool,
    },
}

/// Attribute changes; `None` leaves a field alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAttributes {
    /// Permission, set-id and sticky bits.
    pub mode: Option<u16>,
    /// Set-id bits that go, of the mode that the inode has by then.
    pub clears: Option<SetIds>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last access.
    pub atime: Option<Timestamp>,
    /// Last change of content.
    pub mtime: Option<Timestamp>,
}

/// Set-id bits that a change by somebody without CAP_FSETID takes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetIds {
    /// Set-uid, and set-gid where the group may execute: without that it means mandatory locking. Of a directory they mean
    /// something else, and stay.
    All,
    /// Set-gid, of what does not belong to this group.
    GroupUnless(u32),
}

/// The flags of setxattr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum XattrMode {
    /// Create or replace.
    Set,
    /// XATTR_CREATE.
    Create,
    /// XATTR_REPLACE.
    Replace,
}

/// Where the next whole content of a file is to be written (DESIGN section 4, "Plain objects and their keys").
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// At the file's own path: an ordinary object. `replaces` is the version there now, if Forebay knows one; the
    /// writer completes with `IfVersion(replaces)` or `IfAbsent`, and gives the object the `token`, by which it is known if
    /// the writer does not come to commit it. The intent is durable when this is returned, but for a file's first content:
    /// who begins an upload in parts there syncs the tree first.
    Own {
        /// The key that the file's path spells.
        key: ObjectKey,
        /// The version that is to be replaced.
        replaces: Option<Version>,
        /// What the object is to carry.
        token: String,
    },
    /// In a uniquely named owned blob, because the path is no key, or its key holds another file's bytes.
    Owned {
        /// A fresh key under `.forebay/blobs/`.
        key: ObjectKey,
        /// Whether the path is being made free, which only takes longer than one waits here.
        comes_free: bool,
    },
}

impl Placement {
    /// The key to write to.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Own { key, .. } | Self::Owned { key, .. } => key,
        }
    }
}

/// Who asked for a clone, and is asked between its steps.
#[async_trait]
pub trait CloneGuide: Send + Sync {
    /// Says how much is copied. Returns whether to go on; nothing stays of a clone that does not.
    fn goes_on(&self, cloned: &Cloned) -> bool;

    /// Brings to an end what is being written to these files, whose bytes are about to be replaced, and waits a little: the
    /// clone asks for the `times`-th time. Returns whether to try again.
    async fn settle(&self, files: &[InodeId], times: u32) -> Result<bool>;
}

/// What statfs shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Bytes of all files known to the tree.
    pub bytes: u64,
    /// Inodes known to the tree.
    pub inodes: u64,
    /// The quota of the root, which is the volume's.
    pub quota: Option<Quota>,
}

/// A directory tree. Every change is atomic; changes are answered at once and durable after `sync` or within 5 s,
/// except where a method says that it returns only when durable.
///
/// Errors common to all: `NotFound` when an inode is gone, `Invalid` for malformed names, `NameTooLong`,
/// `NotDirectory`, `ReadOnly` on a read-only tree, `Unavailable` when engine or bucket cannot be reached.
/// Permission checks are the kernel's (`default_permissions`); the tree keeps owners and modes.
#[async_trait]
pub trait Tree: Send + Sync + std::fmt::Debug {
    /// Finds `name` in `parent`.
    async fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Lookup>;

    /// The same if it can be told without waiting on anything; `None` otherwise.
    fn lookup_now(&self, parent: InodeId, name: &[u8]) -> Option<Result<Lookup>>;

    /// Attributes of an inode.
    async fn attributes(&self, ino: InodeId) -> Result<Attributes>;

    /// The same if they can be told without waiting; `None` otherwise.
    fn attributes_now(&self, ino: InodeId) -> Option<Result<Attributes>>;

    /// Entries of a directory after the name `after` (from the start when `None`), at most `limit`.
    async fn read_directory(&self, ino: InodeId, after: Option<&[u8]>, limit: usize)
    -> Result<DirectoryPage>;

    /// The directory that holds `ino`; the root is its own parent. For files, one of its directories.
    async fn parent(&self, ino: InodeId) -> Result<InodeId>;

    /// Where a file's bytes are, and the content generation they belong to.
    async fn layout(&self, ino: InodeId) -> Result<(FileLayout, u64)>;

    /// Files that follow `ino` in its directory, in the order of inode numbers, which is that of a listing, among the next
    /// `limit` numbers. For reading ahead: what is new, large or elsewhere may be missing.
    async fn files_after(&self, ino: InodeId, limit: usize) -> Result<Vec<(InodeId, FileLayout)>>;

    /// Target of a symlink.
    async fn read_link(&self, ino: InodeId) -> Result<Bytes>;

    /// Makes an inode under a name, or fails with `OverQuota`. The bool tells whether it is new.
    async fn create(
        &self,
        parent: InodeId,
        name: &[u8],
        new: NewInode,
        existing: Existing,
    ) -> Result<(Attributes, bool)>;

    /// Makes a file as `create` does, or takes the one that is there, and says as `opened` does that it is open.
    async fn create_opened(
        &self,
        parent: InodeId,
        name: &[u8],
        new: NewInode,
        existing: Existing,
    ) -> Result<Created> {
        let (attributes, is_new) = self.create(parent, name, new, existing).await?;
        let (layout, generation) = self.opened(attributes.ino).await?;
        Ok(Created { attributes, is_new, layout, generation })
    }

    /// Gives a file a further name.
    async fn link(&self, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Attributes>;

    /// Removes a name of something that is not a directory. Its inode lives on while other names or openers hold it; returns it if
    /// that was its last name.
    async fn unlink(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>>;

    /// Removes an empty directory, and returns it.
    async fn remove_directory(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>>;

    /// Moves or exchanges names. A directory moves with all below it in one commit; if that moves it between quotas, it is
    /// counted before. Fails with `OverQuota` when it does not fit. Returns what was replaced if that was its last name.
    async fn rename(
        &self,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        mode: RenameMode,
    ) -> Result<Option<Removed>>;

    /// Changes attributes; an access control list follows the mode, and a change of owner clears set-id bits as POSIX says.
    async fn set_attributes(&self, ino: InodeId, changes: SetAttributes) -> Result<Attributes>;

    /// Says that a file was read. Its access time follows where relatime asks for it; nothing else changes.
    async fn accessed(&self, ino: InodeId, atime: Timestamp) -> Result<()>;

    /// Whether it is known, without asking anybody, that an open file has no set-id bits: who writes to it without privileges has to
    /// know that each time.
    fn lacks_set_ids(&self, _ino: InodeId) -> bool {
        false
    }

    /// The value of an extended attribute, or `NoAttribute`.
    async fn xattr(&self, ino: InodeId, name: &[u8]) -> Result<Bytes>;

    /// The names of all extended attributes.
    async fn xattrs(&self, ino: InodeId) -> Result<Vec<Bytes>>;

    /// Sets an extended attribute; the value may have up to 64 KiB. Access control lists (`system.posix_acl_access`,
    /// `system.posix_acl_default`) are checked, and permission bits follow them.
    async fn set_xattr(&self, ino: InodeId, name: &[u8], value: Bytes, mode: XattrMode) -> Result<()>;

    /// Removes an extended attribute, or fails with `NoAttribute`.
    async fn remove_xattr(&self, ino: InodeId, name: &[u8]) -> Result<()>;

    /// Says that this session has the file open, so that unlinking keeps it; one call per opener. Returns what `layout` does, of a
    /// file that never had content once it was looked for the first, which a mount may have put and died before that was recorded.
    async fn opened(&self, ino: InodeId) -> Result<(FileLayout, u64)>;

    /// Takes one `opened` back; the last one of an unlinked inode frees it.
    async fn closed(&self, ino: InodeId) -> Result<()>;

    /// Sets an advisory lock of this mount, beside its owner's others on the file and in the place of what they have in common: now or
    /// not at all, or once nobody else's is in the way. Who gives up waiting, at any moment, has not set it. The answer is
    /// `Granted`, `Held`, `Deadlock` or `Full`.
    ///
    /// # Errors
    /// `Unavailable` past the deadline, or where this mount was cut off for so long that what its owner had locked there is lost.
    async fn lock(&self, ino: InodeId, lock: Lock, waits: bool) -> Result<LockAnswer>;

    /// The lock that is in the way of another one, if any is.
    async fn blocker(&self, ino: InodeId, lock: Lock) -> Result<Option<Blocker>>;

    /// Takes an owner's locks away, where it has any; nobody is waited for where nobody serves the tree.
    ///
    /// # Errors
    /// `Unavailable` where they were lost, as with [`Self::lock`], until it is told of all of them.
    async fn unlock(&self, ino: InodeId, owner: u64, range: LockRange) -> Result<()>;

    /// Says that an open file is about to be `size` bytes long, before any of them leave: they count against quotas from
    /// here on, until the file is committed or closed.
    ///
    /// # Errors
    /// `OverQuota` when they do not fit.
    async fn reserve(&self, ino: InodeId, size: u64) -> Result<()>;

    /// Asks where the next whole content of a file goes and records the intent, durably, where one is needed. The content is
    /// new, or `seals` the one that the file has, whose bytes lie elsewhere.
    async fn place(&self, ino: InodeId, seals: bool) -> Result<Placement>;

    /// Finds out what came of the last write to the file's own path, if it was not committed. What it brought is the file's
    /// content then: in the next generation if it was new, and not where newer one was committed since. Of one that is in
    /// doubt, what has not come by now may still come.
    async fn settle(&self, ino: InodeId) -> Result<()>;

    /// Says that a write to the file's own path was not answered and is given up: what comes of it later is the file's content
    /// as above, or goes if the file is gone, and nothing else is written there meanwhile.
    async fn doubt(&self, ino: InodeId) -> Result<()>;

    /// Whether such a write may still come.
    async fn is_in_doubt(&self, ino: InodeId) -> Result<bool>;

    /// A fresh key for an owned blob that a later `commit_layout` is going to refer to. It names this session: what no
    /// layout refers to goes after the session ended.
    fn fresh_blob(&self) -> ObjectKey;

    /// Whether the next content of a file, if it is small, goes into a segment that it shares with others: so it does in
    /// packed directories.
    async fn packs(&self, ino: InodeId) -> Result<bool>;

    /// Whether an object of the file stands in the bucket, which other tools read, older than the content or not, until the
    /// next whole content replaces it.
    async fn has_object(&self, ino: InodeId) -> Result<bool>;

    /// A fresh key for a segment that later commits of several files are going to refer to. It is let go of once all of
    /// them were made.
    fn fresh_segment(&self) -> SegmentPin;

    /// Whether any layout refers to the owned blob at `key`, by the newest state, which need not be durable yet.
    async fn is_referred(&self, key: &ObjectKey) -> Result<bool>;

    /// Notes that this session has begun an upload in parts, so that the next one ends it if this one dies.
    async fn upload_started(&self, key: &ObjectKey, id: &str) -> Result<()>;

    /// Notes that it was completed or aborted.
    async fn upload_ended(&self, id: &str) -> Result<()>;

    /// Gives a file new content: layout and size, mtime, ctime and the next generation, in one commit.
    ///
    /// Blobs of the old layout that nothing refers to any more are queued for deletion (a blob replaced in place at
    /// the file's own key is gone already). Intents of this inode are settled.
    ///
    /// # Errors
    /// `Conflict` when the generation is no longer `expected`, or bytes that the layout keeps were moved meanwhile; the
    /// caller reads the layout again and decides.
    async fn commit_layout(
        &self,
        ino: InodeId,
        expected: u64,
        layout: FileLayout,
        mtime: Timestamp,
    ) -> Result<Attributes>;

    /// As `commit_layout`, of a layout that shares bytes with the file `lender`. A plain object that is shared is moved
    /// to an owned blob before Forebay replaces or deletes it.
    ///
    /// # Errors
    /// `Conflict` also when the bytes are about to go, or are not where the layout says any more; `OverQuota`.
    async fn commit_shared(
        &self,
        ino: InodeId,
        expected: u64,
        layout: FileLayout,
        mtime: Timestamp,
        lender: InodeId,
    ) -> Result<Attributes>;

    /// Makes a copy of a file, or of a directory with all below it, under a name that is free. It shares all bytes with
    /// what it is a copy of, as with [`Self::commit_shared`], and shows it as it is at one moment: that of the last step, since a large one is made
    /// in several.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for a directory into itself; `OverQuota`; `NotFound` when it is removed meanwhile; `Conflict`
    /// while bytes are about to be replaced, or when more is changed than can be followed; `Unavailable` when `guide`
    /// does not go on. Nothing stays then.
    async fn clone_tree(
        &self,
        source: InodeId,
        to: (InodeId, &[u8]),
        guide: &dyn CloneGuide,
    ) -> Result<Cloned>;

    /// Says that the same bytes now lie elsewhere (sealed, moved, packed): the layout changes, the generation and the
    /// times do not. Blobs no longer referred to are queued for deletion and intents settled, as in `commit_layout`.
    ///
    /// # Errors
    /// `Conflict` when the generation is no longer `expected`; nothing changed then.
    async fn relocate(&self, ino: InodeId, expected: u64, layout: FileLayout) -> Result<()>;

    /// Returns when every change answered so far is durable.
    async fn sync(&self) -> Result<()>;

    /// Counts for statfs.
    async fn statistics(&self) -> Result<Statistics>;

    /// Lists a directory of the bucket again, now, and every other one at its next look.
    async fn refresh(&self, ino: InodeId) -> Result<()>;

    /// Who tells of names that changed without anybody having asked for it here.
    fn outside(&self) -> &OutsideChanges;

    /// Syncs and releases what the tree holds; nothing may be called afterwards.
    async fn close(&self) -> Result<()>;

    /// The tree itself where it is served in this process: upkeep is done there only.
    fn local(&self) -> Option<&super::LocalTree> {
        None
    }

    /// The tree itself where another process serves it.
    fn remote(&self) -> Option<&crate::remote::RemoteTree> {
        None
    }
}
