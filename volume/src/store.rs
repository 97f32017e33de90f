//! The places an open file works with: tree, cache and bucket of its volume, and how dirty bytes become blobs.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, FileLayout, InodeId, ObjectKey, Result, Source, Timestamp};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, Condition, ObjectInfo, Upload, UploadNotes, UploadOptions};
use forebay_metadata::tree::{Placement, Tree};

use crate::copying::{Plan, Run};
use crate::discards::Discards;
use crate::fetch::Fetch;
use crate::prefetch::PrefetchSettings;
use crate::segments::{Segments, Stored};
use crate::settings::WriteSettings;
use crate::staging::Uploads;
use crate::unsealed::Unsealed;

/// Times a whole object is placed again after an outsider took its key in between.
const PLACE_ATTEMPTS: usize = 3;

/// How much more than `seal_max_bytes` of a file may pass through this host where an older object of it stands in the bucket:
/// 64 GiB by default, some ten minutes of a fast link. The alternative is an object that other tools take for the file.
const OLDER_OBJECT_FACTOR: u64 = 64;

/// What every open inode of a volume shares.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) tree: Arc<dyn Tree>,
    pub(crate) bucket: Bucket,
    pub(crate) fetch: Fetch,
    pub(crate) segments: Segments,
    pub(crate) write: WriteSettings,
    /// Whether the store copies ranges of objects into new ones, and only of the version meant.
    pub(crate) part_copy: bool,
    pub(crate) prefetch: PrefetchSettings,
    pub(crate) clock: Clock,
    /// Who brings in what is staged on this host.
    pub(crate) uploads: Option<Arc<Uploads>>,
    /// Closed files that stay in pieces.
    pub(crate) unsealed: Unsealed,
    /// Blobs that nobody is going to name.
    pub(crate) discards: Discards,
}

impl Store {
    /// Returns when every name and attribute answered so far is in the bucket.
    ///
    /// # Errors
    /// `Unavailable` past the deadline; the changes are kept and still on their way.
    pub(crate) async fn sync_tree(&self) -> Result<()> {
        self.in_time("names and attributes reach the store", self.tree.sync()).await
    }

    /// Where the next whole content of a file goes, as [`Tree::place`].
    async fn place(&self, ino: InodeId, seals: bool) -> Result<Placement> {
        let placed = self.in_time("the intent to write reaches the store", self.tree.place(ino, seals)).await;
        match placed {
            Err(error) => Err(error.context(format!("{} could not be written", self.named(ino).await))),
            placed => placed,
        }
    }

    /// What a file is called, for those who read an error.
    async fn named(&self, ino: InodeId) -> String {
        match self.tree.local() {
            Some(tree) => match tree.path(ino).await {
                Ok(path) => format!("`{path}`"),
                Err(_) => format!("inode {ino}"),
            },
            None => format!("inode {ino}"),
        }
    }

    async fn in_time<T>(&self, what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        in_time(self.write.deadline_ms, what, work).await
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.wall()
    }

    /// Writes the whole content of a file, which is at hand, as one object: at its own path when nothing else is
    /// there, else as an owned blob. So that nothing is lost, that is also where it goes when the store refuses the path
    /// again and again: an outsider may write there, or the path of a file lead through another, which is not yet moved.
    ///
    /// A small file of a packed directory goes into a segment instead.
    pub(crate) async fn put_whole(&self, ino: InodeId, content: Bytes) -> Result<Stored> {
        if let Some(blob) = self.stage(ino, &content).await {
            return Ok(blob.into());
        }
        if self.packs(ino, content.len() as u64).await? {
            let put = self.segments.put(content).await;
            return put
                .map_err(|error| error.context(format!("inode {ino} could not be written to a segment")));
        }
        for _ in 0..PLACE_ATTEMPTS {
            let placement = self.place(ino, false).await?;
            let (key, condition) = (placement.key(), condition(&placement));
            let put = match &placement {
                Placement::Own { token, .. } => {
                    self.bucket.put_as(key, content.clone(), condition, token).await
                }
                Placement::Owned { .. } => self.bucket.put(key, content.clone(), condition).await,
            };
            match put {
                Err(error) if is_refused(&error) => self.ended(ino, &placement).await,
                Err(error) => {
                    self.failed(ino, &placement, &error).await;
                    return Err(not_written(ino, key, error));
                }
                Ok(info) => {
                    let blob = info.blob();
                    self.fetch.remember(&blob, content);
                    return Ok(blob.into());
                }
            }
        }
        self.put_owned(ino, content).await.map(Stored::from)
    }

    /// Whether the content of a file, `size` bytes, belongs into a segment.
    pub(crate) async fn packs(&self, ino: InodeId, size: u64) -> Result<bool> {
        Ok(size <= self.write.pack_max_bytes && self.tree.packs(ino).await?)
    }

    /// Writes bytes of a file as one owned blob.
    pub(crate) async fn put_owned(&self, ino: InodeId, packed: Bytes) -> Result<Blob> {
        match self.stage(ino, &packed).await {
            Some(blob) => Ok(blob),
            None => self.put_unstaged(ino, packed).await,
        }
    }

    /// The same, to the bucket in any case.
    pub(crate) async fn put_unstaged(&self, ino: InodeId, packed: Bytes) -> Result<Blob> {
        let key = self.tree.fresh_blob();
        let put = self.bucket.put(&key, packed.clone(), Condition::IfAbsent).await;
        let blob = put.map_err(|error| self.not_put(ino, key, error))?.blob();
        self.fetch.remember(&blob, packed);
        Ok(blob)
    }

    /// The error of a blob that did not get to a key of its own, as far as the store says: it may come still.
    fn not_put(&self, ino: InodeId, key: ObjectKey, error: Error) -> Error {
        let error = not_written(ino, &key, error);
        self.discards.add(vec![key]);
        error
    }

    /// Starts an object that is written front to back.
    pub(crate) async fn start_upload(&self, ino: InodeId) -> Result<(Upload, Placement)> {
        self.start(ino, false, UploadOptions::default()).await
    }

    /// The same of the content that the file has, `size` bytes that are at hand elsewhere: no more than [`Self::sealing_bytes`] of
    /// them are in memory at once.
    pub(crate) async fn start_sealing(&self, ino: InodeId, size: u64) -> Result<(Upload, Placement)> {
        let (bytes_in_flight, length) = (2 * self.write.buffer_bytes, Some(size));
        self.start(ino, true, UploadOptions { bytes_in_flight, length, ..UploadOptions::default() }).await
    }

    /// Memory that it takes to seal a file: parts in flight, the one that fills up, and what is read.
    pub(crate) fn sealing_bytes(&self, layout: &FileLayout) -> u64 {
        let (part, buffer) = (self.plan(layout).part_bytes(), self.write.buffer_bytes);
        layout.size().min((2 * buffer).max(part) + part + buffer)
    }

    async fn start(&self, ino: InodeId, seals: bool, options: UploadOptions) -> Result<(Upload, Placement)> {
        let placement = self.place(ino, seals).await?;
        let token = match &placement {
            Placement::Own { token, .. } => Some(token.clone()),
            Placement::Owned { .. } => None,
        };
        let (tree, deadline_ms) = (self.tree.clone(), self.write.deadline_ms);
        let notes = Arc::new(Notes { tree, deadline_ms, is_announced: token.is_some() });
        let options = UploadOptions { notes: Some(notes), token, ..options };
        match self.bucket.upload_with(placement.key(), options) {
            Ok(upload) => Ok((upload, placement)),
            Err(error) => {
                self.failed(ino, &placement, &error).await;
                Err(error)
            }
        }
    }

    /// Copies all bytes of a file, which lie in blobs, into one blob of its own.
    pub(crate) async fn put_aside(&self, ino: InodeId, layout: &FileLayout) -> Result<Blob> {
        let (tree, key) = (self.tree.clone(), self.tree.fresh_blob());
        let notes = Notes { tree, deadline_ms: self.write.deadline_ms, is_announced: false };
        let (notes, length) = (Some(Arc::new(notes) as _), Some(layout.size()));
        let options = UploadOptions { notes, length, ..UploadOptions::default() };
        let mut upload = self.bucket.upload_with(&key, options)?;
        self.copy_content(layout, &mut upload).await?;
        let put = upload.complete(Condition::IfAbsent).await;
        put.map(|info| info.blob()).map_err(|error| self.not_put(ino, key, error))
    }

    /// How the bytes of a file get into a new object.
    fn plan(&self, layout: &FileLayout) -> Plan {
        match self.bucket.wants_even_parts() {
            true => Plan::even(layout, self.part_copy),
            false => Plan::of(layout, self.part_copy),
        }
    }

    /// How many bytes of a file sealing moves through this host, but for those that have to leave it anyway.
    pub(crate) fn carried_bytes(&self, layout: &FileLayout) -> u64 {
        let staged = layout.extents().iter().map(|extent| match &extent.source {
            Source::Blob { blob, .. } if self.fetch.is_staged(blob) => extent.length,
            _ => 0,
        });
        self.plan(layout).carried() - staged.sum::<u64>()
    }

    /// Whether a file may become a plain object: of a large one, most must be copied by the store, unless an older object
    /// of it is what other tools read. Holes take no room until they are carried: for them there is no such exception.
    pub(crate) async fn may_carry(&self, ino: InodeId, layout: &FileLayout) -> Result<bool> {
        let (carried, most) = (self.carried_bytes(layout), self.write.seal_max_bytes);
        let holes = layout.size().saturating_sub(layout.allocated());
        let is_bearable = carried <= most.saturating_mul(OLDER_OBJECT_FACTOR) && holes <= most;
        Ok(carried <= most || is_bearable && self.tree.has_object(ino).await?)
    }

    /// Logs that a file could not be sealed, and notes it unless it is gone.
    pub(crate) fn tell_unsealed(&self, ino: InodeId, error: &Error) {
        if error.kind() != ErrorKind::NotFound {
            self.unsealed.note(ino);
        }
        tracing::warn!(%ino, %error, "could not seal; the file stays readable through Forebay");
    }

    /// Appends a whole file to an upload as it is planned: long runs of one blob inside the store, the rest through here.
    /// Returns the content if it is no more than is read in one piece.
    pub(crate) async fn copy_content(
        &self,
        layout: &FileLayout,
        upload: &mut Upload,
    ) -> Result<Option<Bytes>> {
        let plan = self.plan(layout);
        if let Some(part) = plan.even_part() {
            upload.cut_into(part);
        }
        for run in plan.runs() {
            match run {
                Run::Copied(blob, range) => {
                    let copied = upload.copy_from(&blob.key, &blob.version, range.clone()).await;
                    copied.map_err(lost_source)?;
                }
                Run::Carried(range) => {
                    upload.cut_into(plan.cut(range.end - range.start));
                    let content = self.carry(layout, range.clone(), upload).await?;
                    if range.end - range.start == layout.size() {
                        return Ok(content);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Appends `range` of a file to an upload through here. Returns it if it is no more than is read in one piece.
    pub(crate) async fn carry(
        &self,
        layout: &FileLayout,
        range: Range<u64>,
        upload: &mut Upload,
    ) -> Result<Option<Bytes>> {
        let (step, mut at) = (self.write.buffer_bytes.max(1), range.start);
        while at < range.end {
            let end = range.end.min(at + step);
            let content = self.fetch.bytes(layout.pieces(at..end)).await?;
            upload.write(content.clone()).await?;
            if (at..end) == range {
                return Ok(Some(content));
            }
            at = end;
        }
        Ok(None)
    }

    /// Has the tree find out what became of a write that failed, now if the store is done with it.
    pub(crate) async fn failed(&self, ino: InodeId, placement: &Placement, error: &Error) {
        if error.kind() != ErrorKind::Unavailable {
            return self.ended(ino, placement).await;
        }
        if let (Placement::Own { .. }, Err(error)) = (placement, self.tree.doubt(ino).await) {
            tracing::debug!(%ino, %error, "what is not answered is settled when the file is written again");
        }
    }

    /// The same of a write that was given up before the store could show anything of it.
    pub(crate) async fn ended(&self, ino: InodeId, placement: &Placement) {
        let Placement::Own { .. } = placement else { return };
        if let Err(error) = self.in_time("what was written is known", self.tree.settle(ino)).await {
            tracing::debug!(%ino, %error, "settled later");
            self.tree.doubt(ino).await.ok();
        }
    }

    /// Makes a streamed object visible.
    pub(crate) async fn complete(&self, upload: Upload, placement: &Placement) -> Result<ObjectInfo> {
        let key = placement.key();
        upload.complete(condition(placement)).await.map_err(|error| {
            let fact = match error.kind() {
                ErrorKind::Conflict => format!("`{key}` was changed in the bucket while it was being written"),
                ErrorKind::NotFound => format!(
                    "`{key}`, or the upload to it, went from the bucket while it was being written: somebody ended it, as \
                     is done with those of a process that was not heard of for a minute"
                ),
                _ => return error,
            };
            Error::new(ErrorKind::Stale, fact).with_source(error)
        })
    }
}

/// An error that says which file's bytes did not get to which key: all that its log and whoever syncs learn.
pub(crate) fn not_written(ino: InodeId, key: &ObjectKey, error: Error) -> Error {
    error.context(format!("inode {ino} could not be written to `{key}`"))
}

/// Whether a write did not find at its key what it was to replace: S3 says 412 for another version, 404 for none.
fn is_refused(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Conflict | ErrorKind::NotFound)
}

/// The error of copying bytes that a layout names: there is the file, and its object was replaced or is gone.
fn lost_source(error: Error) -> Error {
    match is_refused(&error) {
        true => Error::new(ErrorKind::Stale, "what was to be copied is gone").with_source(error),
        false => error,
    }
}

/// Waits for the tree as long as for any request: an engine inside the bucket goes on trying for ever.
async fn in_time<T>(deadline_ms: u64, what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(Duration::from_millis(deadline_ms), work).await.unwrap_or_else(|_| {
        let waited = deadline_ms / 1000;
        Err(Error::new(ErrorKind::Unavailable, format!("waited {waited} s until {what}"))
            .with_hint("see whether the store can be reached, then sync again: nothing was given up"))
    })
}

/// Notes uploads in the tree, which ends them when this process dies.
#[derive(Debug)]
struct Notes {
    tree: Arc<dyn Tree>,
    deadline_ms: u64,
    /// An intent tells of the upload, so that it is found there even if the store began it and it was never noted. The
    /// key of an owned blob tells as much by itself.
    is_announced: bool,
}

#[async_trait]
impl UploadNotes for Notes {
    async fn starting(&self) -> Result<()> {
        match self.is_announced {
            true => {
                in_time(self.deadline_ms, "the intent to write reaches the store", self.tree.sync()).await
            }
            false => Ok(()),
        }
    }

    async fn started(&self, key: &ObjectKey, id: &str) {
        if let Err(error) = self.tree.upload_started(key, id).await {
            tracing::warn!(%key, %error, "an upload is not noted: it stays in the store if this process dies");
        }
    }

    async fn ended(&self, id: &str) {
        if let Err(error) = self.tree.upload_ended(id).await {
            tracing::debug!(%error, "an upload that ended stays noted; the next mount forgets it");
        }
    }
}

/// What the store must still hold at a placement's key for a write to be ours to make.
fn condition(placement: &Placement) -> Condition {
    match placement {
        Placement::Own { replaces: Some(version), .. } => Condition::IfVersion(version.clone()),
        Placement::Own { replaces: None, .. } | Placement::Owned { .. } => Condition::IfAbsent,
    }
}
