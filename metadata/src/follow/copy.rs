//! A tree as a mount for writing has it, copied to where a read-only mount keeps its own.
//!
//! Promises that the copy is of one moment, and that a failed one leaves nothing: of one that was cut off, the next mount does
//! away with the rest. What is at work in the other mount is left out: its sessions, what it has open without names, and writes
//! that may or may not have happened, whose keys are as any other then.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};

use super::leader::check_whole;
use crate::kv::{Batch, Durability, Engine, Pair, Snapshot};
use crate::schema::{Claim, Counters, HolderState, Keys, OWN_NUMBERS, Tag, encode_plain};

/// Records that are read and written at once: an engine may sync each batch.
pub(super) const PAGE: usize = 4096;

/// Replaces what `into` has of the volume by the records that `from` shows; gives their number. Nobody may use `into` meanwhile.
///
/// # Errors
/// `Unavailable` while that tree is being loaded; `Corrupt` or `Unsupported` for records that cannot be read; those of the
/// engines. Nothing of the volume is left in `into` then.
pub async fn copy(from: &dyn Snapshot, keys: Keys, into: &dyn Engine) -> Result<u64> {
    clear(keys, into).await?;
    let mut mark = Batch::default();
    mark.put(keys.copied(), encode_plain(b""));
    into.write(mark, Durability::Buffered).await?;
    let copied = fill(from, keys, into).await;
    if copied.is_err() {
        clear(keys, into).await?;
    }
    copied
}

/// Removes what [`copy`] left in `engine` earlier, be it whole or in part. A tree that was made of listings stays.
pub async fn forget(keys: Keys, engine: &dyn Engine) -> Result<()> {
    match engine.get(&keys.copied()).await? {
        Some(_) => clear(keys, engine).await,
        None => Ok(()),
    }
}

async fn fill(from: &dyn Snapshot, keys: Keys, into: &dyn Engine) -> Result<u64> {
    check_whole(from, keys).await?;
    let (mut start, end) = keys.all();
    let mut copied = 0;
    loop {
        let page = from.scan(&start, &end, PAGE).await?;
        let Some((last, _)) = page.last() else { return Ok(copied) };
        start = after(last);
        let mut batch = Batch::default();
        for (key, value) in page {
            if keys.tag_in(&key)? == Tag::Counters {
                let theirs = Counters::decode(value)?;
                if theirs.next_ino >= OWN_NUMBERS {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        "the tree gives out the numbers of read-only mounts",
                    ));
                }
                let counters = Counters { next_ino: OWN_NUMBERS, ..theirs };
                batch.put(key, counters.encode());
            } else if is_followed(keys, &key, &value)? {
                batch.put(key, value);
            }
        }
        copied += batch.len() as u64;
        into.write(batch, Durability::Buffered).await?;
    }
}

/// Whether a record of the other mount's tree is one of its copy, too.
pub(super) fn is_followed(keys: Keys, key: &Bytes, value: &Bytes) -> Result<bool> {
    Ok(match keys.tag_in(key)? {
        // Listings pass over what is claimed: what the other mount is about to write there is to be seen.
        Tag::Claim => !matches!(Claim::decode(value.clone())?.state, HolderState::Intended(_)),
        tag => tag.is_of_the_tree(),
    })
}

pub(super) async fn clear(keys: Keys, engine: &dyn Engine) -> Result<()> {
    let (start, end) = keys.all();
    loop {
        let page: Vec<Pair> = engine.scan(&start, &end, PAGE).await?;
        let mut batch = Batch::default();
        // The mark goes last: clearing may be cut off, too.
        let is_last = page.len() < PAGE;
        page.into_iter()
            .filter(|(key, _)| is_last || *key != keys.copied())
            .for_each(|(key, _)| batch.delete(key));
        engine.write(batch, Durability::Buffered).await?;
        if is_last {
            return Ok(());
        }
    }
}

/// The first key after this one.
pub(super) fn after(key: &[u8]) -> Bytes {
    [key, &[0]].concat().into()
}

#[cfg(test)]
mod tests {
    use forebay_core::{InodeId, ObjectKey, VolumeId};

    use super::*;
    use crate::kv::{MemEngine, MemStore};
    use crate::schema::{Intent, SessionRecord, encode_plain};

    const KEYS: Keys = Keys(VolumeId(7));

    fn claim(key: &str, state: HolderState) -> (Bytes, Bytes) {
        (KEYS.claim(key), Claim { key: ObjectKey::new(key), state }.encode())
    }

    async fn engine_of(records: &[(Bytes, Bytes)]) -> MemEngine {
        let engine = MemEngine::open(&MemStore::default());
        let mut batch = Batch::default();
        records.iter().for_each(|(key, value)| batch.put(key.clone(), value.clone()));
        engine.write(batch, Durability::Durable).await.expect("written");
        engine
    }

    async fn all(engine: &MemEngine) -> Vec<Pair> {
        engine.scan(&[], &[], usize::MAX).await.expect("scanned")
    }

    #[tokio::test]
    async fn what_is_at_work_is_left_out_and_other_volumes_stay() {
        let xattr = |name: &[u8]| (KEYS.xattr(InodeId(2), name), encode_plain(b"v"));
        let held = claim("held", HolderState::Held(InodeId(2)));
        let intent = Intent { key: ObjectKey::new("intended"), replaces: None, copies: None, mark: None };
        let records = [
            xattr(b"user.a"),
            held.clone(),
            claim("intended", HolderState::Intended(InodeId(3))),
            (KEYS.intent(InodeId(3)), intent.encode()),
            (KEYS.session(9), SessionRecord { started: Default::default(), is_guest: false }.encode()),
        ];
        let (from, other) = (engine_of(&records).await, (Keys(VolumeId(8)).loading(), encode_plain(b"")));
        let into = engine_of(&[xattr(b"user.old"), other.clone()]).await;
        let copied = copy(&*from.snapshot().expect("snapshot"), KEYS, &into).await.expect("copied");
        assert_eq!(copied, 2);
        let mark = (KEYS.copied(), encode_plain(b""));
        let mut expected = vec![xattr(b"user.a"), held, mark, other.clone()];
        expected.sort();
        assert_eq!(all(&into).await, expected);
        forget(KEYS, &into).await.expect("forgotten");
        assert_eq!(all(&into).await, std::slice::from_ref(&other));
        // What listings have made stays.
        let listed = engine_of(&[xattr(b"user.a"), other]).await;
        forget(KEYS, &listed).await.expect("looked");
        assert_eq!(all(&listed).await.len(), 2);
    }

    /// An engine that is killed may have any number of a copy's batches.
    #[tokio::test]
    async fn a_copy_that_was_cut_off_is_forgotten_whole() {
        let many = |count: usize| -> Vec<_> {
            let xattr = |number: usize| (KEYS.xattr(InodeId(number as u64), b"user.a"), encode_plain(b"v"));
            (0..count).map(xattr).chain([(KEYS.copied(), encode_plain(b""))]).collect()
        };
        for count in [0, 1, PAGE - 1, PAGE, 2 * PAGE + 1] {
            let cut_off = engine_of(&many(count)).await;
            forget(KEYS, &cut_off).await.expect("forgotten");
            assert_eq!(all(&cut_off).await, Vec::new(), "{count}");
        }
    }

    #[tokio::test]
    async fn a_copy_that_fails_leaves_nothing() {
        let xattr = (KEYS.xattr(InodeId(2), b"user.a"), encode_plain(b"v"));
        let unknown = ([&KEYS.all().0[..], b"~"].concat().into(), encode_plain(b""));
        let loading = (KEYS.loading(), encode_plain(b""));
        for (wrong, kind) in [(unknown, ErrorKind::Unsupported), (loading, ErrorKind::Unavailable)] {
            let from = engine_of(&[xattr.clone(), wrong]).await;
            let into = engine_of(std::slice::from_ref(&xattr)).await;
            let error = copy(&*from.snapshot().expect("snapshot"), KEYS, &into).await.expect_err("refused");
            assert_eq!((error.kind(), all(&into).await), (kind, Vec::new()));
        }
    }
}
