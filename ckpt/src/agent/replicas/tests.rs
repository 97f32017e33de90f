//! Copies on their way from one agent to another, both in this process.

use std::time::Duration;

use forebay_io::mem::WriteMapping;
use forebay_io::net::{Door, come};

use super::super::copy::Copy;
use super::super::pace::Pace;
use super::super::trainer::Trainer;
use super::*;
use crate::agent::Reply;
use crate::arena::{SLOTS, Seal};
use crate::manifest::{Checksum, Identity, Slice, SliceKind, Tensor};
use crate::restore::Address;
use crate::testing::card;

use std::sync::Arc;

use forebay_io::clock::Clock;
use forebay_io::mem::SharedMemory;

/// Longer than any answer takes.
const LONG: Duration = Duration::from_secs(120);
const HEADER: usize = 4096;
const START: &str = "0123456789abcdef0123456789abcdef";

/// A rank's memory, and the way of what it seals to another host.
struct Rank {
    memory: Arc<SharedMemory>,
    slots: Vec<WriteMapping>,
    outbox: Outbox,
    hears: FdStream,
    saves: u64,
}

impl Rank {
    fn new(slot_bytes: usize) -> Self {
        let memory = Arc::new(SharedMemory::create("forebay-test", SLOTS * slot_bytes).expect("memory"));
        let slot = |slot| memory.map_write(slot * slot_bytes..(slot + 1) * slot_bytes).expect("a slot");
        let slots = (0..SLOTS).map(slot).collect();
        let (near, hears) = FdStream::pair().expect("pair");
        let pace = Arc::new(Pace::new(None));
        let outbox = Sender::begin(2, &Trainer::new(near, pace.clone()), &pace, card(0)).expect("a sender");
        Self { memory, slots, outbox, hears, saves: 0 }
    }

    /// As [`Self::new`], to that keeper.
    fn beside(keeper: &Keeper, slot_bytes: usize) -> Self {
        let rank = Self::new(slot_bytes);
        rank.outbox.set_address(address(keeper.address()));
        rank
    }

    /// Fills the next slot with a step's number.
    fn seal(&mut self, step: u64, length: usize) -> Held {
        self.saves += 1;
        let slot = self.saves as usize % SLOTS;
        let shard = &mut self.slots[slot][..HEADER + length];
        shard[..HEADER].fill(b' ');
        shard[HEADER..].fill(step as u8);
        let crc32c = Checksum(forebay_core::crc32c(&shard[HEADER..]));
        let (kind, offsets, lengths, blake3) =
            (SliceKind::Box, vec![0], vec![length as u64], Identity::UNKNOWN);
        let (start, end) = (HEADER as u64, shard.len() as u64);
        let slice = Slice { kind, offsets, lengths, shard: 0, start, end, crc32c, blake3 };
        let (name, dtype, shape) = ("t".to_owned(), "uint8".to_owned(), vec![length as u64]);
        let tensors = vec![Tensor { name, dtype, shape, slices: vec![slice] }];
        let seal = Seal { slot, ..Seal::of_test(self.saves, step, shard, HEADER, tensors) };
        Held::new(START.to_owned(), 0, 2, seal)
    }

    fn send(&self, held: &Held) -> Option<Copy> {
        self.outbox.copy(Arc::new(held.clone()), self.memory.clone())
    }

    /// What the trainer hears next.
    fn hear(&mut self) -> Reply {
        assert!(self.hears.readable(LONG).expect("readable"), "nothing was said");
        let (frame, _) = self.hears.receive().expect("receive").expect("a frame");
        serde_json::from_slice(&frame).expect("parses")
    }

    /// Seals a step and has it copied; whether it was.
    fn copies(&mut self, step: u64, length: usize) -> bool {
        let held = self.seal(step, length);
        let copy = self.send(&held).expect("it is known where to");
        let is_copied = match self.hear() {
            Reply::Replicated { save, .. } if save == held.seal.save => true,
            Reply::NotReplicated { save } if save == held.seal.save => false,
            reply => panic!("{reply:?}"),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        runtime.block_on(copy.settled(&Clock::manual()));
        is_copied
    }

    fn is_silent(&self) -> bool {
        !self.hears.readable(Duration::from_millis(100)).expect("readable")
    }
}

fn keeper() -> Keeper {
    Keeper::open(&Arc::new(Pace::new(None)), card(1)).expect("a keeper")
}

fn address((port, secret): (u16, String)) -> Address {
    Address { addresses: vec!["127.0.0.1".into()], port, secret }
}

/// The steps that are kept, once their bytes were looked at, and the numbers of their memory.
fn look(replicas: &[Replica]) -> Vec<(u64, u64)> {
    let look = |Replica { held, memory, .. }: &Replica| {
        let size = held.seal.size as usize;
        let mapping = memory.map_read(0..size).expect("a copy");
        assert!(mapping.as_ref()[HEADER..].iter().all(|byte| u64::from(*byte) == held.seal.step));
        (held.seal.step, memory.id())
    };
    replicas.iter().map(look).collect()
}

fn steps(keeper: &Keeper) -> Vec<u64> {
    keeper.steps().iter().map(|step| step.step).collect()
}

#[test]
fn the_newest_copies_are_kept_and_memory_is_used_again_until_it_is_shown() {
    let keeper = keeper();
    let mut rank = Rank::beside(&keeper, 32 << 20);
    assert!(rank.copies(1, 20 << 20) && rank.copies(2, 20 << 20));
    let first = look(&keeper.kept());
    assert!(rank.copies(3, 19 << 20) && rank.copies(4, 20 << 20));
    let second = look(&keeper.kept());
    assert_eq!(second.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(
        second.iter().map(|(_, id)| id).collect::<Vec<_>>(),
        first.iter().map(|(_, id)| id).collect::<Vec<_>>()
    );
    // A step that is saved again takes the place of the first try of it.
    assert!(rank.copies(4, 100) && steps(&keeper) == [3, 4]);
    let shown = keeper.show();
    let mapped: Vec<_> =
        shown.iter().map(|replica| replica.memory.map_read(0..HEADER + 100).expect("a copy")).collect();
    assert!(rank.copies(5, 20 << 20) && rank.copies(6, 100) && steps(&keeper) == [5, 6]);
    assert!(mapped[0].as_ref()[HEADER..].iter().all(|byte| *byte == 3), "who looks at it has it");
    look(&shown);
    drop(shown);
    // What came since is used again as before.
    assert!(rank.copies(7, 20 << 20) && rank.copies(8, 20 << 20));
    let third = look(&keeper.kept());
    assert!(rank.copies(9, 20 << 20) && look(&keeper.kept())[1].1 == third[0].1);
    assert!(rank.copies(5, 20 << 20) && rank.copies(6, 100));
    keeper.retain(START, |_| false);
    assert_eq!(steps(&keeper), [5, 6], "the start goes on");
    keeper.retain("another", |step| step.step == 6);
    assert_eq!(steps(&keeper), [6]);
    keeper.clear();
    assert!(steps(&keeper).is_empty());
}

#[test]
fn what_is_not_what_was_sealed_is_not_kept() {
    let keeper = keeper();
    let mut rank = Rank::beside(&keeper, 8 << 20);
    assert!(rank.copies(1, 5 << 20));
    let told = |rank: &mut Rank, held: &Held| {
        let _copy = rank.send(held).expect("it is known where to");
        let Reply::NotReplicated { .. } = rank.hear() else { panic!("it was kept") };
        match rank.hear() {
            Reply::Warning { message } => message,
            reply => panic!("{reply:?}"),
        }
    };
    // In the header, in the first and the last byte of a tensor.
    for at in [7, HEADER, HEADER + (5 << 20) - 1] {
        let held = rank.seal(2, 5 << 20);
        rank.slots[held.seal.slot][at] ^= 1;
        let message = told(&mut rank, &held);
        assert!(
            message.contains("(replicas): its agent keeps none: it was given up, or changed"),
            "{message}"
        );
        // It is told again once it worked in between.
        assert!(rank.copies(3, 100));
    }
    let mut held = rank.seal(4, 100);
    held.seal.step = 5;
    assert!(
        told(&mut rank, &held).contains("step 5: what is said of rank 0's part changed after it was sealed")
    );
    let mut held = rank.seal(4, 100);
    held.seal.tensors[0].slices[0].end -= 1;
    let _copy = rank.send(&held.sealed_again()).expect("sent");
    assert!(matches!(rank.hear(), Reply::NotReplicated { .. }) && rank.is_silent(), "told once");
    assert_eq!(steps(&keeper), [3], "the newest stays, whatever comes to nothing beside it");
}

/// A copy is no reason to take the trainer's memory.
#[test]
fn a_host_without_memory_keeps_none_and_takes_none() {
    let keeper = keeper();
    let mut rank = Rank::beside(&keeper, 1 << 20);
    let mut held = rank.seal(1, 100);
    held.seal.size = 1 << 45;
    held.seal.tensors[0].slices[0].end = held.seal.size;
    let _copy = rank.send(&held.sealed_again()).expect("sent");
    assert!(matches!(rank.hear(), Reply::NotReplicated { .. }));
    let Reply::Warning { message } = rank.hear() else { panic!("it is told") };
    assert!(message.contains("its host has no memory for a copy of 35184372088832 bytes"), "{message}");
    assert!(rank.copies(2, 100));
}

#[test]
fn copies_go_nowhere_while_nobody_is_there_and_that_is_told_once() {
    let mut rank = Rank::new(1 << 20);
    let held = rank.seal(1, 100);
    assert!(rank.send(&held).is_none(), "it is not known where to");
    let gone = keeper().address();
    rank.outbox.set_address(address(gone.clone()));
    assert!(!rank.copies(2, 100));
    let Reply::Warning { message } = rank.hear() else { panic!("it is told") };
    assert!(message.contains(&format!("127.0.0.1 (port {}) is not reached", gone.0)), "{message}");
    assert!(!rank.copies(3, 100) && rank.is_silent());
    let keeper = keeper();
    rank.outbox.set_address(address((keeper.address().0, "wrong".repeat(13))));
    assert!(!rank.copies(4, 100) && rank.is_silent());
    rank.outbox.set_address(address(keeper.address()));
    assert!(rank.copies(5, 100) && rank.is_silent() && steps(&keeper) == [5]);
}

/// Ranks of a job end at about the same time: what one of them does without then is nothing to warn of.
#[test]
fn a_keeper_that_ends_with_its_job_is_no_trouble() {
    let keeper = keeper();
    let mut rank = Rank::beside(&keeper, 1 << 20);
    let held = rank.seal(1, 100);
    let (port, secret) = keeper.address();
    let mut stream = come(&["127.0.0.1".to_owned()], port, &secret, PATIENCE).expect("there");
    stream.set_patience(LONG).expect("patience");
    say(&mut stream, &Offer { version: VERSION, steps: 2, held }).expect("say");
    let hear = |stream: &mut FdStream| -> Option<Answer> {
        let (frame, _) = stream.receive().expect("receive")?;
        Some(parse(&frame).expect("an answer"))
    };
    let Some(Answer::Ready { .. }) = hear(&mut stream) else { panic!("there is room") };
    drop(keeper);
    assert!(matches!(hear(&mut stream), Some(Answer::Over)) && hear(&mut stream).is_none());
    // The same, as a rank hears it.
    let door = Door::open("secret".to_owned()).expect("a port");
    rank.outbox.set_address(address((door.port().expect("port"), "secret".to_owned())));
    let ends = std::thread::spawn(move || {
        forebay_io::net::wait_readable(&[std::os::fd::AsFd::as_fd(&door)], LONG).expect("wait");
        let mut visitor = door.welcome().expect("look").expect("a visitor");
        visitor.receive().expect("receive").expect("an offer");
        say(&mut visitor, &Answer::Over).expect("say");
    });
    assert!(!rank.copies(2, 100) && rank.is_silent());
    ends.join().expect("a keeper");
}

/// Another build's words may be any, but for the version.
#[test]
fn agents_of_other_builds_are_refused() {
    let keeper = keeper();
    let (port, secret) = keeper.address();
    for words in [r#"{"version":2,"more":true}"#, "[]", "no words"] {
        let mut stream = come(&["127.0.0.1".to_owned()], port, &secret, PATIENCE).expect("there");
        stream.set_patience(LONG).expect("patience");
        stream.send(words.as_bytes(), None).expect("say");
        let (frame, _) = stream.receive().expect("receive").expect("an answer");
        let Answer::Refused { reason } = parse(&frame).expect("an answer") else { panic!("it was taken") };
        assert!(reason.contains("different builds"), "{reason}");
    }
}

/// In a machine with network cards the bytes come by these.
#[test]
fn a_copy_comes_by_cards_where_both_hosts_have_some() {
    let pace = Arc::new(Pace::new(None));
    let far = card(1);
    let keeper = Keeper::open(&pace, far.clone()).expect("a keeper");
    let mut rank = Rank::beside(&keeper, 16 << 20);
    assert!(rank.copies(1, 9 << 20) && rank.copies(2, 1));
    assert_eq!(look(&keeper.kept()).len(), 2);
    if let Some(far) = far {
        let sealed = (9 << 20) + 1 + 2 * HEADER as u64;
        let read = far.bytes_read();
        assert!((sealed..sealed + 1024).contains(&read), "{read} of {sealed} bytes came by the card");
    }
}
