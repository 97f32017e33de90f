//! Copies and writes of which it is not known whether they were made, or still will be: the store was asked and did not
//! answer.
//!
//! Their intents stand meanwhile, so that nobody else writes where they may appear: a store may still be at one that nobody
//! waits for. So they do when the next process starts, which cannot know what the store answered the one that died.
//!
//! The same of copies that were planned and not asked for, as a step before failed, and of those whose commit did: here
//! nothing comes any more, and the next pass settles them.

use std::collections::HashMap;

use forebay_core::{InodeId, ObjectKey, Result};
use parking_lot::Mutex;

use super::Mover;
use super::deletions::after;
use super::run::{PAGE, Tally};
use crate::records::{Records, readable};
use crate::schema::{Intent, Mark, Tag};

/// How long a store may go on with a copy or a write that nobody waits for. It had more time than that for the bytes of any
/// that is large; what is left is one that hung on the way.
pub(crate) const LONGEST_MS: u64 = 5 * 60 * 1000;

/// How far a copy or a write came whose intent stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// The store was not asked for it.
    Never,
    /// The store is done with it; what came of that is to be looked up.
    Over,
    /// The store did not answer: it may still be made.
    Unanswered,
}

/// One copy, or the writes of one file, in doubt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Doubt {
    of: Of,
    asked: Asked,
    /// Nothing comes after this.
    until_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Of {
    /// A copy to this key.
    Copy(ObjectKey),
    /// Writes whose objects carry these tokens.
    Writes(Vec<String>),
}

impl Doubt {
    fn is_copy(&self) -> bool {
        matches!(self.of, Of::Copy(_))
    }

    /// Whether it is the copy or write that `intent` announces, or one of before that it tells of.
    fn is_of(&self, intent: &Intent) -> bool {
        match (&self.of, &intent.mark) {
            (Of::Copy(key), None) => intent.copies.is_some() && intent.key == *key,
            (Of::Writes(tokens), Some(mark)) => tokens.iter().any(|token| mark.names(token)),
            _ => false,
        }
    }

    /// Whether it is a write after which `intent` announces none.
    fn is_last_of(&self, intent: &Intent) -> bool {
        match (&self.of, &intent.mark) {
            (Of::Writes(tokens), Some(mark)) => tokens.contains(&mark.token),
            _ => false,
        }
    }

    /// Whether the store was not asked for the copy that `intent` announces.
    pub(super) fn is_unasked(&self, intent: &Intent) -> bool {
        self.asked == Asked::Never && self.is_of(intent)
    }
}

/// By the inodes whose copies and writes these are. In memory only.
#[derive(Debug, Default)]
pub(super) struct Doubts(Mutex<HashMap<InodeId, Doubt>>);

impl Doubts {
    /// The intent to copy `ino` to `key` stands and is to be settled; one that may still come, when it cannot any more.
    fn add(&self, ino: InodeId, key: &ObjectKey, now_ms: u64, asked: Asked) {
        let mut doubts = self.0.lock();
        let holds = |doubt: &Doubt| doubt.is_copy() && doubt.until_ms > now_ms;
        if asked != Asked::Unanswered && doubts.get(&ino).is_some_and(holds) {
            return;
        }
        let most_ms = if asked == Asked::Unanswered { LONGEST_MS } else { 0 };
        let until_ms = now_ms.saturating_add(most_ms);
        doubts.insert(ino, Doubt { of: Of::Copy(key.clone()), asked, until_ms });
    }

    /// The store did not answer the write whose object carries `token`: it may come from here on.
    fn add_write(&self, ino: InodeId, token: &str, now_ms: u64) {
        let until_ms = now_ms.saturating_add(LONGEST_MS);
        let mut doubts = self.0.lock();
        let mut tokens = match doubts.remove(&ino).map(|doubt| doubt.of) {
            Some(Of::Writes(tokens)) => tokens,
            _ => Vec::new(),
        };
        if !tokens.iter().any(|known| known == token) {
            tokens.push(token.to_owned());
        }
        doubts.insert(ino, Doubt { of: Of::Writes(tokens), asked: Asked::Unanswered, until_ms });
    }

    /// Whether the write that `intent` announces, or one of before, may still come; from here on it is over by itself. Where
    /// nothing is known of it, it is in doubt now, if it is `unknown` to be answered.
    pub(super) fn awaits(&self, ino: InodeId, intent: &Intent, now_ms: u64, unknown: bool) -> bool {
        let Some(Mark { token, .. }) = &intent.mark else { return false };
        if let Some(doubt) = self.0.lock().get_mut(&ino).filter(|doubt| doubt.is_of(intent)) {
            if let Of::Writes(tokens) = &mut doubt.of
                && !tokens.contains(token)
            {
                tokens.push(token.clone());
            }
            return doubt.until_ms > now_ms;
        }
        if unknown {
            self.add_write(ino, token, now_ms);
        }
        unknown
    }

    pub(super) fn of(&self, ino: InodeId) -> Option<Doubt> {
        self.0.lock().get(&ino).cloned()
    }

    /// Ends what was known of `ino` before it was settled, not what was added since.
    pub(super) fn end(&self, ino: InodeId, settled: Option<&Doubt>) {
        let mut doubts = self.0.lock();
        if doubts.get(&ino) == settled {
            doubts.remove(&ino);
        }
    }

    /// Whether what `intent` announces was asked for, not answered, and may still come.
    pub(super) fn holds(&self, ino: InodeId, intent: &Intent, now_ms: u64) -> bool {
        self.0.lock().get(&ino).is_some_and(|doubt| doubt.is_of(intent) && doubt.until_ms > now_ms)
    }

    /// Whether any copy goes to `key`, until it is settled. A write that would replace what is deleted there is refused.
    pub(super) fn names(&self, key: &ObjectKey) -> bool {
        self.0.lock().values().any(|doubt| doubt.of == Of::Copy(key.clone()))
    }

    fn copies(&self) -> Vec<(InodeId, Doubt)> {
        self.select(Doubt::is_copy)
    }

    /// Copies that do not come any more.
    fn over(&self, now_ms: u64) -> Vec<(InodeId, Doubt)> {
        self.select(|doubt| doubt.is_copy() && doubt.until_ms <= now_ms)
    }

    fn writes(&self) -> Vec<(InodeId, Doubt)> {
        self.select(|doubt| !doubt.is_copy())
    }

    fn select(&self, is_meant: impl Fn(&Doubt) -> bool) -> Vec<(InodeId, Doubt)> {
        let doubts = self.0.lock();
        let meant = doubts.iter().filter(|(_, doubt)| is_meant(doubt));
        meant.map(|(ino, doubt)| (*ino, doubt.clone())).collect()
    }
}

/// Notes a write in doubt when it is dropped: whoever asks for a place may lose patience, which may be recorded by then.
pub(crate) struct Unplaced {
    mover: Option<Mover>,
    ino: InodeId,
    token: String,
}

impl Unplaced {
    pub(crate) fn new(mover: Option<Mover>, ino: InodeId, token: &str) -> Self {
        Self { mover, ino, token: token.to_owned() }
    }

    /// There is no such place, or who asked for it has heard of it.
    pub(crate) fn forget(&mut self) {
        self.mover = None;
    }
}

impl Drop for Unplaced {
    fn drop(&mut self) {
        if let Some(mover) = &self.mover {
            mover.doubts().add_write(self.ino, &self.token, mover.shared().now_ms());
        }
    }
}

impl Mover {
    /// Notes that a step of a copy failed and its intent stands: else nobody would end that.
    pub(super) fn doubt(&self, ino: InodeId, key: &ObjectKey, asked: Asked) {
        self.doubts().add(ino, key, self.shared().now_ms(), asked);
    }

    /// Notes that the store did not answer what was written of a file to its own path.
    pub(crate) async fn doubt_write(&self, ino: InodeId) -> Result<()> {
        if let Some(Intent { mark: Some(mark), .. }) = self.look(move |look| look.intent(ino)).await? {
            self.doubts().add_write(ino, &mark.token, self.shared().now_ms());
        }
        Ok(())
    }

    /// Notes all copies whose intents stand: after a panic nobody may be at them any more, and what came of them is not known.
    pub(super) async fn doubt_copies(&self) -> Result<()> {
        let keys = self.shared().keys;
        let (mut start, end) = keys.family(Tag::Intent);
        loop {
            let (from, to) = (start.clone(), end.clone());
            let page = self.look(move |look| look.reads().scan(&from, &to, PAGE)).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            start = after(last);
            for (key, value) in page {
                let read = || Ok((InodeId(keys.number_in(&key)?), Intent::decode(value)?));
                match readable(read()) {
                    Some((ino, intent)) if intent.copies.is_some() => {
                        self.doubt(ino, &intent.key, Asked::Unanswered);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Whether what was written of a file to its own path may still come.
    pub(crate) async fn awaits_write(&self, ino: InodeId) -> Result<bool> {
        let intent = self.look(move |look| look.intent(ino)).await?;
        Ok(intent.is_some_and(|intent| self.doubts().holds(ino, &intent, self.shared().now_ms())))
    }

    /// Whether a copy of what lies at `key` is in doubt: by that it is known from others' objects.
    pub(super) async fn is_copied_in_doubt(&self, key: &ObjectKey) -> Result<bool> {
        for (ino, _) in self.doubts().copies() {
            let intent = self.look(move |look| look.intent(ino)).await?;
            if intent.and_then(|intent| intent.copies).is_some_and(|source| source.key == *key) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Settles what has come, and what cannot any more.
    pub(super) async fn settle_doubts(&self) -> Result<Tally> {
        let mut tally = Tally::default();
        for (ino, doubt) in self.doubts().over(self.shared().now_ms()) {
            let _turn = self.turn().await;
            tally.add(self.settle_doubt(ino, &doubt).await.map(usize::from));
        }
        let mut writes = Vec::new();
        for (ino, doubt) in self.doubts().writes() {
            match self.look(move |look| look.intent(ino)).await {
                Ok(Some(intent)) if doubt.is_last_of(&intent) => writes.push((ino, intent)),
                // Its next write is under way.
                Ok(Some(intent)) if doubt.is_of(&intent) => {}
                Ok(_) => self.doubts().end(ino, Some(&doubt)),
                Err(error) => tally.pass_over(Err(error))?,
            }
        }
        self.settle_writes(writes, &mut tally).await;
        Ok(tally)
    }

    async fn settle_doubt(&self, ino: InodeId, doubt: &Doubt) -> Result<bool> {
        let intent = self.look(move |look| look.intent(ino)).await?;
        if intent.is_some_and(|intent| intent.copies.is_some() && doubt.is_of(&intent)) {
            return self.settle_intent(ino).await;
        }
        // It was ended; one that stands now may be that of a writer, who is at it.
        self.doubts().end(ino, Some(doubt));
        Ok(true)
    }
}
