//! How tensors lie in a shard file: a safetensors file whose data starts on a page.
//!
//! ```text
//! 0        8                    header              size
//! +--------+--------------------+-------------------+
//! | u64 LE | JSON, then spaces  | tensors, no gaps  |
//! +--------+--------------------+-------------------+
//! ```
//! The first field is the length of JSON and spaces; it is chosen so that `header` is a multiple of 4,096. Tensors
//! are sorted by element size, largest first, then by name, so that each lies aligned to its elements. The layout
//! is a pure function of the tensors.

use std::ops::Range;

use forebay_core::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::dtype::Dtype;
use crate::region::Region;

/// Where data starts is a multiple of this: a page, so that direct I/O and mappings need no copy.
const HEADER_ALIGNMENT: usize = 4096;

/// The longest header that safetensors itself reads, in bytes.
const MAX_HEADER: usize = 100_000_000;

/// A tensor to be laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name, unique in the step.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions over all ranks.
    pub shape: Vec<u64>,
    /// The part of it that is laid out.
    pub region: Region,
}

impl TensorSpec {
    /// A tensor that is laid out whole.
    pub fn whole(name: impl Into<String>, dtype: Dtype, shape: Vec<u64>) -> Self {
        Self { name: name.into(), dtype, region: Region::whole(&shape), shape }
    }

    /// Its name in the file: a part's says where it begins.
    fn entry(&self) -> String {
        if self.region.is_whole(&self.shape) {
            return self.name.clone();
        }
        let offsets: Vec<_> = self.region.offsets.iter().map(u64::to_string).collect();
        format!("{}#{}", self.name, offsets.join(","))
    }
}

/// Where everything lies in a shard file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardLayout {
    /// The file's first bytes, up to the data.
    pub header: Vec<u8>,
    /// Byte range of each tensor in the file, in the order of the tensors given.
    pub ranges: Vec<Range<u64>>,
    /// Bytes in the file.
    pub size: u64,
}

#[derive(Serialize)]
struct HeaderEntry<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

impl ShardLayout {
    /// Lays `tensors` out.
    ///
    /// # Errors
    /// `TooLarge` when their sizes do not fit 64 bits or the header passes what safetensors reads.
    pub fn of(tensors: &[TensorSpec]) -> Result<Self> {
        let too_large = |what: &str| Error::new(ErrorKind::TooLarge, format!("{what} is too large"));
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by(|a, b| {
            let (a, b) = (&tensors[*a], &tensors[*b]);
            let places = || (&a.name, &a.region.offsets).cmp(&(&b.name, &b.region.offsets));
            b.dtype.size.cmp(&a.dtype.size).then_with(places)
        });
        let mut ranges = vec![0..0; tensors.len()];
        let mut end = 0u64;
        let text = |error: serde_json::Error| Error::bug(format!("encode a shard header: {error}"));
        let mut json = String::from(r#"{"__metadata__":{"format":"pt"}"#);
        for index in order {
            let tensor = &tensors[index];
            let length =
                tensor.dtype.bytes_of(&tensor.region.lengths).ok_or_else(|| too_large(&tensor.name))?;
            let start = end;
            end = start.checked_add(length).ok_or_else(|| too_large("the state"))?;
            let bytes_shape = [length];
            let (dtype, shape) = match tensor.dtype.safetensors {
                Some(dtype) => (dtype, tensor.region.lengths.as_slice()),
                None => ("U8", bytes_shape.as_slice()),
            };
            let entry = HeaderEntry { dtype, shape, data_offsets: [start, end] };
            json.push(',');
            json += &serde_json::to_string(&tensor.entry()).map_err(text)?;
            json.push(':');
            json += &serde_json::to_string(&entry).map_err(text)?;
            ranges[index] = start..end;
        }
        json.push('}');
        let header = frame(json).ok_or_else(|| too_large("the shard's header"))?;
        let data = header.len() as u64;
        let size = end.checked_add(data).ok_or_else(|| too_large("the state"))?;
        let ranges = ranges.into_iter().map(|range| range.start + data..range.end + data).collect();
        Ok(Self { header, ranges, size })
    }
}

/// Puts the length before the JSON and spaces after it.
fn frame(json: String) -> Option<Vec<u8>> {
    let total = (8 + json.len()).next_multiple_of(HEADER_ALIGNMENT);
    if total > MAX_HEADER {
        return None;
    }
    let mut header = Vec::with_capacity(total);
    header.extend_from_slice(&((total - 8) as u64).to_le_bytes());
    header.extend_from_slice(json.as_bytes());
    header.resize(total, b' ');
    Some(header)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::SliceKind;

    fn spec(name: &str, dtype: &str, shape: &[u64]) -> TensorSpec {
        TensorSpec::whole(name, Dtype::named(dtype).expect(dtype), shape.into())
    }

    #[test]
    fn header_bytes_are_pinned() {
        let tensors = [
            spec("b", "bfloat16", &[3]),
            spec("a \"quoted\"", "float32", &[2, 2]),
            spec("c", "complex128", &[]),
        ];
        let layout = ShardLayout::of(&tensors).expect("layout");
        let json = concat!(
            r#"{"__metadata__":{"format":"pt"},"c":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},"#,
            r#""a \"quoted\"":{"dtype":"F32","shape":[2,2],"data_offsets":[16,32]},"#,
            r#""b":{"dtype":"BF16","shape":[3],"data_offsets":[32,38]}}"#
        );
        assert_eq!(&layout.header[..8], &4088u64.to_le_bytes());
        assert_eq!(&layout.header[8..8 + json.len()], json.as_bytes());
        assert!(layout.header[8 + json.len()..].iter().all(|byte| *byte == b' '));
        assert_eq!(layout.ranges, [4128..4134, 4112..4128, 4096..4112]);
        assert_eq!(layout.size, 4134);
    }

    #[test]
    fn parts_are_named_by_where_they_begin() {
        let mut part = spec("w", "float32", &[4, 6]);
        part.region = Region { kind: SliceKind::Box, offsets: vec![2, 3], lengths: vec![2, 3] };
        let mut range = spec("v", "int8", &[100]);
        range.region = Region::flat(40..50);
        let layout = ShardLayout::of(&[range, part]).expect("layout");
        let json = concat!(
            r#"{"__metadata__":{"format":"pt"},"#,
            r#""w#2,3":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
            r##""v#40":{"dtype":"I8","shape":[10],"data_offsets":[24,34]}}"##
        );
        assert_eq!(std::str::from_utf8(&layout.header[8..8 + json.len()]).expect("text"), json);
        assert_eq!(layout.ranges, [4120..4130, 4096..4120]);
    }

    #[test]
    fn nothing_and_too_much() {
        assert_eq!(ShardLayout::of(&[]).expect("empty").size, 4096);
        let huge = [spec("x", "float32", &[u64::MAX / 8]), spec("y", "float32", &[u64::MAX / 8])];
        assert_eq!(ShardLayout::of(&huge).expect_err("overflow").kind(), ErrorKind::TooLarge);
    }
}
