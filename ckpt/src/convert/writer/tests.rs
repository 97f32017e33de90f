//! What is written piece by piece is a step like any other, and what does not hold together is none.

use std::time::Duration;

use forebay_core::ErrorKind;
use forebay_io::object::Faults;
use futures::TryStreamExt;

use super::*;
use crate::catalog::{EVERY, Note, RankKey, forget_notes, list_ranks, list_steps, load_manifest};
use crate::dtype::Dtype;
use crate::manifest::SliceKind;
use crate::region::Region;
use crate::restore::read_parts;

/// A part of a tensor of bytes, 4 by 6.
fn part(offsets: [u64; 2], lengths: [u64; 2]) -> TensorSpec {
    let dtype = Dtype::named("uint8").expect("a type");
    let region = Region { kind: SliceKind::Box, offsets: offsets.into(), lengths: lengths.into() };
    TensorSpec { name: "w".into(), dtype, shape: vec![4, 6], region }
}

fn start(number: u64) -> Start {
    Start { nonce: format!("{number:032x}"), host: "h".into(), pid: 1, started_ms: 5 }
}

/// The byte of an element.
fn element(row: u64, column: u64) -> u8 {
    (row * 6 + column + 1) as u8
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_of_a_tensor_are_joined() {
    let bucket = Bucket::in_memory();
    let quarters = [part([2, 2], [2, 4]), part([0, 0], [2, 2]), part([0, 2], [2, 4]), part([2, 0], [2, 2])];
    let scalar = TensorSpec::whole("n", Dtype::named("int16").expect("a type"), vec![]);
    let nothing = TensorSpec::whole("empty", Dtype::named("int8").expect("a type"), vec![0, 3]);
    let specs = [&quarters[..], &[scalar, nothing]].concat();
    let mut writer = StepWriter::begin(&bucket, start(1), 7, &specs).await.expect("begin");
    assert_eq!(writer.tensor_bytes(), 26);
    let pieces: Vec<Piece> = writer.pieces().collect();
    for piece in &pieces {
        let region = &specs[piece.tensor].region;
        let data: Vec<u8> = match piece.tensor {
            4 => vec![1, 2],
            _ => (region.offsets[0]..region.offsets[0] + region.lengths[0])
                .flat_map(|row| {
                    (region.offsets[1]..region.offsets[1] + region.lengths[1]).map(move |at| element(row, at))
                })
                .collect(),
        };
        let (first, last) = (piece.start as usize, (piece.start + piece.length) as usize);
        writer.write(data[first..last].to_vec().into()).await.expect("write");
    }
    assert!(list_steps(&bucket).await.expect("steps").is_empty(), "nothing is there before its commit");
    writer.commit(Vec::new()).await.expect("commit");
    assert_eq!(crate::verify(&bucket, None, &|_| {}).await.expect("verify"), []);
    let step = list_steps(&bucket).await.expect("steps").pop().expect("a step");
    let manifest = load_manifest(&bucket, &step.key).await.expect("a manifest");
    assert_eq!(manifest.tensors.len(), 3);
    let (runtime, place) = (tokio::runtime::Handle::current(), bucket.clone());
    let read = move || read_parts((&runtime, &place, &manifest), vec![(0, Region::whole(&[4, 6]))], 1);
    let found = tokio::task::spawn_blocking(read).await.expect("join").expect("read");
    assert_eq!(found, (1..=24).collect::<Vec<u8>>());
}

#[tokio::test]
async fn parts_that_are_not_the_tensor_are_refused_before_anything_is_written() {
    let check = async |specs: &[TensorSpec], why: &str| {
        let bucket = Bucket::in_memory();
        let error = StepWriter::begin(&bucket, start(1), 7, specs).await.expect_err(why);
        assert!(error.kind() == ErrorKind::Invalid && error.message().contains(why), "{error}");
        assert!(crate::catalog::newest_run(&bucket).await.expect("runs").is_none());
    };
    check(&[part([0, 0], [2, 6])], "hold 12 elements of 24").await;
    check(&[part([0, 0], [2, 6]), part([1, 0], [2, 6])], "overlap").await;
    check(&[part([2, 0], [3, 6])], "outside").await;
    let mut other = part([2, 0], [2, 6]);
    other.shape = vec![4, 7];
    check(&[part([0, 0], [2, 6]), other], "one type and shape").await;
}

#[tokio::test]
async fn a_step_that_was_not_written_whole_is_none() {
    let bucket = Bucket::in_memory();
    let whole = [part([0, 0], [4, 6])];
    let mut writer = StepWriter::begin(&bucket, start(1), 7, &whole).await.expect("begin");
    assert_eq!(writer.write(vec![0; 23].into()).await.expect_err("too short").kind(), ErrorKind::Bug);
    assert_eq!(writer.commit(Vec::new()).await.expect_err("not written").kind(), ErrorKind::Bug);
    StepWriter::begin(&bucket, start(2), 7, &whole).await.expect("begin").abort().await;
    assert!(list_steps(&bucket).await.expect("steps").is_empty());
}

/// A host that was suspended before the commit told nobody that it goes on.
#[tokio::test]
async fn a_step_whose_shard_was_collected_before_its_commit_is_refused() {
    let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let specs = [part([0, 0], [4, 6])];
    let mut writer =
        StepWriter::begin(&plain.with_faults(&faults), start(1), 7, &specs).await.expect("begin");
    (writer.begun, writer.clock) = (clock.now(), clock.clone());
    writer.write(vec![7; 24].into()).await.expect("write");
    clock.advance(Duration::from_secs(7200));
    let commit = writer.commit(Vec::new());
    tokio::pin!(commit);
    let committed = loop {
        let gate = faults.gate(1);
        tokio::select! { done = &mut commit => break done, () = gate.reached() => {} }
        let shards: Vec<_> = plain.list("shards").try_collect().await.expect("list");
        for shard in shards {
            let shard: ObjectInfo = shard;
            plain.delete(&shard.key).await.expect("delete");
        }
        gate.open();
    };
    let error = committed.expect_err("refused");
    assert!(error.message().contains("was deleted before its commit"), "{error}");
    assert!(list_steps(&plain).await.expect("steps").is_empty());
}

/// One that takes hours is no dead agent's: what says so is there while it goes on, and no longer.
#[tokio::test]
async fn a_step_that_takes_hours_is_told_to_go_on() {
    let tensor = |name| TensorSpec::whole(name, Dtype::named("uint8").expect("a type"), vec![9 << 20]);
    for commits in [true, false] {
        let (plain, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
        let bucket = plain.with_faults(&faults);
        let specs = [tensor("a"), tensor("b")];
        let mut writer = StepWriter::begin(&bucket, start(1), 7, &specs).await.expect("begin");
        let save = writer.run.save(7);
        writer.alive = Alive::new(clock.clone(), bucket.clone(), save.clone(), 0);
        let notes = async || list_ranks(&plain).await.expect("list");
        let note = RankKey { save: save.clone(), rank: 0, note: Note::Alive };
        // One piece comes late, and another is on its way for long.
        clock.advance(EVERY);
        assert_eq!(notes().await, []);
        let mut pieces: Vec<_> = writer.pieces().map(|piece| vec![7; piece.length as usize]).collect();
        writer.write(pieces.remove(0).into()).await.expect("write");
        assert_eq!(notes().await, std::slice::from_ref(&note));
        forget_notes(&plain, std::slice::from_ref(&save), 0).await.expect("forget");
        let gate = faults.gate(1);
        let finish = async {
            for piece in pieces {
                writer.write(piece.into()).await.expect("write");
            }
            match commits {
                true => writer.commit(Vec::new()).await.expect("commit"),
                false => writer.abort().await,
            }
        };
        tokio::pin!(finish);
        tokio::select! { () = &mut finish => panic!("it is held back"), () = gate.reached() => {} }
        clock.advance(EVERY);
        let told = async {
            while notes().await != std::slice::from_ref(&note) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! { () = &mut finish => panic!("it is held back"), () = told => {} }
        gate.open();
        finish.await;
        assert_eq!(notes().await, []);
        assert_eq!(list_steps(&plain).await.expect("steps").len(), usize::from(commits));
    }
}
