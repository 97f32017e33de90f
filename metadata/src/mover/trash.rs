//! What was in the trash long enough.

use forebay_core::{InodeId, Result};

use super::Mover;
use super::deletions::after;
use super::run::{PAGE, Tally};
use crate::kv::Durability;
use crate::records::{Change, Records, TrashId, readable};
use crate::schema::Tag;

impl Mover {
    /// Frees what is past its time, a page at a time. Its bytes follow as those of any file that is gone.
    pub(crate) async fn purge_trash(&self) -> Result<Tally> {
        let keys = self.shared().keys;
        let (mut start, _) = keys.family(Tag::Trash);
        let end = keys.trash(self.shared().now_ms().saturating_add(1), InodeId(0));
        let mut tally = Tally::default();
        loop {
            let (from, to) = (start.clone(), end.clone());
            let page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = page.last() else { return Ok(tally) };
            start = after(last);
            for (key, _) in page {
                let Some((due_ms, ino)) = readable(keys.number_and_ino_in(&key)) else {
                    tally.failed += 1;
                    continue;
                };
                let purge = move |change: &mut Change<'_, '_>| change.purge(TrashId { due_ms, ino });
                tally.add(self.transact(Durability::Buffered, purge).await.map(usize::from));
            }
            if self.is_stopping() {
                return Ok(tally);
            }
        }
    }
}
