//! Compaction: what is left of segments that lost most of their bytes, and small ones, is written into new segments.
//!
//! The tree says which segments are new or lost bytes, and which files refer to each. Their bytes come through the cache,
//! go into one new segment, and one commit after another takes the files there, generation and times as they were. Who has
//! an older layout open reads the old segment until it is deleted, and then follows. A round that is cut off anywhere
//! leaves every file with its bytes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::MIB;
use forebay_core::{Extent, FileLayout, InodeId, Result, Source};
use forebay_metadata::tree::{GcSettings, LocalTree, Loose, Tree};

use crate::Volume;
use crate::segments::SEGMENT_BYTES;
use crate::volume::local;

/// Below this a segment is written together with others, however full it is.
const SMALL_BYTES: u64 = MIB;
/// Segments that are looked at before the first of them is rewritten: those of neighbouring files go together.
const WINDOW: usize = 1024;
/// Segments asked for at once.
const PAGE: usize = 128;

/// What a round of compaction did, or would do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Compacted {
    /// Segments whose files were taken elsewhere.
    pub(crate) segments: u64,
    /// The bytes of these.
    pub(crate) bytes: u64,
    /// Those of them that were in use.
    pub(crate) live_bytes: u64,
}

/// A segment that is worth rewriting.
#[derive(Debug)]
struct Candidate {
    loose: Loose,
    /// The bytes in use.
    ranges: Vec<Range<u64>>,
    first: InodeId,
}

impl Candidate {
    fn live(&self) -> u64 {
        total(&self.ranges)
    }

    fn is_sparse(&self) -> bool {
        self.live() * 2 < self.loose.blob.size
    }
}

fn total(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Starts the task that compacts now and then, slowly.
pub(crate) fn start(volume: &Arc<Volume>, interval_ms: u64) {
    if interval_ms == 0 || volume.read_only() {
        return;
    }
    let (weak, clock, stop) = (Arc::downgrade(volume), volume.clock().clone(), volume.tasks().stop());
    let GcSettings { first_ms, pause_ms, .. } = GcSettings::default();
    volume.tasks().spawn("compact", async move {
        let mut rest = Duration::from_millis(first_ms);
        while stop.run_until_cancelled(clock.sleep(rest)).await.is_some() {
            let Some(volume) = weak.upgrade() else { return };
            rest = Duration::from_millis(interval_ms);
            let round = compact(&volume, Duration::from_millis(pause_ms), false);
            if let Some(Err(error)) = stop.run_until_cancelled(round).await {
                tracing::warn!(%error, "compaction put off");
            }
        }
    });
}

/// Looks at every segment that is new or lost bytes, and rewrites those that are worth it; rests `pause` after each.
///
/// # Errors
/// `Unsupported` when the tree is served elsewhere; `Unavailable` when tree or store cannot be reached: what was done
/// stands.
pub(crate) async fn compact(volume: &Volume, pause: Duration, dry_run: bool) -> Result<Compacted> {
    let tree = local(volume)?;
    let _turn = volume.store().segments.compaction().await;
    let round = Round { volume, tree, pause, dry_run };
    let mut compacted = Compacted::default();
    let (mut window, mut last): (Vec<Candidate>, Option<Loose>) = (Vec::new(), None);
    loop {
        let (found, next) = tree.loose_segments(last.as_ref(), PAGE).await?;
        for loose in found {
            window.extend(round.look(loose).await?);
        }
        if window.len() >= WINDOW || next.is_none() {
            round.rewrite(std::mem::take(&mut window), &mut compacted).await?;
        }
        if next.is_none() {
            return Ok(compacted);
        }
        last = next;
        volume.clock().sleep(pause).await;
    }
}

struct Round<'a> {
    volume: &'a Volume,
    tree: &'a LocalTree,
    pause: Duration,
    dry_run: bool,
}

impl Round<'_> {
    /// What is to be rewritten of a segment. One that is full enough is not looked at again before it changes.
    async fn look(&self, loose: Loose) -> Result<Option<Candidate>> {
        let (ranges, first) = self.tree.live_ranges(&loose.blob).await?;
        let Some(first) = first else { return Ok(None) };
        let candidate = Candidate { loose, ranges, first };
        if candidate.is_sparse() || candidate.loose.blob.size < SMALL_BYTES {
            return Ok(Some(candidate));
        }
        if !self.dry_run {
            self.tree.settle_segment(candidate.loose).await?;
        }
        Ok(None)
    }

    /// Rewrites candidates, as many together as fit one segment. A small one without company waits for some.
    async fn rewrite(&self, mut window: Vec<Candidate>, compacted: &mut Compacted) -> Result<()> {
        window.sort_by_key(|candidate| candidate.first);
        let mut group: Vec<Candidate> = Vec::new();
        let mut rest = window.into_iter().peekable();
        while let Some(candidate) = rest.next() {
            group.push(candidate);
            let live: u64 = group.iter().map(Candidate::live).sum();
            if rest.peek().is_some_and(|next| live + next.live() <= SEGMENT_BYTES) {
                continue;
            }
            if group.len() > 1 || group.iter().any(Candidate::is_sparse) {
                self.rewrite_group(&group, compacted).await?;
                self.volume.clock().sleep(self.pause).await;
            }
            group.clear();
        }
        Ok(())
    }

    async fn rewrite_group(&self, group: &[Candidate], compacted: &mut Compacted) -> Result<()> {
        let live: u64 = group.iter().map(Candidate::live).sum();
        let _permit = if self.dry_run { None } else { Some(self.volume.charge_write(live).await?) };
        let (mut contents, mut taken) = (Vec::new(), Vec::new());
        for candidate in group {
            if !self.dry_run {
                match self.read(candidate).await {
                    Ok(bytes) => contents.extend(bytes),
                    // It holds up no other; fsck tells what is lost.
                    Err(error) => {
                        tracing::warn!(key = %candidate.loose.blob.key, %error, "a segment cannot be compacted");
                        continue;
                    }
                }
            }
            taken.push(candidate);
            compacted.segments += 1;
            compacted.bytes += candidate.loose.blob.size;
            compacted.live_bytes += candidate.live();
        }
        match self.dry_run || taken.is_empty() {
            true => Ok(()),
            false => self.take(&taken, &contents).await,
        }
    }

    async fn read(&self, candidate: &Candidate) -> Result<Vec<Bytes>> {
        let whole = FileLayout::of_blob(candidate.loose.blob.clone());
        let mut bytes = Vec::with_capacity(candidate.ranges.len());
        for range in &candidate.ranges {
            bytes.push(self.volume.store().fetch.bytes(whole.pieces(range.clone())).await?);
        }
        Ok(bytes)
    }

    /// Puts `contents`, what is live of `taken`, into a new segment and takes all files there.
    async fn take(&self, taken: &[&Candidate], contents: &[Bytes]) -> Result<()> {
        let pin = self.tree.fresh_segment();
        let fresh = self.volume.store().segments.put_segment(&pin, contents).await?;
        let (mut at, mut files) = (0, 0);
        for candidate in taken {
            let mut to = FileLayout::empty();
            for range in &candidate.ranges {
                let length = range.end - range.start;
                let source = Source::Blob { blob: fresh.clone(), offset: at };
                to.write(Extent { offset: range.start, length, source });
                at += length;
            }
            files += self.tree.move_segment(&candidate.loose.blob, &to).await?;
        }
        if files == 0 {
            // All of them changed or went meanwhile.
            self.volume.bucket().delete(pin.key()).await?;
        }
        tracing::debug!(segments = taken.len(), files, bytes = at, "compacted");
        Ok(())
    }
}
