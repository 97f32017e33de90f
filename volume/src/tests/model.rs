//! Random edits of a few files against plain arrays, through flushes, closes and reopened volumes.

use std::sync::Arc;

use forebay_core::ErrorKind;
use forebay_core::units::{KIB, MIB};
use forebay_io::object::{Bucket, Faults};
use forebay_io::rng::Rng;

use super::support::{Fixture, Model, create, object, pattern, run, with_seeds};
use crate::Volume;
use crate::staging::{Staged, WritebackSettings};

const FILES: u64 = 3;
/// Larger than the buffer of 1 MiB, so that every way of writing is met.
const SPACE: u64 = 3 * MIB;

impl Model {
    async fn step(&mut self, rng: &Rng, number: u64) {
        let start = rng.below(SPACE);
        let end = start + 1 + rng.below((SPACE - start).min(700 * KIB));
        match rng.below(15) {
            // Short ones, which are put together when they are synced.
            12..=14 => {
                let (at, step) = (start.min(SPACE / 2), 1 + rng.below(16 * KIB));
                for (count, at) in (at..).step_by(step as usize).take(6).enumerate() {
                    self.write(at, pattern(number + count as u64, at..at + step)).await;
                    self.file.fsync().await.expect("fsync");
                }
            }
            0..=3 => self.write(start, pattern(number, start..end)).await,
            4..=6 => {
                let size = self.bytes.len() as u64;
                self.write(size.min(SPACE), pattern(number, 0..end - start)).await;
            }
            7 => {
                self.file.allocate(0x03, start, end - start).await.expect("punch");
                let size = self.bytes.len();
                self.bytes[size.min(start as usize)..size.min(end as usize)].fill(0);
            }
            8 => self.file.flush().await.expect("flush"),
            9 => self.file.fsync().await.expect("fsync"),
            _ => self.check(start, end).await,
        }
    }

    async fn check(&self, start: u64, end: u64) {
        let expected = &self.bytes[self.bytes.len().min(start as usize)..self.bytes.len().min(end as usize)];
        let got = self.file.read(start, (end - start) as u32).await.expect("read");
        assert_eq!(got.len(), expected.len(), "length of {} at {start}", self.name);
        assert!(got == expected, "bytes of {} at {start}..{end}", self.name);
    }
}

async fn truncate(volume: &Arc<Volume>, model: &mut Model, size: u64) {
    let ino = model.file.ino();
    let set = volume.set_attributes(ino, Default::default(), Some(size)).await.expect("truncate");
    assert_eq!(set.size, size);
    model.bytes.resize(size as usize, 0);
}

async fn check_seed(seed: u64, writes_back: bool) {
    let rng = Rng::seeded(seed);
    let bucket = Bucket::in_memory().with_faults(&Faults::random(seed, 0.02));
    let mut fixture = Fixture::new(bucket);
    fixture.write.gather_extents = rng.below(4) as usize;
    if writes_back {
        // Now and then the ceiling is reached, and files are uploaded at any time.
        let bytes = 2 * MIB + rng.below(8 * MIB);
        let (delay_ms, open_ms) = (rng.below(20), rng.below(40));
        fixture = fixture.writing_back(WritebackSettings { enabled: true, bytes, delay_ms, open_ms });
    }
    let mut volume = fixture.open().await;
    let mut models = Model::files(&volume, FILES).await;
    for _ in 0..40 {
        let number = rng.below(FILES);
        let model = &mut models[number as usize];
        match rng.below(20) {
            0 => truncate(&volume, model, rng.below(SPACE)).await,
            1 => model.reopen(&volume).await,
            2 => Model::remount(&mut models, &fixture, &mut volume).await,
            _ => model.step(&rng, number).await,
        }
    }
    for model in &models {
        model.check(0, SPACE * 2).await;
        model.file.release().await.expect("release");
    }
    volume.drain(|_| {}).await.expect("drain");
    assert_eq!(volume.staged(), Staged::default());
    volume.close().await.expect("close");
    for model in &models {
        assert!(
            object(&fixture.bucket, &model.name).await == model.bytes,
            "object {} after sealing",
            model.name
        );
    }
}

/// Promise: a closed file is a plain object with the same bytes, whatever was done to it before.
#[test]
fn files_agree_with_arrays_and_end_as_plain_objects() {
    check_seeds(false);
}

/// The same with bytes that are staged first.
#[test]
fn files_that_are_written_back_agree_with_arrays_and_end_as_plain_objects() {
    check_seeds(true);
}

fn check_seeds(writes_back: bool) {
    with_seeds(12, |seed| check_seed(seed, writes_back));
}

#[test]
fn a_read_of_an_unknown_allocation_mode_is_refused() {
    run(async {
        let volume = Fixture::new(Bucket::in_memory()).open().await;
        let file = create(&volume, "f").await;
        let refused = file.allocate(0x08, 0, 4096).await.expect_err("collapse range");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    });
}
