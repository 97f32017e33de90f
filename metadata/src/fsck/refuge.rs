//! `/lost+found`: where inodes go that nothing leads to, and files that lost bytes.

use bytes::Bytes;
use forebay_core::{FileKind, InodeId, Result};

use crate::records::{Change, Charge, Records, usage_of};
use crate::schema::{Dentry, ImportState, Inode, Tag};

/// The name of the directory in the root.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// The directory, made if need be; `None` when something else has its name.
pub(super) fn lost_and_found(change: &mut Change<'_, '_>) -> Result<Option<InodeId>> {
    if let Some(entry) = change.dentry(InodeId::ROOT, LOST_AND_FOUND)? {
        return Ok(Some(entry.ino).filter(|_| entry.kind == FileKind::Directory));
    }
    let mut root = change.directory(InodeId::ROOT)?;
    let ino = change.next_ino(&mut root)?;
    let mut made = Inode::new(FileKind::Directory, 0o700, (root.uid, root.gid), change.now);
    made.name = Bytes::from_static(LOST_AND_FOUND);
    made.kept = true;
    change.charge(InodeId::ROOT, usage_of(&made), Charge::Forced)?;
    change.put_inode(ino, &made)?;
    change.put_dentry(InodeId::ROOT, LOST_AND_FOUND, Dentry { ino, kind: FileKind::Directory })?;
    root.nlink += 1;
    change.put_changed_directory(InodeId::ROOT, root)?;
    change.put_import_state(ino, &ImportState::default())?;
    change.attach(ino)?;
    change.count(1, 0)?;
    Ok(Some(ino))
}

/// Forgets all names of an inode but the first. Their entries are left to the caller.
pub(super) fn forget_links(change: &mut Change<'_, '_>, ino: InodeId) -> Result<()> {
    /// Names taken away in one step.
    const STEP: usize = 256;
    let (start, end) = change.keys().below(Tag::Link, ino.0);
    loop {
        let some = change.reads().scan(&start, &end, STEP)?;
        let is_last = some.len() < STEP;
        some.into_iter().try_for_each(|(key, _)| change.delete(key))?;
        if is_last {
            return Ok(());
        }
    }
}
