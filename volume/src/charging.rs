//! Memory for what is being written.

use forebay_core::{ErrorKind, Result};
use forebay_io::mem::{Class, Permit};
use forebay_io::object::MIN_PART_BYTES;

use crate::content::Content;
use crate::volume::Volume;

impl Volume {
    /// Memory for `bytes` that are about to be written. When there is none left, what other files hold in memory
    /// goes to the store first, a file at a time; then the writer waits its turn.
    ///
    /// Parts on their way give their memory back by themselves. What an upload keeps after [`Upload::relieve`] is
    /// less than the least part, so waiting is safe as long as that much for every upload leaves room for `bytes`;
    /// otherwise uploads are completed early, and their files sealed later.
    ///
    /// # Errors
    /// `Unavailable` when the store does not take what one file holds: it would take no other's.
    ///
    /// [`Upload::relieve`]: forebay_io::object::Upload::relieve
    pub(crate) async fn charge_write(&self, bytes: u64) -> Result<Permit> {
        if let Some(permit) = self.budget.try_acquire(Class::Write, bytes) {
            return Ok(permit);
        }
        let open = self.open_inodes();
        let uploads = open.iter().filter(|inode| !inode.look(Content::readable)).count() as u64;
        let finish = uploads * MIN_PART_BYTES + bytes > self.budget.largest();
        let mut failure = None;
        for inode in open {
            // It sticks to its own file; here it matters only if there is no room without it.
            if let Err(error) = inode.relieve(finish).await {
                let is_away = error.kind() == ErrorKind::Unavailable;
                failure = Some(error);
                if is_away {
                    break;
                }
            }
            if let Some(permit) = self.budget.try_acquire(Class::Write, bytes) {
                return Ok(permit);
            }
        }
        match (self.budget.try_acquire(Class::Write, bytes), failure) {
            (Some(permit), _) => Ok(permit),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(self.budget.acquire(Class::Write, bytes).await),
        }
    }
}
