//! The lease of a directory: a locked file, held for as long as its process lives.

use std::io::ErrorKind as Io;
use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};

use forebay_io::lock_file::{LockFile, Locked};

/// What the file says after its holder's name while that one closes the volume.
const ENDING: &str = " (closing it)";
/// What can be done where the holder says so.
pub(super) const STILL_ENDING: &str =
    "it was unmounted and still brings changes to the bucket: wait until its process has ended";

/// Takes the lock for `holder`, or gives what the file says of who has it. Blocks on the disk.
pub(super) fn lock(bucket: &Path, holder: &str) -> Result<Locked> {
    let directory = bucket.join(".forebay");
    let path = directory.join("volume.lock");
    let locked = std::fs::create_dir_all(&directory).and_then(|()| LockFile::lock(&path, holder));
    locked.map_err(|error| cannot_write(error, &path))
}

fn cannot_write(error: std::io::Error, path: &Path) -> Error {
    let hint = match error.kind() {
        Io::ReadOnlyFilesystem => {
            "the bucket's file system is read-only, as `findmnt -T` shows: mount it with --read-only"
        }
        Io::PermissionDenied => {
            "whoever runs this has to be allowed to write there: compare `id` and `ls -ld`; `mount --read-only` needs it not"
        }
        Io::StorageFull | Io::QuotaExceeded => {
            "make room on the file system that holds it: `df -h` and `df -i` show what there is"
        }
        _ => "the bucket's file system has to take new files and locks",
    };
    Error::from(error).context(path.display()).with_hint(hint)
}

/// Says that `holder` is about to give the lock back. Blocks on the disk.
pub(super) fn say_ending(lock: &LockFile, holder: &str) -> Result<()> {
    Ok(lock.say(&format!("{holder}{ENDING}"))?)
}

/// Whether the file says that its holder closes the volume.
pub(super) fn is_ending(holder: &str) -> bool {
    holder.ends_with(ENDING)
}

pub(super) fn held_by(other: &str) -> Error {
    let message = format!("the volume is mounted read-write by {other}");
    let hint = match is_ending(other) {
        true => STILL_ENDING,
        false => {
            "unmount it there, or mount both with --join-secret, to write from both; on a directory the lock goes with its process and \
             cannot be taken over"
        }
    };
    Error::new(ErrorKind::Conflict, message).with_hint(hint)
}
