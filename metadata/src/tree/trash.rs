//! Looking into the trash, bringing back, emptying. Whoever deletes puts there what can be brought back
//! ([`crate::records`]), and the mover frees what is past its time.

use bytes::Bytes;
use forebay_core::{Attributes, InodeId, Result, Timestamp};

use super::local::LocalTree;
use crate::kv::Durability;
use crate::records::{Look, Records, TrashId, path_or_name};
use crate::schema::{Inode, Tag};

/// Something deleted that can be brought back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trashed {
    /// Names it, and tells until when.
    pub id: TrashId,
    /// Where it was: names from the root, joined by slashes. A directory on the way that was renamed since has its
    /// new name; one that is gone for good has the name `?`, and what was above it is left out.
    pub path: Bytes,
    /// What it is.
    pub attributes: Attributes,
    /// When it was deleted.
    pub deleted: Timestamp,
}

impl LocalTree {
    /// Up to `limit` of what is in the trash, after `after` in the order of their times.
    pub async fn trash(&self, after: Option<TrashId>, limit: usize) -> Result<Vec<Trashed>> {
        let keys = self.shared.keys;
        let (first, end) = keys.family(Tag::Trash);
        let start = match after {
            Some(id) => [&keys.trash(id.due_ms, id.ino)[..], &[0]].concat().into(),
            None => first,
        };
        self.look(move |look| {
            let mut found = Vec::new();
            for (key, _) in look.reads().scan(&start, &end, limit)? {
                let (due_ms, ino) = keys.number_and_ino_in(&key)?;
                // What is missing here is for fsck.
                if let Some(inode) = look.find(ino)? {
                    found.push(trashed(look, TrashId { due_ms, ino }, &inode)?);
                }
            }
            Ok(found)
        })
        .await
    }

    /// Brings something back as `name` in `parent`, with all that it had. A file becomes an object at its path again,
    /// by a copy inside the store.
    ///
    /// # Errors
    /// `NotFound` when it is not in the trash any more; `Exists` when the name is taken.
    pub async fn restore(&self, id: TrashId, parent: InodeId, name: &[u8]) -> Result<Attributes> {
        self.check_writable()?;
        self.ensure_listed(parent).await?;
        let name = Bytes::copy_from_slice(name);
        self.change(move |change| change.restore(id, parent, &name)).await
    }

    /// Frees something in the trash now. Returns whether it is gone: not so while somebody reads it.
    pub async fn purge(&self, id: TrashId) -> Result<bool> {
        self.check_writable()?;
        self.transact(Durability::Buffered, move |change| change.purge(id)).await
    }
}

fn trashed(look: &Look<'_, '_>, id: TrashId, inode: &Inode) -> Result<Trashed> {
    let path = path_or_name(look, inode)?;
    let attributes = inode.attributes(id.ino);
    Ok(Trashed { id, path, deleted: attributes.ctime, attributes })
}
