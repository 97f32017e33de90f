//! The header of a safetensors file that anyone may have written.

use std::collections::BTreeMap;
use std::ops::Range;

use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version};
use forebay_io::object::{Bucket, ObjectInfo};
use serde::Deserialize;
use serde_json::Value;

use crate::dtype::{DTYPES, Dtype};

/// The longest header that safetensors itself reads, in bytes.
pub(super) const MAX_HEADER: u64 = 100_000_000;

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Its bytes in the file.
    pub(super) range: Range<u64>,
}

#[derive(Deserialize)]
struct Text {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The tensors of a file, by name, and the version that has them there.
///
/// # Errors
/// `NotFound`; `Stale` when it is replaced meanwhile; `Corrupt` when it is no safetensors file, `Unsupported` for a type that no checkpoint has.
pub(super) async fn read(bucket: &Bucket, key: &ObjectKey) -> Result<(BTreeMap<String, Entry>, Version)> {
    let place = || format!("`{key}` of {}", bucket.url());
    let lost = || {
        Error::new(ErrorKind::NotFound, format!("{} holds no `{key}`", bucket.url()))
            .with_hint("give a directory with a model: model.safetensors, or an index of its files")
    };
    let ObjectInfo { size, version, .. } = bucket.head(key).await?.ok_or_else(lost)?;
    if size < 8 {
        return Err(Error::corrupt(format!("{} is no safetensors file", place())));
    }
    let head = bucket.get(key, Some(&version), 0..8).await?;
    let length = head.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if length > MAX_HEADER || length > size - 8 {
        return Err(Error::corrupt(format!(
            "{} is no safetensors file: a header of {length} bytes",
            place()
        )));
    }
    let text = bucket.get(key, Some(&version), 8..8 + length).await?;
    let entries = parse(&text, 8 + length, size).map_err(|error| error.context(place()))?;
    Ok((entries, version))
}

fn parse(text: &[u8], header: u64, size: u64) -> Result<BTreeMap<String, Entry>> {
    let bad = |why: String| Error::corrupt(format!("its header is not as safetensors has it: {why}"));
    let named: BTreeMap<String, Value> =
        serde_json::from_slice(text).map_err(|error| bad(error.to_string()))?;
    let mut entries = BTreeMap::new();
    for (name, value) in named.into_iter().filter(|(name, _)| name != "__metadata__") {
        let entry: Text = serde_json::from_value(value).map_err(|error| bad(format!("`{name}`: {error}")))?;
        let Text { dtype, shape, data_offsets: [start, end] } = entry;
        let known = DTYPES.iter().find(|known| known.safetensors == Some(dtype.as_str())).copied();
        let unknown = || {
            Error::new(ErrorKind::Unsupported, format!("tensor `{name}` is {dtype}, which no checkpoint has"))
        };
        let dtype = known.ok_or_else(unknown)?;
        let fits = end.checked_add(header).is_some_and(|end| end <= size)
            && end.checked_sub(start).is_some_and(|bytes| dtype.bytes_of(&shape) == Some(bytes));
        if !fits {
            return Err(bad(format!("`{name}` of {shape:?} at {start}..{end}")));
        }
        entries.insert(name, Entry { dtype, shape, range: header + start..header + end });
    }
    let mut ranges: Vec<_> = entries.iter().map(|(name, entry)| (&entry.range, name)).collect();
    ranges.retain(|(range, _)| !range.is_empty());
    ranges.sort_by_key(|(range, _)| range.start);
    match ranges.windows(2).find(|pair| pair[1].0.start < pair[0].0.end) {
        Some(pair) => Err(bad(format!("`{}` and `{}` share bytes", pair[0].1, pair[1].1))),
        None => Ok(entries),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        match parse(text.as_bytes(), 100, 132) {
            Ok(entries) => assert_eq!(expected, format!("{}", entries.len()), "{text}"),
            Err(error) => assert!(!expected.is_empty() && error.to_string().contains(expected), "{error}"),
        }
    }

    #[test]
    fn what_does_not_hold_together_is_refused() {
        check(r#"{"a":{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]},"__metadata__":{"x":"y"}}  "#, "1");
        check(r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[32,32]}}"#, "1");
        check(r#"{"a":{"dtype":"F32","shape":[2,4],"data_offsets":[1,33]}}"#, "`a` of [2, 4] at 1..33");
        check(r#"{"a":{"dtype":"F32","shape":[2,4],"data_offsets":[32,0]}}"#, "`a` of [2, 4] at 32..0");
        check(r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,32]}}"#, "`a` of [2, 3]");
        check(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}}"#, "`a` of");
        check(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551615,3]}}"#, "`a` of");
        check(r#"{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}"#, "F4, which no checkpoint has");
        let both = r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[7,15]}}"#;
        check(both, "`a` and `b` share bytes");
        check("[]", "not as safetensors has it");
        check(r#"{"a":{"dtype":"U8"}}"#, "missing field");
    }
}
