//! What is kept in memory of clones under way: which directories are copied, and what was changed of them since.
//!
//! A clone is built beside the tree, in many transactions. Whoever changes something that it has copied already says so
//! here, within that transaction, and the clone follows before it ends: its last transaction finds nothing left to follow,
//! so that the copy is the tree as it is at that moment. Where no clone is under way this costs one look at a number.
//!
//! All of it is used within the committer's closures alone, hence by one after another. It is not durable: a clone whose
//! process ends is freed by the next session.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use forebay_core::{FileKind, InodeId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::Shared;
use crate::schema::{Inode, Usage};

/// Changes that a clone may be behind. One that falls further behind is given up: it would never end.
pub(crate) const MOST_CHANGED: usize = 1 << 18;

/// What a clone made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cloned {
    /// Directories.
    pub directories: u64,
    /// Everything else.
    pub files: u64,
    /// Bytes that the files share with those they were cloned from.
    pub bytes: u64,
}

impl Cloned {
    /// What it counts where it is.
    pub(crate) fn usage(&self) -> Usage {
        Usage { inodes: (self.directories + self.files) as i64, ..Usage::of_bytes(self.bytes) }
    }
}

/// One per tree.
#[derive(Debug, Default)]
pub(crate) struct Clones {
    under_way: AtomicUsize,
    next: AtomicU64,
    clones: Mutex<HashMap<u64, Building>>,
}

/// A clone under way: its state goes with this, and what it has made so far is freed then, unless it is linked.
#[derive(Debug)]
pub(crate) struct CloneTicket {
    shared: Arc<Shared>,
    number: u64,
}

/// How far the entries of a directory are copied: in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Read {
    Nothing,
    /// Up to this name, which is.
    UpTo(Box<[u8]>),
    All,
}

/// The copy of a directory.
#[derive(Debug, Clone)]
pub(crate) struct Made {
    pub(crate) copy: InodeId,
    /// The directory above the one that it is a copy of; of the topmost the same.
    pub(crate) above: InodeId,
    /// The copy of that which it lies in. It is no part of the clone any more once another copy of that one is.
    pub(crate) inside: InodeId,
    /// What was copied right below it, but for directories.
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    pub(crate) read: Read,
}

/// Something that a clone has copied and that was changed since.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Changed {
    /// What a name in a directory leads to.
    Name(InodeId, Bytes),
    /// The attributes of a directory.
    Directory(InodeId),
    /// A file that has several names, some of them in directories that are being copied perhaps.
    Links(InodeId),
}

/// A clone and how far it is.
#[derive(Debug, Default)]
pub(crate) struct Building {
    /// The copy of the topmost directory, which has no name yet.
    pub(crate) top: Option<InodeId>,
    /// The copies of directories, by what they are copies of. Some hundred bytes for each.
    pub(crate) made: HashMap<InodeId, Made>,
    /// Directories whose entries are to be copied; the next one is the last.
    pub(crate) waiting: Vec<InodeId>,
    /// Files that are copied and had several names then.
    pub(crate) linked: HashSet<InodeId>,
    pub(crate) changed: HashSet<Changed>,
    /// What was not copied because its bytes are about to be replaced.
    pub(crate) held_up: HashSet<Changed>,
    /// What lies in the copy.
    pub(crate) cloned: Cloned,
    /// Whether changes were lost because there were too many.
    pub(crate) is_overrun: bool,
}

impl Clones {
    /// Begins one.
    pub(crate) fn begin(shared: &Arc<Shared>) -> CloneTicket {
        let clones = &shared.clones;
        let number = clones.next.fetch_add(1, Ordering::Relaxed);
        clones.clones.lock().insert(number, Building::default());
        clones.under_way.fetch_add(1, Ordering::SeqCst);
        CloneTicket { shared: shared.clone(), number }
    }

    /// Whether a directory without a name is what a living clone builds.
    pub(crate) fn builds(&self, top: InodeId) -> bool {
        self.clones.lock().values().any(|building| building.top == Some(top))
    }

    /// Works on the state of a clone.
    pub(crate) fn with<T>(&self, number: u64, work: impl FnOnce(&mut Building) -> T) -> T {
        work(self.clones.lock().entry(number).or_default())
    }

    /// Notes that a name in `directory` leads elsewhere.
    pub(super) fn note_name(&self, directory: InodeId, name: &[u8]) {
        self.note(|building| {
            building.copied(directory, name).map(|_| Changed::Name(directory, Bytes::copy_from_slice(name)))
        });
    }

    /// Notes that an inode was changed.
    pub(super) fn note_inode(&self, ino: InodeId, inode: &Inode) {
        self.note(|building| match (inode.kind, inode.nlink) {
            (FileKind::Directory, _) => building.made.contains_key(&ino).then_some(Changed::Directory(ino)),
            // Its entry was changed, too.
            (_, 0) => None,
            (_, 1) => building
                .copied(inode.parent, &inode.name)
                .map(|_| Changed::Name(inode.parent, inode.name.clone())),
            _ => {
                let is_copied =
                    building.linked.contains(&ino) || building.copied(inode.parent, &inode.name).is_some();
                is_copied.then_some(Changed::Links(ino))
            }
        });
    }

    fn note(&self, what: impl Fn(&Building) -> Option<Changed>) {
        if self.under_way.load(Ordering::SeqCst) == 0 {
            return;
        }
        for building in self.clones.lock().values_mut() {
            let Some(changed) = what(building) else { continue };
            // What is noted already is nothing further to follow.
            match building.changed.contains(&changed) || building.changed.len() < MOST_CHANGED {
                true => drop(building.changed.insert(changed)),
                false => building.is_overrun = true,
            }
        }
    }
}

impl CloneTicket {
    /// What names it in [`Clones::with`].
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Works on its state.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Building) -> T) -> T {
        self.shared.clones.with(self.number, work)
    }
}

impl Drop for CloneTicket {
    fn drop(&mut self) {
        self.shared.clones.under_way.fetch_sub(1, Ordering::SeqCst);
        self.shared.clones.clones.lock().remove(&self.number);
        self.shared.work.notify_one();
    }
}

impl Building {
    /// The copy of `directory`, if what it has under `name` was copied, or was seen not to be there.
    pub(crate) fn copied(&self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        let made = self.made.get(&directory)?;
        let is_read = match &made.read {
            Read::Nothing => false,
            Read::UpTo(last) => name <= &last[..],
            Read::All => true,
        };
        is_read.then_some(made.copy)
    }

    /// The directories whose copies these are, and all that are copied below them.
    pub(crate) fn gone(&self, copies: &HashSet<InodeId>) -> HashSet<InodeId> {
        if copies.is_empty() {
            return HashSet::new();
        }
        let mut is_gone: HashMap<InodeId, bool> = HashMap::with_capacity(self.made.len());
        for source in self.made.keys() {
            let (mut at, mut way) = (*source, Vec::new());
            let gone = loop {
                if let Some(known) = is_gone.get(&at) {
                    break *known;
                }
                way.push(at);
                match self.made.get(&at) {
                    Some(made) if copies.contains(&made.copy) => break true,
                    Some(made) if made.above == at => break false,
                    Some(made)
                        if self.made.get(&made.above).is_none_or(|above| above.copy != made.inside) =>
                    {
                        break true;
                    }
                    Some(made) => at = made.above,
                    None => break true,
                }
            };
            is_gone.extend(way.into_iter().map(|one| (one, gone)));
        }
        is_gone.into_iter().filter(|(_, gone)| *gone).map(|(source, _)| source).collect()
    }
}
