//! Directories whose names may not be on the disk yet.
//!
//! A put that makes a directory syncs the one above before it is answered. One that comes into that directory meanwhile finds
//! it there, and would be answered though a power cut still takes the directory away, and its object with it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

/// The directories that this process has made, until whoever made one has synced its name.
#[derive(Debug, Default)]
pub(super) struct Unsynced(Mutex<Made>);

#[derive(Debug, Default)]
struct Made {
    directories: HashMap<PathBuf, u64>,
    last: u64,
}

/// What a put has to sync.
#[derive(Debug)]
pub(super) struct Chain {
    /// The uppermost directory to sync, of those from the object's own.
    pub(super) top: PathBuf,
    /// The directories that the put made, and the number of its making.
    made: Vec<(PathBuf, u64)>,
}

impl Unsynced {
    /// What a put into `directory` syncs that made all directories below `top`. For who holds the lock of changes, before the
    /// object is seen.
    pub(super) fn begin(&self, directory: &Path, top: &Path) -> Chain {
        let mut kept = self.0.lock();
        kept.last += 1;
        let new = directory.ancestors().take_while(|path| *path != top);
        let made: Vec<_> = new.map(|path| (path.to_owned(), kept.last)).collect();
        kept.directories.extend(made.iter().cloned());
        let is_synced = |path: &&Path| !kept.directories.contains_key(*path);
        let top = top.ancestors().find(is_synced).unwrap_or(top).to_owned();
        Chain { top, made }
    }

    /// A put has synced its chain.
    pub(super) fn end(&self, chain: Chain) {
        let mut kept = self.0.lock();
        for (path, number) in chain.made {
            if kept.directories.get(&path) == Some(&number) {
                kept.directories.remove(&path);
            }
        }
    }

    /// A directory was removed. One that is made in its place is its maker's to sync.
    pub(super) fn forget(&self, directory: &Path) {
        self.0.lock().directories.remove(directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_to_a_new_directory_syncs_its_name_as_well() {
        let unsynced = Unsynced::default();
        let [root, a, b, c] = ["/top", "/top/a", "/top/a/b", "/top/a/b/c"].map(Path::new);
        let first = unsynced.begin(b, root);
        assert_eq!(first.top, root);
        assert_eq!(unsynced.begin(b, b).top, root, "neither name is known to be synced");
        assert_eq!(unsynced.begin(a, a).top, root);
        let third = unsynced.begin(c, b);
        assert_eq!(third.top, root);
        unsynced.end(first);
        assert_eq!(unsynced.begin(b, b).top, b);
        assert_eq!(unsynced.begin(c, c).top, b, "the name of c");
        unsynced.end(third);
        assert_eq!(unsynced.begin(c, c).top, c);
        assert!(unsynced.0.lock().directories.is_empty());
    }

    #[test]
    fn a_directory_that_was_made_again_is_its_new_makers() {
        let unsynced = Unsynced::default();
        let [root, a] = ["/top", "/top/a"].map(Path::new);
        let first = unsynced.begin(a, root);
        unsynced.forget(a);
        let second = unsynced.begin(a, root);
        unsynced.end(first);
        assert_eq!(unsynced.begin(a, a).top, root, "what the first one synced is gone");
        unsynced.end(second);
        assert_eq!(unsynced.begin(a, a).top, a);
    }
}
