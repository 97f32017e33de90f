//! The lease of a directory: a locked file, held for as long as its process lives.

use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};

use forebay_io::lock_file::{LockFile, Locked};

/// What the file says after its holder's name while that one closes the volume.
const ENDING: &str = " (closing it)";

/// Takes the lock for `holder`, or gives what the file says of who has it. Blocks on the disk.
pub(super) fn lock(bucket: &Path, holder: &str) -> Result<Locked> {
    let directory = bucket.join(".forebay");
    std::fs::create_dir_all(&directory)?;
    Ok(LockFile::lock(&directory.join("volume.lock"), holder)?)
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
        true => "it was unmounted and still brings changes to the bucket: wait until its process has ended",
        false => "unmount it there; on a directory the lock goes with its process and cannot be taken over",
    };
    Error::new(ErrorKind::Conflict, message).with_hint(hint)
}
