//! Failures that lost bytes of a file, and who knows of them.
//!
//! As Linux tells of them (errseq): each open file that was open when one happened is told of it by its own fsync or close,
//! once; one that nobody was told of yet is told to who opens the file next.

use forebay_core::{Error, Result};
use parking_lot::Mutex;

use super::stream::Stream;
use super::{OpenInode, Writer};
use crate::content::Content;
use crate::store::not_written;

/// What happened to one file.
#[derive(Debug, Default)]
pub(super) struct Failures {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// How many there were.
    count: u64,
    last: Option<Error>,
    /// Whether some open file was told of the last one.
    is_known: bool,
}

/// How far one open file was told.
#[derive(Debug)]
pub(crate) struct Told {
    /// How many failures there were when it was opened.
    opened: u64,
    /// How many there were before what it does not know.
    known: Mutex<u64>,
}

impl Failures {
    pub(super) fn record(&self, error: Error) {
        let mut state = self.state.lock();
        *state = State { count: state.count + 1, last: Some(error), is_known: false };
    }

    /// What a file that is opened now counts as told.
    pub(super) fn begin(&self) -> Told {
        let state = self.state.lock();
        let known = if state.is_known { state.count } else { state.count.saturating_sub(1) };
        Told { opened: state.count, known: Mutex::new(known) }
    }

    /// The last failure, if an open file was not told of it: once.
    pub(super) fn tell(&self, told: &Told) -> Result<()> {
        let mut state = self.state.lock();
        let before = std::mem::replace(&mut *told.known.lock(), state.count);
        if before == state.count {
            return Ok(());
        }
        state.is_known = true;
        state.last.as_ref().map_or(Ok(()), |error| Err(error.duplicate()))
    }

    /// The last failure, while an open file was not told of it.
    pub(super) fn untold(&self, told: &Told) -> Result<()> {
        let state = self.state.lock();
        let error = state.last.as_ref().filter(|_| *told.known.lock() < state.count);
        error.map_or(Ok(()), |error| Err(error.duplicate()))
    }

    /// The same if it came after that file was opened, and lost what was written through it.
    fn lost(&self, told: &Told) -> Result<()> {
        let is_newer = told.opened < self.state.lock().count;
        if is_newer { self.untold(told) } else { Ok(()) }
    }

    /// The last failure, while nobody was told of it.
    pub(super) fn unknown(&self) -> Option<Error> {
        let state = self.state.lock();
        state.last.as_ref().filter(|_| !state.is_known).map(Error::duplicate)
    }
}

impl OpenInode {
    /// The last failure that lost bytes, while nobody was told about it.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failures.unknown().or_else(|| self.lost(false))
    }

    /// The last failure that was recorded, while nobody was told about it.
    pub(crate) fn unknown_failure(&self) -> Option<Error> {
        self.failures.unknown()
    }

    /// Notes a failure that lost bytes: each handle is told.
    pub(crate) fn record_failure(&self, error: Error) {
        self.failures.record(error);
    }

    /// What a handle that is opened now was told of failures.
    pub(crate) fn begin_telling(&self) -> Told {
        self.failures.begin()
    }

    /// The last failure that lost bytes, for each handle once.
    pub(crate) fn tell_failure(&self, told: &Told) -> Result<()> {
        if let Some(error) = self.lost(true) {
            self.failures.record(error);
        }
        self.failures.tell(told)
    }

    /// The same for a handle that is on its way out, where nobody listens: it stays untold.
    pub(crate) fn untold_failure(&self, told: &Told) -> Result<()> {
        self.failures.untold(told)
    }

    /// The last failure since a handle was opened, while it was not told of it. Nothing of that handle is in the file then, nor is to
    /// come: its next bytes would lie over others than it knows of, and what is missing before them be zeros.
    pub(crate) fn check_kept(&self, told: &Told) -> Result<()> {
        self.failures.lost(told)
    }

    fn lost(&self, tells: bool) -> Option<Error> {
        self.look(|content| self.store.lost(self.ino, content.layout(), tells))
    }

    /// A streamed object could not be written: its bytes are gone, the file keeps its last committed content, and
    /// the next fsync or close of each handle says so.
    pub(super) async fn lose_stream(&self, writer: &mut Writer, error: Error) -> Error {
        let error = match &writer.stream {
            Some(stream) => not_written(self.ino, stream.placement.key(), error),
            None => error,
        };
        tracing::error!(ino = %self.ino, %error, "lost written bytes: the upload failed");
        self.failures.record(error.duplicate());
        if let Some(Stream { upload, placement }) = writer.stream.take() {
            if let Err(abort) = upload.abort().await {
                tracing::warn!(ino = %self.ino, error = %abort, "could not abort the failed upload");
            }
            self.store.failed(self.ino, &placement, &error).await;
        }
        self.fall_back(writer).await;
        error
    }

    /// Shows what was committed last instead of bytes that are lost.
    pub(super) async fn fall_back(&self, writer: &mut Writer) {
        // What still comes to them would lie past the end.
        writer.gaps.clear();
        let known = self.look(|content| (content.base().clone(), content.generation()));
        let (layout, generation) = self.store.tree.layout(self.ino).await.unwrap_or_else(|error| {
            tracing::warn!(ino = %self.ino, %error, "the last content is the one that this mount knew");
            known
        });
        self.store.settled(self.ino);
        *self.content.write() = Content::committed(layout, generation);
    }
}
