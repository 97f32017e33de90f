//! What a mount may know of the tree: of nothing else does it have to be told.
//!
//! A kernel keeps what it was answered for a second at most (docs/semantics.md, S73), so that of what a mount did not ask for lately
//! it knows nothing. Told of all that others change, each of a thousand mounts would be told of what a thousand do.

use std::collections::HashSet;
use std::mem::take;
use std::time::Duration;

use forebay_core::InodeId;
use tokio::time::Instant;

use super::serve::SILENCE;
use super::wire::{Answer, Request};
use crate::tree::{Lookup, OutsideChange};

/// How long a kernel keeps an answer, and how long that may be on its way: what takes longer ends the stream.
const KEPT: Duration = Duration::from_secs(1 + SILENCE.as_secs());
/// Inodes that are remembered for that long. A mount that asks for more is told of everything.
const MOST: usize = 1 << 18;

/// The inodes that a mount asked for, or was shown, of late.
#[derive(Debug)]
pub(super) struct Interest {
    /// Since this moment, and in as long a time before that.
    since: Instant,
    newest: HashSet<InodeId>,
    older: HashSet<InodeId>,
    /// Whether there was no room for all of them.
    is_all: [bool; 2],
}

impl Default for Interest {
    fn default() -> Self {
        let (newest, older) = Default::default();
        Self { since: Instant::now(), newest, older, is_all: [false; 2] }
    }
}

impl Interest {
    /// Notes what is asked for. To be called before the tree is looked at.
    pub(super) fn ask(&mut self, request: &Request) {
        self.turn();
        match request {
            Request::Link(ino, directory, _) => [*ino, *directory].into_iter().for_each(|ino| self.add(ino)),
            Request::Rename((from, _), (to, _), _) => [*from, *to].into_iter().for_each(|ino| self.add(ino)),
            Request::Lookup(ino, _)
            | Request::Attributes(ino)
            | Request::ReadDirectory(ino, ..)
            | Request::Parent(ino)
            | Request::ReadLink(ino)
            | Request::Create(ino, ..)
            | Request::CreateOpened(ino, ..)
            | Request::Unlink(ino, _)
            | Request::RemoveDirectory(ino, _)
            | Request::SetAttributes(ino, _)
            | Request::Xattr(ino, _)
            | Request::Xattrs(ino)
            | Request::SetXattr(ino, ..)
            | Request::RemoveXattr(ino, _)
            | Request::Opened(ino)
            | Request::CommitLayout(ino, ..)
            | Request::CommitShared(ino, ..) => self.add(*ino),
            _ => {}
        }
    }

    /// Notes what is shown. A change between the look at it and this is seen a second later.
    pub(super) fn show(&mut self, answer: &Answer) {
        match answer {
            Answer::Lookup(Lookup::Found(attributes)) | Answer::Made(attributes, _) => {
                self.add(attributes.ino)
            }
            Answer::Created(made) => self.add(made.attributes.ino),
            Answer::Page(page) => page.entries.iter().for_each(|entry| self.add(entry.attributes.ino)),
            _ => {}
        }
    }

    /// Whether the mount may know something else than `change` says. Of files that are open it always has to be told.
    pub(super) fn is_in(&mut self, change: &OutsideChange) -> bool {
        self.turn();
        match change {
            OutsideChange::Name { directory: ino, .. } | OutsideChange::Inode { ino, .. } => {
                self.is_all.contains(&true) || self.newest.contains(ino) || self.older.contains(ino)
            }
            OutsideChange::Anything => true,
        }
    }

    fn add(&mut self, ino: InodeId) {
        match self.newest.len() < MOST {
            true => drop(self.newest.insert(ino)),
            false => self.is_all[0] = true,
        }
    }

    /// Forgets what is too long ago.
    fn turn(&mut self) {
        let passed = self.since.elapsed();
        if passed < KEPT {
            return;
        }
        let is_older_of_use = passed < 2 * KEPT;
        self.older = take(&mut self.newest);
        self.is_all = [false, self.is_all[0]];
        if !is_older_of_use {
            self.older.clear();
            self.is_all[1] = false;
        }
        self.since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn inode(number: u64) -> OutsideChange {
        OutsideChange::Inode { ino: InodeId(number), has_content: true }
    }

    #[tokio::test(start_paused = true)]
    async fn a_mount_is_told_of_what_it_asked_for_of_late() {
        let (mut interest, name) = (Interest::default(), Bytes::from_static(b"n"));
        let named = |number| OutsideChange::Name { directory: InodeId(number), name: name.clone() };
        assert!(interest.is_in(&OutsideChange::Anything));
        interest.ask(&Request::Lookup(InodeId(1), name.clone()));
        interest.ask(&Request::Link(InodeId(2), InodeId(3), name.clone()));
        for change in [named(1), inode(1), inode(2), named(3)] {
            assert!(interest.is_in(&change), "{change:?}");
        }
        assert!(!interest.is_in(&named(4)) && !interest.is_in(&inode(4)));
        tokio::time::advance(KEPT).await;
        interest.ask(&Request::Attributes(InodeId(4)));
        assert!(interest.is_in(&named(1)) && interest.is_in(&inode(4)), "at least for so long");
        tokio::time::advance(KEPT).await;
        assert!(!interest.is_in(&named(1)) && interest.is_in(&inode(4)));
        tokio::time::advance(2 * KEPT).await;
        assert!(!interest.is_in(&inode(4)));
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_for_more_than_is_remembered_is_told_of_everything() {
        let mut interest = Interest::default();
        for number in 0..=MOST as u64 {
            interest.ask(&Request::Attributes(InodeId(number)));
        }
        assert!(interest.is_in(&inode(u64::MAX)) && interest.newest.len() == MOST);
        tokio::time::advance(KEPT).await;
        assert!(interest.is_in(&inode(u64::MAX)), "still");
        tokio::time::advance(KEPT).await;
        assert!(!interest.is_in(&inode(u64::MAX)) && !interest.is_in(&inode(0)));
    }
}
