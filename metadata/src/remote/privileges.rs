//! What a write takes away from a file, as far as it is known that there is nothing: set-id bits, where its caller may not keep
//! them, and a file capability.
//!
//! The kernel leaves both to the mount, at each write that passes its page cache. Whether there is something is known of files
//! that are open: what made or opened them says it, and so does who is asked later. What others change is told (`Listener`),
//! and throws that away. What is said of a moment before that is not believed (`Doubts`). A write that went by what was known
//! while it was not true any more, as nobody could be asked, is made good when the file is committed.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_core::InodeId;

use crate::schema::{SET_GID, SET_UID};

/// Inodes share these counters: one that is another's costs a question.
const PLACES: usize = 256;

/// Counts what may have made untrue what is being told.
#[derive(Debug)]
pub(super) struct Doubts([AtomicU64; PLACES]);

impl Default for Doubts {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; PLACES])
    }
}

impl Doubts {
    /// The doubts of an inode so far.
    pub(super) fn of(&self, ino: InodeId) -> u64 {
        self.at(ino).load(Ordering::SeqCst)
    }

    pub(super) fn raise(&self, ino: InodeId) {
        self.at(ino).fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn raise_all(&self) {
        for doubts in &self.0 {
            doubts.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn at(&self, ino: InodeId) -> &AtomicU64 {
        &self.0[ino.0 as usize % PLACES]
    }
}

/// Whether it is known that a file does not have something.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Lack {
    is_known: bool,
    /// Whether something was written because of it, and not committed yet.
    is_relied_on: bool,
}

impl Lack {
    pub(super) fn learn(&mut self, is_lacking: bool) {
        self.is_known |= is_lacking;
    }

    /// It may not be so any more.
    pub(super) fn doubt(&mut self) {
        self.is_known = false;
    }

    /// Whether a write may go by it.
    pub(super) fn rely(&mut self) -> bool {
        self.is_relied_on |= self.is_known;
        self.is_known
    }

    /// Whether something was written because of it since the last commit.
    pub(super) fn commit(&mut self) -> bool {
        std::mem::take(&mut self.is_relied_on)
    }

    /// As it was before [`Self::commit`] told so.
    pub(super) fn rely_again(&mut self, was_relied_on: bool) {
        self.is_relied_on |= was_relied_on;
    }

    pub(super) fn is_known(self) -> bool {
        self.is_known
    }
}

/// What was written because of what a file lacks.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Relied {
    pub(super) set_ids: bool,
    pub(super) capability: bool,
}

/// Whether a mode has no set-id bits.
pub(super) fn is_plain(mode: u16) -> bool {
    mode & (SET_UID | SET_GID) == 0
}
