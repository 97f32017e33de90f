//! A tree that another process serves, as a [`Tree`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{
    Attributes, Error, ErrorKind, FileLayout, InodeId, ObjectKey, Result, Timestamp, VolumeId,
};
use forebay_io::net::secure::Host;
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use tokio::time::Instant;

use super::link::{Ends, Finder, Link, Reached};
use super::privileges::{Relied, is_plain};
use super::state::{Shared, unexpected};
use super::wire::{Answer, Request};
use crate::records::owned_key;
use crate::tree::{
    Blocker, CAPABILITY, CloneGuide, Cloned, Created, DirectoryPage, Existing, Lock, LockAnswer, LockRange,
    Lookup, NewInode, OutsideChanges, Placement, Removed, RenameMode, SegmentPin, SetAttributes, SetIds,
    Statistics, Tree, XattrMode,
};

/// How long a command may take: to check a large volume takes its time.
const COMMAND: Duration = Duration::from_secs(24 * 3600);
/// How long what is left is waited for at the end.
const CLOSING: Duration = Duration::from_secs(5);

/// What a remote tree is made of.
pub struct RemoteParts {
    /// The volume whose tree it is.
    pub volume: VolumeId,
    /// This host's end of the way there, for [`super::PROTOCOL`].
    pub host: Host,
    /// Finds who serves it.
    pub find: Finder,
    /// For messages there: this host and process.
    pub name: String,
    /// How long who serves it is looked for at first.
    pub first: Duration,
    /// How long the tree may be away until a call fails.
    pub deadline: Duration,
    /// Chance, for the names of owned blobs.
    pub rng: Rng,
}

/// A tree that another process serves. What is asked while that process, or another that takes the tree over, is being looked for
/// waits up to the deadline.
#[derive(Debug)]
pub struct RemoteTree {
    pub(super) shared: Arc<Shared>,
    rng: Rng,
    tasks: TaskGroup,
}

/// What an answer is to be.
macro_rules! expect {
    ($answer:expr, $kind:ident($($value:pat),+) => $result:expr) => {
        match $answer {
            Answer::$kind($($value),+) => Ok($result),
            _ => Err(unexpected()),
        }
    };
}

/// One that is dropped without being closed is lost to who serves it: its session runs out there.
impl Drop for RemoteTree {
    fn drop(&mut self) {
        self.tasks.stop().cancel();
    }
}

impl RemoteTree {
    /// Looks for who serves the tree, and returns when it is found.
    ///
    /// # Errors
    /// `Unavailable`, with what the last try met, where nobody is found that serves it; `Denied` for another secret.
    pub async fn open(parts: RemoteParts) -> Result<Self> {
        let RemoteParts { volume, host, find, name, first, deadline, rng } = parts;
        let shared =
            Arc::new(Shared::new(Link::new(Ends { volume, name, host, find, deadline, rng: rng.clone() })));
        // Of its own: what ends before the tree is closed still asks it.
        let tasks = TaskGroup::new("remote tree");
        tasks.spawn("link", Link::keep(shared.clone(), tasks.clone()));
        let (syncing, stop) = (shared.clone(), tasks.stop());
        tasks.spawn("sync", async move { stop.run_until_cancelled(syncing.sync_behind()).await });
        let tree = Self { shared, rng, tasks };
        match tree.shared.link.wait(Instant::now() + first).await {
            Ok(()) => {
                tree.attributes(InodeId::ROOT).await?;
                tree.statistics().await?;
                Ok(tree)
            }
            Err(error) => {
                tree.tasks.shutdown(CLOSING).await;
                Err(error)
            }
        }
    }

    /// Where the tree is served; none while it is being looked for.
    pub fn reached(&self) -> Option<Reached> {
        self.shared.link.reached()
    }

    /// Requests that were asked of it so far.
    pub fn requests(&self) -> u64 {
        self.shared.link.requests()
    }

    async fn call(&self, request: Request) -> Result<Answer> {
        let changes = request.changes();
        let answer = self.shared.link.call(request).await;
        if changes {
            // Also where it failed: it may have been done.
            self.shared.changes.fetch_add(1, Ordering::SeqCst);
        }
        answer
    }

    async fn done(&self, request: Request) -> Result<()> {
        match self.call(request).await? {
            Answer::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }

    async fn removed(&self, request: Request) -> Result<Option<Removed>> {
        expect!(self.call(request).await?, Removed(removed) => removed)
    }

    fn end_hold(&self, ino: InodeId) {
        self.shared.held.lock().remove(&ino);
    }

    /// After a commit was refused: whether it was this one's own that came before, asked for twice.
    async fn is_committed(
        &self,
        ino: InodeId,
        expected: u64,
        layout: &FileLayout,
    ) -> Result<Option<Attributes>> {
        let (found, generation) = self.layout(ino).await?;
        match generation > expected && found == *layout && layout.blobs().next().is_some() {
            true => self.attributes(ino).await.map(Some),
            false => Ok(None),
        }
    }

    async fn commit(
        &self,
        request: Request,
        ino: InodeId,
        expected: u64,
        layout: &FileLayout,
    ) -> Result<Attributes> {
        let relied = self.shared.relied_on(ino);
        match self.commit_once(request, ino, expected, layout).await {
            Ok(committed) => {
                self.end_hold(ino);
                Ok(self.take_privileges(ino, relied, committed).await)
            }
            Err(error) => {
                self.shared.rely_again(ino, relied);
                Err(error)
            }
        }
    }

    async fn commit_once(
        &self,
        request: Request,
        ino: InodeId,
        expected: u64,
        layout: &FileLayout,
    ) -> Result<Attributes> {
        match self.call(request).await {
            Err(error) if error.kind() == ErrorKind::Conflict => {
                let committed = self.is_committed(ino, expected, layout).await?.ok_or(error)?;
                // Who was asked twice still takes this mount to be at it.
                self.done(Request::Settle(ino)).await?;
                Ok(committed)
            }
            answer => expect!(answer?, Attributes(attributes) => attributes),
        }
    }

    /// Takes from a file that was committed what others gave it while it was written to, and those writes could not know of.
    async fn take_privileges(&self, ino: InodeId, relied: Relied, committed: Attributes) -> Attributes {
        let taken = async {
            if relied.capability && !self.shared.has_no_capability(ino) {
                match self.remove_xattr(ino, CAPABILITY).await {
                    Err(error) if error.kind() != ErrorKind::NoAttribute => return Err(error),
                    _ => {}
                }
            }
            match relied.set_ids && !is_plain(committed.mode) {
                true => {
                    let clears = SetAttributes { clears: Some(SetIds::All), ..SetAttributes::default() };
                    self.set_attributes(ino, clears).await.map(Some)
                }
                false => Ok(None),
            }
        };
        let taken: Result<Option<Attributes>> = taken.await;
        match taken {
            Ok(changed) => changed.unwrap_or(committed),
            // The commit is made all the same.
            Err(error) => {
                tracing::warn!(%ino, %error, "a file may keep set-id bits or a capability");
                committed
            }
        }
    }
}

#[async_trait]
impl Tree for RemoteTree {
    async fn lookup(&self, parent: InodeId, name: &[u8]) -> Result<Lookup> {
        let name = Bytes::copy_from_slice(name);
        expect!(self.call(Request::Lookup(parent, name)).await?, Lookup(found) => found)
    }

    fn lookup_now(&self, _parent: InodeId, _name: &[u8]) -> Option<Result<Lookup>> {
        None
    }

    async fn attributes(&self, ino: InodeId) -> Result<Attributes> {
        let doubts = self.shared.doubts_of(ino);
        let attributes =
            expect!(self.call(Request::Attributes(ino)).await?, Attributes(attributes) => attributes)?;
        self.shared.learn(ino, doubts, is_plain(attributes.mode), false);
        if ino == InodeId::ROOT {
            *self.shared.root.lock() = Some(attributes.clone());
        }
        Ok(attributes)
    }

    fn attributes_now(&self, ino: InodeId) -> Option<Result<Attributes>> {
        let is_away = ino == InodeId::ROOT && self.reached().is_none();
        self.shared.root.lock().clone().filter(|_| is_away).map(Ok)
    }

    fn lacks_set_ids(&self, ino: InodeId) -> bool {
        self.shared.lacks_set_ids(ino)
    }

    async fn read_directory(
        &self,
        ino: InodeId,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<DirectoryPage> {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        let request = Request::ReadDirectory(ino, after.map(Bytes::copy_from_slice), limit);
        expect!(self.call(request).await?, Page(page) => page)
    }

    async fn parent(&self, ino: InodeId) -> Result<InodeId> {
        expect!(self.call(Request::Parent(ino)).await?, Inode(parent) => parent)
    }

    async fn layout(&self, ino: InodeId) -> Result<(FileLayout, u64)> {
        expect!(self.call(Request::Layout(ino)).await?, Layout(layout, generation) => (layout, generation))
    }

    async fn files_after(&self, ino: InodeId, limit: usize) -> Result<Vec<(InodeId, FileLayout)>> {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        expect!(self.call(Request::FilesAfter(ino, limit)).await?, Files(files) => files)
    }

    async fn read_link(&self, ino: InodeId) -> Result<Bytes> {
        expect!(self.call(Request::ReadLink(ino)).await?, Bytes(target) => target)
    }

    async fn create(
        &self,
        parent: InodeId,
        name: &[u8],
        new: NewInode,
        existing: Existing,
    ) -> Result<(Attributes, bool)> {
        let request = Request::Create(parent, Bytes::copy_from_slice(name), new, existing);
        expect!(self.call(request).await?, Made(attributes, is_new) => (attributes, is_new))
    }

    async fn create_opened(
        &self,
        parent: InodeId,
        name: &[u8],
        new: NewInode,
        existing: Existing,
    ) -> Result<Created> {
        let request = Request::CreateOpened(parent, Bytes::copy_from_slice(name), new, existing);
        expect!(self.call(request).await?, Created(made) => made)
    }

    async fn link(&self, ino: InodeId, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        let request = Request::Link(ino, parent, Bytes::copy_from_slice(name));
        expect!(self.call(request).await?, Attributes(attributes) => attributes)
    }

    async fn unlink(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>> {
        self.removed(Request::Unlink(parent, Bytes::copy_from_slice(name))).await
    }

    async fn remove_directory(&self, parent: InodeId, name: &[u8]) -> Result<Option<Removed>> {
        self.removed(Request::RemoveDirectory(parent, Bytes::copy_from_slice(name))).await
    }

    async fn rename(
        &self,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        mode: RenameMode,
    ) -> Result<Option<Removed>> {
        let (from, to) = ((from.0, Bytes::copy_from_slice(from.1)), (to.0, Bytes::copy_from_slice(to.1)));
        self.removed(Request::Rename(from, to, mode)).await
    }

    async fn set_attributes(&self, ino: InodeId, changes: SetAttributes) -> Result<Attributes> {
        let may_set_ids = changes.mode.is_some_and(|mode| !is_plain(mode));
        if may_set_ids {
            self.shared.dress(ino);
        }
        let answer = self.call(Request::SetAttributes(ino, changes)).await;
        if may_set_ids {
            self.shared.dress(ino);
        }
        expect!(answer?, Attributes(attributes) => attributes)
    }

    async fn accessed(&self, ino: InodeId, atime: Timestamp) -> Result<()> {
        self.done(Request::Accessed(ino, atime)).await
    }

    async fn xattr(&self, ino: InodeId, name: &[u8]) -> Result<Bytes> {
        if name == CAPABILITY && self.shared.lacks_capability(ino) {
            return Err(Error::new(ErrorKind::NoAttribute, "it has none"));
        }
        let (doubts, request) =
            (self.shared.doubts_of(ino), Request::Xattr(ino, Bytes::copy_from_slice(name)));
        let answer = self.call(request).await;
        if name == CAPABILITY && answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoAttribute) {
            self.shared.learn(ino, doubts, false, true);
        }
        expect!(answer?, Bytes(value) => value)
    }

    async fn xattrs(&self, ino: InodeId) -> Result<Vec<Bytes>> {
        expect!(self.call(Request::Xattrs(ino)).await?, Names(names) => names)
    }

    async fn set_xattr(&self, ino: InodeId, name: &[u8], value: Bytes, mode: XattrMode) -> Result<()> {
        let request = Request::SetXattr(ino, Bytes::copy_from_slice(name), value, mode);
        if name != CAPABILITY {
            return self.done(request).await;
        }
        self.shared.dress(ino);
        let set = self.done(request).await;
        // What was asked meanwhile may be of before.
        self.shared.dress(ino);
        set
    }

    async fn remove_xattr(&self, ino: InodeId, name: &[u8]) -> Result<()> {
        self.done(Request::RemoveXattr(ino, Bytes::copy_from_slice(name))).await
    }

    async fn opened(&self, ino: InodeId) -> Result<(FileLayout, u64)> {
        let doubts = self.shared.doubts_of(ino);
        let answer = self.call(Request::Opened(ino)).await?;
        let (found, is_bare) =
            expect!(answer, Opened(layout, generation, is_bare) => ((layout, generation), is_bare))?;
        self.shared.learn(ino, doubts, is_bare, is_bare);
        Ok(found)
    }

    async fn closed(&self, ino: InodeId) -> Result<()> {
        let Some(standing) = self.shared.let_go(ino) else { return Ok(()) };
        if self.reached().is_some() {
            return self.shared.close(ino, standing).await;
        }
        // Told to whoever serves the tree next, or still does: nobody waits for that.
        let shared = self.shared.clone();
        self.tasks.spawn("closed", async move {
            if let Err(error) = shared.close(ino, standing).await {
                tracing::debug!(%ino, %error, "nobody was told that a file was closed");
            }
        });
        Ok(())
    }

    async fn lock(&self, ino: InodeId, lock: Lock, waits: bool) -> Result<LockAnswer> {
        self.shared.set_lock(&self.tasks, ino, lock, waits).await
    }

    async fn blocker(&self, ino: InodeId, lock: Lock) -> Result<Option<Blocker>> {
        self.shared.blocker(ino, lock).await
    }

    async fn unlock(&self, ino: InodeId, owner: u64, range: LockRange) -> Result<()> {
        self.shared.unlock(&self.tasks, ino, owner, range).await
    }

    async fn reserve(&self, ino: InodeId, size: u64) -> Result<()> {
        match self.shared.link.has_quotas() {
            true => self.done(Request::Reserve(ino, size)).await,
            false => Ok(()),
        }
    }

    async fn place(&self, ino: InodeId, seals: bool) -> Result<Placement> {
        let placement =
            expect!(self.call(Request::Place(ino, seals)).await?, Placement(placement) => placement)?;
        if let Placement::Own { .. } = placement {
            self.shared.held.lock().insert(ino);
        }
        Ok(placement)
    }

    async fn settle(&self, ino: InodeId) -> Result<()> {
        self.end_hold(ino);
        self.done(Request::Settle(ino)).await
    }

    async fn doubt(&self, ino: InodeId) -> Result<()> {
        self.end_hold(ino);
        self.done(Request::Doubt(ino)).await
    }

    async fn is_in_doubt(&self, ino: InodeId) -> Result<bool> {
        expect!(self.call(Request::IsInDoubt(ino)).await?, Flag(flag) => flag)
    }

    fn fresh_blob(&self) -> ObjectKey {
        owned_key(self.shared.link.session(), &self.rng.name())
    }

    /// Never: files of packed directories that are written here are objects of their own.
    async fn packs(&self, _ino: InodeId) -> Result<bool> {
        Ok(false)
    }

    async fn has_object(&self, ino: InodeId) -> Result<bool> {
        expect!(self.call(Request::HasObject(ino)).await?, Flag(flag) => flag)
    }

    fn fresh_segment(&self) -> SegmentPin {
        SegmentPin::new(&self.shared.pins, self.shared.link.session(), &self.rng.name())
    }

    async fn is_referred(&self, key: &ObjectKey) -> Result<bool> {
        expect!(self.call(Request::IsReferred(key.clone())).await?, Flag(flag) => flag)
    }

    async fn upload_started(&self, key: &ObjectKey, id: &str) -> Result<()> {
        self.done(Request::UploadStarted(key.clone(), id.to_owned())).await
    }

    async fn upload_ended(&self, id: &str) -> Result<()> {
        self.done(Request::UploadEnded(id.to_owned())).await
    }

    async fn commit_layout(
        &self,
        ino: InodeId,
        expected: u64,
        layout: FileLayout,
        mtime: Timestamp,
    ) -> Result<Attributes> {
        let request = Request::CommitLayout(ino, expected, layout.clone(), mtime);
        self.commit(request, ino, expected, &layout).await
    }

    async fn commit_shared(
        &self,
        ino: InodeId,
        expected: u64,
        layout: FileLayout,
        mtime: Timestamp,
        lender: InodeId,
    ) -> Result<Attributes> {
        let request = Request::CommitShared(ino, expected, layout.clone(), mtime, lender);
        self.commit(request, ino, expected, &layout).await
    }

    async fn clone_tree(
        &self,
        _source: InodeId,
        _to: (InodeId, &[u8]),
        _guide: &dyn CloneGuide,
    ) -> Result<Cloned> {
        Err(self.elsewhere("a tree is cloned"))
    }

    async fn relocate(&self, ino: InodeId, expected: u64, layout: FileLayout) -> Result<()> {
        self.done(Request::Relocate(ino, expected, layout)).await?;
        self.end_hold(ino);
        Ok(())
    }

    async fn sync(&self) -> Result<()> {
        self.shared.sync().await
    }

    async fn statistics(&self) -> Result<Statistics> {
        if let (None, Some(known)) = (self.reached(), *self.shared.statistics.lock()) {
            return Ok(known);
        }
        let statistics =
            expect!(self.call(Request::Statistics).await?, Statistics(statistics) => statistics)?;
        *self.shared.statistics.lock() = Some(statistics);
        Ok(statistics)
    }

    async fn refresh(&self, ino: InodeId) -> Result<()> {
        self.done(Request::Refresh(ino)).await
    }

    fn outside(&self) -> &OutsideChanges {
        &self.shared.outside
    }

    async fn close(&self) -> Result<()> {
        let synced = self.sync().await;
        // Its session ends in any case, a minute later.
        let is_told = match self.reached() {
            Some(_) => {
                tokio::time::timeout(CLOSING, self.done(Request::Bye)).await.is_ok_and(|left| left.is_ok())
            }
            None => false,
        };
        if !is_told {
            tracing::debug!("the process that serves the tree did not hear that this mount ends");
        }
        self.tasks.shutdown(CLOSING).await;
        synced
    }

    fn remote(&self) -> Option<&RemoteTree> {
        Some(self)
    }
}

impl RemoteTree {
    /// How often changes of this mount were lost with a process that served the tree.
    pub fn losses(&self) -> u64 {
        self.shared.losses.load(Ordering::SeqCst)
    }

    /// What others changed so far, as this mount heard of it.
    pub fn heard(&self) -> u64 {
        self.shared.heard.load(Ordering::SeqCst)
    }

    /// Whether something that an owner had locked of a file is lost, as this mount was cut off for too long, and it was not told yet.
    pub fn has_lost_locks(&self, ino: InodeId, owner: u64) -> bool {
        self.shared.locks.is_lost(ino, owner)
    }

    /// Whether names of a directory may have been lost of late, once for each that asks; 0 for the volume as a whole.
    ///
    /// # Errors
    /// `Unavailable` where they may.
    pub fn tell_loss(&self, directory: InodeId) -> Result<()> {
        self.shared.tell_loss(directory)
    }

    /// Has a command of people carried out where the tree is.
    ///
    /// # Errors
    /// `Unavailable` where it is not known whether it was.
    pub async fn command(&self, command: Bytes) -> Result<Bytes> {
        self.shared.link.expect_quotas();
        let reply = self.shared.link.call_for(COMMAND, Request::Command(command)).await;
        self.shared.changes.fetch_add(1, Ordering::SeqCst);
        expect!(reply?, Bytes(reply) => reply)
    }

    /// The error of what is done only where the tree is.
    pub fn elsewhere(&self, what: &str) -> Error {
        let at = match self.reached() {
            Some(Reached { address, .. }) => format!("the process at {address}"),
            None => "another process".to_owned(),
        };
        Error::new(ErrorKind::Unsupported, format!("{what} where the tree is: {at} serves it to this mount"))
            .with_hint("use a mount on that host, or one that holds the volume by itself")
    }
}
