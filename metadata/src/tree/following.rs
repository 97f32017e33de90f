//! The files that follow one in its directory, for readers who take them in order.

use forebay_core::{FileKind, FileLayout, InodeId, Result};

use crate::records::{Look, Records};
use crate::schema::{Inode, Tag};

/// Up to `limit` files of the directory of `ino`, with numbers above it, in their order. Those that a look would have to
/// fetch further records for are left out, and so is what comes after numbers of other directories.
pub(super) fn files_after(
    look: &Look<'_, '_>,
    ino: InodeId,
    limit: usize,
) -> Result<Vec<(InodeId, FileLayout)>> {
    let Some(first) = look.find(ino)? else { return Ok(Vec::new()) };
    let end = look.keys.family(Tag::Inode).1;
    let mut files = Vec::new();
    for (key, value) in look.reads().scan(&look.keys.inode(InodeId(ino.0.saturating_add(1))), &end, limit)? {
        let (next, inode) = (InodeId(look.keys.number_in(&key)?), Inode::decode(value)?);
        let is_here = inode.parent == first.parent && inode.nlink > 0;
        if is_here && inode.kind == FileKind::File && inode.further == 0 {
            files.push((next, look.layout(next, &inode)?));
        }
    }
    Ok(files)
}
