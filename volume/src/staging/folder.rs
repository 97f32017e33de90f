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

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, InodeId, ObjectKey, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::files::is_want;
use forebay_io::lock_file::{LockFile, Locked};
use forebay_io::object::BucketUrl;
use forebay_io::task::blocking;
use futures::stream::{self, StreamExt};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::Staged;
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
    /// By file name.
    entries: BTreeMap<String, Entry>,
    /// The names of the files with bytes of an inode.
    inodes: BTreeMap<InodeId, BTreeSet<String>>,
    /// Room that their files take, and those being written.
    bytes: u64,
    /// The number of the next blob.
    next: u64,
    /// The folder has names that are not durable.
    is_folder_dirty: bool,
    /// Writes go through to the store, and that was told.
    is_full: bool,
    /// Until when they do because the disk did not make files durable.
    rests_until: Option<Moment>,
    last_error: Option<String>,
}

/// One staged blob.
#[derive(Debug, Clone)]
struct Entry {
    tail: Arc<Tail>,
    number: u64,
    /// Seconds of the wall clock when it was written, to show.
    since: i64,
    on_disk: OnDisk,
    state: State,
    /// No commit that would refer to it is on its way.
    is_settled: bool,
    /// Failed reads since the disk did not make it durable.
    failed_reads: u32,
    /// Whoever writes the file knows that its bytes are lost.
    is_told: bool,
}

/// What the disk makes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnDisk {
    /// It has the bytes.
    Written,
    /// They survive a failure of power.
    Durable,
    /// It could not make them durable.
    Refused,
    /// Nor does it give them back.
    Lost,
}

/// How far a blob is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It is about to be referred to by a commit.
    Fresh,
    /// It is to be uploaded if a layout refers to it.
    Ready,
    /// Nothing refers to it; its file goes once that is durable.
    Done,
    /// Its file is damaged or cannot be read, which was logged.
    Damaged,
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
        let (name, bytes) = (name_of(&key)?, file::room(data.len() as u64));
        if !self.take_room(bytes) {
            return None;
        }
        let (path, size) = (self.folder.join(&name), data.len() as u64);
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
                blobs.add(name, tail, self.clock.wall().seconds, State::Fresh);
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
        self.tail(key).is_some()
    }

    fn tail(&self, key: &ObjectKey) -> Option<(String, Arc<Tail>)> {
        let name = name_of(key)?;
        let blobs = self.blobs.lock();
        let tail = blobs.entries.get(&name)?.tail.clone();
        Some((name, tail))
    }

    /// Bytes of a blob, checked; `None` when they are not here, or not any more. May wait for the disk.
    pub(crate) fn read_now(&self, key: &ObjectKey, range: Range<u64>) -> Option<Result<Bytes>> {
        self.try_read(key, range).map(|read| read.map_err(file::told))
    }

    fn try_read(&self, key: &ObjectKey, range: Range<u64>) -> Option<io::Result<Bytes>> {
        let (name, tail) = self.tail(key)?;
        if range.end > tail.size {
            let message = format!("the staged file of {key} was cut short");
            return Some(Err(io::Error::new(io::ErrorKind::InvalidData, message)));
        }
        match file::read(&self.folder.join(&name), &tail, range) {
            Err(_) if !self.holds(key) => None,
            // Where they were given up, others are not to wait for them either.
            Err(error) if self.is_lost(&name) => {
                Some(Err(io::Error::new(io::ErrorKind::InvalidData, error.to_string())))
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                if let Some(entry) = self.blobs.lock().entries.get_mut(&name) {
                    entry.state = State::Damaged;
                }
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

    fn is_lost(&self, name: &str) -> bool {
        self.blobs.lock().entries.get(name).is_some_and(|entry| entry.on_disk == OnDisk::Lost)
    }

    /// Whether bytes of `ino` that it `refers` to are lost and nobody who writes it was told. From then on somebody was, if this
    /// `tells`.
    pub(crate) fn has_lost(&self, ino: InodeId, refers: impl Fn(&ObjectKey) -> bool, tells: bool) -> bool {
        let mut blobs = self.blobs.lock();
        let Blobs { entries, inodes, .. } = &mut *blobs;
        let mut is_any = false;
        for name in inodes.get(&ino).into_iter().flatten() {
            if let Some(entry) = entries.get_mut(name)
                && entry.state == State::Damaged
                && !entry.is_told
                && key_of(name).is_some_and(|key| refers(&key))
            {
                entry.is_told = tells;
                is_any = true;
            }
        }
        is_any
    }

    /// Says that no commit of `ino` is on its way: what was staged for it is referred to by now, or never will be. Tells
    /// whether there is something.
    pub(crate) fn settle(&self, ino: InodeId) -> bool {
        let mut blobs = self.blobs.lock();
        let Blobs { entries, inodes, .. } = &mut *blobs;
        let mut is_any = false;
        for name in inodes.get(&ino).into_iter().flatten() {
            let Some(entry) = entries.get_mut(name) else { continue };
            entry.is_settled = true;
            if entry.state == State::Fresh {
                entry.state = State::Ready;
                is_any = true;
            }
        }
        is_any
    }

    /// Seconds since the first of its bytes were staged.
    pub(crate) fn age(&self, ino: InodeId) -> u64 {
        let blobs = self.blobs.lock();
        let entries = blobs.inodes.get(&ino).into_iter().flatten().filter_map(|name| blobs.entries.get(name));
        let now = self.clock.wall().seconds;
        entries.map(|entry| u64::try_from(now - entry.since).unwrap_or(0)).max().unwrap_or(0)
    }

    /// The blobs of `ino` that may be uploaded.
    pub(crate) fn ready(&self, ino: InodeId) -> Vec<(ObjectKey, u64)> {
        let blobs = self.blobs.lock();
        let entries = blobs.inodes.get(&ino).into_iter().flatten();
        let entries = entries.filter_map(|name| Some((name, blobs.entries.get(name)?)));
        let ready = entries.filter(|(_, entry)| entry.state == State::Ready);
        ready.filter_map(|(name, entry)| Some((key_of(name)?, entry.tail.size))).collect()
    }

    /// The files whose bytes are here.
    pub(crate) fn inodes(&self) -> Vec<InodeId> {
        self.blobs.lock().inodes.keys().copied().collect()
    }

    /// Every blob that is here, and the number that the next one gets.
    pub(crate) fn keys(&self) -> (HashSet<ObjectKey>, u64) {
        let blobs = self.blobs.lock();
        (blobs.entries.keys().filter_map(|name| key_of(name)).collect(), blobs.next)
    }

    /// Where their files lie.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Notes that nothing refers to a blob any more.
    pub(crate) fn doom(&self, key: &ObjectKey) {
        if let Some(name) = name_of(key)
            && let Some(entry) = self.blobs.lock().entries.get_mut(&name)
        {
            if entry.state == State::Damaged {
                // The disk is not asked to keep it.
                entry.on_disk = OnDisk::Lost;
            }
            entry.state = State::Done;
        }
        self.tell();
    }

    /// The blobs that nothing refers to.
    pub(crate) fn doomed(&self) -> Vec<ObjectKey> {
        let blobs = self.blobs.lock();
        let found = blobs.entries.iter().filter(|(_, entry)| entry.state == State::Done);
        found.filter_map(|(name, _)| key_of(name)).collect()
    }

    /// The blobs whose files are damaged, but for those that a commit may be about to refer to; with their sizes, where
    /// those are known.
    pub(crate) fn damaged(&self) -> Vec<(ObjectKey, Option<u64>)> {
        let blobs = self.blobs.lock();
        let found =
            blobs.entries.iter().filter(|(_, entry)| entry.state == State::Damaged && entry.is_settled);
        let sized =
            found.map(|(name, entry)| (name, Some(entry.tail.size).filter(|_| !entry.tail.is_missing())));
        sized.filter_map(|(name, size)| Some((key_of(name)?, size))).collect()
    }

    /// Forgets blobs and deletes their files: the bucket has them, or a durable tree does not refer to them.
    pub(crate) async fn forget(&self, keys: Vec<ObjectKey>) -> Result<()> {
        let names: Vec<String> = keys.iter().filter_map(name_of).collect();
        {
            let mut blobs = self.blobs.lock();
            for name in &names {
                blobs.remove(name);
            }
            blobs.is_full = false;
        }
        self.tell();
        let folder = self.folder.clone();
        blocking(move || {
            for name in names {
                match fs::remove_file(folder.join(&name)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        tracing::warn!(name, %error, "a staged file stays until the next start");
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
        self.blobs.lock().next
    }

    /// What is staged under numbers below `end` and can be uploaded.
    pub(crate) fn pending(&self, end: u64) -> Staged {
        let blobs = self.blobs.lock();
        let wanted = |state| matches!(state, State::Fresh | State::Ready);
        let pending: Vec<&Entry> =
            blobs.entries.values().filter(|entry| entry.number < end && wanted(entry.state)).collect();
        let mut inodes: Vec<InodeId> = pending.iter().map(|entry| entry.tail.ino).collect();
        inodes.sort_unstable();
        inodes.dedup();
        let now = self.clock.wall().seconds;
        let ages = pending.iter().map(|entry| u64::try_from(now - entry.since).unwrap_or(0));
        Staged {
            files: inodes.len() as u64,
            bytes: pending.iter().map(|entry| entry.tail.size).sum(),
            oldest_seconds: ages.max(),
            damaged: blobs.entries.values().filter(|entry| entry.state == State::Damaged).count() as u64,
            last_error: blobs.last_error.clone(),
        }
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
        let (names, is_folder_dirty) = {
            let mut blobs = self.blobs.lock();
            let dirty = blobs.entries.iter().filter(|(_, entry)| entry.on_disk == OnDisk::Written);
            let names: Vec<String> = dirty.map(|(name, _)| name.clone()).collect();
            (names, std::mem::take(&mut blobs.is_folder_dirty))
        };
        if !names.is_empty() || is_folder_dirty {
            let each = names.into_iter().map(|name| async move {
                let path = self.folder.join(&name);
                (name, blocking(move || sync(&path)).await.flatten())
            });
            let synced: Vec<_> = stream::iter(each).buffer_unordered(SYNCS_AT_ONCE).collect().await;
            let folder = self.folder.clone();
            let named = blocking(move || sync(&folder)).await.flatten();
            self.note_synced(synced, named);
        }
        let blobs = self.blobs.lock();
        let refused = blobs.entries.iter().filter(|(_, entry)| entry.on_disk == OnDisk::Refused);
        let refused = refused.filter(|(_, entry)| entry.state != State::Damaged);
        Ok(refused.filter_map(|(name, entry)| Some((key_of(name)?, entry.tail.size))).collect())
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
        let mut blobs = self.blobs.lock();
        let Some(entry) = name_of(key).and_then(|name| blobs.entries.get_mut(&name)) else { return true };
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
    }

    fn note_synced(&self, synced: Vec<(String, Result<()>)>, named: Result<()>) {
        let until = self.clock.now() + REST;
        let mut blobs = self.blobs.lock();
        for (name, synced) in synced {
            let Err(error) = synced.and_then(|()| named.as_ref().copied().map_err(Error::duplicate)) else {
                if let Some(entry) = blobs.entries.get_mut(&name) {
                    entry.on_disk = OnDisk::Durable;
                }
                continue;
            };
            if let Some(entry) = blobs.entries.get_mut(&name) {
                entry.on_disk = OnDisk::Refused;
            }
            blobs.rests_until = Some(until);
            blobs.tell_full(&format!("the local disk does not keep them: {error}"));
        }
        blobs.is_folder_dirty |= named.is_err();
    }
}

impl Blobs {
    /// Whether the disk is left alone.
    fn rests(&self, now: Moment) -> bool {
        self.rests_until.is_some_and(|until| until > now)
    }

    fn add(&mut self, name: String, tail: Tail, since: i64, state: State) {
        self.inodes.entry(tail.ino).or_default().insert(name.clone());
        let (tail, number) = (Arc::new(tail), self.next);
        self.next += 1;
        self.is_folder_dirty = true;
        let on_disk = OnDisk::Written;
        let is_settled = state != State::Fresh;
        let entry =
            Entry { tail, number, since, on_disk, state, is_settled, failed_reads: 0, is_told: false };
        self.entries.insert(name, entry);
    }

    fn remove(&mut self, name: &str) {
        let Some(Entry { tail, .. }) = self.entries.remove(name) else { return };
        self.bytes -= file::room(tail.size);
        if let Some(names) = self.inodes.get_mut(&tail.ino) {
            names.remove(name);
            if names.is_empty() {
                self.inodes.remove(&tail.ino);
            }
        }
    }

    /// Once for each time that it comes to this.
    fn tell_full(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_full, true) {
            tracing::warn!(why, "written bytes go straight to the store");
        }
    }
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
    let mut blobs = Blobs::default();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if name == LOCK || key_of(&name).is_none() {
            continue;
        }
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
        blobs.bytes += file::room(tail.size);
        blobs.add(name, tail, since.map_or(now, |since| since.as_secs() as i64), state);
    }
    Ok(blobs)
}
