//! Memory for what is being written.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use forebay_core::{ErrorKind, Result};
use forebay_io::mem::{Class, Permit};

use crate::content::Content;
use crate::inode::OpenInode;
use crate::volume::Volume;

/// How long a writer waits for memory before it looks again at what others hold: doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Volume {
    /// Memory for `bytes` that are about to be written. When there is none left, the writer takes its place among those
    /// that wait, and brings what open files hold in memory to the store meanwhile, a file at a time. It does so again
    /// and again: a file that it has passed may be filled by one who then writes no more.
    ///
    /// Parts on their way give their memory back by themselves. What an upload keeps after [`Upload::relieve`] is
    /// less than the least part, so waiting is safe as long as that much for every upload leaves room for `bytes`;
    /// otherwise uploads are completed early, and their files sealed later. Files of which nothing has left yet are spared
    /// for a moment while more is on its way than they hold: what leaves them now has to be copied when they are sealed.
    ///
    /// # Errors
    /// `Unavailable` when the store does not take what one file holds: it would take no other's. What else keeps files from
    /// leaving, where nothing else leaves or there is no room without them.
    ///
    /// [`Upload::relieve`]: forebay_io::object::Upload::relieve
    pub(crate) async fn charge_write(&self, bytes: u64) -> Result<Permit> {
        if let Some(permit) = self.budget.try_acquire(Class::Write, bytes) {
            return Ok(permit);
        }
        let mut granted = pin!(self.budget.acquire(Class::Write, bytes));
        let (mut pause, least_part) = (FIRST_PAUSE, self.store().bucket.least_part_bytes());
        loop {
            let mut open = self.open_inodes_that(OpenInode::holds_memory);
            open.sort_by_cached_key(|inode| inode.look(Content::readable));
            let uploads = open.iter().filter(|inode| !inode.look(Content::readable)).count() as u64;
            let finish = uploads * least_part + bytes > self.budget.largest();
            let beginnings: u64 = open.iter().map(|inode| inode.look(Content::dirty)).sum();
            let mut kept = beginnings;
            let (mut failure, mut stuck, mut others) = (None, 0, false);
            for inode in &open {
                if let Poll::Ready(permit) = futures::poll!(granted.as_mut()) {
                    return Ok(permit);
                }
                let is_beginning = inode.look(Content::dirty) > 0;
                if is_beginning && pause < LONGEST_PAUSE && self.budget.used(Class::Write) > kept + beginnings
                {
                    break;
                }
                match inode.relieve(finish).await {
                    Ok(bytes) => {
                        kept += bytes;
                        others |= !inode.look(Content::readable);
                    }
                    Err(error) if error.kind() == ErrorKind::Unavailable => {
                        (failure, others) = (Some(error), false);
                        break;
                    }
                    // It sticks to its own file; here it matters only if there is no room without that.
                    Err(error) => {
                        stuck += inode.look(Content::dirty);
                        failure = Some(error);
                    }
                }
            }
            let leaves_room = others && stuck + uploads * least_part + bytes <= self.budget.largest();
            match (futures::poll!(granted.as_mut()), failure) {
                (Poll::Ready(permit), _) => return Ok(permit),
                (Poll::Pending, Some(error)) if !leaves_room => return Err(error),
                (Poll::Pending, _) => {}
            }
            if let Ok(permit) = tokio::time::timeout(pause, granted.as_mut()).await {
                return Ok(permit);
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}
