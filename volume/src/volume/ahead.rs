//! Bringing in blocks ahead of their readers: what is under way is bounded, and what is dropped its reader fetches.

use std::sync::Arc;

use forebay_core::{BlockKey, InodeId};
use futures::stream::{self, StreamExt};

use super::Volume;
use crate::prefetch::directory::SMALL_FILE;

/// Blocks of all open files together that are being brought in ahead of their readers, and of the small files of one window.
/// 48 blocks of 4 MiB keep a 25 Gbit/s link busy where the store gives each 85 MB/s; past that, reading ahead of more files only
/// evicts what others still need.
pub(super) const FILLS_AT_ONCE: usize = 48;
/// Windows of small files that are being brought in at once: two for each walk that is told apart. A reader's progress asks
/// for the next one, whether or not the last one came.
pub(super) const WINDOWS_AT_ONCE: usize = 64;

impl Volume {
    /// Brings a block in without waiting for it, unless it is not `wanted` any more when its turn comes; dropped when enough of them
    /// are under way.
    pub(crate) fn fill_ahead(&self, key: BlockKey, wanted: impl FnOnce() -> bool + Send + 'static) {
        let Ok(permit) = self.fills.clone().try_acquire_owned() else { return };
        let blocks = self.store.fetch.blocks.clone();
        self.tasks.spawn("fill-ahead", async move {
            // The reader that comes to this block asks again and gets the error.
            if wanted()
                && let Err(error) = blocks.fetch_ahead(&key).await
            {
                tracing::debug!(%error, "could not read ahead");
            }
            drop(permit);
        });
    }

    /// Notes that a small file is being read, and brings in those that its reader comes to next.
    pub(crate) fn walk_on(self: &Arc<Self>, ino: InodeId) {
        // First: a walk that has asked waits for its answer.
        let Ok(permit) = self.windows.clone().try_acquire_owned() else { return };
        let Some(ask) = self.walks.lock().observe(ino) else { return };
        let volume = self.clone();
        self.tasks.spawn("files-ahead", async move {
            let mut files =
                volume.store.tree.files_after(ask.after, ask.files).await.unwrap_or_else(|error| {
                    tracing::debug!(%error, "could not look ahead");
                    Vec::new()
                });
            files.retain(|(_, layout)| layout.size() <= SMALL_FILE);
            let sizes = files.iter().map(|(ino, layout)| (*ino, layout.size()));
            let taken = volume.walks.lock().answer(ask, sizes);
            files.truncate(taken);
            let fetch = &volume.store.fetch;
            let keys = files.iter().flat_map(|(_, layout)| fetch.keys(layout, 0..layout.size()));
            let bring = async |key: BlockKey| {
                // The reader that comes to this file asks again and gets the error.
                if let Err(error) = fetch.blocks.fetch_ahead(&key).await {
                    tracing::debug!(%error, "could not read a file ahead");
                }
            };
            stream::iter(keys).for_each_concurrent(FILLS_AT_ONCE, bring).await;
            drop(permit);
        });
    }
}
