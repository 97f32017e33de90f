//! Copies of files and trees that share all bytes with what they were copied from: no byte is read or written.
//!
//! A file is cloned as it is at one moment. A tree is cloned entry by entry: what changes in it meanwhile may or may not
//! be in the copy. Owners, modes, times and extended attributes are kept; of hard links each becomes a file of its own.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Attributes, Error, ErrorKind, FileKind, InodeId, Result};
use forebay_metadata::tree::{
    Existing, Lookup, NewInode, OutsideChange, SetAttributes, XattrMode, resolve, walk,
};
use futures::StreamExt;
use serde::{Deserialize, Serialize};

use crate::Volume;

/// Attempts to share the bytes of a file that is being written or moved, and what the next waits longer.
const ATTEMPTS: u32 = 10;
const WAIT: Duration = Duration::from_millis(50);

/// What a clone made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cloned {
    /// Directories.
    pub directories: u64,
    /// Everything else.
    pub files: u64,
    /// Bytes that the files share with those they were cloned from.
    pub bytes: u64,
}

/// Makes `to`, which must not exist, a copy of the file or directory `from`. Both are paths from the volume's root.
///
/// # Errors
/// `NotFound`, `Exists`, `ReadOnly`; `Invalid` for a directory into itself; `Conflict` for a file that is written all
/// the time. What was made until then stays.
pub async fn clone(volume: &Volume, from: &str, to: &str) -> Result<Cloned> {
    let tree = &**volume.tree();
    let source = resolve(tree, from).await?;
    let to = to.trim_end_matches('/');
    let (directory, name) = to.rsplit_once('/').unwrap_or(("", to));
    let parent = resolve(tree, directory).await?;
    if let Lookup::Found(_) = tree.lookup(parent.ino, name.as_bytes()).await? {
        return Err(Error::new(ErrorKind::Exists, format!("`{to}` exists"))
            .with_hint("name a path that does not exist yet"));
    }
    if source.kind == FileKind::Directory {
        check_outside(volume, source.ino, parent.ino).await?;
    }
    let mut made = Cloned::default();
    let top = copy(volume, &source, (parent.ino, name.as_bytes()), &mut made).await?;
    if source.kind == FileKind::Directory {
        clone_below(volume, source.ino, top, &mut made).await?;
        finish(volume, &source, top).await?;
    }
    // The kernel may know that there was no such name.
    let name = Bytes::copy_from_slice(name.as_bytes());
    tree.outside().tell(OutsideChange { directory: parent.ino, name });
    tree.outside().heard().await;
    volume.sync_names().await?;
    Ok(made)
}

/// Refuses to clone a directory into itself, which would never end.
async fn check_outside(volume: &Volume, source: InodeId, mut at: InodeId) -> Result<()> {
    loop {
        if at == source {
            return Err(Error::invalid("a directory cannot be cloned into itself")
                .with_hint("name a path outside of it"));
        }
        if at == InodeId::ROOT {
            return Ok(());
        }
        at = volume.tree().parent(at).await?;
    }
}

/// Everything below `source`. Holds one number for every directory.
async fn clone_below(volume: &Volume, source: InodeId, top: InodeId, made: &mut Cloned) -> Result<()> {
    let mut directories: HashMap<Bytes, (Attributes, InodeId)> = HashMap::new();
    let mut walked = walk(&**volume.tree(), source);
    while let Some(entry) = walked.next().await.transpose()? {
        let (above, name) = match entry.path.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (entry.path.slice(..slash), entry.path.slice(slash + 1..)),
            None => (Bytes::new(), entry.path.clone()),
        };
        let parent =
            if above.is_empty() { top } else { directories.get(&above).map_or(top, |(_, ino)| *ino) };
        let ino = copy(volume, &entry.attributes, (parent, &name), made).await?;
        if entry.attributes.kind == FileKind::Directory {
            directories.insert(entry.path, (entry.attributes, ino));
        }
    }
    drop(walked);
    // Times of directories last: making entries changes them.
    for (attributes, ino) in directories.values() {
        finish(volume, attributes, *ino).await?;
    }
    Ok(())
}

/// One entry, and all that it is.
async fn copy(
    volume: &Volume,
    from: &Attributes,
    to: (InodeId, &[u8]),
    made: &mut Cloned,
) -> Result<InodeId> {
    let tree = volume.tree();
    let target = match from.kind {
        FileKind::Symlink => tree.read_link(from.ino).await?,
        _ => Bytes::new(),
    };
    let (mode, uid, gid, rdev) = (from.mode, from.uid, from.gid, from.rdev);
    let new = NewInode { kind: from.kind, mode, umask: 0, uid, gid, rdev, target };
    let (copy, _) = tree.create(to.0, to.1, new, Existing::Refuse).await?;
    if from.kind == FileKind::Directory {
        made.directories += 1;
    } else {
        made.files += 1;
    }
    // What it inherited from its directory is not the source's.
    for name in tree.xattrs(copy.ino).await? {
        tree.remove_xattr(copy.ino, &name).await?;
    }
    for name in tree.xattrs(from.ino).await? {
        let value = tree.xattr(from.ino, &name).await?;
        tree.set_xattr(copy.ino, &name, value, XattrMode::Set).await?;
    }
    if from.kind == FileKind::File {
        made.bytes += share(volume, from, &copy).await?;
    }
    finish(volume, from, copy.ino).await?;
    Ok(copy.ino)
}

/// Gives the new file `copy` the bytes of `from`. Returns how many.
async fn share(volume: &Volume, from: &Attributes, copy: &Attributes) -> Result<u64> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        volume.commit(from.ino).await?;
        let (layout, _) = volume.tree().layout(from.ino).await?;
        let size = layout.size();
        if size == 0 {
            return Ok(0);
        }
        let shared =
            volume.tree().commit_shared(copy.ino, copy.generation, layout, from.mtime, from.ino).await;
        match shared {
            Err(error) if error.kind() == ErrorKind::Conflict && attempt < ATTEMPTS => {
                volume.clock().sleep(WAIT * attempt).await;
            }
            Err(error) => return Err(error),
            Ok(_) => return Ok(size),
        }
    }
}

/// Owner, mode and times as they were.
async fn finish(volume: &Volume, from: &Attributes, ino: InodeId) -> Result<()> {
    let changes = SetAttributes {
        mode: Some(from.mode),
        uid: Some(from.uid),
        gid: Some(from.gid),
        atime: Some(from.atime),
        mtime: Some(from.mtime),
    };
    volume.tree().set_attributes(ino, changes).await.map(drop)
}
