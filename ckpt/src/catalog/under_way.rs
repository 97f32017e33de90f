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
    /// Its part is in the store.
    Stored,
    /// It will not store its part, for this cause.
    Failed(String),
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

/// The saves under way in a bucket, the oldest step first; a save of one rank alone leaves nothing here.
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

/// What each rank told last: of failures and an index, as several rounds may have left them, the newest counts.
async fn news(bucket: &Bucket, notes: &[(RankKey, Timestamp)]) -> Result<Vec<RankNews>> {
    let ranks: BTreeSet<u32> = notes.iter().map(|(key, _)| key.rank).collect();
    let mut news = Vec::with_capacity(ranks.len());
    for rank in ranks {
        let own: Vec<_> = notes.iter().filter(|(key, _)| key.rank == rank).collect();
        let settled = own.iter().filter(|(key, _)| matches!(key.note, Note::Failed(_) | Note::Index));
        let state = match settled.max_by_key(|(_, at)| *at) {
            Some((key, _)) if key.note == Note::Index => RankState::Stored,
            Some((key, _)) => RankState::Failed(failure_of(bucket, key).await?),
            None => RankState::AtWork,
        };
        let heard = own.iter().map(|(_, at)| *at).max().unwrap_or_default();
        news.push(RankNews { rank, state, heard });
    }
    Ok(news)
}

/// How many ranks there are, as one of them that stored its part told; `None` where its note is gone by now.
async fn world_size(bucket: &Bucket, notes: &[(RankKey, Timestamp)]) -> Result<Option<u32>> {
    let Some((key, _)) = notes.iter().find(|(key, _)| key.note == Note::Index) else { return Ok(None) };
    match bucket.get_whole_at_most(&key.object(), TextLength::MOST).await {
        Ok((data, _)) => Ok(Some(Manifest::decode_index(&data)?.world_size)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
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
        put_rank(&bucket, &run, 1, &index_of(&run, 1)).await.expect("put");
        assert_eq!(second().await, RankState::Stored, "it was tried again");
        let merged = merge_ranks(&bucket, &run.save(5), 2, &"c0".repeat(16), &mut None).await;
        let step = merged.expect("whole").expect("of one round");
        commit(&bucket, &run, &step).await.expect("committed");
        assert_eq!(saves().await, []);
        put_alive(&bucket, run.save(4), 1).await.expect("put");
        assert!(saves().await[0].is_left, "the job is past it");
    }
}
