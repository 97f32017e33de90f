//! The staged blobs of one volume: a folder of the state directory, and what is known of each file in it.
//!
//! ```text
//! lock                 held by the process that uses the folder
//! bucket               whose bytes they are ([`super::origin`])
//! SESSION-NAME         the blob `.forebay/blobs/SESSION/NAME`
//! ```
//! With the tree, which is durable by itself, the folder is the journal: a blob that a layout refers to is wanted, any
//! other is of no use. Files are written before the commit that refers to them, and made durable before it is
//! ([`super::Durable`]). They go once they are in the bucket, or once a durable tree does not refer to them any more.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, InodeId, ObjectKey, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::files::{is_want, keep_private};
use forebay_io::lock_file::{LockFile, Locked};
use forebay_io::object::BucketUrl;
use forebay_io::task::blocking;
use futures::stream::{self, StreamExt};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::Staged;
use super::entries::{Entries, Entry, OnDisk, State};
use super::file::{self, Tail, key_of, name_of};
use super::origin;

pub(super) const LOCK: &str = "lock";
/// Files that are synced at once: the disk's own journal makes one write of several.
const SYNCS_AT_ONCE: usize = 8;
/// How long a disk that did not make files durable is left alone: there may be room again then.
const REST: Duration = Duration::from_secs(30);
/// Failed reads of a file that the disk did not make durable, after which its bytes are lost. With the pauses in between that
/// is half a minute: the tree waits for as long.
const READS: u32 = 6;

/// The staged blobs of one volume.
#[derive(Debug)]
pub(crate) struct Staging {
    folder: PathBuf,
    /// Named in layouts, so that others know where the bytes are.
    host: String,
    /// Most room that files take.
    ceiling: u64,
    clock: Clock,
    blobs: Mutex<Blobs>,
    /// Counts what became of blobs, for those who wait for it.
    changes: watch::Sender<u64>,
    /// `None` after closing.
    lock: Mutex<Option<LockFile>>,
}

#[derive(Debug, Default)]
struct Blobs {
    entries: Entries,
    /// Room that their files take, and those being written.
    bytes: u64,
    /// The folder has names that are not durable.
    is_folder_dirty: bool,
    /// Writes go through to the store, and that was told.
    is_full: bool,
    /// Until when they do because the disk did not make files durable.
    rests_until: Option<Moment>,
    last_error: Option<String>,
}

impl Staging {
    /// Opens the folder, which is made if need be, and finds what an earlier process left in it for the bucket.
    ///
    /// # Errors
    /// `Conflict` while another process uses it; `Invalid` while it holds bytes for another bucket; those of the disk.
    pub(crate) async fn open(
        folder: PathBuf,
        bucket: &BucketUrl,
        ceiling: u64,
        clock: Clock,
    ) -> Result<Arc<Self>> {
        let host = forebay_io::host::name().await;
        let now = clock.wall().seconds;
        let (path, bucket) = (folder.clone(), bucket.clone());
        let (lock, blobs, is_marked) = blocking(move || {
            fs::create_dir_all(&path)?;
            keep_private(&path);
            // What is durable below a folder is of no use if the folder is not.
            path.ancestors().skip(1).take(2).try_for_each(sync)?;
            let lock = match LockFile::lock(&path.join(LOCK), &std::process::id().to_string())? {
                Locked::Mine(lock) => lock,
                Locked::By(process) => {
                    let message = format!("{} is in use by process {process}", path.display());
                    return Err(Error::new(ErrorKind::Conflict, message));
                }
            };
            let blobs = find(&path, now)?;
            let is_marked = origin::mark(&path, &bucket, blobs.entries.is_empty())?;
            Ok((lock, blobs, is_marked))
        })
        .await?
        .map_err(|error: Error| error.context(format!("the folder of staged bytes {}", folder.display())))?;
        // Nobody could tell later whose bytes they are.
        let ceiling = if is_marked { ceiling } else { 0 };
        let (changes, blobs) = (watch::Sender::new(0), Mutex::new(blobs));
        let lock = Mutex::new(Some(lock));
        Ok(Arc::new(Self { folder, host, ceiling, clock, blobs, changes, lock }))
    }

    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Lets the next process have the folder.
    pub(crate) fn close(&self) {
        self.lock.lock().take();
    }

    /// Stages `data`, written to `ino`, under `key`. `None` where there is no room: it then goes to the store.
    pub(crate) async fn put(&self, ino: InodeId, key: ObjectKey, data: Bytes) -> Option<Blob> {
        let (path, bytes) = (self.path(&key)?, file::room(data.len() as u64));
        if !self.take_room(bytes) {
            return None;
        }
        let size = data.len() as u64;
        let written = blocking(move || {
            file::write(&path, ino, &data).inspect_err(|_| {
                // The first error is the one to tell; what stays is dropped at the next start.
                let _ = fs::remove_file(&path);
            })
        });
        let written = written.await.and_then(|written| written.map_err(Error::from));
        let mut blobs = self.blobs.lock();
        match written {
            Ok(tail) => {
                blobs.add(key.clone(), tail, self.clock.wall().seconds, State::Fresh);
                Some(Blob::staged(key, size, &self.host))
            }
            Err(error) => {
                blobs.bytes -= bytes;
                blobs.tell_full(&format!("the local disk does not take them: {error}"));
                None
            }
        }
    }

    /// Whether `bytes` more can be staged.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let blobs = self.blobs.lock();
        !blobs.rests(self.clock.now()) && blobs.bytes.saturating_add(file::room(bytes)) <= self.ceiling
    }

    fn take_room(&self, bytes: u64) -> bool {
        let mut blobs = self.blobs.lock();
        if blobs.rests(self.clock.now()) {
            return false;
        }
        let fits = blobs.bytes.saturating_add(bytes) <= self.ceiling;
        match fits {
            true => blobs.bytes += bytes,
            false if self.ceiling > 0 => blobs.tell_full("the ceiling of --writeback-size is reached"),
            false => {}
        }
        fits
    }

    /// Whether the bytes of the blob at `key` are here.
    pub(crate) fn holds(&self, key: &ObjectKey) -> bool {
        self.blobs.lock().entries.get(key).is_some()
    }

    /// The file of a blob; `None` for keys that are not owned.
    fn path(&self, key: &ObjectKey) -> Option<PathBuf> {
        Some(self.folder.join(name_of(key)?))
    }

    /// Bytes of a blob, checked; `None` when they are not here, or not any more. May wait for the disk.
    pub(crate) fn read_now(&self, key: &ObjectKey, range: Range<u64>) -> Option<Result<Bytes>> {
        self.try_read(key, range).map(|read| read.map_err(file::told))
    }

    fn try_read(&self, key: &ObjectKey, range: Range<u64>) -> Option<io::Result<Bytes>> {
        let path = self.path(key)?;
        let tail = self.blobs.lock().entries.get(key)?.tail.clone();
        if range.end > tail.size {
            let message = format!("the staged file of {key} was cut short");
            return Some(Err(io::Error::new(io::ErrorKind::InvalidData, message)));
        }
        match file::read(&path, &tail, range) {
            Err(_) if !self.holds(key) => None,
            // Where they were given up, others are not to wait for them either.
            Err(error) if self.is_lost(key) => {
                Some(Err(io::Error::new(io::ErrorKind::InvalidData, error.to_string())))
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                self.blobs.lock().entries.change(key, |entry| entry.state = State::Damaged);
                tracing::error!(%key, %error, "staged bytes are lost");
                Some(Err(error))
            }
            read => Some(read),
        }
    }

    /// The same for callers that may not wait for a disk.
    pub(crate) async fn read(self: &Arc<Self>, key: &ObjectKey, range: Range<u64>) -> Result<Option<Bytes>> {
        let (own, key) = (self.clone(), key.clone());
        blocking(move || own.read_now(&key, range)).await?.transpose()
    }

    fn is_lost(&self, key: &ObjectKey) -> bool {
        self.blobs.lock().entries.get(key).is_some_and(|entry| entry.on_disk == OnDisk::Lost)
    }

    /// Whether bytes of `ino` that it `refers` to are lost and nobody who writes it was told. From then on somebody was, if this
    /// `tells`.
    pub(crate) fn has_lost(&self, ino: InodeId, refers: impl Fn(&ObjectKey) -> bool, tells: bool) -> bool {
        let entries = &mut self.blobs.lock().entries;
        let untold = entries.of(ino, State::Damaged).filter(|entry| !entry.is_told && refers(&entry.key));
        let lost = keys(untold);
        for key in lost.iter().filter(|_| tells) {
            entries.change(key, |entry| entry.is_told = true);
        }
        !lost.is_empty()
    }

    /// Says that no commit of `ino` is on its way: what was staged for it is referred to by now, or never will be. Tells
    /// whether there is something.
    pub(crate) fn settle(&self, ino: InodeId) -> bool {
        let entries = &mut self.blobs.lock().entries;
        let all = entries.of(ino, State::Fresh).chain(entries.of(ino, State::Damaged));
        let mut is_any = false;
        for key in keys(all.filter(|entry| !entry.is_settled)) {
            entries.change(&key, |entry| {
                entry.is_settled = true;
                if entry.state == State::Fresh {
                    entry.state = State::Ready;
                    is_any = true;
                }
            });
        }
        is_any
    }

    /// Seconds since the first of its bytes were staged.
    pub(crate) fn age(&self, ino: InodeId) -> u64 {
        self.blobs.lock().entries.first_of(ino).map_or(0, |entry| self.age_of(entry))
    }

    fn age_of(&self, entry: &Entry) -> u64 {
        u64::try_from(self.clock.wall().seconds - entry.since).unwrap_or(0)
    }

    /// The blobs of `ino` that may be uploaded.
    pub(crate) fn ready(&self, ino: InodeId) -> Vec<(ObjectKey, u64)> {
        let blobs = self.blobs.lock();
        blobs.entries.of(ino, State::Ready).map(|entry| (entry.key.clone(), entry.tail.size)).collect()
    }

    /// Whether there are any.
    pub(crate) fn has_ready(&self, ino: InodeId) -> bool {
        self.blobs.lock().entries.of(ino, State::Ready).next().is_some()
    }

    /// The files whose bytes are here.
    pub(crate) fn inodes(&self) -> Vec<InodeId> {
        self.blobs.lock().entries.inodes()
    }

    /// Every blob that is here, and the number that the next one gets.
    pub(crate) fn keys(&self) -> (HashSet<ObjectKey>, u64) {
        let blobs = self.blobs.lock();
        (blobs.entries.keys().cloned().collect(), blobs.entries.next())
    }

    /// Where their files lie.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Notes that nothing refers to a blob any more.
    pub(crate) fn doom(&self, key: &ObjectKey) {
        self.blobs.lock().entries.change(key, |entry| {
            if entry.state == State::Damaged {
                // The disk is not asked to keep it.
                entry.on_disk = OnDisk::Lost;
            }
            (entry.state, entry.is_settled) = (State::Done, true);
        });
        self.tell();
    }

    /// The blobs that nothing refers to.
    pub(crate) fn doomed(&self) -> Vec<ObjectKey> {
        keys(self.blobs.lock().entries.in_state(State::Done))
    }

    /// The blobs whose files are damaged, but for those that a commit may be about to refer to; with their sizes, where
    /// those are known.
    pub(crate) fn damaged(&self) -> Vec<(ObjectKey, Option<u64>)> {
        let blobs = self.blobs.lock();
        let found = blobs.entries.in_state(State::Damaged).filter(|entry| entry.is_settled);
        let size = |tail: &Tail| Some(tail.size).filter(|_| !tail.is_missing());
        found.map(|entry| (entry.key.clone(), size(&entry.tail))).collect()
    }

    /// Forgets blobs and deletes their files: the bucket has them, or a durable tree does not refer to them.
    pub(crate) async fn forget(&self, keys: Vec<ObjectKey>) -> Result<()> {
        for key in &keys {
            self.blobs.lock().remove(key);
        }
        self.blobs.lock().is_full = false;
        self.tell();
        let paths: Vec<PathBuf> = keys.iter().filter_map(|key| self.path(key)).collect();
        blocking(move || {
            for path in paths {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        tracing::warn!(path = %path.display(), %error, "a staged file stays until the next start");
                    }
                    _ => {}
                }
            }
        })
        .await
    }

    /// Notes why uploads fail; `None` once one has succeeded.
    pub(crate) fn note_error(&self, error: Option<String>) {
        self.blobs.lock().last_error = error;
        self.tell();
    }

    /// The number that the next blob gets: all that there are now have lower ones.
    pub(crate) fn next(&self) -> u64 {
        self.blobs.lock().entries.next()
    }

    /// The same, to ask for [`Self::pending`] below it.
    pub(crate) fn mark(&self) -> u64 {
        self.blobs.lock().entries.mark()
    }

    /// What is staged under numbers below `end`, which is a [`Self::mark`] or above all numbers, and can be uploaded.
    pub(crate) fn pending(&self, end: u64) -> Staged {
        let blobs = self.blobs.lock();
        let waiting = blobs.entries.waiting(end);
        let oldest = blobs.entries.oldest_waiting().filter(|_| waiting.blobs > 0);
        Staged {
            files: waiting.files,
            bytes: waiting.bytes,
            oldest_seconds: oldest.map(|entry| self.age_of(entry)),
            damaged: blobs.entries.damaged(),
            last_error: blobs.last_error.clone(),
        }
    }

    /// How often what is known of a blob was looked at.
    #[cfg(test)]
    pub(crate) fn looks(&self) -> u64 {
        self.blobs.lock().entries.looks()
    }

    /// Follows what becomes of blobs.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn tell(&self) {
        self.changes.send_modify(|count| *count += 1);
    }
}

impl Staging {
    /// Makes every staged file durable, and then its name. Returns the blobs for which the disk does not do that: after a
    /// failure it may have dropped their bytes and say nothing the next time, so it is not asked again.
    pub(super) async fn make_durable(&self) -> Result<Vec<(ObjectKey, u64)>> {
        let (written, is_folder_dirty) = {
            let mut blobs = self.blobs.lock();
            (keys(blobs.entries.written()), std::mem::take(&mut blobs.is_folder_dirty))
        };
        if !written.is_empty() || is_folder_dirty {
            let files = written.into_iter().filter_map(|key| Some((self.path(&key)?, key)));
            let each =
                files.map(|(path, key)| async move { (key, blocking(move || sync(&path)).await.flatten()) });
            let synced: Vec<_> = stream::iter(each).buffer_unordered(SYNCS_AT_ONCE).collect().await;
            let folder = self.folder.clone();
            let named = blocking(move || sync(&folder)).await.flatten();
            self.note_synced(synced, named);
        }
        let blobs = self.blobs.lock();
        Ok(blobs.entries.refused().map(|entry| (entry.key.clone(), entry.tail.size)).collect())
    }

    /// All bytes of a blob for which the disk does not do that; `None` when they are not here any more, or lost.
    ///
    /// # Errors
    /// Those of the disk, until it has failed often enough.
    pub(super) async fn rescue(self: &Arc<Self>, key: &ObjectKey, size: u64) -> Result<Option<Bytes>> {
        let (own, key) = (self.clone(), key.clone());
        let rescued = blocking(move || match own.try_read(&key, 0..size) {
            None => Ok(None),
            Some(Ok(data)) => Ok(Some(data)),
            Some(Err(error)) if own.gives_up(&key, &error) => Ok(None),
            Some(Err(error)) => Err(file::told(error).context("what the local disk does not keep")),
        });
        rescued.await?
    }

    /// Counts a failed read; tells whether it was the last.
    fn gives_up(&self, key: &ObjectKey, error: &io::Error) -> bool {
        if error.kind() == io::ErrorKind::InvalidData {
            return true;
        }
        if is_want(error) {
            return false;
        }
        let given_up = self.blobs.lock().entries.change(key, |entry| {
            entry.failed_reads += 1;
            if entry.failed_reads < READS {
                return false;
            }
            entry.on_disk = OnDisk::Lost;
            // What nothing refers to is no loss.
            if entry.state != State::Done {
                entry.state = State::Damaged;
                tracing::error!(%key, %error, "staged bytes are lost: the local disk neither keeps them nor gives them back");
            }
            true
        });
        given_up.unwrap_or(true)
    }

    fn note_synced(&self, synced: Vec<(ObjectKey, Result<()>)>, named: Result<()>) {
        let until = self.clock.now() + REST;
        for (key, synced) in synced {
            // Readers get it in between: there may be many.
            let mut blobs = self.blobs.lock();
            let durable = synced.and_then(|()| named.as_ref().copied().map_err(Error::duplicate));
            let on_disk = if durable.is_ok() { OnDisk::Durable } else { OnDisk::Refused };
            blobs.entries.change(&key, |entry| entry.on_disk = on_disk);
            if let Err(error) = durable {
                blobs.rests_until = Some(until);
                blobs.tell_full(&format!("the local disk does not keep them: {error}"));
            }
        }
        self.blobs.lock().is_folder_dirty |= named.is_err();
    }
}

impl Blobs {
    /// Whether the disk is left alone.
    fn rests(&self, now: Moment) -> bool {
        self.rests_until.is_some_and(|until| until > now)
    }

    fn add(&mut self, key: ObjectKey, tail: Tail, since: i64, state: State) {
        self.is_folder_dirty = true;
        self.entries.add(key, tail, since, state);
    }

    fn remove(&mut self, key: &ObjectKey) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= file::room(entry.tail.size);
        }
    }

    /// Once for each time that it comes to this.
    fn tell_full(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_full, true) {
            tracing::warn!(why, "written bytes go straight to the store");
        }
    }
}

fn keys<'a>(entries: impl Iterator<Item = &'a Entry>) -> Vec<ObjectKey> {
    entries.map(|entry| entry.key.clone()).collect()
}

/// Makes a file or folder durable; one that is gone needs nothing.
pub(super) fn sync(path: &Path) -> Result<()> {
    #[cfg(test)]
    crate::tests::refuse_sync(path)?;
    match File::open(path).and_then(|file| file.sync_all()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// What an earlier process left. Its last writes may be cut short: nothing refers to those, which is still to be seen.
fn find(folder: &Path, now: i64) -> Result<Blobs> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let Some(key) = key_of(&name).filter(|_| name != LOCK) else { continue };
        let (tail, state) = match file::read_tail(&path) {
            Ok(tail) => (tail, State::Ready),
            // That says nothing about the file.
            Err(error) if is_want(&error) => return Err(Error::from(error).context(path.display())),
            // It is kept, if it is wanted: the next start may be able to read it.
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a staged file cannot be read");
                (Tail::missing(), State::Damaged)
            }
        };
        let written = fs::metadata(&path).and_then(|found| found.modified()).ok();
        let since = written.and_then(|written| written.duration_since(std::time::UNIX_EPOCH).ok());
        found.push((since.map_or(now, |since| since.as_secs() as i64), key, tail, state));
    }
    // They are numbered as they were staged.
    found.sort_by_key(|(since, ..)| *since);
    let mut blobs = Blobs::default();
    for (since, key, tail, state) in found {
        blobs.bytes += file::room(tail.size);
        blobs.add(key, tail, since, state);
    }
    Ok(blobs)
}

#[cfg(test)]
mod tests {
    use forebay_io::object::Bucket;

    use super::*;
    use crate::tests::support::run;

    const DATABASE: InodeId = InodeId(7);
    const SMALL: u64 = 1_000;

    /// A blob that is staged, but for its file.
    fn add(staging: &Staging, name: u64, ino: InodeId, state: State) -> ObjectKey {
        let key = ObjectKey::new(format!("{}{:016x}/{name}", Blob::OWNED_PREFIX, 1));
        let mut tail = Tail::missing();
        (tail.ino, tail.size) = (ino, 1);
        staging.blobs.lock().entries.add(key.clone(), tail, 0, state);
        key
    }

    /// Thousands of small files wait for a store that is away, and a database fsyncs its pages: what is looked at is what
    /// has changed since the last time, and not all that is staged.
    #[test]
    fn no_commit_looks_at_all_that_is_staged() {
        run(async {
            let (folder, bucket) = (tempfile::tempdir().expect("scratch"), Bucket::in_memory());
            let folder = folder.path().join("staging");
            let staging = Staging::open(folder, bucket.url(), 1 << 30, Clock::system()).await.expect("open");
            for name in 0..SMALL {
                add(&staging, name, InodeId(100 + name), State::Ready);
                add(&staging, SMALL + name, DATABASE, State::Ready);
            }
            assert!(staging.make_durable().await.expect("durable").is_empty());
            let page = add(&staging, 2 * SMALL, DATABASE, State::Fresh);

            let before = staging.looks();
            assert!(staging.make_durable().await.expect("durable").is_empty());
            assert!(staging.make_durable().await.expect("durable").is_empty());
            assert!(staging.settle(DATABASE) && !staging.settle(DATABASE));
            assert!(!staging.has_lost(DATABASE, |_| true, true));
            assert!(staging.has_ready(DATABASE) && staging.holds(&page));
            assert!(staging.age(DATABASE) > 0);
            let end = staging.mark();
            assert_eq!((staging.pending(end).files, staging.pending(end).bytes), (SMALL + 1, 2 * SMALL + 1));
            staging.doom(&page);
            assert_eq!((staging.doomed(), staging.damaged()), (vec![page], Vec::new()));
            assert!(staging.looks() - before < 20, "{}", staging.looks() - before);
        });
    }
}
