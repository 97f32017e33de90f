//! What another mount's tree has otherwise than a copy of it, of any size, a page at a time.

use std::collections::VecDeque;

use bytes::Bytes;
use forebay_core::Result;

use super::copy::{PAGE, after, is_followed};
use crate::kv::{Edit, Pair, Snapshot};
use crate::schema::{Beneath, Keys, Tag};

/// Two views side by side, from their first key to their last.
pub(super) struct Difference<'a> {
    keys: Keys,
    theirs: Walk<'a>,
    own: Walk<'a>,
    /// What they have, as far as is known here, where listings changed records.
    beneath: Walk<'a>,
}

impl<'a> Difference<'a> {
    pub(super) fn new(keys: Keys, theirs: &'a dyn Snapshot, own: &'a dyn Snapshot) -> Self {
        let walk =
            |snapshot, (start, end)| Walk { snapshot, start, end, page: VecDeque::new(), is_last: false };
        let beneath = walk(own, keys.family(Tag::Beneath));
        Self { keys, theirs: walk(theirs, keys.all()), own: walk(own, keys.all()), beneath }
    }

    /// Up to `most` changes, or all that are left; none at the end.
    pub(super) async fn next(&mut self, most: usize) -> Result<Vec<Edit>> {
        let mut edits = Vec::new();
        while edits.len() < most {
            let keys = self.keys;
            let theirs = self.theirs.peek_if(|key, value| is_followed(keys, key, value)).await?;
            let own = self.own.peek_if(|key, _| Ok(keys.tag_in(key)?.is_of_the_tree())).await?;
            let beneath =
                self.beneath.peek_if(|_, _| Ok(true)).await?.map(|(key, value)| (keys.above(&key), value));
            let firsts = [&theirs, &own, &beneath].into_iter().flatten().map(|(key, _)| key);
            let Some(key) = firsts.min().cloned() else { break };
            let at_key = |found: Option<Pair>| found.filter(|(at, _)| *at == key).map(|(_, value)| value);
            let (theirs, own, beneath) = (at_key(theirs), at_key(own), at_key(beneath));
            theirs.is_some().then(|| self.theirs.pass());
            own.is_some().then(|| self.own.pass());
            beneath.is_some().then(|| self.beneath.pass());
            let known = match beneath {
                Some(beneath) => Beneath::decode(beneath)?.0,
                None => own,
            };
            if theirs != known {
                edits.push((key, theirs));
            }
        }
        Ok(edits)
    }
}

/// The records of a range, in order.
struct Walk<'a> {
    snapshot: &'a dyn Snapshot,
    start: Bytes,
    end: Bytes,
    page: VecDeque<Pair>,
    is_last: bool,
}

impl Walk<'_> {
    /// The next one that is `wanted`; those before it are passed.
    async fn peek_if(&mut self, wanted: impl Fn(&Bytes, &Bytes) -> Result<bool>) -> Result<Option<Pair>> {
        loop {
            match self.page.front() {
                Some((key, value)) if wanted(key, value)? => return Ok(Some((key.clone(), value.clone()))),
                Some(_) => self.pass(),
                None if self.is_last => return Ok(None),
                None => {
                    // An engine on a disk of this host waits for nothing.
                    tokio::task::yield_now().await;
                    self.page = self.snapshot.scan(&self.start, &self.end, PAGE).await?.into();
                    self.is_last = self.page.len() < PAGE;
                    if let Some((last, _)) = self.page.back() {
                        self.start = after(last);
                    }
                }
            }
        }
    }

    fn pass(&mut self) {
        self.page.pop_front();
    }
}
