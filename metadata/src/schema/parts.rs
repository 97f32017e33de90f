//! How a layout is cut into records, so that little is written again when little of it changes.
//!
//! The first extents are in the `I` record, each further run of them in an `E` record. Where runs begin stays as it is while
//! extents come and go; one that becomes too long is cut, and what becomes short joins its neighbour. An `E` record's number
//! is no place in the order: a new run takes a free one.

use std::collections::HashMap;
use std::ops::Range;

use forebay_core::{Blob, Difference, Extent, Extents, Source};

/// Bytes of extents that an `I` record may hold before `E` records follow: small files need one read.
const HEAD_BYTES: usize = 1024;
/// Bytes of extents in one `E` record.
const FURTHER_BYTES: usize = 4096;

/// A layout in parts, as it is read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parts {
    /// What the `I` record holds.
    pub head: Vec<Extent>,
    /// What each `E` record holds, by its number.
    pub further: Vec<Vec<Extent>>,
}

impl Parts {
    /// All extents in their order.
    pub fn joined(&self) -> Vec<Extent> {
        let runs = self.cuts().runs.into_iter().map(|cut| &self.further[cut.number as usize][..]);
        [&self.head[..]].into_iter().chain(runs).flatten().cloned().collect()
    }

    /// Where they are cut.
    pub fn cuts(&self) -> Cuts {
        let start = |run: &[Extent]| run.first().map_or(u64::MAX, |extent| extent.offset);
        let cut = |(number, run): (usize, &Vec<Extent>)| Cut { start: start(run), number: number as u32 };
        let mut runs: Vec<Cut> = self.further.iter().enumerate().map(cut).collect();
        runs.sort_by_key(|cut| cut.start);
        Cuts { runs }
    }
}

/// Which extents of a layout each record has: the `I` record those before the first run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cuts {
    /// In the order of the file.
    runs: Vec<Cut>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    /// Where the first extent of the run begins.
    start: u64,
    /// Which `E` record has it.
    number: u32,
}

/// The records of a layout that was changed.
#[derive(Debug, PartialEq, Eq)]
pub struct Recut {
    /// What the `I` record is to hold.
    pub head: Vec<Extent>,
    /// How it is cut from now on.
    pub cuts: Cuts,
    /// What the `E` records are to hold that are to be written, by their numbers: as few as may be.
    pub changed: Vec<(u32, Vec<Extent>)>,
}

/// Consecutive extents of the new layout.
struct Run<'a> {
    start: u64,
    /// The record that has them, or will; a new one where there is none.
    number: Option<u32>,
    /// Them, if they are not what that record has.
    extents: Option<Vec<&'a Extent>>,
}

impl Cuts {
    /// How many `E` records there are.
    pub fn count(&self) -> u32 {
        self.runs.len() as u32
    }

    /// The extents that the `I` record has.
    pub fn head<'a>(&self, extents: &'a Extents) -> impl Iterator<Item = &'a Extent> {
        between(extents, 0, self.start(0))
    }

    /// The records of a file that has `new` now and had `old`, which is cut so. Looks at the extents of records that change and
    /// of those beside them.
    pub fn recut(&self, old: &Extents, new: &Extents) -> Recut {
        if fits(new.iter(), HEAD_BYTES) {
            return Recut { head: new.to_vec(), cuts: Self::default(), changed: Vec::new() };
        }
        let mut is_touched = vec![false; self.runs.len() + 1];
        for difference in old.differences(new) {
            let (Difference::Old(extent) | Difference::New(extent)) = difference;
            is_touched[self.runs.partition_point(|run| run.start <= extent.offset)] = true;
        }
        let mut front: Vec<&Extent> = self.head(new).collect();
        let rest = front.split_off(fitting(front.iter().copied(), HEAD_BYTES));
        let mut runs = Vec::with_capacity(self.runs.len() + 1);
        cut(&rest, None, self.runs.is_empty(), &mut runs);
        for (index, Cut { start, number }) in self.runs.iter().copied().enumerate() {
            let end = self.start(index + 1);
            match is_touched[index + 1] {
                false => runs.push(Run { start, number: Some(number), extents: None }),
                true => {
                    let extents: Vec<_> = between(new, start, end).collect();
                    cut(&extents, Some(number), end == u64::MAX, &mut runs);
                }
            }
        }
        let (cuts, written) = numbered(join(new, runs), new);
        let had: HashMap<u32, Range<u64>> = self
            .runs
            .iter()
            .enumerate()
            .map(|(place, run)| (run.number, run.start..self.start(place + 1)))
            .collect();
        let is_new = |(number, extents): &(u32, Vec<&Extent>)| {
            let had = had.get(number).map(|had| between(old, had.start, had.end));
            had.is_none_or(|had| !had.eq(extents.iter().copied()))
        };
        let written = written.into_iter().filter(is_new);
        let changed = written.map(|(number, extents)| (number, cloned(&extents))).collect();
        Recut { head: cloned(&front), cuts, changed }
    }

    /// Where the run at a place in the order begins; past the last, nothing does.
    fn start(&self, place: usize) -> u64 {
        self.runs.get(place).map_or(u64::MAX, |run| run.start)
    }
}

fn cloned(extents: &[&Extent]) -> Vec<Extent> {
    extents.iter().map(|extent| (*extent).clone()).collect()
}

/// The extents that begin in `start..end`.
fn between(extents: &Extents, start: u64, end: u64) -> impl Iterator<Item = &Extent> {
    extents.iter_from(start).take_while(move |extent| extent.offset < end)
}

/// Adds a run that changed in pieces that records can hold: filled where files grow, at the end, and halves elsewhere, which leave
/// room.
fn cut<'a>(extents: &[&'a Extent], number: Option<u32>, is_last: bool, runs: &mut Vec<Run<'a>>) {
    let (mut number, mut rest) = (number, extents);
    while let Some(first) = rest.first() {
        let fits = fitting(rest.iter().copied(), FURTHER_BYTES).max(1);
        let taken = if is_last || fits == rest.len() { fits } else { fits.min(rest.len().div_ceil(2)) };
        let (taken, more) = rest.split_at(taken);
        runs.push(Run { start: first.offset, number: number.take(), extents: Some(taken.to_vec()) });
        rest = more;
    }
}

/// Joins what was changed and is short with its neighbour, where half of a record holds both.
fn join<'a>(all: &'a Extents, runs: Vec<Run<'a>>) -> Vec<Run<'a>> {
    let mut joined: Vec<Run<'a>> = Vec::with_capacity(runs.len());
    let mut runs = runs.into_iter().peekable();
    while let Some(run) = runs.next() {
        let end = runs.peek().map_or(u64::MAX, |next| next.start);
        if let Some(last) = joined.last_mut().filter(|last| last.extents.is_some() || run.extents.is_some())
            && fits(between(all, last.start, end), FURTHER_BYTES / 2)
        {
            last.number = last.number.or(run.number);
            last.extents = Some(between(all, last.start, end).collect());
            continue;
        }
        joined.push(run);
    }
    joined
}

/// The number of each run, of which none is left out, and what may not be what the record has.
fn numbered<'a>(mut runs: Vec<Run<'a>>, all: &'a Extents) -> (Cuts, Vec<(u32, Vec<&'a Extent>)>) {
    let mut is_taken = vec![false; runs.len()];
    for run in &mut runs {
        run.number = run.number.filter(|number| (*number as usize) < is_taken.len());
        if let Some(number) = run.number {
            is_taken[number as usize] = true;
        }
    }
    let mut free = (0..).zip(is_taken).filter(|(_, is_taken)| !is_taken).map(|(number, _)| number);
    let (mut cuts, mut written) = (Vec::with_capacity(runs.len()), Vec::new());
    let mut runs = runs.into_iter().peekable();
    while let Some(Run { start, number, extents }) = runs.next() {
        let end = runs.peek().map_or(u64::MAX, |next| next.start);
        let in_place = number.is_some() && extents.is_none();
        // As many numbers are free as runs have none.
        let number = number.or_else(|| free.next()).unwrap_or_default();
        cuts.push(Cut { start, number });
        if !in_place {
            written.push((number, extents.unwrap_or_else(|| between(all, start, end).collect())));
        }
    }
    (Cuts { runs: cuts }, written)
}

/// Whether extents take at most `most` bytes.
fn fits<'a>(extents: impl Iterator<Item = &'a Extent>, most: usize) -> bool {
    let mut seen = 0;
    fitting(extents.inspect(|_| seen += 1), most) == seen
}

/// How many of the first extents take at most `most` bytes.
fn fitting<'a>(extents: impl Iterator<Item = &'a Extent>, most: usize) -> usize {
    let (mut taken, mut count) = (0, 0);
    let mut blobs: Vec<&Blob> = Vec::new();
    for extent in extents {
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
            return count;
        }
        count += 1;
    }
    count
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

    /// A file and its records.
    #[derive(Debug, Clone, PartialEq, Default)]
    struct Recorded {
        extents: Extents,
        cuts: Cuts,
        parts: Parts,
    }

    /// What a file has next, and how many `E` records change for it, or go.
    fn next(file: &Recorded, extents: Vec<Extent>) -> (Recorded, usize) {
        next_of(file, extents.into())
    }

    fn next_of(file: &Recorded, extents: Extents) -> (Recorded, usize) {
        let Recut { head, cuts, changed } = file.cuts.recut(&file.extents, &extents);
        let count = cuts.count() as usize;
        let gone = file.parts.further.len().saturating_sub(count);
        let mut further = file.parts.further.clone();
        further.resize(count, Vec::new());
        let written = changed.len();
        for (number, run) in changed {
            assert_ne!(further[number as usize], run, "only what changed is written");
            further[number as usize] = run;
        }
        let parts = Parts { head, further };
        assert_eq!(parts.cuts(), cuts, "as it is read");
        assert!(cuts.head(&extents).eq(&parts.head));
        (Recorded { extents, cuts, parts }, written + gone)
    }

    /// The same of a file that had nothing.
    fn first(extents: &[Extent]) -> Recorded {
        next(&Recorded::default(), extents.to_vec()).0
    }

    #[track_caller]
    fn check(file: &Recorded, extents: &[Extent]) {
        assert_eq!(file.parts.joined(), extents);
        for run in &file.parts.further {
            let record = encode_extents(run);
            assert!(run.len() == 1 || record.len() <= 4200, "{} bytes", record.len());
            assert_eq!(&decode_extents(record).expect("extents"), run);
        }
    }

    #[test]
    fn short_layouts_have_no_further_records_and_long_extents_one_of_their_own() {
        let few: Vec<_> = (0..5).map(|n| written(n * 20, 10, n)).collect();
        let Recorded { parts, .. } = first(&few);
        assert_eq!((parts.head.len(), parts.further.len()), (5, 0));
        let inline = Extent { offset: 0, length: 5000, source: Source::Inline(vec![1; 5000].into()) };
        let long = first(&[inline]);
        assert_eq!((long.parts.head.len(), long.parts.further.len()), (0, 1));
        assert_eq!(next(&long, Vec::new()), (Recorded::default(), 1));
        let many: Vec<_> = (0..5_000).map(|n| written(n * 20, 10, n)).collect();
        let long = first(&many);
        check(&long, &many);
        assert_eq!(
            next(&long, few.clone()).0.parts,
            Parts { head: few, further: Vec::new() },
            "one that was sealed is short again"
        );
    }

    #[test]
    fn a_file_that_grows_writes_its_last_record() {
        let (mut file, mut extents) = (Recorded::default(), Vec::new());
        for number in 0..3_000 {
            extents.push(written(number * 20, 10, number));
            let (next, changed) = next(&file, extents.clone());
            assert!(changed <= 1, "extent {number}");
            file = next;
        }
        check(&file, &extents);
        assert_eq!(file.cuts.count(), first(&extents).cuts.count(), "they are filled");
    }

    /// Writes, holes and new sizes anywhere: as many bytes are written for each as for a file that is as long as a few
    /// records, and records are not much emptier than those of a layout that is written at once.
    #[test]
    fn changes_anywhere_write_few_records() {
        let mut rng = Chance::fresh();
        for _ in 0..rounds(4) {
            let (mut layout, mut file) = (FileLayout::empty(), Recorded::default());
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
                // Sometimes of a list that shares nothing with the one before.
                let (next, changed) = match rng.below(4) {
                    0 => next(&file, layout.extents().to_vec()),
                    _ => next_of(&file, layout.extents().clone()),
                };
                if number % 20 == 0 {
                    check(&next, &layout.extents().to_vec());
                }
                assert!(!is_local || changed <= 4, "{changed}");
                file = next;
            }
            let (all, least) = (file.cuts.count(), first(&layout.extents().to_vec()).cuts.count());
            assert!(all <= 4 * least + 4, "{all} records where {least} would do");
        }
    }
}
