//! `forebay ckpt ranks`: which ranks a save waits for.

use std::process::ExitCode;

use clap::Args;
use forebay_ckpt::catalog::{RankNews, RankState, UnderWay, under_way};
use forebay_core::Result;
use forebay_io::object::Bucket;
use serde_json::{Value, json};

use crate::print;

/// The arguments of `forebay ckpt ranks`.
#[derive(Debug, Args)]
pub(crate) struct RanksArguments {
    /// The URL, or the directory, that was saved to.
    pub(crate) url: String,
}

/// Shows each save that was begun and is not committed, and the ranks whose part is missing.
pub(super) async fn show(bucket: &Bucket, json: bool) -> Result<ExitCode> {
    let saves = under_way(bucket).await?;
    if json {
        let saves: Vec<_> = saves.iter().map(told).collect();
        print::json(&json!({ "saves": saves }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let head = print::row(["STEP", "INCARNATION", "RANK", "", "LAST HEARD"]);
    print::table(&std::iter::once(head).chain(saves.iter().flat_map(rows)).collect::<Vec<_>>());
    Ok(ExitCode::SUCCESS)
}

fn told(save: &UnderWay) -> Value {
    let rank = |news: &RankNews| {
        let cause = match &news.state {
            RankState::Failed(cause) => Some(cause),
            _ => None,
        };
        json!({ "rank": news.rank, "state": word(&news.state), "cause": cause, "heard": print::utc(news.heard) })
    };
    json!({
        "step": save.save.step,
        "incarnation": save.save.incarnation,
        "ranks": save.world_size,
        "stored": save.stored(),
        "left": save.is_left,
        "heard": save.ranks.iter().map(rank).collect::<Vec<_>>(),
        "unheard": save.unheard(),
    })
}

/// One for the save, and one for each rank that it waits for.
fn rows(save: &UnderWay) -> Vec<Vec<String>> {
    let (step, start) = (save.save.step.to_string(), save.save.incarnation.to_string());
    let of = save.world_size.map_or_else(|| "?".to_owned(), |ranks| ranks.to_string());
    let left = if save.is_left { ", and left: a newer step is committed" } else { "" };
    let heard = save.ranks.iter().map(|news| news.heard).max().map(print::utc).unwrap_or_default();
    let whole =
        print::row([&step, &start, "all", &format!("{} of {of} stored{left}", save.stored()), &heard]);
    let waited = save.ranks.iter().filter(|news| news.state != RankState::Stored).map(|news| {
        let state = match &news.state {
            RankState::Failed(cause) => format!("failed: {cause}"),
            state => word(state).to_owned(),
        };
        print::row([&step, &start, &news.rank.to_string(), &state, &print::utc(news.heard)])
    });
    let unheard = runs(&save.unheard());
    let unheard = unheard.iter().map(|ranks| print::row([&step, &start, ranks, "not heard of", ""]));
    std::iter::once(whole).chain(waited).chain(unheard).collect()
}

fn word(state: &RankState) -> &'static str {
    match state {
        RankState::AtWork => "at work",
        RankState::Stored => "stored",
        RankState::Failed(_) => "failed",
        RankState::Earlier => "not heard of in this try",
    }
}

/// Numbers in order, those that follow each other as `FIRST-LAST`.
fn runs(numbers: &[u32]) -> Vec<String> {
    let follows = |first: &u32, second: &u32| first + 1 == *second;
    let run = |run: &[u32]| match run {
        [first, .., last] => format!("{first}-{last}"),
        run => run.iter().map(u32::to_string).collect(),
    };
    numbers.chunk_by(follows).map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_follow_each_other_are_one_row() {
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), ["0-2", "5", "7-8"]);
        assert!(runs(&[]).is_empty());
    }
}
