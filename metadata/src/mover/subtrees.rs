//! Directories that were renamed while objects lay below them.
//!
//! The rename itself claims whole prefixes, in one commit. Here every directory below is walked: it is attached to its
//! new path, each of its files gets a claim of its own on the key that holds its bytes, and a move. When all queued
//! directories are walked and none was renamed meanwhile, the claims on prefixes go, and that is on disk before anything is
//! written below these. One that cannot be listed keeps them, and no others from being walked.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};

use super::Mover;
use super::deletions::after;
use super::run::{PAGE, Tally};
use crate::kv::Durability;
use crate::records::{Change, Records, is_about_a_record, prefix_with_slash};
use crate::schema::{Dentry, HolderState, Move, Tag};

/// Entries claimed in one transaction.
const STEP: usize = 128;

impl Mover {
    /// Walks what is queued and takes the claims on prefixes back.
    pub(crate) async fn walk_subtrees(&self) -> Result<Tally> {
        // Where that failed before.
        self.sync_freed().await?;
        // In its turn: one that a rename under way has counted, and not queued yet, is counted once more or queued by then.
        let count = |change: &mut Change<'_, '_>| Ok(change.shared.subtree_moves.load(Ordering::SeqCst));
        let renames = self.transact(Durability::Buffered, count).await?;
        let mut tally = Tally::default();
        let queued = self.queued_subtrees(&mut tally).await?;
        if queued.is_empty() {
            return Ok(tally);
        }
        for ino in &queued {
            let walked = self.walk(*ino).await;
            let is_vain = walked.as_ref().is_err_and(is_away);
            tally.add(walked.map(|()| 0));
            if is_vain {
                break;
            }
        }
        if tally.failed > 0 {
            return Ok(tally);
        }
        let count = queued.len();
        let finish = move |change: &mut Change<'_, '_>| {
            if change.shared.subtree_moves.load(Ordering::SeqCst) != renames {
                return Ok(false);
            }
            queued.iter().try_for_each(|ino| take_back(change, *ino))?;
            Ok(true)
        };
        // Who writes there in the meantime waits for that itself.
        self.shared().prefixes_freed.fetch_add(1, Ordering::SeqCst);
        let done = self.transact(Durability::Buffered, finish).await?;
        self.sync_freed().await?;
        Ok(Tally { done: if done { count } else { 0 }, failed: 0 })
    }

    /// Makes sure that prefixes which were let go of are free on disk. The caller is the only one who lets go of any.
    async fn sync_freed(&self) -> Result<()> {
        let freed = self.shared().prefixes_freed.load(Ordering::SeqCst);
        if freed > 0 {
            self.committer().sync().await?;
            self.shared().prefixes_freed.fetch_sub(freed, Ordering::SeqCst);
        }
        Ok(())
    }

    /// The directories to be walked. What cannot be read may be one, unless it is a file's, and is counted.
    async fn queued_subtrees(&self, tally: &mut Tally) -> Result<Vec<InodeId>> {
        let keys = self.shared().keys;
        let (mut start, end) = keys.family(Tag::Move);
        let mut queued = Vec::new();
        loop {
            let (from, to) = (start.clone(), end.clone());
            let page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = page.last() else { return Ok(queued) };
            start = after(last);
            for (key, value) in page {
                let decoded = keys.number_in(&key).map(InodeId).map(|ino| (ino, Move::decode(value)));
                match decoded {
                    Ok((ino, Ok(Move::Subtree { .. }))) => queued.push(ino),
                    Ok((_, Ok(Move::File))) => {}
                    Ok((ino, Err(_))) if self.is_file(ino).await => {}
                    Ok((_, Err(error))) | Err(error) => tally.pass_over(Err(error))?,
                }
            }
        }
    }

    async fn is_file(&self, ino: InodeId) -> bool {
        let inode = self.look(move |look| look.inode(ino)).await;
        inode.is_ok_and(|inode| inode.kind == FileKind::File)
    }

    async fn is_gone(&self, directory: InodeId) -> Result<bool> {
        Ok(self.look(move |look| look.find(directory)).await?.is_none_or(|inode| inode.nlink == 0))
    }

    /// Goes through a directory and all below it, depth first. What leaves it meanwhile by a rename is walked on its
    /// own.
    ///
    /// # Errors
    /// That of the first directory that could not be listed, or record that could not be read; unless the store is away, the
    /// others were walked.
    async fn walk(&self, top: InodeId) -> Result<()> {
        let (mut waiting, mut failed) = (vec![top], None);
        while let Some(directory) = waiting.pop() {
            match self.importer().ensure(directory).await {
                Err(error) if error.kind() == ErrorKind::NotFound && self.is_gone(directory).await? => {
                    continue;
                }
                Err(error) if is_away(&error) => return Err(error),
                Err(error) => {
                    failed.get_or_insert(error);
                    continue;
                }
                Ok(()) => {}
            }
            match self.walk_one(directory, &mut waiting).await {
                Ok(None) => {}
                Ok(Some(error)) => drop(failed.get_or_insert(error)),
                Err(error) if is_about_a_record(&error) => drop(failed.get_or_insert(error)),
                Err(error) => return Err(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Goes through the entries of a directory; the directories among them come to `waiting`. Returns why a file of it could
    /// not be claimed.
    async fn walk_one(&self, directory: InodeId, waiting: &mut Vec<InodeId>) -> Result<Option<Error>> {
        self.transact(Durability::Buffered, move |change| detach(change, directory)).await?;
        let (mut last, mut failed) = (None::<Bytes>, None);
        loop {
            let after = last.take();
            let step = move |change: &mut Change<'_, '_>| claim_files(change, directory, after.as_deref());
            let (entries, unclaimed) = self.transact(Durability::Buffered, step).await?;
            failed = failed.or(unclaimed);
            let below = entries.iter().filter(|(_, entry)| entry.kind == FileKind::Directory);
            waiting.extend(below.map(|(_, entry)| entry.ino));
            last = entries.last().map(|(name, _)| name.clone());
            if entries.len() < STEP {
                return Ok(failed);
            }
        }
    }
}

/// Whether each further listing would wait for the store in vain.
fn is_away(error: &Error) -> bool {
    error.kind() == ErrorKind::Unavailable
}

/// No further objects come into the directory from its old prefix.
fn detach(change: &mut Change<'_, '_>, directory: InodeId) -> Result<()> {
    match change.find(directory)? {
        Some(mut inode) if inode.nlink > 0 => {
            let before = change.import_state(directory)?.prefix;
            let now = change.attach(directory)?;
            match before.filter(|before| now.as_ref() != Some(before)) {
                Some(before) => {
                    // What made it a directory of the bucket goes with the old prefix.
                    if !inode.kept {
                        inode.kept = true;
                        change.put_inode(directory, &inode)?;
                    }
                    change.doom_marker(&prefix_with_slash(&before))
                }
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// A step of the entries of a directory, and why one of these files could not be claimed.
type Claimed = (Vec<(Bytes, Dentry)>, Option<Error>);

/// Claims the keys of a step of files, one by one.
fn claim_files(change: &mut Change<'_, '_>, directory: InodeId, after: Option<&[u8]>) -> Result<Claimed> {
    let entries = change.entries(directory, after, STEP)?;
    let mut failed = None;
    for (_, entry) in entries.iter().filter(|(_, entry)| entry.kind == FileKind::File) {
        let claimed = change.inode(entry.ino).and_then(|inode| change.settle_home(entry.ino, &inode));
        match claimed {
            Err(error) if is_about_a_record(&error) => drop(failed.get_or_insert(error)),
            claimed => claimed?,
        }
    }
    Ok((entries, failed))
}

/// Ends the job of one directory.
fn take_back(change: &mut Change<'_, '_>, ino: InodeId) -> Result<()> {
    let Some(Move::Subtree { prefixes }) = change.movement(ino)? else { return Ok(()) };
    for prefix in prefixes {
        let claim = change.claim(&prefix)?.map(|claim| claim.state);
        if claim == Some(HolderState::Subtree(ino)) {
            change.delete_claim(&prefix)?;
            // That of a directory which is made there by now goes, too: the tree knows it without.
            change.doom_marker(&prefix)?;
        }
    }
    change.delete(change.keys().movement(ino))
}
