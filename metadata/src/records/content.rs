//! What a file consists of, and which owned blobs are referred to.

use std::collections::BTreeMap;

use forebay_core::{Blob, FileLayout, InodeId, ObjectKey, Result, Version};

use super::{Change, Records};
use crate::schema::{Deletion, Inode, References, encode_extents, split};

impl Change<'_, '_> {
    /// Replaces a file's layout and size; references, further extents and counts follow. The caller puts the inode.
    pub(crate) fn replace_layout(
        &mut self,
        ino: InodeId,
        inode: &mut Inode,
        layout: &FileLayout,
    ) -> Result<()> {
        let old = self.layout(ino, inode)?;
        self.change_references(&old, layout)?;
        let (head, further) = split(layout.extents());
        for (n, chunk) in (0u32..).zip(&further) {
            self.put(self.keys().extents(ino, n), encode_extents(chunk))?;
        }
        let further = further.len() as u32;
        for n in further..inode.further {
            self.delete(self.keys().extents(ino, n))?;
        }
        self.count(0, layout.size() as i64 - inode.size as i64)?;
        inode.size = layout.size();
        inode.extents = head.to_vec();
        inode.further = further;
        Ok(())
    }

    /// Counts the inode in at the owned blobs that only `new` has, and out at those that only `old` has. A blob that
    /// nothing refers to any more is queued for deletion.
    fn change_references(&mut self, old: &FileLayout, new: &FileLayout) -> Result<()> {
        let (old, new) = (owned(old), owned(new));
        for (key, blob) in &new {
            if !old.contains_key(key) {
                let count = self.references(key)?.map_or(0, |record| record.count);
                self.put_references(blob, count + 1)?;
                self.delete(self.keys().deletion(Deletion::UNCOMMITTED_MS, key))?;
            }
        }
        for (key, blob) in &old {
            if new.contains_key(key) {
                continue;
            }
            let count = self.references(key)?.map_or(0, |record| record.count);
            self.put_references(blob, count.saturating_sub(1))?;
            if count <= 1 {
                let due_ms = self.shared.now_ms().saturating_add(self.shared.settings.delete_delay_ms);
                self.queue_deletion(due_ms, Deletion { blob: (*blob).clone(), session: None })?;
            }
        }
        Ok(())
    }

    /// Notes that an owned blob is about to be written. The record of its deletion says by whom, and goes when a layout
    /// refers to it.
    pub(crate) fn note_uncommitted(&mut self, key: &ObjectKey) -> Result<()> {
        let blob = Blob { key: key.clone(), version: Version::new(""), size: 0 };
        let session = Some(self.shared.session);
        self.queue_deletion(Deletion::UNCOMMITTED_MS, Deletion { blob, session })
    }

    /// Notes how many inodes refer to an owned blob.
    pub(crate) fn put_references(&mut self, blob: &Blob, count: u64) -> Result<()> {
        let record = References { key: blob.key.clone(), count };
        self.put(self.keys().references(blob.key.as_str()), record.encode())
    }
}

/// The owned blobs of a layout, each once.
fn owned(layout: &FileLayout) -> BTreeMap<&str, &Blob> {
    layout.blobs().filter(|blob| blob.is_owned()).map(|blob| (blob.key.as_str(), blob)).collect()
}
