//! The directory of a disk tier: who may use it, how block files are named, and what is found at opening. Blocking.
//!
//! ```text
//! lock                                                     held by the process that uses the directory
//! ceiling                                                  how many bytes it was given last, in decimal
//! share                                                    whose share of what hosts have together lies here: 16 digits
//! v1/DD/DIGEST-INDEX-SIZE-SERIAL[-pinned]                  one block; DD is the digest's first byte
//! ```
//! All numbers are hexadecimal. The name says everything the index needs, so opening reads names only. Whatever
//! else lies below `v1` is removed: the directory holds only copies.

use std::io::ErrorKind as Io;
use std::path::{Path, PathBuf};

use forebay_core::{Error, ErrorKind, Result};
use forebay_io::files::keep_private;
use forebay_io::lock_file::{LockFile, Locked};
use parking_lot::Mutex;

use crate::block::BlockId;
use crate::tier::index::Slot;

const PINNED: &str = "pinned";
const CEILING: &str = "ceiling";
const SHARE: &str = "share";

/// The ceiling that a directory was given last; none where it has none that can be read.
pub(crate) fn remembered_ceiling(root: &Path) -> Option<u64> {
    std::fs::read_to_string(root.join(CEILING)).ok()?.trim().parse().ok()
}

/// An opened, locked cache directory.
#[derive(Debug)]
pub(crate) struct Directory {
    root: PathBuf,
    blocks: PathBuf,
    /// `None` after closing.
    lock: Mutex<Option<LockFile>>,
}

impl Directory {
    /// Creates the directory where needed and locks it.
    ///
    /// # Errors
    /// `Conflict` when another process has it; what the file system says otherwise, with a hint.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let shown = root.display();
        let failed = |error: std::io::Error| {
            Error::from(error).context(format_args!("cache directory {shown}")).with_hint(
                "choose a directory that this user may create and write, or leave the disk cache out",
            )
        };
        std::fs::create_dir_all(root).map_err(failed)?;
        let own = std::process::id().to_string();
        let lock = match LockFile::lock(&root.join("lock"), &own).map_err(failed)? {
            Locked::Mine(lock) => lock,
            Locked::By(process) => {
                let message = format!("cache directory {shown} is in use by process {process}");
                let hint = "give every mount or node a cache directory of its own";
                return Err(Error::new(ErrorKind::Conflict, message).with_hint(hint));
            }
        };
        let blocks = root.join("v1");
        if blocks.symlink_metadata().is_ok_and(|found| !found.is_dir()) {
            std::fs::remove_file(&blocks).map_err(failed)?;
        }
        std::fs::create_dir_all(&blocks).map_err(failed)?;
        keep_private(&blocks);
        Ok(Self { root: root.to_owned(), blocks, lock: Mutex::new(Some(lock)) })
    }

    /// A number by which hosts that share blocks agree on those that lie here, wherever this directory is found next; `drawn`
    /// where it had none.
    pub(crate) fn share(&self, drawn: u64) -> u64 {
        let path = self.root.join(SHARE);
        let noted = std::fs::read_to_string(&path).ok();
        if let Some(share) = noted.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()) {
            return share;
        }
        if let Err(error) = replace(&path, &format!("{drawn:016x}")) {
            tracing::warn!(directory = %self.root.display(), %error, "the share of the cache could not be noted there");
        }
        drawn
    }

    /// Has those who come later, and give the directory no ceiling, keep to this one.
    pub(crate) fn remember_ceiling(&self, bytes: u64) {
        if remembered_ceiling(&self.root) != Some(bytes)
            && let Err(error) = replace(&self.root.join(CEILING), &bytes.to_string())
        {
            tracing::warn!(directory = %self.root.display(), %error, "the size of the cache could not be noted there");
        }
    }

    /// Lets the next process have the directory.
    pub(crate) fn unlock(&self) {
        self.lock.lock().take();
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Where a block's file lies.
    pub(crate) fn path(&self, slot: &Slot) -> PathBuf {
        let Slot { id: BlockId { digest, index }, serial, size, pinned } = *slot;
        let suffix = if pinned { format!("-{PINNED}") } else { String::new() };
        let first = (digest >> 120) as u8;
        self.blocks.join(format!("{first:02x}/{digest:032x}-{index:x}-{size:x}-{serial:x}{suffix}"))
    }

    /// Removes a file; one that is gone is no matter, one that stays is dropped at the next opening.
    pub(crate) fn remove(&self, slot: &Slot) {
        let path = self.path(slot);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != Io::NotFound => {
                tracing::warn!(path = %path.display(), %error, "a cached block could not be removed");
            }
            _ => {}
        }
    }

    /// Gives all block files to `take`, in no order. What is no block file is removed; what cannot be read is left out.
    pub(crate) fn scan(&self, mut take: impl FnMut(Slot)) {
        let mut dropped = 0_u64;
        for folder in entries(&self.blocks) {
            if !folder.path().is_dir() {
                dropped += u64::from(std::fs::remove_file(folder.path()).is_ok());
                continue;
            }
            for file in entries(&folder.path()) {
                let slot = file.file_name().to_str().and_then(parse);
                match slot.filter(|slot| self.path(slot) == file.path()) {
                    Some(slot) => take(slot),
                    None => dropped += u64::from(std::fs::remove_file(file.path()).is_ok()),
                }
            }
        }
        if dropped > 0 {
            let directory = self.root.display();
            tracing::warn!(%directory, dropped, "files that are no cached blocks were removed");
        }
    }
}

/// Writes a note in place of an older one, of which a full disk, or a crash, takes nothing.
fn replace(path: &Path, note: &str) -> std::io::Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, note)?;
    std::fs::rename(new, path)
}

fn entries(directory: &Path) -> impl Iterator<Item = std::fs::DirEntry> {
    let read = std::fs::read_dir(directory).inspect_err(
        |error| tracing::warn!(directory = %directory.display(), %error, "part of the cache cannot be read"),
    );
    read.into_iter().flatten().flatten()
}

/// Reads a file's name back.
fn parse(name: &str) -> Option<Slot> {
    let mut fields = name.split('-');
    let digest = u128::from_str_radix(fields.next()?, 16).ok()?;
    let index = u64::from_str_radix(fields.next()?, 16).ok()?;
    let size = u32::from_str_radix(fields.next()?, 16).ok()?;
    let serial = u64::from_str_radix(fields.next()?, 16).ok()?;
    let pinned = match fields.next() {
        None => false,
        Some(PINNED) => true,
        Some(_) => return None,
    };
    fields.next().is_none().then_some(Slot { id: BlockId { digest, index }, serial, size, pinned })
}
