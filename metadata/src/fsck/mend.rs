//! Mending: one transaction for each damage, which looks again before it changes anything.
//!
//! Records that cannot be read are beyond mending; they are left as they are.

use bytes::Bytes;
use forebay_core::{ErrorKind, FileKind, InodeId, Result};

use super::damage::{Damage, Mended};
use super::lost::give_up;
use super::refuge::{forget_links, lost_and_found};
use crate::records::{Change, Records};
use crate::schema::{Counters, Deletion, Dentry, Loan, encode_plain};

/// Mends one damage.
pub(super) fn mend(change: &mut Change<'_, '_>, damage: &Damage) -> Result<Mended> {
    match damage {
        Damage::DanglingEntry { parent, name, ino } => {
            if change.dentry(*parent, name)?.is_some_and(|entry| entry.ino == *ino) {
                change.delete_dentry(*parent, name)?;
            }
        }
        Damage::WrongType { parent, name, ino, kind } => {
            change.put_dentry(*parent, name, Dentry { ino: *ino, kind: *kind })?;
        }
        Damage::LostInode { ino, subdirectories, .. } => return bring_back(change, *ino, *subdirectories),
        Damage::WrongNames { ino, names } => set_names(change, *ino, names)?,
        Damage::WrongLinkCount { ino, found, .. } => {
            let mut inode = change.inode(*ino)?;
            inode.nlink = *found;
            change.put_inode(*ino, &inode)?;
        }
        Damage::WrongReferences { blob, found, .. } => {
            change.put_references(blob, *found)?;
            if *found == 0 {
                let due_ms = change.shared.now_ms().saturating_add(change.shared.settings.delete_delay_ms);
                change.queue_deletion(due_ms, Deletion { blob: blob.clone(), session: None })?;
            }
        }
        Damage::WrongMember { segment, ino, is_recorded: false } => change.put_member(segment, *ino)?,
        Damage::WrongMember { segment, ino, is_recorded: true } => {
            change.delete(change.keys().member(segment.as_str(), *ino))?;
        }
        Damage::WrongLoan { blob, found, .. } => {
            let moved = change.loan(blob)?.and_then(|loan| loan.moved);
            match found {
                0 => change.delete(change.keys().loan(blob))?,
                _ => change.put_loan(&Loan { blob: blob.clone(), count: *found, moved })?,
            }
        }
        Damage::WrongImportState { ino, .. } => match change.find(*ino)? {
            Some(inode) if inode.kind == FileKind::Directory => drop(change.attach(*ino)?),
            _ => change.delete(change.keys().import(*ino))?,
        },
        Damage::StrayTrash { ino, due_ms } => change.delete(change.keys().trash(*due_ms, *ino))?,
        Damage::WrongQuota { ino, recorded, found: Some(found) } => {
            change.correct_quota(*ino, *found - *recorded)?;
        }
        Damage::WrongQuota { ino, found: None, .. } => change.delete(change.keys().quota(*ino))?,
        Damage::EmptyClaim { key } => change.delete_claim(key.as_str())?,
        Damage::WrongCounters { recorded, found } => correct_counters(change, *recorded, *found)?,
        // Leaks are freed by the round of gc after each pass.
        Damage::LeakedBlob { .. } | Damage::LeakedUploads { .. } => {}
        Damage::DanglingExtent(loss) => return give_up(change, loss),
        Damage::UnreadableRecord { .. } | Damage::BadLayout { .. } | Damage::NotUploaded { .. } => {
            return Ok(Mended::Cannot);
        }
    }
    Ok(Mended::Done)
}

/// Corrects what the volume counts by what a survey found it to be off by: what was mended since has counted on, and taken
/// numbers that nobody may be given again.
fn correct_counters(change: &mut Change<'_, '_>, recorded: Option<Counters>, found: Counters) -> Result<()> {
    let now = match change.counters() {
        Err(error) if error.kind() == ErrorKind::Corrupt => None,
        now => Some(now?),
    };
    let corrected = match (now, recorded) {
        (Some(now), Some(recorded)) => Counters {
            next_ino: now.next_ino.max(found.next_ino),
            inodes: now.inodes.wrapping_add(found.inodes).wrapping_sub(recorded.inodes),
            bytes: now.bytes.wrapping_add(found.bytes).wrapping_sub(recorded.bytes),
        },
        // Without counters nothing was made since.
        _ => found,
    };
    change.put(change.keys().counters(), corrected.encode())
}

/// Gives an inode that nothing leads to a name in `/lost+found`.
fn bring_back(change: &mut Change<'_, '_>, ino: InodeId, subdirectories: u32) -> Result<Mended> {
    let Some(mut inode) = change.find(ino)? else { return Ok(Mended::Nothing) };
    let Some(parent) = lost_and_found(change)? else { return Ok(Mended::Cannot) };
    let name = Bytes::from(format!("inode-{ino}"));
    if change.dentry(parent, &name)?.is_some() {
        return Ok(Mended::Cannot);
    }
    forget_links(change, ino)?;
    let is_directory = inode.kind == FileKind::Directory;
    inode.nlink = if is_directory { 2 + subdirectories } else { 1 };
    (inode.parent, inode.name) = (parent, name.clone());
    inode.ctime = change.now;
    if is_directory {
        // As a renamed directory: what lies at its old prefix is claimed file by file.
        change.claim_subtree(ino, &inode)?;
        let mut above = change.inode(parent)?;
        above.nlink += 1;
        change.put_inode(parent, &above)?;
    }
    change.put_inode(ino, &inode)?;
    change.put_dentry(parent, &name, Dentry { ino, kind: inode.kind })?;
    change.settle_home(ino, &inode)?;
    Ok(Mended::Done)
}

/// Makes an inode remember just the names that lead to it. A directory keeps one.
fn set_names(change: &mut Change<'_, '_>, ino: InodeId, names: &[(InodeId, Bytes)]) -> Result<()> {
    let Some(mut inode) = change.find(ino)? else { return Ok(()) };
    let known = |name: &&(InodeId, Bytes)| name.0 == inode.parent && name.1 == inode.name;
    let Some(first) = names.iter().find(known).or(names.first()).cloned() else { return Ok(()) };
    forget_links(change, ino)?;
    for (parent, name) in names.iter().filter(|name| **name != first) {
        match inode.kind {
            FileKind::Directory => change.delete_dentry(*parent, name)?,
            _ => change.put(change.keys().link(ino, *parent, name), encode_plain(b""))?,
        }
    }
    if inode.kind != FileKind::Directory {
        inode.nlink = names.len() as u32;
    }
    (inode.parent, inode.name) = first;
    change.put_inode(ino, &inode)?;
    change.settle_home(ino, &inode)
}
