//! How a layout is cut into records, so that little is written again when little of it changes.
//!
//! The first extents are in the `I` record, each further run of them in an `E` record. Where runs begin stays as it is while
//! extents come and go; one that becomes too long is cut, and what becomes short joins its neighbour. An `E` record's number
//! is no place in the order: a new run takes a free one.

use std::ops::Range;

use forebay_core::{Blob, Extent, Source};

/// Bytes of extents that an `I` record may hold before `E` records follow: small files need one read.
const HEAD_BYTES: usize = 1024;
/// Bytes of extents in one `E` record.
const FURTHER_BYTES: usize = 4096;

/// A layout in parts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parts {
    /// What the `I` record holds.
    pub head: Vec<Extent>,
    /// What each `E` record holds, by its number.
    pub further: Vec<Vec<Extent>>,
}

/// Consecutive extents of the new layout.
struct Run {
    range: Range<usize>,
    /// The record that has them, or will; a new one where there is none.
    number: Option<usize>,
    is_changed: bool,
}

impl Parts {
    /// All extents in their order.
    pub fn joined(&self) -> Vec<Extent> {
        let mut further: Vec<&[Extent]> = self.further.iter().map(Vec::as_slice).collect();
        further.sort_by_key(|run| start(run));
        [&self.head[..]].into_iter().chain(further).flatten().cloned().collect()
    }

    /// `extents`, in their order, in parts that differ from these in as few `E` records as may be.
    pub fn recut(&self, extents: &[Extent]) -> Self {
        if fitting(extents, HEAD_BYTES) == extents.len() {
            return Self { head: extents.to_vec(), further: Vec::new() };
        }
        let mut old: Vec<usize> = (0..self.further.len()).collect();
        old.sort_by_key(|number| start(&self.further[*number]));
        let place = |number: &usize| {
            let at = start(&self.further[*number]);
            extents.partition_point(|extent| extent.offset < at)
        };
        let bounds: Vec<usize> = old.iter().map(place).chain([extents.len()]).collect();
        let head = fitting(&extents[..bounds[0]], HEAD_BYTES);
        let mut runs = Vec::with_capacity(old.len() + 1);
        cut(extents, head..bounds[0], None, old.is_empty(), &mut runs);
        for (index, number) in old.iter().enumerate() {
            let range = bounds[index]..bounds[index + 1];
            if extents[range.clone()] == self.further[*number][..] {
                runs.push(Run { range, number: Some(*number), is_changed: false });
            } else {
                cut(extents, range, Some(*number), index + 1 == old.len(), &mut runs);
            }
        }
        let further = numbered(extents, join(extents, runs));
        Self { head: extents[..head].to_vec(), further }
    }
}

/// Where a run begins in its file.
fn start(run: &[Extent]) -> u64 {
    run.first().map_or(u64::MAX, |extent| extent.offset)
}

/// Adds the changed run `range` in pieces that records can hold: filled where files grow, at the end, and halves elsewhere, which
/// leave room.
fn cut(extents: &[Extent], range: Range<usize>, number: Option<usize>, is_last: bool, runs: &mut Vec<Run>) {
    let (mut number, mut rest) = (number, range);
    while !rest.is_empty() {
        let fits = fitting(&extents[rest.clone()], FURTHER_BYTES).max(1);
        let taken = if is_last || fits == rest.len() { fits } else { fits.min(rest.len().div_ceil(2)) };
        let (range, more) = (rest.start..rest.start + taken, rest.start + taken..rest.end);
        runs.push(Run { range, number: number.take(), is_changed: true });
        rest = more;
    }
}

/// Joins what was changed and is short with its neighbour, where half of a record holds both.
fn join(extents: &[Extent], runs: Vec<Run>) -> Vec<Run> {
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        if let Some(last) = joined.last_mut().filter(|last| last.is_changed || run.is_changed) {
            let both = last.range.start..run.range.end;
            if fitting(&extents[both.clone()], FURTHER_BYTES / 2) == both.len() {
                let number = last.number.or(run.number);
                *last = Run { range: both, number, is_changed: true };
                continue;
            }
        }
        joined.push(run);
    }
    joined
}

/// The extents of each run by its number, of which none is left out.
fn numbered(extents: &[Extent], runs: Vec<Run>) -> Vec<Vec<Extent>> {
    let mut further: Vec<Option<Range<usize>>> = runs.iter().map(|_| None).collect();
    let mut unnumbered = Vec::new();
    for run in runs {
        match run.number.and_then(|number| further.get_mut(number)) {
            Some(place) => *place = Some(run.range),
            None => unnumbered.push(run.range),
        }
    }
    let mut unnumbered = unnumbered.into_iter();
    let ranges = further.into_iter().filter_map(|place| place.or_else(|| unnumbered.next()));
    ranges.map(|range| extents[range].to_vec()).collect()
}

/// How many of the first extents take at most `most` bytes.
fn fitting(extents: &[Extent], most: usize) -> usize {
    let mut taken = 0;
    let mut blobs: Vec<&Blob> = Vec::new();
    for (index, extent) in extents.iter().enumerate() {
        taken += 16;
        match &extent.source {
            Source::Inline(bytes) => taken += bytes.len(),
            Source::Blob { blob, .. } if !blobs.contains(&blob) => {
                taken += blob.key.as_str().len() + blob.version.as_str().len() + 16;
                blobs.push(blob);
            }
            Source::Blob { .. } => {}
        }
        if taken > most {
            return index;
        }
    }
    extents.len()
}

#[cfg(test)]
mod tests {
    use forebay_core::{FileLayout, ObjectKey, Version};

    use super::*;
    use crate::schema::{decode_extents, encode_extents};
    use crate::testing::{Chance, rounds};

    /// Bytes that some commit wrote to a blob of its own.
    fn written(offset: u64, length: u64, number: u64) -> Extent {
        let key = ObjectKey::new(format!(".forebay/blobs/{:016x}/{number:032x}", 7));
        let blob = Blob { key, version: Version::new("0123456789abcdef0123456789abcdef"), size: length };
        Extent { offset, length, source: Source::Blob { blob, offset: 0 } }
    }

    /// How many `E` records change from one to the other, and how many go.
    fn changed(before: &Parts, after: &Parts) -> usize {
        let both =
            before.further.iter().zip(&after.further).filter(|(before, after)| before != after).count();
        both + before.further.len().abs_diff(after.further.len())
    }

    #[track_caller]
    fn check(parts: &Parts, extents: &[Extent]) {
        assert_eq!(parts.joined(), extents);
        for run in &parts.further {
            let record = encode_extents(run);
            assert!(run.len() == 1 || record.len() <= 4200, "{} bytes", record.len());
            assert_eq!(&decode_extents(record).expect("extents"), run);
        }
    }

    #[test]
    fn short_layouts_have_no_further_records_and_long_extents_one_of_their_own() {
        let few: Vec<_> = (0..5).map(|n| written(n * 20, 10, n)).collect();
        let parts = Parts::default().recut(&few);
        assert_eq!((parts.head.len(), parts.further.len()), (5, 0));
        let inline = Extent { offset: 0, length: 5000, source: Source::Inline(vec![1; 5000].into()) };
        let parts = Parts::default().recut(std::slice::from_ref(&inline));
        assert_eq!((parts.head.len(), parts.further.len()), (0, 1));
        assert_eq!(parts.recut(&[]), Parts::default());
        let many: Vec<_> = (0..5_000).map(|n| written(n * 20, 10, n)).collect();
        let parts = Parts::default().recut(&many);
        check(&parts, &many);
        assert_eq!(
            parts.recut(&few),
            Parts { head: few, further: Vec::new() },
            "one that was sealed is short again"
        );
    }

    #[test]
    fn a_file_that_grows_writes_its_last_record() {
        let (mut parts, mut extents) = (Parts::default(), Vec::new());
        for number in 0..3_000 {
            extents.push(written(number * 20, 10, number));
            let next = parts.recut(&extents);
            assert!(changed(&parts, &next) <= 1, "extent {number}");
            parts = next;
        }
        check(&parts, &extents);
        assert_eq!(parts.further.len(), Parts::default().recut(&extents).further.len(), "they are filled");
    }

    /// Writes, holes and new sizes anywhere: as many bytes are written for each as for a file that is as long as a few
    /// records, and records are not much emptier than those of a layout that is written at once.
    #[test]
    fn changes_anywhere_write_few_records() {
        let mut rng = Chance::fresh();
        for _ in 0..rounds(4) {
            let (mut layout, mut parts) = (FileLayout::empty(), Parts::default());
            for number in 0..3_000 {
                let (at, length) = (rng.below(1 << 30), 1 + rng.below(8192));
                let is_local = match rng.below(100) {
                    0 => {
                        layout.truncate(at);
                        false
                    }
                    1..8 => {
                        layout.punch(at..at + length);
                        true
                    }
                    _ => {
                        layout.write(written(at, length, number));
                        true
                    }
                };
                let next = parts.recut(layout.extents());
                if number % 20 == 0 {
                    check(&next, layout.extents());
                }
                assert!(!is_local || changed(&parts, &next) <= 4, "{}", changed(&parts, &next));
                parts = next;
            }
            let least = Parts::default().recut(layout.extents()).further.len();
            assert!(
                parts.further.len() <= 4 * least + 4,
                "{} records where {least} would do",
                parts.further.len()
            );
        }
    }
}
