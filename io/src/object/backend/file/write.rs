//! Making files appear under their keys in one step, and disappear.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path as FilePath, PathBuf};

use object_store::path::Path;
use object_store::{CopyMode, PutMode, PutPayload, PutResult, Result};

use super::{Inner, STAGING, Wanted, copy_bytes, io_error, open_object, put_result, sync, token, version_of};

impl Inner {
    pub(super) fn put(
        &self,
        key: &Path,
        payload: &PutPayload,
        mode: &PutMode,
        token: String,
        wanted: &Wanted,
    ) -> Result<PutResult> {
        let write = |file: &mut File| {
            payload.iter().try_for_each(|bytes| wanted.check().and_then(|()| file.write_all(bytes)))
        };
        self.write_whole(key, write, mode, token, wanted)
    }

    /// Copies the bytes: a hard link would let a later change in place reach both keys. As in a bucket, the token of their
    /// write goes with them.
    pub(super) fn copy(&self, from: &Path, to: &Path, mode: CopyMode, wanted: &Wanted) -> Result<()> {
        let failed = |error| io_error(from, error);
        let (mut source, metadata) = open_object(&self.file_of(from)).map_err(failed)?;
        let held = token::held(&source, &metadata);
        let mode = match mode {
            CopyMode::Overwrite => PutMode::Overwrite,
            CopyMode::Create => PutMode::Create,
        };
        let write = |file: &mut File| copy_bytes(&mut source, file, u64::MAX, wanted).map(drop);
        self.write_whole(to, write, &mode, held.unwrap_or_default(), wanted).map(drop)
    }

    fn write_whole(
        &self,
        key: &Path,
        write: impl FnOnce(&mut File) -> io::Result<()>,
        mode: &PutMode,
        token: String,
        wanted: &Wanted,
    ) -> Result<PutResult> {
        let staged = self.staging_path(&self.rng.name());
        let written = self.stage(&staged, write, &token, wanted).map_err(|error| io_error(key, error));
        let published = written.and_then(|()| self.publish(&staged, key, mode, token, wanted));
        if published.is_err() {
            // The first error is the one to report; a file left in the staging folder is seen by no reader.
            let _ = std::fs::remove_file(&staged);
        }
        published
    }

    /// Creates `folder`, which lies below the root, and returns the deepest one above it (or itself) that was there before. A
    /// root that went away stays away: whatever would be written in its place, on the disk below a mount point, would be lost
    /// when it comes back.
    pub(super) fn create_below_root(&self, folder: &FilePath) -> io::Result<PathBuf> {
        let below = folder.ancestors().take_while(|path| *path != self.root);
        let missing: Vec<&FilePath> = below.take_while(|path| !path.is_dir()).collect();
        for path in missing.iter().rev() {
            match std::fs::create_dir(path) {
                // Another process made it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(io::Error::new(io::ErrorKind::NotADirectory, error));
                }
                created => created?,
            }
        }
        let top = missing.last().map_or(Some(folder), |path| path.parent());
        Ok(top.unwrap_or(&self.root).to_owned())
    }

    pub(super) fn staging_path(&self, name: &str) -> PathBuf {
        self.root.join(STAGING).join(name)
    }

    fn stage(
        &self,
        staged: &FilePath,
        write: impl FnOnce(&mut File) -> io::Result<()>,
        token: &str,
        wanted: &Wanted,
    ) -> io::Result<()> {
        let open = || OpenOptions::new().write(true).create_new(true).open(staged);
        let mut file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.create_below_root(&self.root.join(STAGING))?;
                open()?
            }
            other => other?,
        };
        write(&mut file)?;
        sync(&file, token, wanted)
    }

    /// Moves the synced file `staged` to its key if `mode` allows and it is still `wanted`, and syncs the directories that
    /// changed.
    pub(super) fn publish(
        &self,
        staged: &FilePath,
        key: &Path,
        mode: &PutMode,
        token: String,
        wanted: &Wanted,
    ) -> Result<PutResult> {
        let target = self.file_of(key);
        let failed = |error| io_error(key, error);
        // The version survives rename and link: neither changes inode, size or modification time.
        let version = version_of(&std::fs::metadata(staged).map_err(failed)?);
        let parent = target.parent().unwrap_or(&self.root).to_owned();
        // Before the rename, so that whoever sees the new version can settle a lost reply by it.
        self.remember(&version, token);
        let place = || match mode {
            PutMode::Create => std::fs::hard_link(staged, &target),
            PutMode::Overwrite | PutMode::Update(_) => std::fs::rename(staged, &target),
        };
        // Within the lock, or a delete of the last neighbour could take the directory away in between.
        let chain = self.locked(|| {
            wanted.check().map_err(failed)?;
            let top = self.create_below_root(&parent).map_err(|error| taken_error(key, error))?;
            let chain = self.unsynced.begin(&parent, &top);
            if let PutMode::Update(update) = mode {
                expect_version(&target, key, update.e_tag.as_deref())?;
            }
            place().map_err(|error| taken_error(key, error))?;
            Ok(chain)
        })?;
        if *mode == PutMode::Create {
            // The object is there; a second name left in the staging folder is seen by no reader.
            let _ = std::fs::remove_file(staged);
        }
        match sync_directories(&parent, &chain.top) {
            Ok(()) => self.unsynced.end(chain),
            // The object was deleted as soon as it was there, and its directory with it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.root.exists() => {}
            Err(error) => return Err(failed(error)),
        }
        Ok(put_result(version))
    }

    /// Deletes objects and syncs the directories that they were in.
    pub(super) fn delete_all(&self, keys: &[Path], wanted: &Wanted) -> Result<()> {
        // What was deleted before one failed is gone for good as well: who asks again finds it gone.
        let (mut changed, mut outcome) = (BTreeSet::new(), Ok(()));
        for key in keys {
            match self.delete(key, wanted) {
                Ok(directory) => changed.extend(directory.map(|directory| (directory, key))),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        for (directory, key) in changed {
            match sync_directories(&directory, &directory) {
                // Whoever deleted what was left in it syncs the one above.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error(key, error)),
                _ => {}
            }
        }
        outcome
    }

    /// Returns the directory that the name is gone from; `None` where it was not there.
    fn delete(&self, key: &Path, wanted: &Wanted) -> Result<Option<PathBuf>> {
        let target = self.file_of(key);
        self.locked(|| {
            wanted.check().map_err(|error| io_error(key, error))?;
            let was_there = match std::fs::remove_file(&target) {
                Ok(()) => true,
                // A directory is no object.
                Err(error) if error.kind() == io::ErrorKind::IsADirectory => false,
                Err(error) => match io_error(key, error) {
                    object_store::Error::NotFound { .. } if self.root.exists() => false,
                    other => return Err(other),
                },
            };
            // A bucket has no empty directories: those that a key leaves behind go with it.
            let mut directory = target.parent();
            while let Some(path) = directory.filter(|path| *path != self.root && path.starts_with(&self.root))
            {
                if std::fs::remove_dir(path).is_err() {
                    break;
                }
                self.unsynced.forget(path);
                directory = path.parent();
            }
            Ok(directory.filter(|_| was_there).map(FilePath::to_owned))
        })
    }

    /// Runs `change` alone among all threads and processes that use this directory through Forebay.
    fn locked<T>(&self, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let _threads = self.lock.lock();
        let key = Path::from(".forebay/staging/lock");
        let path = self.staging_path("lock");
        let open = || OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.create_below_root(&self.root.join(STAGING)).and_then(|_| open())
            }
            other => other,
        };
        let file = file.map_err(|error| io_error(&key, error))?;
        file.lock().map_err(|error| io_error(&key, error))?;
        change()
    }
}

fn expect_version(target: &FilePath, key: &Path, wanted: Option<&str>) -> Result<()> {
    let found = match std::fs::metadata(target) {
        Ok(metadata) => Some(version_of(&metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(io_error(key, error)),
    };
    if found.as_deref() == wanted {
        return Ok(());
    }
    let source = format!("expected {wanted:?}, found {found:?}").into();
    Err(object_store::Error::Precondition { path: key.to_string(), source })
}

/// An I/O error on making the name of `key`: where a directory of that name is, or a file in place of a directory above, an
/// object is in the way.
fn taken_error(key: &Path, error: io::Error) -> object_store::Error {
    match error.kind() {
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory | io::ErrorKind::DirectoryNotEmpty => {
            object_store::Error::AlreadyExists { path: key.to_string(), source: error.into() }
        }
        _ => io_error(key, error),
    }
}

/// Syncs `directory` and all above it up to `top`.
fn sync_directories(directory: &FilePath, top: &FilePath) -> io::Result<()> {
    for path in directory.ancestors() {
        File::open(path)?.sync_all()?;
        if path == top {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use forebay_core::{ErrorKind, ObjectKey};

    use crate::object::{Bucket, BucketUrl, Condition, StoreSettings};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_was_given_up_has_no_effect() {
        // A copy took longer than its request, somebody else wrote there meanwhile, and the copy came in over that.
        let folder = tempfile::tempdir().expect("scratch");
        let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
        let [from, to] = ["from", "to"].map(ObjectKey::new);
        bucket.put(&from, Bytes::from_static(b"copied"), Condition::Always).await.expect("put");
        let staging = folder.path().join(super::STAGING);
        let staged = || std::fs::read_dir(&staging).expect("staging").count() - 1;
        let until = async |count: usize| {
            while staged() != count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        // Whoever changes a name waits for this.
        let lock = std::fs::File::open(staging.join("lock")).expect("the lock");
        lock.lock().expect("locked");
        let copy = bucket.copy(&from, &to, 6, &Condition::Always);
        tokio::select! {
            _ = copy => panic!("somebody has the lock"),
            () = until(1) => {}
        }
        lock.unlock().expect("unlocked");
        until(0).await;
        assert_eq!(bucket.head(&to).await.expect("an answer"), None, "the copy was given up");
        bucket.copy(&from, &to, 6, &Condition::IfAbsent).await.expect("copied");
        let again = bucket.copy(&from, &to, 6, &Condition::IfAbsent).await;
        assert_eq!(again.expect_err("it is there").kind(), ErrorKind::Conflict);
    }

    /// What came too late made the root again, empty, in the place where a disk had been mounted: nothing told that from a bucket
    /// of which all was deleted.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_root_that_goes_away_in_the_middle_of_a_change_stays_away() {
        for what in ["put", "copy", "upload", "delete"] {
            println!("{what}");
            let folder = tempfile::tempdir().expect("scratch");
            let (root, elsewhere) = (folder.path().join("bucket"), folder.path().join("elsewhere"));
            std::fs::create_dir(&root).expect("a folder");
            let url: BucketUrl = format!("file://{}", root.display()).parse().expect("a URL");
            let settings = StoreSettings { deadline_ms: 300, ..StoreSettings::default() };
            let bucket = Bucket::open(&url, &settings).await.expect("a bucket");
            let [from, to] = ["from", "d/to"].map(ObjectKey::new);
            bucket.put(&from, Bytes::from_static(b"bytes"), Condition::Always).await.expect("put");
            let lock = std::fs::File::open(root.join(super::STAGING).join("lock")).expect("the lock");
            lock.lock().expect("locked");
            let change = async {
                match what {
                    "put" => bucket.put(&to, "bytes".into(), Condition::IfAbsent).await.map(drop),
                    "copy" => bucket.copy(&from, &to, 5, &Condition::IfAbsent).await.map(drop),
                    "delete" => bucket.delete(&from).await,
                    _ => {
                        let mut upload = bucket.upload(&to).await?;
                        upload.write("bytes".into()).await?;
                        upload.complete(Condition::IfAbsent).await.map(drop)
                    }
                }
            };
            let move_away = async {
                // All that a change does before its turn takes less.
                tokio::time::sleep(Duration::from_millis(100)).await;
                std::fs::rename(&root, &elsewhere).expect("moved away");
                lock.unlock().expect("unlocked");
            };
            let (changed, ()) = tokio::join!(change, move_away);
            let error = changed.expect_err("nobody knows what lies there");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(!root.exists(), "it was made again");
            assert!(elsewhere.join("from").exists());
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_object_that_is_deleted_at_once_was_put() {
        // Two agents of one job: one was still syncing the directory of its index when the other, having put both
        // indexes together, deleted them with their directory.
        let folder = tempfile::tempdir().expect("scratch");
        let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
        let key = ObjectKey::new("ranks/5/a/0.json");
        let puts = async {
            for _ in 0..200 {
                bucket.put(&key, Bytes::from_static(b"index"), Condition::Always).await.expect("put");
            }
        };
        let deletes = async {
            loop {
                bucket.delete(&key).await.expect("delete");
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = puts => {}
            () = deletes => {}
        }
    }

    #[tokio::test]
    async fn what_is_in_the_way_is_told_at_once() {
        // Copied seven times and given up as unreachable, since nothing is at the key itself.
        let folder = tempfile::tempdir().expect("scratch");
        let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
        let [from, file, below, directory] = ["from", "file", "file/below", "directory"].map(ObjectKey::new);
        for key in [&from, &file] {
            bucket.put(key, Bytes::from_static(b"bytes"), Condition::Always).await.expect("put");
        }
        std::fs::create_dir(folder.path().join("directory")).expect("an outsider's directory");
        let before = bucket.counters();
        for to in [&below, &directory] {
            let told = bucket.copy(&from, to, 5, &Condition::IfAbsent).await.expect_err("in the way");
            assert_eq!(told.kind(), ErrorKind::Conflict, "{told}");
            let put = bucket.put(to, Bytes::from_static(b"put"), Condition::IfAbsent).await;
            assert_eq!(put.expect_err("in the way").kind(), ErrorKind::Conflict);
        }
        assert_eq!(bucket.counters().retries, before.retries);
    }
}
