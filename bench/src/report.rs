//! The rows of results: as JSON for machines, as a table for people.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::sample::median;

/// One line of results. What has no baseline or no aim leaves these fields empty.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Which scenario.
    pub scenario: String,
    /// What was measured.
    pub name: String,
    /// Median of our runs.
    pub value: f64,
    /// Unit of `value`, `baseline`, and of `min` and `max` where there is no baseline.
    pub unit: String,
    /// Median of the baseline's runs.
    pub baseline: Option<f64>,
    /// What the baseline is.
    pub baseline_name: Option<String>,
    /// Median of ours / baseline over the pairs.
    pub ratio: Option<f64>,
    /// What is aimed at, in words.
    pub aim: Option<String>,
    /// Whether the aim is met.
    pub holds: Option<bool>,
    /// Pairs, or runs where there is no baseline.
    pub runs: usize,
    /// Smallest ratio of a pair; without a baseline, smallest value.
    pub min: f64,
    /// Largest ratio of a pair; without a baseline, largest value.
    pub max: f64,
}

/// A bound that a row should keep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aim {
    /// The ratio to the baseline, at most.
    RatioAtMost(f64),
    /// The ratio to the baseline, at least.
    RatioAtLeast(f64),
    /// The value itself, at most.
    AtMost(f64),
    /// The value itself, at least.
    AtLeast(f64),
}

impl Row {
    /// From pairs of (ours, baseline).
    pub fn of_pairs(scenario: &str, name: &str, unit: &str, pairs: &[(f64, f64)], baseline: &str) -> Self {
        let ratios: Vec<f64> = pairs.iter().map(|(ours, baseline)| ours / baseline).collect();
        let theirs: Vec<f64> = pairs.iter().map(|(_, baseline)| *baseline).collect();
        let ours: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
        let mut row = Self::of_values(scenario, name, unit, &ours);
        row.baseline = Some(median(&theirs));
        row.baseline_name = Some(baseline.to_owned());
        row.ratio = Some(median(&ratios));
        (row.min, row.max) = extremes(&ratios);
        row
    }

    /// From runs that nothing is compared with.
    pub fn of_values(scenario: &str, name: &str, unit: &str, values: &[f64]) -> Self {
        let (min, max) = extremes(values);
        Self {
            scenario: scenario.to_owned(),
            name: name.to_owned(),
            value: median(values),
            unit: unit.to_owned(),
            baseline: None,
            baseline_name: None,
            ratio: None,
            aim: None,
            holds: None,
            runs: values.len(),
            min,
            max,
        }
    }

    /// The same row with its aim, and whether it is met.
    pub fn aim(mut self, aim: Aim) -> Self {
        let ratio = self.ratio.unwrap_or(f64::NAN);
        let (text, holds) = match aim {
            Aim::RatioAtMost(bound) => (format!("ratio <= {bound}"), ratio <= bound),
            Aim::RatioAtLeast(bound) => (format!("ratio >= {bound}"), ratio >= bound),
            Aim::AtMost(bound) => (format!("<= {bound}"), self.value <= bound),
            Aim::AtLeast(bound) => (format!(">= {bound}"), self.value >= bound),
        };
        (self.aim, self.holds) = (Some(text), Some(holds));
        self
    }
}

fn extremes(values: &[f64]) -> (f64, f64) {
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if values.is_empty() { (0.0, 0.0) } else { (min, max) }
}

/// Replaces the rows of the scenarios in `rows` and keeps those of others, so that scenarios can be run one by one.
pub fn merge(old: Vec<Row>, rows: Vec<Row>) -> Vec<Row> {
    let again = |row: &Row| rows.iter().any(|new| new.scenario == row.scenario);
    old.into_iter().filter(|row| !again(row)).chain(rows.iter().cloned()).collect()
}

/// Reads results; none where the file is not there yet.
pub fn read(file: &Path) -> Result<Vec<Row>> {
    match std::fs::read(file) {
        Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| format!("reading {}", file.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("reading {}", file.display())),
    }
}

/// Writes results.
pub fn write(file: &Path, rows: &[Row]) -> Result<()> {
    let folder = file.parent().context("results lie in a folder")?;
    std::fs::create_dir_all(folder)?;
    let text = serde_json::to_string_pretty(rows)?;
    std::fs::write(file, text + "\n").with_context(|| format!("writing {}", file.display()))
}

/// The rows as a Markdown table, which docs/benchmarks.md takes as it is.
pub fn table(rows: &[Row]) -> String {
    let head = ["scenario", "measured", "ours", "baseline", "ratio (min-max)", "aim", "holds", "runs"];
    let mut lines = vec![head.map(str::to_owned)];
    lines.extend(rows.iter().map(cells));
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut out = String::new();
    for (index, line) in lines.iter().enumerate() {
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(out, "| {cell:width$} ");
        }
        out.push_str("|\n");
        if index == 0 {
            widths.iter().for_each(|width| out.push_str(&format!("|{}", "-".repeat(width + 2))));
            out.push_str("|\n");
        }
    }
    out
}

fn cells(row: &Row) -> [String; 8] {
    let spread = format!("({}-{})", number(row.min), number(row.max));
    let baseline = match (row.baseline, &row.baseline_name) {
        (Some(value), Some(name)) => format!("{} {name}", number(value)),
        _ => String::new(),
    };
    [
        row.scenario.clone(),
        row.name.clone(),
        format!("{} {}", number(row.value), row.unit),
        baseline,
        row.ratio.map_or(spread.clone(), |ratio| format!("{} {spread}", number(ratio))),
        row.aim.clone().unwrap_or_default(),
        row.holds.map_or("", |holds| if holds { "yes" } else { "NO" }).to_owned(),
        row.runs.to_string(),
    ]
}

/// Three significant digits.
fn number(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 || size == 0.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(scenario: &str, pairs: &[(f64, f64)]) -> Row {
        Row::of_pairs(scenario, "speed", "MiB/s", pairs, "ext4")
    }

    #[test]
    fn ratios_are_taken_pair_by_pair() {
        let row = row("read", &[(1.0, 2.0), (8.0, 4.0), (3.0, 3.0)]);
        assert_eq!((row.value, row.baseline, row.ratio), (3.0, Some(3.0), Some(1.0)));
        assert_eq!((row.min, row.max, row.runs), (0.5, 2.0, 3));
    }

    #[test]
    fn aims_hold_or_not() {
        for (aim, holds) in [
            (Aim::RatioAtMost(0.5), true),
            (Aim::RatioAtMost(0.4), false),
            (Aim::RatioAtLeast(0.5), true),
            (Aim::RatioAtLeast(0.6), false),
            (Aim::AtMost(1.0), true),
            (Aim::AtMost(0.9), false),
        ] {
            assert_eq!(row("read", &[(1.0, 2.0)]).aim(aim).holds, Some(holds), "{aim:?}");
        }
        let alone = Row::of_values("read", "speed", "MiB/s", &[1.0]);
        assert_eq!(alone.aim(Aim::RatioAtMost(9.0)).holds, Some(false), "no baseline, no ratio to keep");
    }

    #[test]
    fn a_scenario_replaces_its_own_rows_only() {
        let old = vec![row("read", &[(1.0, 1.0)]), row("write", &[(1.0, 1.0)])];
        let merged = merge(old.clone(), vec![row("read", &[(2.0, 1.0)])]);
        assert_eq!(merged, [old[1].clone(), row("read", &[(2.0, 1.0)])]);
    }

    #[test]
    fn results_round_trip_and_print_as_a_table() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("out/results.json");
        let rows = vec![row("read", &[(3.0, 2.0)]).aim(Aim::RatioAtMost(1.0))];
        assert_eq!(read(&file).unwrap(), []);
        write(&file, &rows).unwrap();
        assert_eq!(read(&file).unwrap(), rows);
        let table = table(&rows);
        let wanted =
            "| read     | speed    | 3.00 MiB/s | 2.00 ext4 | 1.50 (1.50-1.50) | ratio <= 1 | NO    | 1    |";
        assert_eq!(table.lines().nth(2), Some(wanted));
    }
}
