//! Byte sizes and durations as people write and read them.

use std::time::Duration;

use crate::{Error, Result};

/// One KiB in bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;
/// One TiB in bytes.
pub const TIB: u64 = 1 << 40;

/// Reads `512MiB`, `10G`, `4096` or `1.5 GiB` as bytes. Units are powers of 1,024, with or without `iB`/`B`.
pub fn parse_bytes(text: &str) -> Result<u64> {
    let bad = || {
        Error::invalid(format!("`{text}` is not a size"))
            .with_hint("write a number and an optional unit: 4096, 512MiB, 10GiB, 1TiB")
    };
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let number: f64 = trimmed[..digits].parse().map_err(|_| bad())?;
    let unit = match trimmed[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => KIB,
        "m" | "mb" | "mib" => MIB,
        "g" | "gb" | "gib" => GIB,
        "t" | "tb" | "tib" => TIB,
        _ => return Err(bad()),
    };
    let bytes = number * unit as f64;
    if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(bad()) }
}

/// Reads `30s`, `10m`, `12h`, `7d` or `2w`, or a plain number of seconds.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let bad = || {
        Error::invalid(format!("`{text}` is not a duration"))
            .with_hint("write a number and a unit: 30s, 10m, 12h, 7d, 2w")
    };
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let number: u64 = trimmed[..digits].parse().map_err(|_| bad())?;
    let unit = match &trimmed[digits..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        "w" => 7 * 86_400,
        _ => return Err(bad()),
    };
    // More than the age of the universe is a slip of the keyboard.
    let seconds = number.checked_mul(unit).filter(|seconds| *seconds < 1 << 58);
    seconds.map(Duration::from_secs).ok_or_else(bad)
}

/// Shows bytes with three significant digits: `0 B`, `1.50 KiB`, `12.0 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    let (value, unit) = match bytes {
        0..KIB => return format!("{bytes} B"),
        KIB..MIB => (bytes as f64 / KIB as f64, "KiB"),
        MIB..GIB => (bytes as f64 / MIB as f64, "MiB"),
        GIB..TIB => (bytes as f64 / GIB as f64, "GiB"),
        _ => (bytes as f64 / TIB as f64, "TiB"),
    };
    let decimals = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_trip_through_text() {
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("512MiB", 512 * MIB), ("1.5 GiB", 3 * GIB / 2), ("2t", 2 * TIB)]
        {
            assert_eq!(parse_bytes(text).expect(text), bytes, "{text}");
        }
        for text in ["", "MiB", "1XiB", "-1", "1e99", "nan"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        for (text, seconds) in
            [("0", 0), ("90", 90), ("30s", 30), ("10m", 600), ("12h", 43_200), ("2w", 1_209_600)]
        {
            assert_eq!(parse_duration(text).expect(text).as_secs(), seconds, "{text}");
        }
        for text in ["", "d", "1.5h", "-1d", "1y", "99999999999999999999d", "9999999999999999w"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert_eq!(format_bytes(1536), "1.50 KiB");
        assert_eq!(format_bytes(12 * GIB), "12.0 GiB");
    }
}
