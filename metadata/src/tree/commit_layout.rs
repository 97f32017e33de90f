//! Giving a file new content.

use forebay_core::{Attributes, Blob, Error, ErrorKind, FileLayout, InodeId, Result, Timestamp};

use crate::records::{Change, Records};
use crate::schema::{Inode, Intent};

/// What [`super::Tree::commit_layout`] and [`super::Tree::relocate`] are told.
#[derive(Debug, Clone)]
pub(super) struct Content {
    /// The generation that the caller started from.
    pub(super) expected: u64,
    pub(super) layout: FileLayout,
    /// When the content changed; `None` when only its place did.
    pub(super) mtime: Option<Timestamp>,
}

/// As [`super::Tree::commit_layout`].
pub(super) fn commit_layout(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    content: &Content,
) -> Result<Attributes> {
    let mut inode = change.file(ino)?;
    let conflict = |why: &str| Err(Error::new(ErrorKind::Conflict, format!("inode {ino} {why}")));
    if inode.generation != content.expected {
        return conflict(&format!("has generation {}, not {}", inode.generation, content.expected));
    }
    // The mover's own intents are its to end: its copy may be on the way.
    let intent = change.intent(ino)?.filter(|intent| intent.copies.is_none());
    let old = change.layout(ino, &inode)?;
    let Some(home) = new_home(&inode, &old, intent.as_ref(), content) else {
        return conflict("was moved: its layout is based on an object that is not its own any more");
    };
    change.replace_layout(ino, &mut inode, &content.layout)?;
    if let Some(intent) = &intent {
        change.end_intent(ino, intent)?;
    }
    let before = std::mem::replace(&mut inode.home, home);
    if let Some(before) = before {
        give_up(change, (ino, &mut inode), &before, &content.layout)?;
    }
    if let Some(mtime) = content.mtime {
        inode.generation += 1;
        inode.mtime = mtime;
        // The change was made when the content was, not now; utimes may have set an mtime that is still to come.
        inode.ctime = inode.ctime.max(mtime.min(change.now));
    }
    change.put_inode(ino, &inode)?;
    change.settle_home(ino, &inode)?;
    Ok(inode.attributes(ino))
}

/// The plain object that is the file's after the commit; `None` when the layout uses one that it may not use.
fn new_home(
    inode: &Inode,
    old: &FileLayout,
    intent: Option<&Intent>,
    content: &Content,
) -> Option<Option<Blob>> {
    let mut written = None;
    for blob in content.layout.blobs().filter(|blob| !blob.is_owned()) {
        let is_known = inode.home.as_ref() == Some(blob) || old.blobs().any(|known| known == blob);
        if !is_known {
            let is_placed = intent.is_some_and(|intent| intent.key == blob.key);
            if !is_placed || written.is_some_and(|other| other != blob) {
                return None;
            }
            written = Some(blob);
        }
    }
    Some(written.or(inode.home.as_ref()).cloned())
}

/// Queues the plain object that was the file's for deletion, unless it was replaced in place, is still used, or stands
/// at the file's own path, where it stays until the next whole content replaces it: other tools never see a gap.
fn give_up(
    change: &mut Change<'_, '_>,
    (ino, inode): (InodeId, &mut Inode),
    before: &Blob,
    layout: &FileLayout,
) -> Result<()> {
    let is_used = layout.blobs().any(|blob| blob == before);
    let home = inode.home.as_ref();
    if home == Some(before) {
        let stands = inode.nlink > 0 && change.key_of(ino, inode)?.as_deref() == Some(before.key.as_str());
        if is_used || stands {
            return Ok(());
        }
        inode.home = None;
        return change.doom_plain(before);
    }
    if home.is_some_and(|home| home.key == before.key) {
        return Ok(());
    }
    if is_used {
        let message = format!("inode {ino} cannot use the object `{}` beside one at another key", before.key);
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    change.doom_plain(before)
}
