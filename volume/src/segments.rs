//! Small files of packed directories: those that are flushed at the same time share one object, a segment.
//!
//! A file that comes alone goes at once: nothing waits for company. While as many puts as may be are on their way, those
//! that come gather, and go together with the next. Each is answered when its segment is in the store.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, Extent, FileLayout, Result, Source};
use forebay_io::object::{Bucket, Condition};
use forebay_io::task::TaskGroup;
use forebay_metadata::tree::{SegmentPin, Tree};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::fetch::{Fetch, join};

/// Most bytes of a segment: one block of the cache, so that one request brings all of it.
pub(crate) const SEGMENT_BYTES: u64 = forebay_core::BLOCK_SIZE;
/// Most files of a segment that is written at once, so that what is committed and compacted together stays small.
const MOST_FILES: usize = 1024;
/// Segments on their way at once. One would make two writers wait for each other; with more, fewer files share each.
const PUTS_AT_ONCE: usize = 2;

/// The whole content of a file in the store.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    /// Where it is.
    pub(crate) layout: FileLayout,
    /// Keeps a segment from being freed until the file is committed.
    _pin: Option<Arc<SegmentPin>>,
}

impl From<Blob> for Stored {
    fn from(blob: Blob) -> Self {
        Self { layout: FileLayout::of_blob(blob), _pin: None }
    }
}

impl Stored {
    /// The content of a packed file without bytes, which needs no object.
    pub(crate) fn nothing() -> Self {
        Self { layout: FileLayout::empty(), _pin: None }
    }
}

/// What gathers small files into segments; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Segments(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    tree: Arc<dyn Tree>,
    bucket: Bucket,
    fetch: Fetch,
    tasks: TaskGroup,
    queue: Mutex<Queue>,
    /// Held by the one compaction at a time.
    compacting: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// Tasks that put segments.
    workers: usize,
}

/// A file that waits for its segment.
#[derive(Debug)]
struct Waiting {
    content: Bytes,
    tell: oneshot::Sender<Result<Stored>>,
}

/// One of the tasks that put segments.
struct Worker {
    segments: Segments,
    /// It is among those of the queue.
    is_counted: bool,
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.is_counted {
            self.segments.0.queue.lock().workers -= 1;
        }
    }
}

impl Segments {
    pub(crate) fn new(tree: Arc<dyn Tree>, bucket: Bucket, fetch: Fetch, tasks: TaskGroup) -> Self {
        let (queue, compacting) = Default::default();
        Self(Arc::new(Inner { tree, bucket, fetch, tasks, queue, compacting }))
    }

    /// Writes the whole content of a file into a segment.
    pub(crate) async fn put(&self, content: Bytes) -> Result<Stored> {
        if content.is_empty() {
            return Ok(Stored::nothing());
        }
        let (tell, told) = oneshot::channel();
        let worker = {
            let mut queue = self.0.queue.lock();
            queue.waiting.push_back(Waiting { content, tell });
            let is_wanted = queue.workers < PUTS_AT_ONCE;
            queue.workers += usize::from(is_wanted);
            is_wanted.then(|| Worker { segments: self.clone(), is_counted: true })
        };
        if let Some(worker) = worker {
            self.0.tasks.spawn("segment", worker.work());
        }
        let gone = |_| Error::new(ErrorKind::Unavailable, "the volume was closed before the file was stored");
        told.await.map_err(gone)?
    }

    /// Puts a segment of `contents`, one after the other, at the key of `pin`.
    pub(crate) async fn put_segment(&self, pin: &SegmentPin, contents: &[Bytes]) -> Result<Blob> {
        let whole = join(contents.to_vec());
        let blob = self.0.bucket.put(pin.key(), whole.clone(), Condition::IfAbsent).await?.blob();
        self.0.fetch.remember(&blob, whole);
        Ok(blob)
    }

    /// Whoever compacts holds this meanwhile.
    pub(crate) async fn compaction(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.0.compacting.lock().await
    }
}

impl Worker {
    /// Puts segments until nothing waits.
    async fn work(mut self) {
        loop {
            let batch = self.next_batch();
            if batch.is_empty() {
                return;
            }
            let (contents, tell): (Vec<Bytes>, Vec<_>) =
                batch.into_iter().map(|waiting| (waiting.content, waiting.tell)).unzip();
            let pin = self.segments.0.tree.fresh_segment();
            let stored = self.segments.put_segment(&pin, &contents).await;
            answer(pin, &stored, &contents, tell);
        }
    }

    /// What goes into the next segment. Where nothing waits the worker counts no more from then on: who comes as it goes
    /// needs another.
    fn next_batch(&mut self) -> Vec<Waiting> {
        let mut queue = self.segments.0.queue.lock();
        if queue.waiting.is_empty() {
            queue.workers -= usize::from(std::mem::take(&mut self.is_counted));
        }
        let (mut files, mut bytes) = (0, 0);
        for waiting in queue.waiting.iter().take(MOST_FILES) {
            bytes += waiting.content.len() as u64;
            if files > 0 && bytes > SEGMENT_BYTES {
                break;
            }
            files += 1;
        }
        queue.waiting.drain(..files).collect()
    }
}

/// Tells the writers of `contents` where they are. From then on they alone hold the segment: once all of them have committed,
/// it may be compacted.
fn answer(
    pin: SegmentPin,
    stored: &Result<Blob>,
    contents: &[Bytes],
    tell: Vec<oneshot::Sender<Result<Stored>>>,
) {
    let (mut at, mut answers) = (0, Vec::with_capacity(contents.len()));
    let pin = Arc::new(pin);
    for content in contents {
        let length = content.len() as u64;
        let answer = stored.as_ref().map_err(Error::duplicate).map(|blob| {
            let layout = part(blob, at, length);
            Stored { layout, _pin: Some(pin.clone()) }
        });
        answers.push(answer);
        at += length;
    }
    drop(pin);
    for (answer, tell) in answers.into_iter().zip(tell) {
        // A writer that went away wants no answer.
        let _ = tell.send(answer);
    }
}

/// A file that is `length` bytes of a segment.
fn part(segment: &Blob, offset: u64, length: u64) -> FileLayout {
    let mut layout = FileLayout::empty();
    layout.write(Extent { offset: 0, length, source: Source::Blob { blob: segment.clone(), offset } });
    layout
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Wake, Waker};

    use super::*;
    use crate::tests::support::{Fixture, run};

    /// A file that came when workers had found nothing to do and were not gone yet waited for the next.
    #[test]
    fn a_file_that_comes_as_workers_go_is_put() {
        run(async {
            let volume = Fixture::new(Bucket::in_memory()).open().await;
            let segments = &volume.store().segments;
            segments.0.queue.lock().workers = PUTS_AT_ONCE;
            let worker = |_| Worker { segments: segments.clone(), is_counted: true };
            let mut going: Vec<Worker> = (0..PUTS_AT_ONCE).map(worker).collect();
            going.iter_mut().for_each(|worker| assert!(worker.next_batch().is_empty()));
            segments.put(Bytes::from_static(b"content")).await.expect("it is put");
            drop(going);
        });
    }

    /// The writer of a file, who goes on in the very moment in which it is answered.
    struct Writer {
        told: Mutex<Option<oneshot::Receiver<Result<Stored>>>>,
        /// Whether the segment was held when its file was done with.
        is_held: Mutex<Option<bool>>,
    }

    impl Wake for Writer {
        fn wake(self: Arc<Self>) {
            let stored = self.told.lock().take().expect("woken once").try_recv();
            let mut stored = stored.expect("answered").expect("stored");
            let pin = Arc::downgrade(&stored._pin.take().expect("a segment"));
            *self.is_held.lock() = Some(pin.upgrade().is_some());
        }
    }

    /// A segment all of whose files were committed was held until its worker had gone on, and compaction left it out.
    #[test]
    fn a_segment_is_held_by_those_who_are_to_commit_to_it_alone() {
        run(async {
            let volume = Fixture::new(Bucket::in_memory()).open().await;
            let segments = &volume.store().segments;
            let (pin, contents) = (volume.tree().fresh_segment(), [Bytes::from_static(b"content")]);
            let stored = segments.put_segment(&pin, &contents).await;
            let (tell, told) = oneshot::channel();
            let writer = Arc::new(Writer { told: Mutex::new(Some(told)), is_held: Mutex::default() });
            let waker = Waker::from(writer.clone());
            let polled = writer
                .told
                .lock()
                .as_mut()
                .map(|told| std::pin::Pin::new(told).poll(&mut Context::from_waker(&waker)).map(drop));
            assert_eq!(polled, Some(Poll::Pending));
            answer(pin, &stored, &contents, vec![tell]);
            assert_eq!(*writer.is_held.lock(), Some(false));
        });
    }
}
