//! A directory as a store.
//!
//! Each object is a file at its key. Writes go to a staging file first, are synced, and appear under their key in one
//! step, after which the directories on the way are synced: an answered write or deletion survives a power cut, and
//! readers see the old bytes or the new ones.
//!
//! - *Create* is a hard link: of any number of racing writers, on any number of hosts, exactly one succeeds.
//! - *Replace if version* and every other change of a key take a lock file (`flock`) around check and rename: atomic
//!   among Forebay's processes on hosts whose file system shares locks. A foreign program that writes the same file
//!   at the same instant is not held off.
//! - A version is inode, modification time in nanoseconds, and size. A program that rewrites a file in place within
//!   one tick of the file system's clock and to the same size is not noticed.
//! - The token of a write is an extended attribute of its file, where the file system has those.
//!
//! - A request that was given up, as one that took too long, has no effect any more.
//!
//! Staging files, unfinished uploads and the lock lie in `.forebay/staging/`, which listings leave out. What dead
//! processes left in the staging folder goes when it is swept.

mod list;
mod token;
mod upload;
mod write;
mod sweep;
mod unsynced;

use std::collections::{HashMap, VecDeque};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path as FilePath, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::DateTime;
use futures::stream::StreamExt;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, GetOptions, GetResult, GetResultPayload, ObjectMeta, PutResult, Result,
};
use parking_lot::Mutex;

use crate::disk::write_out;
use crate::object::error::{Fault, STORE};
use crate::object::layer::TOKEN_ATTRIBUTE;
use crate::object::progress::Progress;
use crate::object::request::{Reply, Request, Service};
use crate::rng::Rng;
use crate::task::blocking;

pub(in crate::object) use sweep::sweep;
use unsynced::Unsynced;
use upload::Begun;

/// Where what is not an object lies, relative to the directory.
const STAGING: &str = ".forebay/staging";
/// Bytes read at once: large enough that a thread hop costs little.
const CHUNK_BYTES: u64 = 4 << 20;
/// Bytes copied between two looks at whether anybody waits for the copy: some 100 ms of a disk.
const COPIED_BYTES: u64 = 64 << 20;
/// Bytes that are synced between two looks at that: what the slowest disks write in a few seconds.
const SYNCED_BYTES: u64 = 8 << 20;
/// Tokens of recent writes remembered in this process, to settle replies that were lost on the way.
const RECENT_WRITES: usize = 1024;

/// A directory; clones share its state.
#[derive(Debug, Clone)]
pub(super) struct Directory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    rng: Rng,
    /// Held around check and rename, together with the lock file.
    lock: Mutex<()>,
    /// Versions and the tokens they were written with, newest last, for a file system that keeps none with its files.
    recent: Mutex<VecDeque<(String, String)>>,
    /// Directories that puts of this process have made and not synced yet.
    unsynced: Unsynced,
    /// The uploads of this process by id.
    uploads: Mutex<HashMap<String, Begun>>,
}

/// A sync counts as getting on this often, and so many times: a disk with much to write may take that long for the smallest
/// file, and one that hangs is told after it.
const GRANTED: Duration = Duration::from_secs(1);
const MOST_GRANTED: usize = 20;

/// Whether a request is still waited for. Work on a thread goes on when its request was given up, which may be sent again
/// then, or be followed by others: what comes late must not undo those.
#[derive(Debug, Clone, Default)]
struct Wanted {
    given_up: Arc<AtomicBool>,
    /// Who waits, and waits longer for what gets on.
    progress: Option<Progress>,
    /// Whether it waits for a sync, of which nothing tells how it gets on.
    syncs: Arc<AtomicBool>,
}

impl Wanted {
    fn check(&self) -> io::Result<()> {
        match self.given_up.load(Ordering::SeqCst) {
            false => Ok(()),
            true => Err(io::Error::new(io::ErrorKind::TimedOut, "the request was given up")),
        }
    }

    /// Tells whoever waits that a piece of the work is done, and looks whether the next one is wanted.
    fn step(&self) -> io::Result<()> {
        self.progress.iter().for_each(Progress::tell);
        self.check()
    }
}

/// Gives a request up when it is dropped; one that is done does not notice.
struct Waits(Wanted);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.given_up.store(true, Ordering::SeqCst);
    }
}

/// Syncs a file with the token of its write. One that is large is written to its disk piece by piece first, each of which
/// is told: a disk that has much to write is so told from one that hangs.
fn sync(file: &File, token: &str, wanted: &Wanted) -> io::Result<()> {
    let length = file.metadata()?.len();
    let pieces = if length > SYNCED_BYTES { length } else { 0 };
    for at in (0..pieces).step_by(SYNCED_BYTES as usize) {
        write_out(file, at..length.min(at + SYNCED_BYTES))?;
        wanted.step()?;
    }
    wanted.syncs.store(true, Ordering::SeqCst);
    let synced = token::sync(file, token);
    wanted.syncs.store(false, Ordering::SeqCst);
    synced
}

/// Copies up to `length` bytes, in pieces between which it may be given up. Returns how many there were.
fn copy_bytes(source: &mut File, target: &mut File, length: u64, wanted: &Wanted) -> io::Result<u64> {
    let mut copied = 0;
    wanted.check()?;
    while copied < length {
        let piece = (length - copied).min(COPIED_BYTES);
        match io::copy(&mut Read::take(&mut *source, piece), target)? {
            0 => break,
            more => copied += more,
        }
        wanted.step()?;
    }
    Ok(copied)
}

impl Directory {
    /// A store over the existing directory `root`.
    pub(super) fn new(root: PathBuf) -> Self {
        let (lock, recent, uploads) = (Mutex::new(()), Mutex::default(), Mutex::default());
        Self(Arc::new(Inner {
            root,
            rng: Rng::system(),
            lock,
            recent,
            unsynced: Unsynced::default(),
            uploads,
        }))
    }

    async fn run<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Inner) -> Result<T> + Send + 'static,
    {
        let inner = self.0.clone();
        let work = move || work(&inner).map_err(|error| inner.or_gone(error));
        blocking(work).await.unwrap_or_else(|error| {
            Err(object_store::Error::Generic { store: STORE, source: Box::new(error) })
        })
    }

    /// The same for work that is not to take effect after its request was given up.
    async fn run_wanted<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Inner, Wanted) -> Result<T> + Send + 'static,
    {
        let wanted = Wanted { progress: Progress::of_call(), ..Wanted::default() };
        let waits = Waits(wanted.clone());
        let mut work = pin!(self.run(move |inner| work(inner, wanted)));
        let mut granted = 0;
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = tokio::time::sleep(GRANTED), if granted < MOST_GRANTED => {}
            }
            if waits.0.syncs.load(Ordering::SeqCst) {
                granted += 1;
                waits.0.progress.iter().for_each(Progress::tell);
            }
        }
    }

    async fn get(&self, key: Path, options: GetOptions) -> Result<GetResult> {
        let (file, mut result, first) = self.run(move |inner| inner.open(key, &options)).await?;
        let Some(first) = first else { return Ok(result) };
        let (at, end) = (result.range.start + first.len() as u64, result.range.end);
        let rest =
            futures::stream::unfold((Arc::new(file), at, result.meta.clone()), move |state| async move {
                let (file, at, meta) = state;
                if at >= end {
                    return None;
                }
                let (reader, wanted) = (file.clone(), meta.clone());
                let read = blocking(move || read_chunk(&reader, &wanted, at, end)).await;
                let read =
                    read.unwrap_or_else(|error| Err(io_error(&meta.location, io::Error::other(error))));
                let next = read.as_ref().map_or(end, |bytes| at + bytes.len() as u64);
                Some((read, (file, next, meta)))
            });
        let body = futures::stream::once(async { Ok(first) }).chain(rest);
        result.payload = GetResultPayload::Stream(body.boxed());
        Ok(result)
    }
}

#[async_trait]
impl Service for Directory {
    async fn call(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Get { key, options } => self.get(key, options).await.map(Reply::Object),
            Request::Put { key, payload, options, token } => {
                let work = move |inner: &Inner, wanted: Wanted| {
                    inner.put(&key, &payload, &options.mode, token, &wanted)
                };
                self.run_wanted(work).await.map(Reply::Put)
            }
            Request::Delete { keys, .. } => {
                self.run_wanted(move |inner, wanted| inner.delete_all(&keys, &wanted)).await?;
                Ok(Reply::Done)
            }
            Request::DeleteMarker { .. } => Ok(Reply::Done),
            Request::List(list) => {
                let progress = Progress::of_call();
                self.run(move |inner| inner.list(&list, progress)).await.map(Reply::Page)
            }
            Request::Copy { from, to, options, .. } => {
                self.run_wanted(move |inner, wanted| inner.copy(&from, &to, options.mode, &wanted)).await?;
                Ok(Reply::Done)
            }
            Request::Create { key, options, token, .. } => {
                let past_cache = options.extensions.get().copied();
                let work =
                    move |inner: &Inner, wanted: Wanted| inner.create_upload(key, token, past_cache, &wanted);
                self.run_wanted(work).await.map(Reply::Upload)
            }
            Request::Part { upload, offset, payload, .. } => {
                let work =
                    move |inner: &Inner, wanted: Wanted| inner.write_part(&upload, offset, &payload, &wanted);
                self.run_wanted(work).await.map(Reply::Part)
            }
            Request::CopyPart { upload, offset, from, version, range, .. } => {
                let work = move |inner: &Inner, wanted: Wanted| {
                    inner.copy_part(&upload, offset, (&from, version.as_ref(), range), &wanted)
                };
                self.run_wanted(work).await.map(Reply::Part)
            }
            Request::Complete { upload, parts, condition } => {
                let work =
                    move |inner: &Inner, wanted: Wanted| inner.complete(&upload, &parts, &condition, &wanted);
                self.run_wanted(work).await.map(Reply::Put)
            }
            Request::Abort { upload } => {
                self.run(move |inner| inner.abort(&upload)).await?;
                Ok(Reply::Done)
            }
            Request::ListUploads { prefix, .. } => {
                self.run(move |inner| inner.list_uploads(&prefix)).await.map(Reply::Uploads)
            }
            Request::ListParts { upload } => Ok(Reply::HasParts(self.0.has_parts(&upload))),
        }
    }
}

impl Inner {
    /// What is missing of a root that is there is missing; otherwise nobody knows.
    fn or_gone(&self, error: object_store::Error) -> object_store::Error {
        match error {
            object_store::Error::NotFound { .. } if !self.root.exists() => Fault::RootGone.into(),
            error => error,
        }
    }

    fn file_of(&self, key: &Path) -> PathBuf {
        self.root.join(key.as_ref())
    }

    /// Opens an object, checks its preconditions and reads the first chunk, all in one visit to a thread.
    fn open(&self, key: Path, options: &GetOptions) -> Result<(File, GetResult, Option<Bytes>)> {
        let opened = open_object(&self.file_of(&key));
        let (file, metadata) = opened.map_err(|error| io_error(&key, error))?;
        let meta = object_meta(key, &metadata);
        options.check_preconditions(&meta)?;
        let bad_range = |error| object_store::Error::Generic { store: STORE, source: Box::new(error) };
        let range = match &options.range {
            Some(range) => range.as_range(meta.size).map_err(bad_range)?,
            None => 0..meta.size,
        };
        let first = match options.head {
            true => None,
            false => Some(read_chunk(&file, &meta, range.start, range.end)?),
        };
        let mut attributes = Attributes::new();
        let token = if options.head { self.token_of(&file, &meta, &metadata) } else { None };
        if let Some(token) = token {
            attributes.insert(Attribute::Metadata(TOKEN_ATTRIBUTE.into()), token.into());
        }
        let payload = GetResultPayload::Stream(futures::stream::empty().boxed());
        let result = GetResult { payload, meta, range, attributes, extensions: Default::default() };
        Ok((file, result, first))
    }

    /// The token of the write that made this version of a file, empty where it is known that none of Forebay's did.
    fn token_of(&self, file: &File, meta: &ObjectMeta, metadata: &Metadata) -> Option<String> {
        let is_this = |(version, _): &&(String, String)| Some(version) == meta.e_tag.as_ref();
        // This process knows best: a file system may refuse an attribute, and then say that there is none.
        let recent = self.recent.lock().iter().rev().find(is_this).map(|(_, token)| token.clone());
        recent.or_else(|| token::held(file, metadata))
    }

    fn remember(&self, version: &str, token: String) {
        if token.is_empty() {
            return;
        }
        let mut recent = self.recent.lock();
        if recent.len() == RECENT_WRITES {
            recent.pop_front();
        }
        recent.push_back((version.to_owned(), token));
    }
}

/// Opens an object: a file. Whatever else lies there is none, and is not waited for: a pipe would be opened when somebody
/// opens its other end, which may be never, and each attempt would keep a thread until then.
pub(in crate::object) fn open_object(path: &FilePath) -> io::Result<(File, Metadata)> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = match opened {
        // A socket.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Err(io::ErrorKind::NotFound.into()),
        // A file on which another program, as a file server, has a lease: that is waited for.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => File::open(path)?,
        opened => opened?,
    };
    let metadata = file.metadata()?;
    match metadata.is_file() {
        true => Ok((file, metadata)),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Reads up to a chunk of `at..end`, and makes sure that the file is still the version that was opened.
fn read_chunk(mut file: &File, meta: &ObjectMeta, at: u64, end: u64) -> Result<Bytes> {
    let length = (end - at).min(CHUNK_BYTES);
    // Not zeroed first, as a buffer for `read_exact_at` would be.
    let mut buffer = Vec::with_capacity(length as usize);
    file.seek(SeekFrom::Start(at))
        .and_then(|_| file.take(length).read_to_end(&mut buffer))
        .map_err(|error| io_error(&meta.location, error))?;
    if buffer.len() as u64 != length {
        return Err(io_error(&meta.location, io::ErrorKind::UnexpectedEof.into()));
    }
    let metadata = file.metadata().map_err(|error| io_error(&meta.location, error))?;
    if Some(version_of(&metadata)) != meta.e_tag {
        let path = meta.location.to_string();
        return Err(object_store::Error::Precondition { path, source: "written to while being read".into() });
    }
    Ok(buffer.into())
}

fn version_of(metadata: &Metadata) -> String {
    let nanos = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    format!("{:x}-{nanos:x}-{:x}", metadata.ino(), metadata.len())
}

fn object_meta(location: Path, metadata: &Metadata) -> ObjectMeta {
    let modified = DateTime::from_timestamp(metadata.mtime(), metadata.mtime_nsec() as u32);
    ObjectMeta {
        location,
        last_modified: modified.unwrap_or_default(),
        size: metadata.len(),
        e_tag: Some(version_of(metadata)),
        version: None,
    }
}

fn put_result(version: String) -> PutResult {
    PutResult { e_tag: Some(version), version: None, extensions: Default::default() }
}

/// An I/O error on the object `key`, in object_store's terms. A path through a file instead of a directory is an
/// object that does not exist, as in a bucket.
fn io_error(key: &Path, error: io::Error) -> object_store::Error {
    let path = key.to_string();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            object_store::Error::NotFound { path, source: error.into() }
        }
        io::ErrorKind::AlreadyExists => object_store::Error::AlreadyExists { path, source: error.into() },
        io::ErrorKind::PermissionDenied => {
            object_store::Error::PermissionDenied { path, source: error.into() }
        }
        _ => object_store::Error::Generic { store: STORE, source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::{ErrorKind, ObjectKey};
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;
    use crate::object::{Bucket, BucketUrl, Condition, StoreSettings, UploadOptions};

    /// A pipe in a folder held up whoever looked at its name until somebody opened its other end, and a thread with it.
    #[tokio::test]
    async fn what_is_no_file_is_no_object_and_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("scratch");
        let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
        mknodat(CWD, folder.path().join("pipe"), FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
        let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).expect("a socket");
        let check = async {
            for name in ["pipe", "socket"] {
                let (key, to) = (ObjectKey::new(name), ObjectKey::new("to"));
                assert_eq!(bucket.head(&key).await.expect("an answer"), None, "{name}");
                let kind = |error: forebay_core::Error| error.kind();
                let missing = Err(ErrorKind::NotFound);
                assert_eq!(bucket.get_whole(&key).await.map(drop).map_err(kind), missing, "{name}");
                assert_eq!(bucket.open_in_place(&key).map(drop).map_err(kind), missing, "{name}");
                let copied = bucket.copy(&key, &to, 1, &Condition::Always).await;
                assert_eq!(copied.map(drop).map_err(kind), missing, "{name}");
                let mut upload = bucket.upload_with(&to, UploadOptions::default()).expect("an upload");
                let copied = upload.copy_from(&key, &forebay_core::Version::new("1"), 0..1).await;
                let copied = match copied {
                    Ok(_) => upload.complete(Condition::Always).await.map(drop),
                    Err(error) => Err(error),
                };
                assert_eq!(copied.map_err(kind), missing, "{name}");
                let put = bucket.put(&key, "x".into(), Condition::IfAbsent).await;
                assert_eq!(put.map(drop).map_err(kind), Err(ErrorKind::Conflict), "{name}");
            }
        };
        tokio::time::timeout(Duration::from_secs(20), check).await.expect("nobody waits");
    }
}
