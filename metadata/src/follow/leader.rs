//! The tree of a mount for writing, as others come to it: through its bucket.

use std::path::PathBuf;

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Moment;
use forebay_io::object::Bucket;

use super::copy::{clear, copy};
use crate::kv::{
    Edit, Engine, LmdbEngine, LmdbSettings, Next, SlateEngine, SlateLog, SlateSettings, Snapshot,
};
use crate::schema::Keys;

/// Where another mount has its tree.
#[derive(Debug, Clone)]
pub enum Leader {
    /// In a bucket.
    Bucket(Bucket),
    /// In a directory of a bucket that is one.
    Directory(PathBuf),
}

/// What the tree has since it was looked at last.
pub(super) enum News {
    /// Nothing.
    Nothing,
    /// These changes.
    Edits(Vec<Edit>),
    /// Something or other: this is the tree now.
    View(View),
}

/// A tree as it was at one moment.
pub(super) struct View {
    pub(super) snapshot: Box<dyn Snapshot>,
    /// The place of that moment.
    place: Place,
    /// What has to be closed then.
    engine: Option<SlateEngine>,
}

impl View {
    /// Lets go of it.
    pub(super) async fn end(self) -> Place {
        drop(self.snapshot);
        if let Some(engine) = self.engine
            && let Err(error) = engine.close().await
        {
            // Nothing of it was to be kept.
            tracing::debug!(%error, "closing what was opened to be read");
        }
        self.place
    }
}

/// How far a tree is known.
pub(super) enum Place {
    /// Up to this place in its log.
    Log(SlateLog),
    /// Up to this commit.
    Commit(u64),
}

impl Place {
    pub(super) fn is_in_a_log(&self) -> bool {
        matches!(self, Self::Log(_))
    }
}

/// A tree and how far it is known.
pub struct Follower {
    leader: Leader,
    pub(super) keys: Keys,
    /// Nowhere before it was copied, and where its log is gone.
    place: Option<Place>,
    /// Whether it had a root: one that has none any more is another volume.
    pub(super) has_begun: bool,
}

impl Follower {
    /// Of the tree with these keys, of which nothing is known.
    pub fn new(leader: Leader, keys: Keys) -> Self {
        Self { leader, keys, place: None, has_begun: false }
    }

    /// Copies the tree into `into`, in the place of what that has of the volume, and nobody uses; returns the number of records.
    ///
    /// # Errors
    /// As [`super::copy`]; those of a tree that cannot be looked at.
    pub async fn copy(&mut self, into: &dyn Engine) -> Result<u64> {
        // What listings made has other numbers.
        clear(self.keys, into).await?;
        let view = self.view().await?;
        let begun = view.snapshot.get(&self.keys.counters()).await;
        let copied = copy(&*view.snapshot, self.keys, into).await;
        let place = view.end().await;
        let copied = copied?;
        (self.has_begun, self.place) = (begun?.is_some(), Some(place));
        Ok(copied)
    }

    /// Whether the tree was copied.
    pub(super) fn is_somewhere(&self) -> bool {
        self.place.is_some()
    }

    /// The end of the tree's log, if it has one, as it is now.
    pub(super) async fn end(&self) -> Result<Option<SlateLog>> {
        match (&self.leader, &self.place) {
            (Leader::Bucket(bucket), Some(Place::Log(_))) => SlateLog::end(bucket).await.map(Some),
            _ => Ok(None),
        }
    }

    /// Whether everything is taken over that was there at `end`.
    pub(super) fn has_passed(&self, end: &SlateLog) -> bool {
        matches!(&self.place, Some(Place::Log(log)) if log.has_passed(end))
    }

    /// What is new. Once it was taken over it is to be [passed](Self::pass).
    pub(super) async fn news(&mut self, now: Moment) -> Result<News> {
        match &mut self.place {
            Some(Place::Log(log)) => match log.next(now).await? {
                Next::Nothing => return Ok(News::Nothing),
                Next::Edits(edits) => return Ok(News::Edits(edits)),
                Next::Gone => self.place = None,
            },
            Some(Place::Commit(known)) => {
                let known = *known;
                let view = self.view().await?;
                return Ok(match view.place {
                    Place::Commit(commit) if commit == known => News::Nothing,
                    _ => News::View(view),
                });
            }
            None => {}
        }
        self.view().await.map(News::View)
    }

    /// Goes on behind the changes that were told.
    pub(super) fn pass(&mut self) {
        if let Some(Place::Log(log)) = &mut self.place {
            log.pass();
        }
    }

    /// As where the log is gone: the tree is compared as a whole.
    #[cfg(test)]
    pub(crate) fn lose(&mut self) {
        self.place = None;
    }

    /// Goes on at `place`; nowhere has the tree compared as a whole.
    pub(super) fn go_on_at(&mut self, place: Option<Place>) {
        self.place = place;
    }

    /// The tree as it is.
    async fn view(&self) -> Result<View> {
        match &self.leader {
            Leader::Directory(directory) => {
                let (snapshot, commit) = LmdbEngine::view(directory, &LmdbSettings::default()).await?;
                Ok(View { snapshot, place: Place::Commit(commit), engine: None })
            }
            Leader::Bucket(bucket) => {
                // Before the tree is looked at, so that no change is between the two.
                let mut log = SlateLog::end(bucket).await?;
                let engine = SlateEngine::open_aside(bucket, &SlateSettings::default()).await?;
                let (snapshot, sequence) = engine.numbered_snapshot()?;
                log.know(sequence);
                Ok(View { snapshot, place: Place::Log(log), engine: Some(engine) })
            }
        }
    }
}

/// Refuses a tree that is not whole.
pub(super) async fn check_whole(from: &dyn Snapshot, keys: Keys) -> Result<()> {
    match from.get(&keys.loading()).await? {
        Some(_) => Err(Error::new(ErrorKind::Unavailable, "the tree is being loaded from a dump")),
        None => Ok(()),
    }
}
