//! Ends uploads that agents of other starts left when they died, beside the saves: none waits for that.

use forebay_core::{Error, ErrorKind};
use forebay_io::clock::{Clock, Moment};
use forebay_io::object::Bucket;
use tokio::sync::mpsc;

use super::Reply;
use super::trainer::Trainer;
use crate::catalog::{LEAST_AGE, Run, SECOND_LOOK, abort_uploads, find_dead_uploads, still_dead};

/// Uploads that one look aborts at most: with those of thousands of ranks it is done with this many at a time.
pub(super) const MOST: usize = 1000;

/// Looks for them when it is asked, and not more often than what is too young for one look is old enough for the next.
pub(super) struct Sweeper {
    clock: Clock,
    trainer: Trainer,
    looked: Option<Moment>,
    /// The store does not let this start look.
    is_refused: bool,
    /// Whether it was told that it goes wrong: that is space, not data, and once is enough.
    is_told: bool,
}

impl Sweeper {
    pub(super) fn new(clock: Clock, trainer: Trainer) -> Self {
        Self { clock, trainer, looked: None, is_refused: false, is_told: false }
    }

    /// Looks whenever it is asked, until nobody can ask any more.
    pub(super) async fn serve(mut self, mut asked: mpsc::Receiver<(Bucket, Run)>) {
        while let Some((bucket, run)) = asked.recv().await {
            self.look(&bucket, &run, MOST).await;
        }
    }

    /// Aborts `most` dead uploads of others than `run` at most, where it is time to look for them.
    pub(super) async fn look(&mut self, bucket: &Bucket, run: &Run, most: usize) {
        let now = self.clock.now();
        if self.is_refused || self.looked.is_some_and(|looked| now.since(looked) < LEAST_AGE) {
            return;
        }
        self.looked = Some(now);
        match self.sweep(bucket, run, most).await {
            Ok(0) => {}
            Ok(aborted) => tracing::info!(aborted, "uploads that nobody would finish"),
            Err(error) => self.tell(error),
        }
    }

    async fn sweep(&mut self, bucket: &Bucket, run: &Run, most: usize) -> forebay_core::Result<usize> {
        let mut found = find_dead_uploads(bucket, run).await?;
        if found.uploads.is_empty() {
            return Ok(0);
        }
        if found.uploads.len() > most {
            found.uploads.truncate(most);
            // There is more to do when it is asked next.
            self.looked = None;
        }
        // What goes on has told so by then, whatever a store says of when it was begun.
        self.clock.sleep(SECOND_LOOK).await;
        let dead = still_dead(bucket, found).await?;
        abort_uploads(bucket, &dead).await?;
        Ok(dead.len())
    }

    pub(super) fn tell(&mut self, error: Error) {
        tracing::warn!(%error, "uploads of dead agents stay");
        self.is_refused = error.kind() == ErrorKind::Denied;
        if std::mem::replace(&mut self.is_told, true) {
            return;
        }
        let hint = match self.is_refused {
            true => {
                " (hint: on S3 it takes s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, or a lifecycle rule \
                 that aborts incomplete uploads; this start does not try again)"
            }
            false => "",
        };
        let message = format!("uploads that agents left when they died were not aborted: {error}{hint}");
        self.trainer.tell(&Reply::Warning { message });
    }
}
