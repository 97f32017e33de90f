//! Plain objects that files other than their own refer to: copied to owned blobs before they are replaced or deleted.
//!
//! The copy is noted as uncommitted, comes, and one commit says that it is meant wherever layouts name the object. That
//! commit is durable before the object goes. No new loan is made of an object that is about to go, so that none is
//! missed in between.

use forebay_core::{Blob, Error, ErrorKind, Result};
use forebay_io::object::Condition;
use tokio::time::Instant;
use tracing::warn;

use super::Mover;
use crate::kv::Durability;
use crate::records::{Change, Records};

impl Mover {
    /// Copies the bytes of `blob` away if others hold them. The caller holds the turn, and has made sure that nobody
    /// borrows them from now on.
    ///
    /// # Errors
    /// `Stale` when somebody else replaced or deleted the object meanwhile.
    pub(super) async fn save_lent(&self, blob: &Blob) -> Result<()> {
        if !self.look(|look| look.is_lent(blob)).await? {
            return Ok(());
        }
        let fresh = self.fresh_key();
        let noted = fresh.clone();
        let note = move |change: &mut Change<'_, '_>| change.note_uncommitted(&noted);
        self.transact(Durability::Durable, note).await?;
        let copy = match self.copy_inside(blob, &fresh, Condition::Always).await {
            Ok(copied) => copied.blob(),
            Err(error) => {
                // One that was not answered may still come.
                if error.kind() != ErrorKind::Unavailable {
                    let forget = move |change: &mut Change<'_, '_>| change.forget_uncommitted(&fresh);
                    self.transact(Durability::Buffered, forget).await?;
                }
                return Err(error);
            }
        };
        let found = self.bucket().head(&blob.key).await?;
        if copy.size != blob.size || found.is_none_or(|found| found.version != blob.version) {
            return Err(Error::new(
                ErrorKind::Stale,
                format!("`{}` was replaced by somebody else", blob.key),
            ));
        }
        let from = blob.clone();
        let commit = move |change: &mut Change<'_, '_>| change.move_loan(&from, &copy);
        self.transact(Durability::Durable, commit).await
    }

    /// As `save_lent`, for one who is about to replace or delete the object. Returns whether it is there; where somebody
    /// else replaced it the bytes are gone, and whoever holds them learns it when reading.
    pub(super) async fn save_lent_if_there(&self, blob: &Blob) -> Result<bool> {
        let found = self.bucket().head(&blob.key).await?;
        let is_there = found.is_some_and(|found| found.version == blob.version);
        if is_there {
            self.save_lent(blob).await?;
        }
        Ok(is_there)
    }

    /// The same in a turn of its own.
    pub(super) async fn save_one(&self, blob: Blob) {
        let _turn = self.copying_turn().await;
        if let Err(error) = self.save_lent_if_there(&blob).await {
            warn!(key = %blob.key, %error, "lent bytes are not copied away yet");
        }
    }

    /// The same for a writer, who does not wait longer than `until` then: `None`.
    pub(crate) async fn move_lent(&self, blob: &Blob, until: Instant) -> Result<Option<bool>> {
        let (mover, blob) = (self.clone(), blob.clone());
        let save = async move { mover.save_lent_if_there(&blob).await };
        self.alone_until(until, "copy lent bytes away", save).await
    }
}
