//! One stored object: bytes that never change, and what is known of them.

use std::ops::Range;
use std::time::SystemTime;

use bytes::Bytes;
use http::HeaderMap;

use super::fault::Fault;

/// An object; its bytes lie in the pieces they were uploaded in.
#[derive(Debug, Clone)]
pub(super) struct Object {
    pub(super) pieces: Vec<Bytes>,
    pub(super) size: u64,
    /// In quotes, as in the header.
    pub(super) etag: String,
    pub(super) modified: SystemTime,
    /// User metadata and content headers, given back as they came.
    pub(super) headers: HeaderMap,
}

impl Object {
    pub(super) fn new(pieces: Vec<Bytes>, etag: String, headers: HeaderMap) -> Self {
        let size = pieces.iter().map(|piece| piece.len() as u64).sum();
        Self { pieces, size, etag, modified: SystemTime::now(), headers }
    }

    /// The bytes of `range`, which lies inside the object, without copying them.
    pub(super) fn slice(&self, range: Range<u64>) -> Vec<Bytes> {
        let mut slices = Vec::new();
        let mut start = 0;
        for piece in &self.pieces {
            let end = start + piece.len() as u64;
            let (from, to) = (range.start.max(start), range.end.min(end));
            if from < to {
                slices.push(piece.slice((from - start) as usize..(to - start) as usize));
            }
            start = end;
        }
        slices
    }
}

/// `If-Match` and `If-None-Match`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Conditions {
    pub(super) if_match: Option<String>,
    pub(super) if_none_match: Option<String>,
}

impl Conditions {
    /// Whether a write over `current` may go ahead.
    pub(super) fn check_write(&self, current: Option<&Object>) -> Result<(), Fault> {
        match (&self.if_match, current) {
            (Some(_), None) => return Err(Fault::NoSuchKey),
            (Some(wanted), Some(object)) if !matches(wanted, &object.etag) => {
                return Err(Fault::PreconditionFailed);
            }
            _ => {}
        }
        match (&self.if_none_match, current) {
            (Some(refused), Some(object)) if matches(refused, &object.etag) => Err(Fault::PreconditionFailed),
            _ => Ok(()),
        }
    }

    /// Whether a read of `object` may go ahead.
    pub(super) fn check_read(&self, object: &Object) -> Result<(), Fault> {
        if self.if_match.as_ref().is_some_and(|wanted| !matches(wanted, &object.etag)) {
            return Err(Fault::PreconditionFailed);
        }
        if self.if_none_match.as_ref().is_some_and(|known| matches(known, &object.etag)) {
            return Err(Fault::NotModified);
        }
        Ok(())
    }
}

/// Whether a list of ETags, quoted or not, or `*`, names this one.
fn matches(list: &str, etag: &str) -> bool {
    let bare = |tag: &str| tag.trim().trim_start_matches("W/").trim_matches('"').to_owned();
    list.trim() == "*" || list.split(',').any(|one| bare(one) == bare(etag))
}

/// A `Range` header or a part copy's range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByteRange {
    /// First and last byte, both included.
    Bounded(u64, u64),
    /// From this byte on.
    From(u64),
    /// The last so many bytes.
    Last(u64),
}

impl ByteRange {
    /// Reads `bytes=0-9`, `bytes=5-` and `bytes=-3`; anything else is `None` and the whole object is answered.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
        match (first.parse().ok(), last.parse().ok()) {
            (Some(first), Some(last)) if first <= last => Some(Self::Bounded(first, last)),
            (Some(first), None) if last.is_empty() => Some(Self::From(first)),
            (None, Some(count)) if first.is_empty() => Some(Self::Last(count)),
            _ => None,
        }
    }

    /// The bytes it means in an object of `size`.
    pub(super) fn within(self, size: u64) -> Result<Range<u64>, Fault> {
        let range = match self {
            Self::Bounded(first, last) => first..size.min(last.saturating_add(1)),
            Self::From(first) => first..size,
            Self::Last(count) => size.saturating_sub(count)..size,
        };
        if range.is_empty() { Err(Fault::InvalidRange) } else { Ok(range) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_slices_agree() {
        let pieces =
            vec![Bytes::from_static(b"0123"), Bytes::from_static(b"45"), Bytes::from_static(b"6789")];
        let object = Object::new(pieces, "\"1\"".into(), HeaderMap::new());
        for (header, wanted) in [
            ("bytes=0-9", Ok("0123456789")),
            ("bytes=3-6", Ok("3456")),
            ("bytes=4-5", Ok("45")),
            ("bytes=8-99", Ok("89")),
            ("bytes=7-", Ok("789")),
            ("bytes=-2", Ok("89")),
            ("bytes=10-", Err(Fault::InvalidRange)),
        ] {
            let range = ByteRange::parse(header).expect(header).within(object.size);
            let bytes = range.map(|range| object.slice(range).concat());
            assert_eq!(bytes, wanted.map(|text| text.as_bytes().to_vec()), "{header}");
        }
        assert_eq!(ByteRange::parse("bytes=9-3"), None);
        assert_eq!(ByteRange::parse("lines=1-2"), None);
    }

    #[test]
    fn conditions_compare_etags() {
        let object = Object::new(Vec::new(), "\"a\"".into(), HeaderMap::new());
        let check = |if_match: Option<&str>, if_none_match: Option<&str>, present: bool| {
            let owned = |text: Option<&str>| text.map(str::to_owned);
            let conditions = Conditions { if_match: owned(if_match), if_none_match: owned(if_none_match) };
            conditions.check_write(present.then_some(&object))
        };
        assert_eq!(check(None, None, true), Ok(()));
        assert_eq!(check(Some("\"a\""), None, true), Ok(()));
        assert_eq!(check(Some("a"), None, true), Ok(()));
        assert_eq!(check(Some("\"b\""), None, true), Err(Fault::PreconditionFailed));
        assert_eq!(check(Some("\"a\""), None, false), Err(Fault::NoSuchKey));
        assert_eq!(check(None, Some("*"), true), Err(Fault::PreconditionFailed));
        assert_eq!(check(None, Some("*"), false), Ok(()));
    }
}
