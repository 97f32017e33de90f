//! Owned blobs that were put, or may have been, and that no commit is going to name.

use forebay_core::{Blob, ObjectKey, Result, Version};

use super::LocalTree;
use crate::mover::LONGEST_MS;
use crate::records::Records;
use crate::schema::Deletion;

impl LocalTree {
    /// Has such blobs deleted, once nothing can come any more of what the store did not answer. One that a file refers to after
    /// all, or did, goes as any other.
    pub async fn discard(&self, keys: Vec<ObjectKey>) -> Result<()> {
        self.change(move |change| {
            let due_ms = change.shared.now_ms().saturating_add(LONGEST_MS);
            let names: Vec<_> = keys.iter().map(|key| change.keys().references(key.as_str())).collect();
            let names: Vec<&[u8]> = names.iter().map(|name| &name[..]).collect();
            let referred = change.reads().get_many(&names)?;
            for (key, _) in keys.iter().zip(referred).filter(|(_, referred)| referred.is_none()) {
                let blob = Blob { key: key.clone(), version: Version::new(""), size: 0 };
                change.queue_deletion(due_ms, Deletion { blob, session: None })?;
            }
            Ok(())
        })
        .await
    }
}
