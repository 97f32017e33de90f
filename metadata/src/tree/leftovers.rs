//! What other sessions leave: those of before as the tree is opened, those of other mounts when they end.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use forebay_core::Result;
use futures::stream::{self, StreamExt, TryStreamExt};
use tracing::warn;

use super::{LocalTree, Tree};
use crate::kv::{Durability, Pair};
use crate::records::{Change, Records, asking_as, pass_over, readable};
use crate::schema::{SessionRecord, Tag, UploadRecord};

/// Inode numbers, and generations, that are passed over where some may have been given out and lost: more than can be given out in the second or
/// so before what was answered is durable.
const NUMBERS_LOST: u64 = 1 << 28;
/// Records between two looks for more.
const PAGE: usize = 256;
/// Records that are seen to at once: each may take requests to the store.
const AT_ONCE: usize = 32;

impl LocalTree {
    /// Frees what earlier sessions had open: this is the only active one, so they are dead. What their clones left, which may
    /// be much, the mover frees. What cannot be read stays, and refuses no mount.
    pub(super) async fn end_dead_sessions(&self) -> Result<()> {
        self.each_of(Tag::Orphan, |(key, _)| self.free_left_open(key)).await?;
        self.each_of(Tag::Session, |record| self.end_dead_session(record)).await
    }

    /// Does `work` for the records of a family.
    async fn each_of<F: Future<Output = Result<()>>>(
        &self,
        tag: Tag,
        work: impl Fn(Pair) -> F,
    ) -> Result<()> {
        let (mut start, end) = self.shared.keys.family(tag);
        loop {
            let (from, to) = (start.clone(), end.clone());
            let found = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = found.last() else { return Ok(()) };
            start = [&last[..], &[0]].concat().into();
            side_by_side(found, &work).await?;
        }
    }

    /// Ends an inode without a name that a dead session had open.
    async fn free_left_open(&self, key: Bytes) -> Result<()> {
        match readable(self.shared.keys.number_and_ino_in(&key)) {
            Some((session, ino)) => {
                self.transact(Durability::Buffered, move |change| change.free_orphan(session, ino)).await
            }
            None => Ok(()),
        }
    }

    /// Gives guests of the process that served this tree before time to come. Of what it told them last, some may be lost: the
    /// inode numbers of that are nobody's from now on.
    pub(super) async fn expect_guests(&self) -> Result<()> {
        if !self.shared.settings.serves {
            return Ok(());
        }
        let (mut start, end) = self.shared.keys.family(Tag::Session);
        loop {
            let (from, to) = (start.clone(), end.clone());
            let found = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = found.last() else { break };
            start = [&last[..], &[0]].concat().into();
            for (key, value) in found.into_iter().filter(|(key, _)| !self.shared.keys.is_upload(key)) {
                let record = readable(SessionRecord::decode(value)).filter(|record| record.is_guest);
                if let (Some(_), Some(session)) = (record, readable(self.shared.keys.number_in(&key))) {
                    self.shared.guests.expect(session);
                }
            }
        }
        if !self.shared.guests.expected().is_empty() {
            // Before any is given out: the next process to be lost may lose what it had given out as well.
            let skip = |change: &mut Change<'_, '_>| {
                let mut counters = change.counters()?;
                counters.next_ino += NUMBERS_LOST;
                change.put(change.keys().counters(), counters.encode())?;
                Ok(counters.next_ino)
            };
            let first = self.transact(Durability::Durable, skip).await?;
            self.shared.first_number.store(first, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Ends a session of another mount: what it was writing is in doubt, what it wrote and did not commit is garbage.
    pub(crate) async fn end_guest(&self, session: u64) -> Result<()> {
        self.forget_guest(session);
        self.shared.locks.end(session);
        for ino in self.shared.holds.of(session) {
            self.let_go(ino, session).await?;
        }
        for ino in self.shared.guests.opened_by(session) {
            pass_over(asking_as(session, self.closed(ino)).await)?;
        }
        let keys = self.shared.keys;
        let (from, to) = keys.below(Tag::Session, session);
        let found = self.look(move |look| look.reads().scan(&from, &to, usize::MAX)).await?;
        side_by_side(found, |record| self.end_dead_session(record)).await
    }

    /// Ends sessions that did not come.
    pub(crate) async fn end_missing_guests(&self) -> Result<()> {
        for session in self.shared.guests.forget_missing() {
            warn!(
                session = format!("{session:016x}"),
                "a mount that was served before did not come back: what it was writing is given up"
            );
            self.end_guest(session).await?;
        }
        Ok(())
    }

    /// Forgets a session that is not this one, or an upload of such a one, which is aborted first.
    async fn end_dead_session(&self, (key, value): Pair) -> Result<()> {
        let keys = self.shared.keys;
        if readable(keys.number_in(&key)).is_none_or(|session| self.shared.is_living(session)) {
            return Ok(());
        }
        if let (true, Some(mover)) = (keys.is_upload(&key), &self.mover) {
            let upload = UploadRecord::decode(value)?;
            if let Err(error) = mover.bucket().abort_upload(&upload.key, &upload.id).await {
                warn!(key = %upload.key, %error, "an upload of a dead session is left for the next start");
                return Ok(());
            }
        }
        self.transact(Durability::Buffered, move |change| change.delete(key.clone())).await
    }
}

/// Does `work` for records, some at once, and passes over those that cannot be read.
async fn side_by_side<F: Future<Output = Result<()>>>(
    records: Vec<Pair>,
    work: impl Fn(Pair) -> F,
) -> Result<()> {
    let done = stream::iter(records).map(work).buffer_unordered(AT_ONCE);
    done.map(pass_over).try_for_each(async |_| Ok(())).await
}
