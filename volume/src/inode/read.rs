//! Reading: what is at hand, and what has to be looked for as it was moved meanwhile.

use std::sync::atomic::Ordering::SeqCst;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Piece, Result, Source};
use forebay_metadata::remote::RemoteTree;
use forebay_metadata::tree::LocalTree;

use super::OpenInode;
use crate::content::Content;

impl OpenInode {
    /// The bytes at `offset`, short at the end of the file, if all are at hand: see [`Fetch::now`].
    ///
    /// [`Fetch::now`]: crate::fetch::Fetch::now
    pub(crate) fn read_now(&self, offset: u64, length: u64, may_block: bool) -> Option<Bytes> {
        if self.is_behind.load(SeqCst) {
            return None;
        }
        let pieces = self.look(|content| {
            content.readable().then(|| content.layout().pieces(offset..offset.saturating_add(length)))
        })?;
        self.store.fetch.now(pieces, may_block)
    }

    /// The bytes at `offset`, short at the end of the file.
    ///
    /// # Errors
    /// `Stale` when an outsider replaced or deleted the object and no cached copy is left.
    pub(crate) async fn read(&self, offset: u64, length: u64) -> Result<Bytes> {
        if self.is_behind.load(SeqCst) {
            self.catch_up_with_others().await;
        }
        let range = offset..offset.saturating_add(length);
        let mut last: Option<(Vec<Piece>, Error)> = None;
        let mut has_caught_up = false;
        loop {
            // In one look: the next write may begin to leave right after it was found readable.
            let found = self.look(|content| {
                content.readable().then(|| (content.layout().pieces(range.clone()), content.generation()))
            });
            let Some((pieces, generation)) = found else {
                let mut writer = self.writer.lock().await;
                self.finish_stream(&mut writer).await?;
                if self.is_retired() {
                    return Err(Error::bug("a file is read that is not open"));
                }
                continue;
            };
            if let Some((tried, error)) = last.take_if(|(tried, _)| *tried == pieces) {
                if has_caught_up || !self.catch_up().await {
                    return Err(lacking(&tried, error));
                }
                (has_caught_up, last) = (true, Some((tried, error)));
                continue;
            }
            match self.store.fetch.bytes(pieces.clone()).await {
                Err(error) if is_moved(&error) => {
                    self.follow(generation).await?;
                    last = Some((pieces, error));
                }
                other => return other,
            }
        }
    }

    /// Takes over the layout that the tree has by now, if the bytes are still the same: sealing and renaming move
    /// bytes. Waits for a seal of this very inode, which holds the writers' turn until `content` shows its result.
    async fn follow(&self, generation: u64) -> Result<()> {
        let _turn = self.writer.lock().await;
        if self.look(Content::generation) == generation { self.take_over().await } else { Ok(()) }
    }

    /// Where the tree follows another one, or other mounts write to it, shows what that has by now: it may have moved the bytes,
    /// or others in their place. Whether it could look.
    async fn catch_up(&self) -> bool {
        let tree = &self.store.tree;
        if tree.remote().is_some() || tree.local().is_some_and(LocalTree::serves) {
            self.catch_up_with_others().await;
            return true;
        }
        let Some(tree) = self.store.tree.local().filter(|tree| tree.lag().is_some()) else { return false };
        let caught_up = async {
            tree.catch_up().await?;
            let (layout, generation) = self.store.tree.layout(self.ino).await?;
            self.renew(layout, generation);
            Ok::<_, Error>(())
        };
        let outcome = caught_up.await;
        if let Err(error) = &outcome {
            tracing::debug!(ino = %self.ino, %error, "the tree that is followed tells nothing of bytes that are gone");
        }
        outcome.is_ok()
    }

    /// Where the tree follows another one, seconds behind it, the file may be one that was removed, or replaced by a rename: looks
    /// for the first of its bytes, which who opens a file reads next.
    ///
    /// # Errors
    /// `Stale` where it is, and they are gone.
    pub(crate) async fn check_outlived(&self) -> Result<()> {
        let follows = self.store.tree.local().is_some_and(|tree| tree.lag().is_some());
        if !follows || self.read_now(0, 1, false).is_some() {
            return Ok(());
        }
        match self.read(0, 1).await {
            Err(error) if error.kind() == ErrorKind::Stale => {
                let named = self.store.tree.attributes(self.ino).await.is_ok_and(|found| found.nlink > 0);
                if named { Ok(()) } else { Err(error) }
            }
            // Who reads is told.
            _ => Ok(()),
        }
    }

    /// Shows what other mounts wrote, unless something is being written here, which goes over that when it is committed. What
    /// was committed here and is not in the tree any more was lost with the process that served that: each handle is told.
    pub(crate) async fn catch_up_with_others(&self) {
        self.is_behind.store(true, SeqCst);
        let Ok(_turn) = self.writer.try_lock() else { return };
        self.catch_up_in_turn().await;
    }

    /// The same once whoever has the turn is done: it may be looking at what was there a moment ago. Whether it was looked at.
    pub(crate) async fn catch_up_for_certain(&self) -> bool {
        let _turn = self.writer.lock().await;
        self.is_behind.store(false, SeqCst);
        self.compare(false).await
    }

    /// The same for who has the turn, where others changed it since it was looked at.
    pub(super) async fn catch_up_in_turn(&self) {
        if self.is_behind.load(SeqCst) {
            // Before it is looked at: what comes after that sets it again.
            self.is_behind.store(false, SeqCst);
            self.compare(false).await;
        }
    }

    /// The same once for each time that a process was lost which served the tree, however long that takes.
    pub(crate) async fn check_losses(&self) {
        let Some(losses) = self.store.tree.remote().map(RemoteTree::losses) else { return };
        if self.losses.swap(losses, SeqCst) != losses {
            let _turn = self.writer.lock().await;
            self.compare(true).await;
        }
    }

    /// Whether it is empty, here and where other mounts may have written to it. A lock file is emptied by each host
    /// that tries it: contents of nothing would be in each other's way.
    pub(super) async fn is_empty_for_all(&self) -> Result<bool> {
        let tree = &self.store.tree;
        let is_shared = tree.remote().is_some() || tree.local().is_some_and(LocalTree::serves);
        if !is_shared || self.is_pending() || self.look(Content::size) > 0 {
            return Ok(false);
        }
        let (layout, _) = tree.layout(self.ino).await?;
        let is_empty = layout.size() == 0;
        if !is_empty {
            // It is emptied of what others wrote.
            self.compare(false).await;
        }
        Ok(is_empty)
    }

    /// Takes over what the tree has, and says whether that is known. The caller has the turn. After a loss a file that is not there is
    /// lost as well.
    pub(super) async fn compare(&self, is_loss: bool) -> bool {
        let is_written = |content: &Content| content.modified().is_some() || !content.readable();
        // Made here and not written to: what another mount wrote to it meanwhile is not to be emptied by its close.
        let is_made =
            |content: &Content| content.size() == 0 && content.base().size() == 0 && content.readable();
        let is_only_made = self.is_touched() && self.look(is_made);
        if (self.look(is_written) && !is_only_made) || self.is_retired() {
            return true;
        }
        let (layout, generation) = match self.store.tree.layout(self.ino).await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(ino = %self.ino, %error, "an open file is shown as it was");
                match is_loss && error.kind() == ErrorKind::NotFound {
                    true => self.record_failure(lost()),
                    false => self.is_behind.store(true, SeqCst),
                }
                return false;
            }
        };
        let mut content = self.content.write();
        let known = content.generation();
        if content.modified().is_some() && (!is_only_made || known == generation) {
            return true;
        }
        self.is_touched.store(false, SeqCst);
        if known == generation {
            // Elsewhere by now, or, after a loss, what another mount made of it.
            content.follow(layout);
            return true;
        }
        *content = Content::committed(layout, generation);
        drop(content);
        if generation < known {
            let error = lost();
            tracing::error!(ino = %self.ino, %error, "lost written bytes");
            self.record_failure(error);
        }
        true
    }

    /// Goes on from where the tree has the bytes that were committed last; what was written since stays over them. The
    /// caller has the turn.
    pub(super) async fn take_over(&self) -> Result<()> {
        self.take_over_as(None).await
    }

    /// The same, with what the tree had counted of relocations before.
    pub(super) async fn take_over_as(&self, relocations: Option<u64>) -> Result<()> {
        let (layout, current) = self.store.tree.layout(self.ino).await?;
        let mut content = self.content.write();
        if content.generation() == current {
            content.follow(layout);
            content.note_relocations(relocations);
        }
        Ok(())
    }
}

fn lost() -> Error {
    let fact = "the file was written, and lost before it was synced, with the process that served the tree";
    Error::new(ErrorKind::Unavailable, fact)
}

/// The error of a read whose bytes are nowhere: those that a host staged may still be there.
fn lacking(pieces: &[Piece], error: Error) -> Error {
    let staged = pieces.iter().find_map(|piece| match &piece.source {
        Some(Source::Blob { blob, .. }) => blob.staged_on(),
        _ => None,
    });
    match staged.filter(|_| error.kind() == ErrorKind::NotFound) {
        Some(host) => {
            let message =
                format!("the bytes were staged with --writeback on host {host} and are not uploaded");
            Error::new(ErrorKind::Unavailable, message)
                .with_hint("mount the volume there with the same state directory: they are uploaded then")
                .with_source(error)
        }
        None => error,
    }
}

/// Whether an error means that the bytes may merely lie elsewhere by now.
fn is_moved(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Stale)
}
