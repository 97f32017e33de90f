//! Writes to plain objects of which it is not known whether they happened.

use forebay_core::{FileLayout, InodeId, Result};
use forebay_io::object::ObjectInfo;

use super::Mover;
use super::deletions::after;
use super::moves::{discard, is_still};
use super::run::{PAGE, Tally};
use crate::kv::Durability;
use crate::records::{Change, Records};
use crate::schema::{Inode, Intent, Tag};

impl Mover {
    /// Settles every intent there is: at start-up, when nobody can be writing.
    pub(crate) async fn settle_all(&self) -> Result<()> {
        loop {
            let keys = self.shared().keys;
            let (start, end) = keys.family(Tag::Intent);
            let found = self.look(move |look| look.reads().scan(&start, &end, PAGE)).await?;
            if found.is_empty() {
                return Ok(());
            }
            for (key, _) in found {
                self.settle_intent(InodeId(keys.number_in(&key)?)).await?;
            }
        }
    }

    /// Settles the intents of inodes that are gone or in the trash, which nobody is writing.
    pub(super) async fn settle_abandoned(&self) -> Result<Tally> {
        let keys = self.shared().keys;
        let (mut start, end) = keys.family(Tag::Intent);
        let mut tally = Tally::default();
        loop {
            let _turn = self.turn().await;
            let (from, to) = (start.clone(), end.clone());
            let page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = page.last() else { return Ok(tally) };
            start = after(last);
            for (key, _) in page {
                let ino = InodeId(keys.number_in(&key)?);
                let inode = self.look(move |look| look.find(ino)).await?;
                if inode.is_none_or(|inode| inode.nlink == 0) && self.shared().openers(ino) == 0 {
                    tally.add(self.settle_intent(ino).await.map(|()| 1));
                }
            }
        }
    }

    /// Finds out what came of an inode's intent and ends it. The caller holds the turn, since a copy may be on its way.
    pub(super) async fn settle_intent(&self, ino: InodeId) -> Result<()> {
        let intent = self.look(move |look| look.intent(ino)).await?;
        let Some(intent) = intent else { return Ok(()) };
        let found = self.bucket().head(&intent.key).await?;
        let settle = move |change: &mut Change<'_, '_>| settle(change, ino, &intent, found.as_ref());
        self.transact(Durability::Buffered, settle).await
    }

    /// As `settle_intent`, for a writer that asks for a place.
    pub(crate) async fn settle(&self, ino: InodeId) -> Result<()> {
        let _turn = self.turn().await;
        self.settle_intent(ino).await
    }
}

/// The version from before means that nothing happened. Another one is, after a writer's intent, the file's content
/// now, whoever wrote it, unless the file has newer content elsewhere; after the mover's, the copy if it has the size of
/// one.
fn settle(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    intent: &Intent,
    found: Option<&ObjectInfo>,
) -> Result<()> {
    if change.intent(ino)?.as_ref() != Some(intent) {
        return Ok(());
    }
    change.end_intent(ino, intent)?;
    let found = found.filter(|found| Some(&found.version) != intent.replaces.as_ref());
    let inode = change.find(ino)?;
    match (found, inode, &intent.copies) {
        (Some(found), Some(inode), None) if change.outlives(ino, &inode, found)? => {
            change.stand(ino, inode, found.blob())
        }
        (Some(found), Some(inode), None) => adopt(change, ino, inode, found),
        // An owned copy that nothing refers to is queued for deletion already.
        (Some(found), inode, Some(source)) if !found.blob().is_owned() && found.size == source.size => {
            match inode {
                Some(inode) if is_still(change, ino, &inode, (source, &intent.key))? => {
                    adopt(change, ino, inode, found)
                }
                inode => discard(change, ino, inode, &found.blob()),
            }
        }
        (_, Some(inode), _) => change.settle_home(ino, &inode),
        _ => Ok(()),
    }
}

fn adopt(change: &mut Change<'_, '_>, ino: InodeId, mut inode: Inode, found: &ObjectInfo) -> Result<()> {
    let layout = FileLayout::of_blob(found.blob());
    let before = change.replace_layout((ino, &mut inode), &layout, Some(found.blob()))?;
    if let Some(before) = before.filter(|before| before.key != found.key) {
        change.doom_plain(&before)?;
    }
    inode.generation += 1;
    inode.mtime = found.modified;
    inode.ctime = change.now;
    if inode.nlink == 0 && change.shared.openers(ino) == 0 {
        // In the trash, or on its way there: the path is not its own any more.
        change.part_with_home(ino, &mut inode)?;
    }
    change.put_inode(ino, &inode)?;
    change.settle_home(ino, &inode)
}
