//! How a layout is cut into records, so that little is written again when little of it changes.
//!
//! The first extents are in the `I` record, each further run of them in an `E` record. Where runs begin stays as it is while
//! extents come and go; one that becomes too long is cut, and what becomes short joins its neighbour. An `E` record's number
//! is no place in the order: a new run takes a free one.

use std::ops::Range;

use forebay_core::{Blob, Extent, Extents, Source};

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

    /// The parts of a file that has `extents` now, and the numbers of the `E` records that are to be written: as few as may be.
    pub fn recut(self, extents: &Extents) -> (Self, Vec<usize>) {
        let extents: Vec<&Extent> = extents.iter().collect();
        if fitting(&extents, HEAD_BYTES) == extents.len() {
            return (Self { head: cloned(&extents), further: Vec::new() }, Vec::new());
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
        cut(&extents, head..bounds[0], None, old.is_empty(), &mut runs);
        for (index, number) in old.iter().enumerate() {
            let range = bounds[index]..bounds[index + 1];
            if extents[range.clone()].iter().copied().eq(&self.further[*number]) {
                runs.push(Run { range, number: Some(*number), is_changed: false });
            } else {
                cut(&extents, range, Some(*number), index + 1 == old.len(), &mut runs);
            }
        }
        let (further, changed) = numbered(self.further, &extents, join(&extents, runs));
        (Self { head: cloned(&extents[..head]), further }, changed)
    }
}

fn cloned(extents: &[&Extent]) -> Vec<Extent> {
    extents.iter().map(|extent| (*extent).clone()).collect()
}

/// Where a run begins in its file.
fn start(run: &[Extent]) -> u64 {
    run.first().map_or(u64::MAX, |extent| extent.offset)
}

/// Adds the changed run `range` in pieces that records can hold: filled where files grow, at the end, and halves elsewhere, which
/// leave room.
fn cut(extents: &[&Extent], range: Range<usize>, number: Option<usize>, is_last: bool, runs: &mut Vec<Run>) {
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
fn join(extents: &[&Extent], runs: Vec<Run>) -> Vec<Run> {
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

/// The extents of each run by its number, of which none is left out, and which of them are not what the record has.
fn numbered(
    mut old: Vec<Vec<Extent>>,
    extents: &[&Extent],
    runs: Vec<Run>,
) -> (Vec<Vec<Extent>>, Vec<usize>) {
    let mut places: Vec<Option<Run>> = runs.iter().map(|_| None).collect();
    let mut unnumbered = Vec::new();
    for run in runs {
        match run.number.and_then(|number| places.get_mut(number)) {
            Some(place) => *place = Some(run),
            None => unnumbered.push(run),
        }
    }
    let mut unnumbered = unnumbered.into_iter();
    let runs = places.into_iter().filter_map(|place| place.or_else(|| unnumbered.next()));
    let (mut further, mut changed) = (Vec::new(), Vec::new());
    for (number, run) in runs.enumerate() {
        let is_same = |run: &Run| extents[run.range.clone()].iter().copied().eq(&old[number]);
        if run.number == Some(number) && (!run.is_changed || is_same(&run)) {
            further.push(std::mem::take(&mut old[number]));
        } else {
            further.push(cloned(&extents[run.range]));
            changed.push(number);
        }
    }
    (further, changed)
}

/// How many of the first extents take at most `most` bytes.
fn fitting(extents: &[&Extent], most: usize) -> usize {
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

    /// The parts that a file has next, and how many `E` records change for it, or go.
    fn next(parts: &Parts, extents: Vec<Extent>) -> (Parts, usize) {
        let (next, written) = parts.clone().recut(&extents.into());
        let differ =
            |number: &usize| parts.further.get(*number).is_none_or(|run| *run != next.further[*number]);
        let numbers = 0..next.further.len();
        assert_eq!(written, numbers.filter(differ).collect::<Vec<_>>(), "what changed is written");
        let gone = parts.further.len().saturating_sub(next.further.len());
        (next, written.len() + gone)
    }

    /// The same of a file that had nothing.
    fn first(extents: &[Extent]) -> Parts {
        next(&Parts::default(), extents.to_vec()).0
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
        let parts = first(&few);
        assert_eq!((parts.head.len(), parts.further.len()), (5, 0));
        let inline = Extent { offset: 0, length: 5000, source: Source::Inline(vec![1; 5000].into()) };
        let parts = first(&[inline]);
        assert_eq!((parts.head.len(), parts.further.len()), (0, 1));
        assert_eq!(next(&parts, Vec::new()), (Parts::default(), 1));
        let many: Vec<_> = (0..5_000).map(|n| written(n * 20, 10, n)).collect();
        let parts = first(&many);
        check(&parts, &many);
        assert_eq!(
            next(&parts, few.clone()).0,
            Parts { head: few, further: Vec::new() },
            "one that was sealed is short again"
        );
    }

    #[test]
    fn a_file_that_grows_writes_its_last_record() {
        let (mut parts, mut extents) = (Parts::default(), Vec::new());
        for number in 0..3_000 {
            extents.push(written(number * 20, 10, number));
            let (next, changed) = next(&parts, extents.clone());
            assert!(changed <= 1, "extent {number}");
            parts = next;
        }
        check(&parts, &extents);
        assert_eq!(parts.further.len(), first(&extents).further.len(), "they are filled");
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
                let (next, changed) = next(&parts, layout.extents().to_vec());
                if number % 20 == 0 {
                    check(&next, &layout.extents().to_vec());
                }
                assert!(!is_local || changed <= 4, "{changed}");
                parts = next;
            }
            let least = first(&layout.extents().to_vec()).further.len();
            assert!(
                parts.further.len() <= 4 * least + 4,
                "{} records where {least} would do",
                parts.further.len()
            );
        }
    }
}
