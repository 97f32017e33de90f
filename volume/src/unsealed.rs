//! Closed files that could not become objects at their own paths: each is logged once, and counted for `forebay status`.

use std::collections::HashSet;

use forebay_core::InodeId;
use parking_lot::Mutex;

/// The most files that are kept apart. Past it no more are counted, nor logged.
const MOST: usize = 100_000;

/// Those of one mount since it began.
#[derive(Debug, Default)]
pub(crate) struct Unsealed(Mutex<HashSet<InodeId>>);

impl Unsealed {
    /// Notes a file; false where it was noted before.
    pub(crate) fn note(&self, ino: InodeId) -> bool {
        let mut files = self.0.lock();
        files.len() < MOST && files.insert(ino)
    }

    /// It became an object, or was written anew.
    pub(crate) fn forget(&self, ino: InodeId) {
        self.0.lock().remove(&ino);
    }

    /// How many there are of those that are not `gone`, which are forgotten.
    pub(crate) fn count(&self, gone: impl Fn(InodeId) -> bool) -> usize {
        let mut files = self.0.lock();
        files.retain(|ino| !gone(*ino));
        files.len()
    }
}
