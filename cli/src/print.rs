//! What goes to stdout: tables for people, JSON for programs.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use forebay_core::{Error, Result, Timestamp};
use serde::Serialize;

/// Prints one JSON document on a line.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|error| Error::bug(format!("encode: {error}")))?;
    put(&(text + "\n"));
    Ok(())
}

/// Prints rows in columns, each as wide as its widest cell, and each on one line: control characters, as names may have, are escaped
/// as Rust has them.
pub(crate) fn table(rows: &[Vec<String>]) {
    put(&columns(rows));
}

/// Whether nobody reads on, as behind `| head`.
static IS_UNREAD: AtomicBool = AtomicBool::new(false);

/// Whether what is printed may still be read. Commands that print for long end where it is not.
pub(crate) fn is_read() -> bool {
    !IS_UNREAD.load(Relaxed)
}

/// Writes to stdout. Where nobody reads on, no more is written, and the exit code says how the command ended all the same;
/// where it cannot be written, the process fails.
fn put(text: &str) {
    if !is_read() {
        return;
    }
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        if error.kind() != std::io::ErrorKind::BrokenPipe {
            crate::report::warning(&format!("the output cannot be written: {error}"), false);
            std::process::exit(1);
        }
        IS_UNREAD.store(true, Relaxed);
    }
}

fn columns(rows: &[Vec<String>]) -> String {
    let escaped = |cell: &String| -> String {
        cell.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.into() }).collect()
    };
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(escaped).collect()).collect();
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, column: usize| row.get(column).map_or(0, |cell| cell.chars().count());
    let widths: Vec<usize> =
        (0..count).map(|column| rows.iter().map(|row| cell(row, column)).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a string cannot fail.
            let _ = write!(line, "{cell:<width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// One row of a table.
pub(crate) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

/// A moment as `2027-01-15T08:00:00Z`.
pub(crate) fn utc(time: Timestamp) -> String {
    let (days, seconds) = (time.seconds.div_euclid(86_400), time.seconds.rem_euclid(86_400));
    // Days since 1970 to a date, with years that begin in March (Howard Hinnant, "chrono-compatible low-level date
    // algorithms", civil_from_days).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [row(["STEP", "STATE"]), row(["1,000", "größer"]), row(["2", ""])];
        assert_eq!(columns(&rows), "STEP   STATE\n1,000  größer\n2\n");
        assert_eq!(columns(&[]), "");
        let names = [row(["a\nb", "x"]), row(["\u{1b}[2Jc", "\u{9b}"])];
        assert_eq!(columns(&names), "a\\nb        x\n\\u{1b}[2Jc  \\u{9b}\n");
    }

    #[test]
    fn moments_are_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_800_000_000, "2027-01-15T08:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(utc(Timestamp { seconds, nanos: 0 }), text);
        }
    }
}
