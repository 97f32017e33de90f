//! What no manifest can say is refused before anything is sent, on all ranks alike.

use std::collections::HashSet;

use super::tests::{Fixture, PATIENCE, Pair, settle, snapshot};
use super::*;
use crate::arena::Source;
use crate::dtype::Dtype;
use crate::manifest::Encoding;
use crate::plan::{Planned, Share, plan};
use crate::roster::Placement;
use crate::roster::tests::{Tensor, roster};

/// Tensors of each rank's own, of four bytes each.
const TENSORS: usize = 40;

/// What two ranks save: tensors of their own, and one that both have.
fn described() -> Vec<Vec<Tensor>> {
    let tensor = |name: String, placement| (name, "uint8", vec![4], placement, None);
    let own = (0..TENSORS).map(|index| tensor(format!("own{index}"), Placement::Local));
    vec![own.chain([tensor("shared".into(), Placement::Replicated)]).collect(); 2]
}

/// What one of them writes, and what the manifest says beside it.
fn planned(rank: usize) -> (Vec<TensorSpec>, TextLength) {
    let ranks = described();
    let roster = roster(&ranks).expect("told");
    let Planned { shares, beside } = plan(&roster, &HashSet::new(), &[], rank).expect("plan");
    let spec = |Share { tensor, name, region }| {
        let (_, dtype, shape, ..) = &ranks[rank][tensor];
        TensorSpec { name, dtype: Dtype::named(dtype).expect("dtype"), shape: shape.clone(), region }
    };
    (shares.into_iter().map(spec).collect(), beside)
}

impl Pair {
    /// Begins a rank's part of what both are to save, and fills it.
    fn begin(&mut self, rank: usize) -> Result<Snapshot> {
        let (tensors, beside) = planned(rank);
        let count = tensors.len();
        let sizes: Vec<_> = tensors.iter().map(|tensor| tensor.region.elements() as usize).collect();
        let snapshot = self.sessions[rank].begin(tensors, beside, 1, PATIENCE)?;
        let mut snapshot = snapshot.expect("a slot is free");
        let bytes = [7; 4];
        let sources = (0..count).map(|index| (index, Source::Host(&bytes[..sizes[index]]))).collect();
        snapshot.copy(sources, 1, None).expect("copy");
        Ok(snapshot)
    }
}

fn length_of(tensors: Vec<TensorSpec>) -> TextLength {
    Cut::of(tensors).text()
}

#[test]
fn ranks_that_only_together_have_too_much_are_refused_alike_and_send_nothing() {
    let mut fixture = Fixture::new();
    let mut pair = Pair::new(&mut fixture);
    let saves = [pair.save(0, 1, 0..10), pair.save(1, 1, 10..1 << 20)];
    for (rank, save) in saves.iter().enumerate() {
        assert!(matches!(settle(&mut pair.sessions[rank], save), Progress::Durable));
    }
    let before = fixture.objects();
    let parts = [0, 1].map(|rank| length_of(planned(rank).0));
    // Room for the larger one alone, and no more.
    let most = parts[0].bytes.max(parts[1].bytes) + 4096;
    pair.sessions.iter_mut().for_each(|session| session.most_text = most);
    for _ in 0..=SLOTS {
        let refused = [0, 1].map(|rank| pair.begin(rank).map(drop).expect_err("too much for a manifest"));
        for error in &refused {
            assert_eq!(error.kind(), ErrorKind::TooLarge);
            let slices = format!("{} slices", 2 * TENSORS + 2);
            assert!(error.message().contains(&slices), "{error}");
            assert!(error.message().contains(&format!("more than {most}")), "{error}");
        }
        assert_eq!(refused[0].to_string(), refused[1].to_string(), "told alike");
        assert_eq!(refused[0].hint(), refused[1].hint());
    }
    let sent: Vec<_> = fixture.objects().into_iter().filter(|key| !before.contains(key)).collect();
    assert_eq!(sent, [] as [String; 0]);
    assert_eq!(fixture.load(1, 1), vec![1; 1 << 20], "the older step is there");
    let saves = [pair.save(0, 2, 0..10), pair.save(1, 2, 10..1 << 20)];
    for (rank, save) in saves.iter().enumerate() {
        assert!(matches!(settle(&mut pair.sessions[rank], save), Progress::Durable));
    }
    assert_eq!(fixture.load(1, 2), vec![2; 1 << 20]);
}

/// What is told beforehand is never less than what the step then takes, nor much more.
#[test]
fn ranks_are_told_what_their_manifest_takes() {
    let mut fixture = Fixture::new();
    let mut pair = Pair::new(&mut fixture);
    let told = [0, 1].map(|rank| {
        let (tensors, beside) = planned(rank);
        length_of(tensors) + beside
    });
    assert_eq!(told[0], told[1], "all count alike");
    let saves = [0, 1].map(|rank| {
        let snapshot = pair.begin(rank).expect("it fits");
        pair.sessions[rank].seal(snapshot, 1, None, 0, Vec::new()).expect("seal")
    });
    for (rank, save) in saves.iter().enumerate() {
        assert!(matches!(settle(&mut pair.sessions[rank], save), Progress::Durable));
    }
    let manifest = fixture.manifest(1, 1);
    let slices: usize = manifest.tensors.iter().map(|tensor| tensor.slices.len()).sum();
    assert_eq!(told[0].slices, slices as u64);
    let text = manifest.encode().expect("encode").len() as u64;
    // Each rank's slices could lie in as many files of earlier steps.
    let spare = text / 5 + 2 * TextLength::of_files(told[0].slices / 2).bytes;
    assert!(text <= told[0].bytes, "{text} bytes, told {}", told[0].bytes);
    assert!(told[0].bytes <= text + spare, "{text} bytes, told {}", told[0].bytes);
}

#[test]
fn tensors_and_values_count_together() {
    let mut fixture = Fixture::new();
    let (mut session, _agent) = fixture.session(None);
    let tensor = TensorSpec::whole("t", Dtype::named("uint8").expect("u8"), vec![10]);
    let text = length_of(vec![tensor.clone()]);
    let extra =
        |length: usize| Extra { name: "more".into(), encoding: Encoding::Json, data: "\"".repeat(length) };
    let beside = TextLength::of_extra("more", &extra(1000).data);
    assert!(beside.bytes > 2000, "a quote takes two bytes");
    session.most_text = (text + beside).bytes + 1536;
    let much = TextLength::of_extra("more", &extra(1001).data);
    session.begin(vec![tensor.clone()], much, 1, PATIENCE).map(drop).expect_err("known at once");
    for step in 1..=1 + SLOTS as u64 {
        let snapshot = snapshot(&mut session, 10, 1);
        let refused = session.seal(snapshot, step, None, 0, vec![extra(1001)]).expect_err("known late");
        assert_eq!(refused.kind(), ErrorKind::TooLarge);
    }
    assert!(session.has_room(Duration::ZERO).expect("room"), "no slot is lost");
    let fits = snapshot(&mut session, 10, 1);
    let save = session.seal(fits, 9, None, 0, vec![extra(1000)]).expect("as much as there may be");
    assert!(matches!(settle(&mut session, &save), Progress::Durable));
}
