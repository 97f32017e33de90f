//! Saves under way: whose part of a step is stored, and for whose it waits.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use forebay_core::{ErrorKind, Result, Timestamp};
use forebay_io::object::Bucket;

use super::ranks::list_notes;
use super::{Note, RankKey, StepKey, failure_of, list_steps};
use crate::manifest::{Manifest, TextLength};

/// A step that ranks began to save, and that is not committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnderWay {
    /// What it is called.
    pub save: StepKey,
    /// Ranks in all, where one has stored its part, which tells.
    pub world_size: Option<u32>,
    /// Those that were heard of, in order.
    pub ranks: Vec<RankNews>,
    /// Whether a later start of the run, or a later step of this one, is committed: then nobody is at it any more.
    pub is_left: bool,
}

/// What a rank told last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankNews {
    /// Which.
    pub rank: u32,
    /// What.
    pub state: RankState,
    /// When, by the store's clock.
    pub heard: Timestamp,
}

/// How far a rank is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankState {
    /// It is at work. One that is so for long tells it every two and a half minutes.
    AtWork,
    /// Its part is in the store. Of a step that is tried again it may be that of the try before, where another rank had failed already
    /// when it came there.
    Stored,
    /// It will not store its part, for this cause.
    Failed(String),
    /// The step is tried again after a failure, and this rank told nothing since.
    Earlier,
}

impl UnderWay {
    /// How many ranks stored their part.
    pub fn stored(&self) -> usize {
        self.ranks.iter().filter(|news| news.state == RankState::Stored).count()
    }

    /// The ranks of which nothing was heard, where it is known how many there are.
    pub fn unheard(&self) -> Vec<u32> {
        let heard: HashSet<u32> = self.ranks.iter().map(|news| news.rank).collect();
        (0..self.world_size.unwrap_or(0)).filter(|rank| !heard.contains(rank)).collect()
    }
}

/// The saves under way in a bucket, the oldest step first. Of one rank alone those are among them that refer to earlier steps, or take
/// minutes: nobody is told how many ranks they are of.
pub async fn under_way(bucket: &Bucket) -> Result<Vec<UnderWay>> {
    let notes = list_notes(bucket).await?;
    let committed = list_steps(bucket).await?;
    let mut saves: BTreeMap<(u64, u64, String), Vec<(RankKey, Timestamp)>> = BTreeMap::new();
    for (key, at) in notes {
        if committed.iter().all(|info| info.key != key.save) {
            let StepKey { step, incarnation, attempt } = key.save.clone();
            saves.entry((step, incarnation, attempt)).or_default().push((key, at));
        }
    }
    let mut found = Vec::with_capacity(saves.len());
    for notes in saves.into_values() {
        let Some(save) = notes.first().map(|(key, _)| key.save.clone()) else { continue };
        let is_left = committed
            .iter()
            .any(|info| (info.key.incarnation, info.key.step) > (save.incarnation, save.step));
        let (world_size, ranks) = (world_size(bucket, &notes).await?, news(bucket, &notes).await?);
        found.push(UnderWay { save, world_size, ranks, is_left });
    }
    Ok(found)
}

/// What each rank told last. Once a rank told more after its own failure, the step is tried again, and what all told until that failure is
/// of the try before; that others go on after it is nothing new.
async fn news(bucket: &Bucket, notes: &[(RankKey, Timestamp)]) -> Result<Vec<RankNews>> {
    let is_failure = |key: &RankKey| matches!(key.note, Note::Failed(_));
    let tried_again = |(failed, at): &(RankKey, Timestamp)| {
        let is_later =
            |(key, later): &(RankKey, Timestamp)| key.rank == failed.rank && later > at && !is_failure(key);
        is_failure(failed) && notes.iter().any(is_later)
    };
    let begun_again = notes.iter().filter(|note| tried_again(note)).map(|(_, at)| *at).max();
    let ranks: BTreeSet<u32> = notes.iter().map(|(key, _)| key.rank).collect();
    let mut news = Vec::with_capacity(ranks.len());
    for rank in ranks {
        let own = notes.iter().filter(|(key, _)| key.rank == rank);
        let of_try = own.clone().filter(|(_, at)| begun_again.is_none_or(|failed| *at > failed));
        let settled = of_try.clone().filter(|(key, _)| is_failure(key) || key.note == Note::Index);
        let state = match settled.max_by_key(|(key, at)| (*at, is_failure(key))) {
            Some((key, _)) if key.note == Note::Index => RankState::Stored,
            Some((key, _)) => match failure_of(bucket, key).await {
                Ok(cause) => RankState::Failed(cause),
                // It was taken away meanwhile, as a step was committed.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            },
            None if of_try.clone().next().is_some() => RankState::AtWork,
            None => RankState::Earlier,
        };
        let heard = own.map(|(_, at)| *at).max().unwrap_or_default();
        news.push(RankNews { rank, state, heard });
    }
    Ok(news)
}

/// How many ranks there are, as one of them that stored its part told; `None` where its note is gone by now, or damaged.
async fn world_size(bucket: &Bucket, notes: &[(RankKey, Timestamp)]) -> Result<Option<u32>> {
    let Some((key, _)) = notes.iter().find(|(key, _)| key.note == Note::Index) else { return Ok(None) };
    match bucket.get_whole_at_most(&key.object(), TextLength::MOST).await {
        // What is wrong with it is told by who commits.
        Ok((data, _)) => Ok(Manifest::decode_index(&data).ok().map(|index| index.world_size)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::super::ranks::tests::index_of;
    use super::*;
    use crate::catalog::{Start, begin_run, commit, merge_ranks, put_alive, put_failed, put_rank};

    #[tokio::test]
    async fn whose_part_is_missing_is_told_until_the_step_is_committed() {
        let bucket = Bucket::in_memory();
        let start = Start { nonce: "ab".repeat(16), host: "h".into(), pid: 1, started_ms: 0 };
        let run = begin_run(&bucket, start).await.expect("run");
        let saves = async || under_way(&bucket).await.expect("saves");
        assert_eq!(saves().await, []);
        put_alive(&bucket, run.save(5), 0).await.expect("put");
        let [save] = &saves().await[..] else { panic!("one") };
        assert_eq!((save.stored(), save.world_size, &save.unheard()[..]), (0, None, &[][..]));
        put_rank(&bucket, &run, 0, &index_of(&run, 0)).await.expect("put");
        let [save] = &saves().await[..] else { panic!("one") };
        assert_eq!((save.stored(), save.world_size, &save.unheard()[..]), (1, Some(2), &[1][..]));
        let second = async || {
            let [save] = &saves().await[..] else { panic!("one") };
            assert!(save.unheard().is_empty() && !save.is_left, "{save:?}");
            save.ranks[1].state.clone()
        };
        put_alive(&bucket, run.save(5), 1).await.expect("put");
        assert_eq!(second().await, RankState::AtWork);
        put_failed(&bucket, run.save(5), 1, None, "its disk is full").await.expect("put");
        assert_eq!(second().await, RankState::Failed("its disk is full".into()));
        put_alive(&bucket, run.save(5), 0).await.expect("put");
        assert_eq!(second().await, RankState::Failed("its disk is full".into()), "others go on as they were");
        put_alive(&bucket, run.save(5), 1).await.expect("put");
        assert_eq!(second().await, RankState::AtWork, "it is tried again");
        assert_eq!(saves().await[0].ranks[0].state, RankState::AtWork, "with what it told since");
        put_failed(&bucket, run.save(5), 1, None, "it still is").await.expect("put");
        put_alive(&bucket, run.save(5), 1).await.expect("put");
        assert_eq!(saves().await[0].ranks[0].state, RankState::Earlier, "who is waited for now");
        put_rank(&bucket, &run, 1, &index_of(&run, 1)).await.expect("put");
        assert_eq!((second().await, saves().await[0].stored()), (RankState::Stored, 1));
        put_rank(&bucket, &run, 0, &index_of(&run, 0)).await.expect("put");
        assert_eq!(saves().await[0].stored(), 2);
        let merged = merge_ranks(&bucket, &run.save(5), 2, &"c0".repeat(16), &mut None).await;
        let step = merged.expect("whole").expect("of one round");
        commit(&bucket, &run, &step).await.expect("committed");
        assert_eq!(saves().await, []);
        put_alive(&bucket, run.save(4), 1).await.expect("put");
        assert!(saves().await[0].is_left, "the job is past it");
        let next = Start { nonce: "cd".repeat(16), host: "h".into(), pid: 2, started_ms: 1 };
        let next = begin_run(&bucket, next).await.expect("run");
        put_alive(&bucket, next.save(4), 1).await.expect("put");
        assert_eq!(saves().await.iter().map(|save| save.is_left).collect::<Vec<_>>(), [true, false]);
    }
}
