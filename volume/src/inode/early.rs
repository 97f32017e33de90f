//! What left memory for an owned blob before it was committed. It may be written over, cut off or removed by then: no commit names
//! the blob in that case, nor does anybody else, for bytes are shared and moved once they are committed.

use std::collections::BTreeSet;

use forebay_core::{Blob, FileLayout, ObjectKey};

use super::OpenInode;

impl OpenInode {
    /// Notes a blob that is about to be named by the content. What is staged on this host's disk goes by itself.
    pub(super) fn note_early(&self, blob: &Blob) {
        if blob.is_owned() && blob.staged_on().is_none() {
            self.early.lock().push(blob.key.clone());
        }
    }

    /// Has those deleted that the content names no more, and no commit has. The caller has the turn, so that none is being made.
    pub(super) fn discard_superseded(&self) {
        let mut early = self.early.lock();
        if early.is_empty() {
            return;
        }
        let all = std::mem::take(&mut *early);
        let names: BTreeSet<&str> = all.iter().map(ObjectKey::as_str).collect();
        let (committed, named): (BTreeSet<ObjectKey>, BTreeSet<ObjectKey>) = self.look(|content| {
            let at = |layout: &FileLayout| layout.blobs_at(&names).map(|blob| blob.key.clone()).collect();
            (at(content.base()), at(content.layout()))
        });
        let (kept, gone) =
            all.into_iter().filter(|key| !committed.contains(key)).partition(|key| named.contains(key));
        *early = kept;
        self.store.discards.add(gone);
    }

    /// Has all of them deleted that no commit has named: what is not committed never will be.
    pub(super) fn discard_early(&self) {
        let early = std::mem::take(&mut *self.early.lock());
        // The tree keeps those that files refer to.
        self.store.discards.add(early);
    }
}
