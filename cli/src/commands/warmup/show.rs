//! How a warmup looks: a bar while it runs, a table or JSON when it has ended.
#![allow(clippy::print_stderr, reason = "what is missing is told beside the result")]

use std::time::Duration;

use forebay_core::units::format_bytes;
use forebay_core::{Error, Result};
use forebay_volume::warmup::{Outcome, Progress, Unpinned};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::print;

/// Bytes, rate and time left, on stderr where that is a terminal.
const TEMPLATE: &str =
    "{wide_bar} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {eta} left  {msg}";

/// How often the bar is drawn again when nothing comes in: a change that came too soon after another one shows then,
/// and the rate of a store that stands still falls.
const REDRAW: Duration = Duration::from_millis(200);

/// Blocks and reasons shown to a person; JSON has more.
const SHOWN: usize = 20;

/// A progress bar.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// An empty one. Nothing is drawn where stderr is no terminal.
    pub(crate) fn new() -> Self {
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well-formed");
        let bar = ProgressBar::new(0).with_style(style);
        bar.enable_steady_tick(REDRAW);
        Self(bar)
    }

    /// Moves it.
    pub(crate) fn show(&self, progress: &Progress) {
        self.0.set_length(progress.bytes);
        self.0.set_position(progress.done_bytes);
        self.0.set_message(format!("{} files", progress.files));
    }

    /// Takes it away.
    pub(crate) fn end(&self) {
        self.0.finish_and_clear();
    }
}

/// Shows what came of a warmup: totals on stdout, what is missing on stderr. `complete` says whether all of it stays.
pub(super) fn outcome(outcome: &Outcome, dry_run: bool, complete: bool, json: bool) -> Result<()> {
    if json {
        let value = serde_json::to_value(outcome).map_err(|error| Error::bug(error.to_string()));
        let mut value = value?;
        value["complete"] = (complete && !dry_run).into();
        value["dry_run"] = dry_run.into();
        return print::json(&value);
    }
    print::table(&rows(outcome, dry_run));
    let lines = outcome.failures.iter().map(|failure| format!("failed: {failure}"));
    let missing = outcome.missing.iter().map(|missing| format!("missing: {missing}"));
    let (failures, absent) = (outcome.failures.len(), outcome.missing.len());
    for line in lines.take(SHOWN).chain(missing.take(if dry_run { 0 } else { SHOWN })) {
        eprintln!("{line}");
    }
    let more = failures.saturating_sub(SHOWN) + absent.saturating_sub(SHOWN);
    if more > 0 && !dry_run {
        eprintln!("and {more} more: --json lists them");
    }
    Ok(())
}

/// Shows how much was pinned.
pub(super) fn unpinned(Unpinned { blocks, bytes }: Unpinned, json: bool) -> Result<()> {
    if json {
        return print::json(&json!({ "unpinned_blocks": blocks, "unpinned_bytes": bytes }));
    }
    print::table(&[print::row(["blocks unpinned", &blocks.to_string(), &format_bytes(bytes)])]);
    Ok(())
}

fn rows(outcome: &Outcome, dry_run: bool) -> Vec<Vec<String>> {
    let count = |number: u64| number.to_string();
    let Outcome { progress, blocks, fetched, already, proved, memory_only, missing_blocks, .. } = outcome;
    let mut rows = vec![
        vec!["files".to_owned(), count(progress.files), format_bytes(progress.bytes)],
        vec!["blocks".to_owned(), count(*blocks)],
        vec!["in the cache before".to_owned(), count(*already)],
    ];
    if dry_run {
        rows.push(vec!["to be fetched".to_owned(), count(*missing_blocks)]);
        return rows;
    }
    rows.push(vec!["fetched".to_owned(), count(*fetched), format_bytes(progress.origin_bytes)]);
    rows.push(vec!["proved in the cache".to_owned(), count(*proved)]);
    if *memory_only > 0 {
        rows.push(vec!["of these in memory only".to_owned(), count(*memory_only)]);
    }
    rows.push(vec!["missing".to_owned(), count(*missing_blocks)]);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_was_done() {
        let progress = Progress { files: 2, bytes: 4096, done_bytes: 4096, origin_bytes: 1024 };
        let outcome =
            Outcome { progress, blocks: 3, fetched: 1, already: 2, proved: 3, ..Outcome::default() };
        let text = |rows: Vec<Vec<String>>| rows.into_iter().map(|row| row.join(" ")).collect::<Vec<_>>();
        assert_eq!(
            text(rows(&outcome, false)),
            [
                "files 2 4.00 KiB",
                "blocks 3",
                "in the cache before 2",
                "fetched 1 1.00 KiB",
                "proved in the cache 3",
                "missing 0",
            ]
        );
        let memory = Outcome { memory_only: 2, ..outcome.clone() };
        assert!(text(rows(&memory, false)).contains(&"of these in memory only 2".to_owned()));
        let planned = Outcome { missing_blocks: 1, ..outcome };
        assert_eq!(text(rows(&planned, true)).last().expect("rows"), "to be fetched 1");
    }
}
