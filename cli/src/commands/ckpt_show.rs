//! `forebay ckpt show`: what a step holds, who stored it, and how it is cut.

use std::process::ExitCode;

use forebay_ckpt::manifest::{Manifest, SliceKind};
use forebay_ckpt::summary::{Place, RankBytes, Summary, summary};
use forebay_core::Result;
use forebay_core::units::format_bytes;
use serde::Serialize;

use crate::print;

/// Lines about ranks at most: a job of thousands still fits a screen.
const MAX_RANK_LINES: usize = 16;
/// Ranges of ranks that are spelled out at most.
const MAX_RANGES: usize = 4;

/// The manifest as it is, and what follows from it.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    manifest: &'a Manifest,
    placement: &'a Summary,
}

/// Prints it.
pub(super) fn describe(manifest: &Manifest, json: bool) -> Result<ExitCode> {
    let placement = summary(manifest);
    if json {
        print::json(&Shown { manifest, placement: &placement })?;
        return Ok(ExitCode::SUCCESS);
    }
    print::table(&facts(manifest));
    let head = print::row(["RANK", "STORED", "OF EARLIER STEPS"]);
    let ranks = rank_lines(&placement.ranks).into_iter().chain([Vec::new()]);
    print::table(&std::iter::once(head).chain(ranks).collect::<Vec<_>>());
    let head = print::row(["TENSOR", "TYPE", "SHAPE", "SIZE", "PLACEMENT"]);
    let rows = manifest.tensors.iter().zip(&placement.tensors).map(|(tensor, place)| {
        let (shape, size) = (format!("{:?}", tensor.shape), format_bytes(place.bytes));
        print::row([&tensor.name, &tensor.dtype, &shape, &size, &describe_place(place)])
    });
    print::table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    Ok(ExitCode::SUCCESS)
}

fn facts(manifest: &Manifest) -> Vec<Vec<String>> {
    let files = |is_wanted: &dyn Fn(u64) -> bool| {
        let sizes: Vec<u64> =
            manifest.shards.iter().filter(|shard| is_wanted(shard.step)).map(|shard| shard.size).collect();
        format!("{}, {}", sizes.len(), format_bytes(sizes.iter().copied().fold(0, u64::saturating_add)))
    };
    let fact = |name: &str, value: String| vec![name.to_owned(), value];
    let mut facts = vec![
        fact("step", manifest.step.to_string()),
        fact("run", manifest.run.clone()),
        fact("incarnation", manifest.incarnation.to_string()),
        fact("world size", manifest.world_size.to_string()),
        fact("shards", files(&|step| step == manifest.step)),
        fact("tensors", manifest.tensors.len().to_string()),
        fact("extras", manifest.extras.len().to_string()),
        Vec::new(),
    ];
    if let (Some(first), Some(last)) = (manifest.parents.first(), manifest.parents.last()) {
        let files = files(&|step| step != manifest.step);
        facts.insert(5, fact("shards of others", format!("{files}, of {}", steps(*first, *last))));
    }
    facts
}

fn steps(first: u64, last: u64) -> String {
    if first == last { format!("step {first}") } else { format!("steps {first} to {last}") }
}

/// A line for each run of ranks of which the same is to be told; where these are too many, for each of a few ranges.
fn rank_lines(ranks: &[RankBytes]) -> Vec<Vec<String>> {
    let alike = |one: &RankBytes, other: &RankBytes| {
        let told = |bytes: &RankBytes| (format_bytes(bytes.stored), format_bytes(bytes.earlier));
        one.rank.checked_add(1) == Some(other.rank) && told(one) == told(other)
    };
    let mut runs: Vec<&[RankBytes]> = ranks.chunk_by(alike).collect();
    if runs.len() > MAX_RANK_LINES {
        runs = ranks.chunks(ranks.len().div_ceil(MAX_RANK_LINES)).collect();
    }
    runs.into_iter()
        .map(|run| {
            let numbers: Vec<u32> = run.iter().map(|bytes| bytes.rank).collect();
            let each = if run.len() > 1 { " each" } else { "" };
            let bytes = |of: &dyn Fn(&RankBytes) -> u64| {
                let (least, most) = (run.iter().map(of).min(), run.iter().map(of).max());
                let [least, most] = [least, most].map(|bytes| format_bytes(bytes.unwrap_or(0)));
                if least == most { format!("{least}{each}") } else { format!("{least} to {most}{each}") }
            };
            print::row([&ranges(&numbers), &bytes(&|bytes| bytes.stored), &bytes(&|bytes| bytes.earlier)])
        })
        .collect()
}

/// As `0-3, 8`; of many ranges only the ends, and how many ranks they have.
fn ranges(ranks: &[u32]) -> String {
    let runs: Vec<&[u32]> = ranks.chunk_by(|one, other| one.checked_add(1) == Some(*other)).collect();
    match (runs.len(), ranks) {
        (count, [first, .., last]) if count > MAX_RANGES => {
            format!("{first}-{last} ({} of them)", ranks.len())
        }
        _ => {
            let text = runs.iter().map(|run| match run {
                [one] => one.to_string(),
                _ => format!("{}-{}", run[0], run[run.len() - 1]),
            });
            text.collect::<Vec<_>>().join(", ")
        }
    }
}

/// Who stored a tensor, how the ranks' parts divide it, and what of it lies in earlier steps' files.
fn describe_place(place: &Place) -> String {
    let ranks = match place.ranks.as_slice() {
        [] => return String::new(),
        [one] => format!("rank {one}"),
        several => format!("ranks {}", ranges(several)),
    };
    let held = match (place.kind, place.dimensions.as_slice()) {
        (Some(SliceKind::Flat), _) if place.ranks.len() > 1 => format!("replicated, split over {ranks}"),
        (Some(SliceKind::Flat), _) => format!("replicated, by {ranks}"),
        (_, []) => ranks,
        (_, [0]) => format!("{ranks}, rows"),
        (_, [1]) => format!("{ranks}, columns"),
        (_, several) => {
            let numbers: Vec<_> = several.iter().map(usize::to_string).collect();
            format!("{ranks}, dimension{} {}", if numbers.len() > 1 { "s" } else { "" }, numbers.join(", "))
        }
    };
    let (Some(first), Some(last)) = (place.earlier.first(), place.earlier.last()) else {
        return held;
    };
    let bytes = place.earlier.iter().map(|earlier| earlier.bytes).fold(0, u64::saturating_add);
    let share = if bytes == place.bytes { "all".to_owned() } else { format_bytes(bytes) };
    format!("{held}; {share} of {}", steps(first.step, last.step))
}

#[cfg(test)]
mod tests {
    use forebay_ckpt::summary::Earlier;

    use super::*;

    #[test]
    fn a_thousand_ranks_fit_a_screen() {
        let bytes = |rank: u32, stored| RankBytes { rank, stored, earlier: 0 };
        // As replicated tensors are shared out: no two alike to the byte.
        let even: Vec<_> = (0..1000).map(|rank| bytes(rank, (5 << 20) + u64::from(rank % 3))).collect();
        assert_eq!(rank_lines(&even), [["0-999", "5.00 MiB each", "0 B each"]]);
        let uneven: Vec<_> = (0..1000).map(|rank| bytes(rank, u64::from(rank) << 20)).collect();
        let lines = rank_lines(&uneven);
        assert_eq!(lines.len(), 16);
        assert_eq!(lines[15], ["945-999", "945 MiB to 999 MiB each", "0 B each"]);
        let two = [bytes(0, 7), RankBytes { rank: 1, stored: 0, earlier: 9 }, bytes(9, 0)];
        let expected = [["0", "7 B", "0 B"], ["1", "0 B", "9 B"], ["9", "0 B", "0 B"]];
        assert_eq!(rank_lines(&two), expected);
    }

    #[test]
    fn ranks_are_named_by_their_ranges() {
        let all: Vec<u32> = (0..1000).collect();
        let eighths: Vec<u32> = (0..1000).step_by(8).collect();
        for (ranks, text) in [
            (&[7][..], "7"),
            (&[0, 1, 2, 3], "0-3"),
            (&[0, 1, 4, 6, 7, 8], "0-1, 4, 6-8"),
            (&all, "0-999"),
            (&eighths, "0-992 (125 of them)"),
        ] {
            assert_eq!(ranges(ranks), text);
        }
    }

    #[test]
    fn places_are_told_in_words() {
        let place = |ranks: &[u32], kind, dimensions: &[usize], earlier: &[(u64, u64)]| {
            let earlier = earlier.iter().map(|(step, bytes)| Earlier { step: *step, bytes: *bytes });
            describe_place(&Place {
                name: "t".into(),
                bytes: 4096,
                ranks: ranks.into(),
                kind,
                dimensions: dimensions.into(),
                earlier: earlier.collect(),
            })
        };
        let (flat, boxed) = (Some(SliceKind::Flat), Some(SliceKind::Box));
        assert_eq!(place(&[3], boxed, &[], &[]), "rank 3");
        assert_eq!(place(&[0, 1], boxed, &[0], &[]), "ranks 0-1, rows");
        assert_eq!(place(&[0, 1], boxed, &[1], &[]), "ranks 0-1, columns");
        assert_eq!(place(&[0, 1], boxed, &[2], &[]), "ranks 0-1, dimension 2");
        assert_eq!(place(&[0, 1], boxed, &[0, 1], &[]), "ranks 0-1, dimensions 0, 1");
        assert_eq!(
            place(&[0, 1], flat, &[], &[(20, 1024)]),
            "replicated, split over ranks 0-1; 1.00 KiB of step 20"
        );
        assert_eq!(place(&[1], flat, &[], &[(20, 4096)]), "replicated, by rank 1; all of step 20");
        assert_eq!(place(&[1], boxed, &[], &[(10, 1), (20, 4095)]), "rank 1; all of steps 10 to 20");
        assert_eq!(place(&[], None, &[], &[]), "");
    }
}
