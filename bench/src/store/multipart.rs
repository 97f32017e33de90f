//! Uploads in parts that are not complete yet.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::HeaderMap;

use super::fault::Fault;

/// Every part but the last has at least these bytes, as in S3.
const SMALLEST_PART: u64 = 5 << 20;

/// An upload that was started and neither completed nor aborted.
#[derive(Debug)]
pub(super) struct PendingUpload {
    pub(super) bucket: String,
    pub(super) key: String,
    pub(super) headers: HeaderMap,
    pub(super) parts: BTreeMap<u32, Part>,
}

/// One uploaded part.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) pieces: Vec<Bytes>,
    pub(super) etag: String,
}

impl Part {
    fn size(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }
}

impl PendingUpload {
    /// The object's pieces, from the parts that the client lists by number and ETag.
    pub(super) fn assemble(&self, listed: &[(u32, String)]) -> Result<Vec<Bytes>, Fault> {
        let ascending = listed.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if listed.is_empty() || !ascending {
            return Err(Fault::InvalidPart);
        }
        let mut pieces = Vec::new();
        for (index, (number, etag)) in listed.iter().enumerate() {
            let part = self.parts.get(number).ok_or(Fault::InvalidPart)?;
            if etag.trim_matches('"') != part.etag.trim_matches('"') {
                return Err(Fault::InvalidPart);
            }
            if index + 1 < listed.len() && part.size() < SMALLEST_PART {
                return Err(Fault::EntityTooSmall);
            }
            pieces.extend(part.pieces.iter().cloned());
        }
        Ok(pieces)
    }
}
