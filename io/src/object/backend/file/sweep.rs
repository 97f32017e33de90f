//! What dead processes left in the staging folder.
//!
//! An upload that goes on is locked by its process. A whole object is staged only for as long as its bytes are being
//! written, so that one which nobody wrote to for a while is left over. Both are spared while they are young, because
//! a file is made a moment before it is locked.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::STAGING;
use super::upload::UPLOADS;
use crate::object::types::Leftover;

/// Files of the staging folder that stay: the lock around changes, and the one that tells the time.
const KEPT: [&str; 2] = ["lock", CLOCK];
const CLOCK: &str = "clock";

/// Finds what was left in the staging folder of the bucket `root` for at least `min_age`, and removes it unless
/// `keep`. Age is told by the file system's own clock. What cannot be looked at or removed is told, stays, and holds up
/// nothing else. Blocks on the disk.
pub(in crate::object) fn sweep(root: &Path, min_age: Duration, keep: bool) -> io::Result<Vec<Leftover>> {
    let staging = root.join(STAGING);
    let now = match now(&staging) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        now => now?,
    };
    let is_old = |path: &Path| -> io::Result<bool> {
        let modified = std::fs::metadata(path)?.modified()?;
        Ok(now.duration_since(modified).is_ok_and(|age| age >= min_age))
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&staging)? {
        let path = entry?.path();
        let is_kept = KEPT.iter().any(|name| path.ends_with(name));
        if path.is_file() && !is_kept && is_old(&path).unwrap_or(false) {
            found.push((path.clone(), path));
        }
    }
    for entry in std::fs::read_dir(staging.join(UPLOADS)).into_iter().flatten() {
        let folder = entry?.path();
        let data = folder.join("data");
        // A process that dies at the start of an upload, or at its end, leaves a folder without data.
        let is_left = match is_unlocked(&data) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(is_old(&folder).unwrap_or(false)),
            unlocked => unlocked.map(|unlocked| unlocked && is_old(&data).unwrap_or(false)),
        };
        if or_told(&folder, is_left).unwrap_or(false) {
            found.push((folder, data));
        }
    }
    let leftover = |(path, data): (PathBuf, PathBuf)| -> Option<Leftover> {
        let bytes = std::fs::metadata(&data).map_or(0, |metadata| metadata.len());
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        if !keep {
            or_told(&path, remove(&path))?;
        }
        Some(Leftover { name, bytes })
    };
    Ok(found.into_iter().filter_map(leftover).collect())
}

/// The outcome of some work on one entry; an error is told.
fn or_told<T>(path: &Path, outcome: io::Result<T>) -> Option<T> {
    outcome.inspect_err(|error| tracing::warn!(path = %path.display(), %error, "not swept")).ok()
}

/// The time of the file system, which may be another machine's.
fn now(staging: &Path) -> io::Result<SystemTime> {
    File::create(staging.join(CLOCK))?.metadata()?.modified()
}

/// Whether no process holds the upload's file. The lock that tells is given back at once: only its own process would
/// ever go on with an upload. Over NFS a lock is one of bytes, and only who may write has one alone.
fn is_unlocked(data: &Path) -> io::Result<bool> {
    let file = match OpenOptions::new().read(true).write(true).open(data) {
        // Another user's: elsewhere than over NFS, who may read has a lock as well.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => File::open(data)?,
        opened => opened?,
    };
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::{Bucket, BucketUrl, StoreSettings};
    use bytes::Bytes;
    use forebay_core::ObjectKey;

    #[tokio::test]
    async fn what_dead_processes_staged_goes_and_running_uploads_stay() {
        let folder = tempfile::tempdir().expect("scratch");
        let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
        assert_eq!(bucket.sweep_staging(Duration::ZERO, false).await.expect("swept"), Vec::new());
        let mut upload = bucket.upload(&ObjectKey::new("d/running")).await.expect("upload");
        upload.write(Bytes::from(vec![7; 9 << 20])).await.expect("a part");
        let staging = folder.path().join(STAGING);
        // As a process leaves them that is killed while it writes: an object, an upload, an upload just begun.
        std::fs::write(staging.join("whole"), "12345").expect("file");
        for (id, data) in [("left", Some("1234567")), ("begun", None)] {
            let left = staging.join(UPLOADS).join(id);
            std::fs::create_dir_all(&left).expect("folder");
            std::fs::write(left.join("key"), "d/left").expect("file");
            if let Some(data) = data {
                std::fs::write(left.join("data"), data).expect("file");
            }
        }
        let sweep = async |min_age: u64, keep| {
            let swept = bucket.sweep_staging(Duration::from_secs(min_age), keep).await.expect("swept");
            let mut found: Vec<_> = swept.into_iter().map(|left| (left.name, left.bytes)).collect();
            found.sort();
            found
        };
        assert_eq!(sweep(3600, false).await, [], "they are young");
        // Nobody can look at this one: it held up all others.
        let loops = staging.join(UPLOADS).join("loops");
        std::fs::create_dir_all(&loops).expect("folder");
        std::os::unix::fs::symlink("data", loops.join("data")).expect("a link to itself");
        let left = [("uploads/begun", 0), ("uploads/left", 7), ("whole", 5)];
        let left = left.map(|(name, bytes)| (format!("{STAGING}/{name}"), bytes));
        assert_eq!(sweep(0, true).await, left);
        assert_eq!(sweep(0, false).await, left);
        assert_eq!(sweep(0, false).await, []);
        let done = upload.complete(crate::object::Condition::IfAbsent).await.expect("it goes on");
        assert_eq!(done.size, 9 << 20);
        assert_eq!(bucket.list_uploads("").await.expect("uploads"), Vec::new());
    }
}
