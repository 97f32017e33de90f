//! Layouts of many extents of files that are open, as their records have them: a commit reads none of these then, nor does who
//! asks where a file's bytes lie.
//!
//! What is known of a file goes with each transaction that changes its `E` records, before that ends. Who learns what there is has
//! announced it before he read, or before his own change was made, and is not believed if another change came in between.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_core::{FileLayout, InodeId};
use parking_lot::Mutex;

use crate::schema::{Cuts, Inode};

/// Extents known at once: those of a few large files, or of one of half a million. They take some 100 MB where no open file of
/// this process shares them.
const MOST_EXTENTS: usize = 1 << 19;
/// Files known at once, and read.
const MOST_FILES: usize = 4096;

/// A file's layout as its records have it.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) layout: FileLayout,
    pub(crate) cuts: Cuts,
}

impl Stored {
    /// Whether it may be what an inode's records say: it is if its `E` records are the same.
    pub(super) fn is_of(&self, inode: &Inode) -> bool {
        self.layout.size() == inode.size
            && self.cuts.count() == inode.further
            && self.cuts.head(self.layout.extents()).eq(&inode.extents)
    }

    /// How much it counts.
    fn extents(&self) -> usize {
        self.layout.extents().len()
    }
}

/// One per tree.
#[derive(Debug, Default)]
pub(crate) struct Layouts(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    files: HashMap<InodeId, File>,
    /// In all files.
    extents: usize,
    /// Counts announcements and uses.
    count: u64,
}

#[derive(Debug)]
struct File {
    /// Whose announcement it is.
    announced: u64,
    used: u64,
    stored: Option<Arc<Stored>>,
}

/// An announcement of a layout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Awaited {
    ino: InodeId,
    number: u64,
}

impl Layouts {
    /// What the records of a file say, if that is known.
    pub(super) fn of(&self, ino: InodeId, inode: &Inode) -> Option<Arc<Stored>> {
        let mut known = self.0.lock();
        known.count += 1;
        let now = known.count;
        let file = known.files.get_mut(&ino)?;
        file.used = now;
        file.stored.clone().filter(|stored| stored.is_of(inode))
    }

    /// Announces what is about to be read, once no transaction runs any more that began before, or the change that is made now.
    pub(crate) fn await_one(&self, ino: InodeId) -> Awaited {
        let mut known = self.0.lock();
        known.forget(ino);
        known.count += 1;
        let number = known.count;
        known.files.insert(ino, File { announced: number, used: number, stored: None });
        known.make_room();
        Awaited { ino, number }
    }

    /// What was announced is so, unless it was changed since.
    pub(crate) fn learn(&self, awaited: Awaited, stored: Arc<Stored>) {
        let Awaited { ino, number } = awaited;
        let mut known = self.0.lock();
        let is_awaited = |file: &&mut File| file.announced == number && file.stored.is_none();
        let Some(file) = known.files.get_mut(&ino).filter(is_awaited) else { return };
        let extents = stored.extents();
        file.stored = Some(stored);
        known.extents += extents;
        known.make_room();
    }

    /// Nothing is known any more of a file.
    pub(crate) fn forget(&self, ino: InodeId) {
        self.0.lock().forget(ino);
    }
}

impl Known {
    fn forget(&mut self, ino: InodeId) {
        let stored = self.files.remove(&ino).and_then(|file| file.stored);
        self.extents -= stored.map_or(0, |stored| stored.extents());
    }

    /// Forgets what was not used for longest.
    fn make_room(&mut self) {
        while self.extents > MOST_EXTENTS || self.files.len() > MOST_FILES {
            let Some(oldest) = self.files.iter().min_by_key(|(_, file)| file.used).map(|(ino, _)| *ino)
            else {
                return;
            };
            self.forget(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::{Extent, FileKind, Source, Timestamp};

    use super::*;

    const FILE: InodeId = InodeId(7);

    /// A file of so many extents, in one `E` record, and its inode.
    fn stored(extents: u64) -> (Arc<Stored>, Inode) {
        let extent = |number: u64| Extent {
            offset: 2 * number,
            length: 1,
            source: Source::Inline(bytes::Bytes::from_static(b"x")),
        };
        let layout =
            FileLayout::from_parts(2 * extents, (0..extents).map(extent).collect()).expect("a layout");
        let cuts = Cuts::default().recut(FileLayout::empty().extents(), layout.extents()).cuts;
        let mut inode = Inode::new(FileKind::File, 0, (0, 0), Timestamp::default());
        (inode.size, inode.further) = (layout.size(), cuts.count());
        inode.extents = cuts.head(layout.extents()).cloned().collect();
        (Arc::new(Stored { layout, cuts }), inode)
    }

    #[test]
    fn who_read_before_a_change_is_not_believed() {
        let (layouts, (old, inode)) = (Layouts::default(), stored(100));
        assert!(inode.further > 0);
        layouts.learn(layouts.await_one(FILE), old.clone());
        assert!(layouts.of(FILE, &inode).is_some());
        assert!(layouts.of(InodeId(8), &inode).is_none());
        // Its records are others by now, or one that shows.
        let grown = Inode { size: inode.size + 1, ..inode.clone() };
        assert!(layouts.of(FILE, &grown).is_none());

        let (reader, writer) = (layouts.await_one(FILE), layouts.await_one(FILE));
        assert!(layouts.of(FILE, &inode).is_none(), "it is being changed");
        layouts.learn(reader, old.clone());
        assert!(layouts.of(FILE, &inode).is_none());
        layouts.learn(writer, old.clone());
        assert!(layouts.of(FILE, &inode).is_some());
        let reader = layouts.await_one(FILE);
        layouts.forget(FILE);
        layouts.learn(reader, old);
        assert!(layouts.of(FILE, &inode).is_none(), "a change came between");
        assert_eq!(layouts.0.lock().extents, 0);
    }

    #[test]
    fn what_was_not_used_for_longest_makes_way() {
        let (layouts, (one, inode)) = (Layouts::default(), stored(MOST_EXTENTS as u64 / 2 - 1));
        let learn = |ino: u64| layouts.learn(layouts.await_one(InodeId(ino)), one.clone());
        let known = |ino: u64| layouts.of(InodeId(ino), &inode).is_some();
        learn(1);
        learn(2);
        assert!(known(1) && known(2) && known(1));
        learn(3);
        assert!(known(1) && !known(2) && known(3));
        let (too_long, inode) = stored(MOST_EXTENTS as u64 + 1);
        layouts.learn(layouts.await_one(FILE), too_long);
        assert!(layouts.of(FILE, &inode).is_none());
        for number in 0..2 * MOST_FILES as u64 {
            layouts.await_one(InodeId(number));
        }
        let known = layouts.0.lock();
        assert!(known.files.len() == MOST_FILES && known.extents == 0);
    }
}
