//! Giving one file bytes of another without moving them.

use std::ops::Range;
use std::sync::atomic::Ordering;

use forebay_core::{Error, ErrorKind, Result};

use super::{OpenInode, Told, Writer};
use crate::content::Content;
use crate::file::LARGEST_BYTES;

impl OpenInode {
    /// Puts `range` of `source`, which may be this very file, over what is at `to`. Returns the bytes shared: fewer at
    /// the end of `source`. The handle was `told` as with [`Self::write`].
    ///
    /// # Errors
    /// `Conflict` when the bytes of `source` are about to be replaced: they have to be copied.
    pub(crate) async fn share(&self, told: &Told, source: &Self, range: Range<u64>, to: u64) -> Result<u64> {
        if self.ino == source.ino {
            let mut turn = self.writer.lock().await;
            self.check_kept(told)?;
            self.catch_up_in_turn().await;
            self.commit_all(&mut turn).await?;
            return self.share_committed(source, range, to).await;
        }
        // Always the lower number first: two files may be shared both ways at once.
        let (mut of_source, mut own);
        if source.ino < self.ino {
            of_source = source.writer.lock().await;
            own = self.writer.lock().await;
        } else {
            own = self.writer.lock().await;
            of_source = source.writer.lock().await;
        }
        self.check_kept(told)?;
        source.catch_up_in_turn().await;
        source.commit_all(&mut of_source).await?;
        self.finish_stream(&mut own).await?;
        if self.look(Content::dirty) > 0 {
            self.pack(&mut own).await?;
        }
        self.share_committed(source, range, to).await
    }

    /// Whether a file may be so large, or is larger already.
    ///
    /// # Errors
    /// `TooLarge` where it may not.
    pub(super) fn check_size(&self, end: u64) -> Result<()> {
        if end <= LARGEST_BYTES.max(self.look(Content::size)) {
            return Ok(());
        }
        let message = format!("a file of {end} bytes: {LARGEST_BYTES} are the most");
        Err(Error::new(ErrorKind::TooLarge, message))
    }

    /// Commits everything written so far, and leaves failures to those who wrote.
    pub(crate) async fn commit_now(&self) -> Result<()> {
        self.commit_if(|| true).await
    }

    /// The same if it `may`, as is found out when nothing is being written. Does not wait for a seal, during which nothing is.
    pub(crate) async fn commit_if(&self, may: impl FnOnce() -> bool) -> Result<()> {
        if !self.is_pending() {
            return Ok(());
        }
        let mut turn = self.writer.lock().await;
        if may() && !self.is_ending(&turn).await { self.commit_all(&mut turn).await } else { Ok(()) }
    }

    pub(super) async fn commit_all(&self, turn: &mut Writer) -> Result<()> {
        let had_pages = self.has_pages.swap(false, Ordering::SeqCst);
        let was_touched = self.is_touched.swap(false, Ordering::SeqCst);
        let committed = match self.finish_stream(turn).await {
            Ok(()) => self.commit(turn).await,
            failed => failed,
        };
        self.discard_superseded();
        self.has_pages.fetch_or(had_pages && committed.is_err(), Ordering::SeqCst);
        self.is_touched.fetch_or(was_touched && committed.is_err(), Ordering::SeqCst);
        committed
    }

    /// The same when all bytes of both files lie in blobs; the caller has both turns.
    async fn share_committed(&self, source: &Self, range: Range<u64>, to: u64) -> Result<u64> {
        // What lay in blobs of their own may have been moved since, and those deleted.
        source.keep_up().await;
        self.keep_up().await;
        match self.share_once(source, range.clone(), to).await {
            Err(error) if error.kind() == ErrorKind::Conflict => {
                // The object of the source was moved since it was opened.
                let (layout, current) = source.store.tree.layout(source.ino).await?;
                if source.look(Content::generation) != current || source.ino == self.ino {
                    return Err(error);
                }
                *source.content.write() = Content::committed(layout, current);
                self.share_once(source, range, to).await
            }
            shared => shared,
        }
    }

    async fn share_once(&self, source: &Self, range: Range<u64>, to: u64) -> Result<u64> {
        let from = source.look(|content| content.layout().clone());
        let length = range.end.min(from.size()).saturating_sub(range.start);
        if length == 0 {
            return Ok(0);
        }
        let (mut layout, generation) = self.look(|content| (content.layout().clone(), content.generation()));
        self.check_size(to.saturating_add(length))?;
        layout.copy(&from, range, to);
        let turn = self.times.lock().await;
        let (tree, now) = (&self.store.tree, self.store.now());
        let committed = tree.commit_shared(self.ino, generation, layout.clone(), now, source.ino).await?;
        self.store.settled(self.ino);
        *self.content.write() = Content::committed(layout, committed.generation);
        drop(turn);
        self.shares.store(true, Ordering::Relaxed);
        self.keep_up().await;
        Ok(length)
    }
}
