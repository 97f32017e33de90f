//! Which copies count, which go, and what damage leads to.

use forebay_io::clock::Clock;

use super::*;
use crate::arena::Seal;
use crate::catalog::Round;
use crate::manifest::{Checksum, Identity, Slice, SliceKind, Tensor};
use crate::region::Region;
use crate::restore::{Target, read_local};

const HEADER: usize = 4096;
const LENGTH: usize = 1000;

fn start(number: u32) -> String {
    format!("{number:08x}{:024}", 0)
}

fn named(number: u32, step: u64) -> HeldStep {
    HeldStep { start: start(number), step }
}

/// A rank's part of a step: its half of a tensor, filled with the step's number.
fn part(name: &HeldStep, rank: u32) -> (Held, Bytes) {
    let mut shard = vec![b' '; HEADER];
    shard.extend(vec![name.step as u8; LENGTH]);
    let offsets = vec![u64::from(rank) * LENGTH as u64];
    let crc32c = Checksum(forebay_core::crc32c(&shard[HEADER..]));
    let (kind, lengths, blake3) = (SliceKind::Flat, vec![LENGTH as u64], Identity::UNKNOWN);
    let (start, end) = (HEADER as u64, shard.len() as u64);
    let slices = vec![Slice { kind, offsets, lengths, shard: 0, start, end, crc32c, blake3 }];
    let tensor = Tensor { name: "t".into(), dtype: "uint8".into(), shape: vec![2 * LENGTH as u64], slices };
    let seal = Seal::of_test(name.step, name.step, &shard, HEADER, vec![tensor]);
    (Held::new(name.start.clone(), rank, 2, seal), shard.into())
}

async fn put(local: &Local, name: &HeldStep, ranks: &[u32]) {
    for rank in ranks {
        let (held, shard) = part(name, *rank);
        assert!(local.put(&held, &shard, || true).await.expect("put"));
    }
}

async fn open() -> (tempfile::TempDir, Local) {
    let directory = tempfile::tempdir().expect("directory");
    let local = Local::open(&directory.path().display().to_string()).await.expect("open");
    (directory, local)
}

async fn steps(local: &Local) -> Vec<(HeldStep, bool)> {
    let found = local.look().await.expect("look");
    found.steps.into_iter().map(|step| (step.name, step.is_durable)).collect()
}

async fn shards(local: &Local) -> usize {
    local.0.list("shards").try_collect::<Vec<_>>().await.expect("list").len()
}

#[tokio::test]
async fn steps_of_all_ranks_and_of_starts_that_went_on_count() {
    let (_directory, local) = open().await;
    assert_eq!(local.look().await.expect("nothing yet"), Found::default());
    local.begin(&[start(1)], 0).await.expect("begin");
    put(&local, &named(1, 8), &[0, 1]).await;
    put(&local, &named(1, 9), &[0, 1]).await;
    local.mark_durable(&named(1, 8), 1, 2).await.expect("mark");
    // A later start that went back to step 8, and was cut off in its second save.
    local.begin(&[start(1), start(2)], 0).await.expect("begin");
    put(&local, &named(2, 5), &[0, 1]).await;
    put(&local, &named(2, 6), &[1]).await;
    local.mark_durable(&named(2, 6), 1, 2).await.expect("mark");
    let (new, old) = ((named(2, 5), false), [(named(1, 9), false), (named(1, 8), true)]);
    assert_eq!(steps(&local).await, [&[new.clone()][..], &old].concat());
    assert_eq!(local.manifest(&named(2, 6)).await.expect_err("half").kind(), ErrorKind::Corrupt);
    // One that did not go on from here.
    local.begin(&[start(3)], 0).await.expect("begin");
    assert_eq!(steps(&local).await, []);
}

/// A former version noted the starts alone.
#[tokio::test]
async fn what_the_last_start_saw_in_the_store_is_noted() {
    let (_directory, local) = open().await;
    local.begin(&[start(1), start(2)], 7).await.expect("begin");
    let noted = |starts: &[u32], seen| Found {
        starts: starts.iter().map(|number| start(*number)).collect(),
        seen,
        steps: Vec::new(),
    };
    assert_eq!(local.look().await.expect("look"), noted(&[1, 2], 7));
    let former = write_local(&[start(3)]).expect("encoded");
    local.0.put(&ObjectKey::new(STARTS), former, Condition::Always).await.expect("put");
    assert_eq!(local.look().await.expect("look"), noted(&[3], 0));
}

#[tokio::test]
async fn so_many_whole_steps_stay_and_what_is_newer() {
    let (_directory, local) = open().await;
    let starts = [start(1), start(2)];
    local.begin(&starts, 0).await.expect("begin");
    put(&local, &named(7, 100), &[0, 1]).await;
    for step in 1..=3 {
        put(&local, &named(1, step), &[0, 1]).await;
    }
    put(&local, &named(2, 2), &[0, 1]).await;
    put(&local, &named(2, 3), &[0]).await;
    local.prune(&starts, 2, None).await.expect("prune");
    assert_eq!(steps(&local).await, [(named(2, 2), false), (named(1, 3), false)]);
    assert_eq!((shards(&local).await, local.notes().await.expect("notes").len()), (5, 5));
    local.prune(&starts, 9, None).await.expect("prune");
    assert_eq!(shards(&local).await, 5, "fewer than may stay");
    local.prune(&starts, 0, None).await.expect("prune");
    assert_eq!((steps(&local).await, shards(&local).await), (vec![(named(2, 2), false)], 3), "one stays");
}

/// An agent that still wrote its copy when the next start began, or that of another job that was given the same directory, took the
/// copies of that one for nobody's.
#[tokio::test]
async fn what_a_later_start_copied_is_not_deleted_by_an_earlier_ones_agent() {
    for (earlier, later, own_stays) in [
        // One that went on from it, of the same process or another.
        (vec![start(1)], vec![start(1), start(2)], true),
        // One that did not.
        (vec![start(1)], vec![start(2)], false),
    ] {
        let (_directory, local) = open().await;
        local.begin(&earlier, 0).await.expect("begin");
        put(&local, &named(1, 1), &[0, 1]).await;
        local.begin(&later, 0).await.expect("begin");
        put(&local, &named(2, 1), &[0, 1]).await;
        put(&local, &named(1, 2), &[0, 1]).await;
        local.prune(&earlier, 2, None).await.expect("prune");
        let (held, _) = part(&named(1, 3), 0);
        let fits = local.make_room(&held, &earlier, 4 * held.seal.size, None).await.expect("make room");
        let found: Vec<_> = steps(&local).await.into_iter().map(|(step, _)| step).collect();
        assert!(found.contains(&named(2, 1)), "{found:?}");
        assert_eq!(found.contains(&named(1, 2)), own_stays, "{found:?}");
        assert!(!fits, "nothing goes for it");
    }
}

#[tokio::test]
async fn a_rank_that_was_none_of_a_steps_is_told_how_many_were() {
    let (_directory, local) = open().await;
    put(&local, &named(1, 4), &[0, 1]).await;
    let missing = local.part(&named(1, 4), 0, 3).await.expect_err("of two ranks");
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.to_string().contains("saved by 2 ranks, and the job has 3"), "{missing}");
    let missing = local.part(&named(1, 5), 0, 3).await.expect_err("no such step");
    assert!(!missing.to_string().contains("ranks"), "{missing}");
}

#[test]
fn copies_are_read_and_damage_is_found() {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let (directory, local) = runtime.block_on(open());
    let name = named(1, 4);
    runtime.block_on(async {
        local.begin(&[start(1)], 0).await.expect("begin");
        put(&local, &name, &[0, 1]).await;
    });
    let read = || -> Result<Vec<u8>> {
        let manifest = runtime.block_on(local.manifest(&name))?;
        let mut bytes = vec![0; 2 * LENGTH];
        let region = Region::whole(&[2 * LENGTH as u64]);
        let targets = vec![Target { tensor: 0, region, bytes: &mut bytes }];
        let clock = Clock::system();
        read_local((runtime.handle(), &local, &clock), &manifest, targets, 1).map(|()| bytes)
    };
    assert_eq!(read().expect("sound"), vec![4; 2 * LENGTH]);
    let (held, shard) = runtime.block_on(local.part(&name, 1, 2)).expect("a part");
    let bytes = runtime.block_on(shard.read(0..held.seal.size)).expect("its bytes");
    assert_eq!((held, bytes), part(&name, 1));
    let error = runtime.block_on(local.part(&name, 1, 4)).expect_err("of another size of job");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let seal = NoteKey::of(&name, 1, 2, false).object();
    for (key, count) in [(part(&name, 1).0.key().object(), 300), (seal, 300), (ObjectKey::new(STARTS), 300)] {
        let path = directory.path().join(key.as_str());
        let whole = std::fs::read(&path).expect("read");
        for at in (0..whole.len()).step_by(whole.len().div_ceil(count)) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            std::fs::write(&path, damaged).expect("write");
            let error = match key.as_str() == STARTS {
                true => runtime.block_on(local.look()).expect_err("damaged"),
                false => read().expect_err("damaged"),
            };
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{key} byte {at}: {error}");
        }
        std::fs::write(&path, &whole[..whole.len() - 1]).expect("cut");
        assert!(key.as_str() == STARTS || read().is_err(), "{key} was cut");
        std::fs::write(&path, whole).expect("write");
    }
    assert_eq!(read().expect("sound again"), vec![4; 2 * LENGTH]);
}

/// The file's hash vouches for what was written, were it what was sealed or not.
#[tokio::test]
async fn a_seal_that_changed_before_it_was_written_is_refused() {
    let (_directory, local) = open().await;
    let name = named(1, 4);
    local.begin(&[start(1)], 0).await.expect("begin");
    put(&local, &name, &[1]).await;
    let (mut held, shard) = part(&name, 0);
    held.seal.tensors[0].name = "u".into();
    assert!(local.put(&held, &shard, || true).await.expect("put"));
    for error in [
        local.manifest(&name).await.expect_err("changed"),
        local.part(&name, 0, 2).await.map(drop).expect_err("changed"),
    ] {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.message().contains("changed after it was sealed"), "{error}");
    }
}

/// Parts of two tries of a step, where the second one was cut off, were restored as one step.
#[tokio::test]
async fn a_step_is_of_one_try_on_all_ranks() {
    let (_directory, local) = open().await;
    let name = named(1, 4);
    local.begin(&[start(1)], 0).await.expect("begin");
    let put = async |rank, round: Option<u64>| {
        let (mut held, shard) = part(&name, rank);
        held.seal.round = round.map(Round::new);
        held = held.sealed_again();
        held.crc32c.take_if(|_| round.is_none());
        let pinned = round.map_or("{\"save\":4,\"slot\":0,".to_owned(), |round| {
            format!("{{\"save\":4,\"round\":\"{round:016x}\",\"slot\":0,")
        });
        let told = serde_json::to_string(&held.seal).expect("encode");
        assert!(told.starts_with(&pinned), "{told}");
        assert!(local.put(&held, &shard, || true).await.expect("put"));
    };
    // Seals of former versions have none, and no checksum.
    for (rounds, is_one) in
        [([Some(1); 2], true), ([Some(2), Some(1)], false), ([None, Some(1)], false), ([None; 2], true)]
    {
        put(0, rounds[0]).await;
        put(1, rounds[1]).await;
        match local.manifest(&name).await {
            Ok(_) => assert!(is_one, "{rounds:?}"),
            Err(error) => assert!(!is_one && error.kind() == ErrorKind::Corrupt, "{rounds:?}: {error}"),
        }
    }
}

#[test]
fn names_and_framing_are_pinned() {
    let name = named(0x0a1b_2c3d, 500);
    let key = NoteKey::of(&name, 12, 16, false).object();
    assert_eq!(key.as_str(), "seals/00000000000000000500/0a1b2c3d/000012-000016.json");
    let durable = NoteKey::of(&name, 12, 16, true).object();
    assert_eq!(durable.as_str(), "seals/00000000000000000500/0a1b2c3d/000012-000016.durable");
    for key in [key, durable] {
        assert_eq!(NoteKey::parse(&key).expect("a note").object(), key);
    }
    for other in ["seals/5/0a1b2c3d/000012-000016.json", "seals/x", "starts", "seals/a/b/c.d"] {
        assert!(NoteKey::parse(&ObjectKey::new(other)).is_none(), "{other}");
    }
    let shard = part(&name, 12).0.key().object();
    let start = "shards/00000000000000000500/0000000001-0a1b2c3d";
    assert_eq!(shard.as_str(), format!("{start}/000012-000500-00000000.safetensors"));
    let starts = write_local(&["ab"]).expect("encode");
    let hash = blake3::hash(br#"["ab"]"#).to_hex();
    let text =
        format!(r#"{{"format":"forebay-checkpoint-local","version":1,"blake3":"{hash}","body":["ab"]}}"#);
    assert_eq!(starts, text + "\n");
}

/// Writes a rank's part where it fits below the ceiling.
async fn put_below(local: &Local, name: &HeldStep, rank: u32, starts: &[String], ceiling: u64) -> bool {
    let (held, shard) = part(name, rank);
    let fits = local.make_room(&held, starts, ceiling, None).await.expect("make room");
    if fits {
        assert!(local.put(&held, &shard, || true).await.expect("put"));
    }
    fits
}

async fn bytes(local: &Local) -> u64 {
    local.0.list("").try_collect::<Vec<_>>().await.expect("list").iter().map(|object| object.size).sum()
}

#[tokio::test]
async fn a_ceiling_holds_and_what_the_store_lacks_stays() {
    let (_directory, local) = open().await;
    let starts = [start(1), start(2)];
    put(&local, &named(1, 1), &[0]).await;
    // One of the parts with its seal; a ceiling for two steps of two ranks, and not for three.
    let one = bytes(&local).await;
    let ceiling = 5 * one;
    put(&local, &named(1, 1), &[1]).await;
    local.begin(&starts, 0).await.expect("begin");
    let fixed = bytes(&local).await - 2 * one;
    let step = async |number: u32, step: u64| {
        let mut fits = Vec::new();
        for rank in [0, 1] {
            fits.push(put_below(&local, &named(number, step), rank, &starts, ceiling).await);
        }
        assert!(bytes(&local).await - fixed <= ceiling, "step {step}");
        fits
    };
    assert_eq!(step(1, 2).await, [true, true]);
    // Step 2 is newer, so that no restore takes step 1, in the store or not.
    assert_eq!(step(2, 3).await, [true, true]);
    assert_eq!(steps(&local).await, [(named(2, 3), false), (named(1, 2), false)]);
    // Those in the store go before, though they be newer; but not while the ceiling holds without.
    local.mark_durable(&named(2, 3), 0, 2).await.expect("mark");
    assert_eq!(step(2, 4).await, [true, true]);
    assert_eq!(steps(&local).await, [(named(2, 4), false), (named(1, 2), false)]);
    // A part that is saved again takes its own place, and nothing else's.
    assert_eq!(step(2, 4).await, [true, true]);
    assert_eq!(steps(&local).await, [(named(2, 4), false), (named(1, 2), false)]);
    // Step 4 is all that the store lacks and a restore would take: below a lower ceiling it stays, and step 5 does not come.
    let (held, _) = part(&named(2, 5), 0);
    assert!(!local.make_room(&held, &starts, 3 * one, None).await.expect("make room"));
    assert_eq!(
        steps(&local).await,
        [(named(2, 4), false), (named(1, 2), false)],
        "and nothing went for nothing"
    );
    assert!(!local.make_room(&held, &starts, 2 * one - 2, None).await.expect("too large alone"));
    local.mark_durable(&named(2, 4), 1, 2).await.expect("mark");
    assert!(local.make_room(&held, &starts, 3 * one, None).await.expect("make room"));
    // What another start saved, with more ranks, is nobody's: it goes first.
    let other = named(7, 9);
    put(&local, &other, &[0, 1]).await;
    assert!(put_below(&local, &named(2, 5), 1, &starts, ceiling).await);
    let left = local.notes().await.expect("notes");
    assert!(!left.iter().any(|note| (note.step, note.rank) == (9, 1)), "its own part alone went");
    assert!(left.iter().any(|note| (note.step, note.rank) == (9, 0)));
}

/// Another save of a step has files of its own beside the first one's, which were not counted.
#[tokio::test]
async fn another_save_of_a_step_is_counted_beside_the_first() {
    let (_directory, local) = open().await;
    let (starts, name) = ([start(1)], named(1, 4));
    local.begin(&starts, 0).await.expect("begin");
    let fixed = bytes(&local).await;
    put(&local, &name, &[0, 1]).await;
    let one = (bytes(&local).await - fixed) / 2;
    let (mut again, shard) = part(&name, 0);
    again.seal.save += 1;
    again = again.sealed_again();
    // It is all that a restore would take, until it is in the store.
    assert!(!local.make_room(&again, &starts, 3 * one, None).await.expect("make room"));
    assert_eq!(steps(&local).await, [(name.clone(), false)]);
    assert!(local.make_room(&again, &starts, 5 * one, None).await.expect("make room"), "both fit");
    local.mark_durable(&name, 0, 2).await.expect("mark");
    assert!(local.make_room(&again, &starts, 3 * one, None).await.expect("make room"));
    assert!(local.put(&again, &shard, || true).await.expect("put"));
    assert!(bytes(&local).await - fixed <= 3 * one);
    assert_eq!(steps(&local).await, [(name, true)]);
}
