//! From pieces of a layout to bytes: block by block through the cache.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use forebay_cache::Blocks;
use forebay_core::{
    BLOCK_SIZE, Blob, BlockKey, ErrorKind, FileLayout, Piece, Result, Source, VolumeBlob, VolumeId,
};
use futures::stream::{self, StreamExt, TryStreamExt};

use crate::staging::Staging;

/// Blocks of one read that are fetched at once. A FUSE read is at most 1 MiB, so more is for other callers.
const BLOCKS_AT_ONCE: usize = 8;

/// Reads pieces of one volume's layouts.
#[derive(Debug, Clone)]
pub(crate) struct Fetch {
    pub(crate) volume: VolumeId,
    pub(crate) blocks: Arc<dyn Blocks>,
    /// Where bytes lie that are not in the bucket yet.
    pub(crate) staging: Option<Arc<Staging>>,
}

/// One step of answering a read.
enum Step {
    Zeros(usize),
    Bytes(Bytes),
    Block(BlockKey, Range<u64>),
    /// A range of a blob whose bytes are on this host. When it is read they may be in the bucket instead.
    Staged(Blob, Range<u64>),
}

impl Fetch {
    /// The bytes of `range`, if they are all in memory, or also on disk where the caller may wait for that.
    pub(crate) fn now(&self, pieces: Vec<Piece>, may_block: bool) -> Option<Bytes> {
        let parts: Option<Vec<Bytes>> = self
            .steps(pieces)
            .into_iter()
            .map(|step| match step {
                Step::Block(key, within) if may_block => self.blocks.get_near(&key, within),
                Step::Block(key, within) => self.blocks.get_now(&key, within),
                Step::Staged(blob, range) if may_block => {
                    self.staging.as_ref()?.read_now(&blob.key, range)?.ok()
                }
                Step::Staged(..) => None,
                Step::Bytes(bytes) => Some(bytes),
                Step::Zeros(length) => Some(zeros(length)),
            })
            .collect();
        parts.map(join)
    }

    /// The bytes of `range`, wherever they are.
    pub(crate) async fn bytes(&self, pieces: Vec<Piece>) -> Result<Bytes> {
        let parts: Vec<Bytes> = stream::iter(self.steps(pieces))
            .map(async |step| match step {
                Step::Block(key, within) => self.blocks.get(&key, within).await,
                Step::Staged(blob, range) => self.staged(&blob, range).await,
                Step::Bytes(bytes) => Ok(bytes),
                Step::Zeros(length) => Ok(zeros(length)),
            })
            .buffered(BLOCKS_AT_ONCE)
            .try_collect()
            .await?;
        Ok(join(parts))
    }

    async fn staged(&self, blob: &Blob, range: Range<u64>) -> Result<Bytes> {
        let here = match &self.staging {
            Some(staging) => staging.read(&blob.key, range.clone()).await,
            None => Ok(None),
        };
        let failed = match here {
            Ok(Some(bytes)) => return Ok(bytes),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        let mut parts = Vec::new();
        for (key, within) in forebay_cache::pieces(&self.name(blob), range) {
            match (self.blocks.get(&key, within).await, failed.as_ref()) {
                (Ok(part), _) => parts.push(part),
                // It was not uploaded before, as one is whose file a failure of power brought back.
                (Err(error), Some(failed)) if error.kind() == ErrorKind::NotFound => {
                    return Err(failed.duplicate());
                }
                (Err(error), _) => return Err(error),
            }
        }
        Ok(join(parts))
    }

    /// The blocks that hold `range` of `layout`, each once, in file order, but for those that are staged here.
    pub(crate) fn keys(&self, layout: &FileLayout, range: Range<u64>) -> Vec<BlockKey> {
        let mut keys: Vec<BlockKey> = Vec::new();
        for step in self.steps(layout.pieces(range)) {
            match step {
                Step::Block(key, _) if keys.last() != Some(&key) => keys.push(key),
                _ => {}
            }
        }
        keys
    }

    /// The same, each with where in the file it ends, by whole blocks of that.
    pub(crate) fn keys_with_ends(&self, layout: &FileLayout, range: Range<u64>) -> Vec<(BlockKey, u64)> {
        let mut keys: Vec<(BlockKey, u64)> = Vec::new();
        let mut start = range.start;
        while start < range.end {
            let end = (start + 1).next_multiple_of(BLOCK_SIZE).min(range.end);
            for key in self.keys(layout, start..end) {
                match keys.last_mut() {
                    Some(last) if last.0 == key => last.1 = end,
                    _ => keys.push((key, end)),
                }
            }
            start = end;
        }
        keys
    }

    fn steps(&self, pieces: Vec<Piece>) -> Vec<Step> {
        let mut steps = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let length = piece.range.end - piece.range.start;
            match piece.source {
                None => steps.push(Step::Zeros(length as usize)),
                Some(Source::Inline(bytes)) => steps.push(Step::Bytes(bytes)),
                Some(Source::Blob { blob, offset }) if self.is_staged(&blob) => {
                    steps.push(Step::Staged(blob, offset..offset + length));
                }
                Some(Source::Blob { blob, offset }) => {
                    let blocks = forebay_cache::pieces(&self.name(&blob), offset..offset + length);
                    steps.extend(blocks.map(|(key, within)| Step::Block(key, within)));
                }
            }
        }
        steps
    }

    /// Puts a fresh blob into the cache, so that reading back what was just written costs no request.
    pub(crate) fn remember(&self, blob: &Blob, content: Bytes) {
        for (key, _) in forebay_cache::pieces(&self.name(blob), 0..blob.size) {
            let start = key.offset() as usize;
            let end = start + key.len() as usize;
            self.blocks.insert(&key, content.slice(start..end));
        }
    }

    /// Whether the bytes of a blob are on this host and perhaps nowhere else.
    pub(crate) fn is_staged(&self, blob: &Blob) -> bool {
        blob.staged_on().is_some() && self.staging.as_ref().is_some_and(|staging| staging.holds(&blob.key))
    }

    /// A blob under the name that the cache files it.
    pub(crate) fn name(&self, blob: &Blob) -> VolumeBlob {
        VolumeBlob::new(self.volume, blob.clone())
    }
}

fn zeros(length: usize) -> Bytes {
    Bytes::from(vec![0; length])
}

/// One byte string from several; no copy when there is only one.
pub(crate) fn join(mut parts: Vec<Bytes>) -> Bytes {
    if parts.len() == 1 {
        return parts.swap_remove(0);
    }
    let mut whole = BytesMut::with_capacity(parts.iter().map(Bytes::len).sum());
    for part in parts {
        whole.extend_from_slice(&part);
    }
    whole.freeze()
}
