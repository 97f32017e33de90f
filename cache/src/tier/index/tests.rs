//! Eviction order, pins, ceilings, and the sums of the books under random use.

use std::collections::BTreeMap;

use forebay_io::rng::Rng;

use super::*;
use crate::tests::support::{between, rounds};

const CEILING: u64 = 64 * PAGE;
const PINS: u64 = 40 * PAGE;

fn id(index: u64) -> BlockId {
    BlockId { digest: 1, index }
}

/// Puts a one-page block in; returns who left.
fn put(index: &mut Index, block: u64) -> Vec<u64> {
    let (slot, leave) = index.reserve(id(block), 100, false).expect("room");
    assert_eq!(index.commit(slot), None);
    leave.into_iter().map(|slot| slot.id.index).collect()
}

#[test]
fn blocks_that_were_read_stay_longer() {
    let mut index = Index::new(3 * PAGE, 2 * PAGE);
    for block in 0..3 {
        assert!(put(&mut index, block).is_empty());
    }
    index.find(&id(0));
    assert!(index.peek(&id(1)).is_some(), "a peek is no read");
    assert_eq!(put(&mut index, 3), [1]);
    assert_eq!(put(&mut index, 4), [2]);
    assert_eq!(put(&mut index, 5), [0]);
    let slot = index.find(&id(3)).expect("here");
    index.set_pinned(&slot, true).expect("room").expect("listed");
    for block in 6..20 {
        put(&mut index, block);
    }
    let pinned = index.peek(&id(3)).expect("pinned blocks stay");
    index.set_pinned(&pinned, false).expect("unpin").expect("listed");
    let left: Vec<u64> = (20..26).flat_map(|block| put(&mut index, block)).collect();
    assert!(left.contains(&3), "{left:?}");
}

/// Each round left an entry behind, for as long as nothing had to be evicted.
#[test]
fn pinning_again_and_again_takes_no_memory() {
    let mut index = Index::new(8 * PAGE, 4 * PAGE);
    for block in 0..3 {
        put(&mut index, block);
    }
    for _ in 0..1000 {
        for pinned in [true, false] {
            let slot = index.peek(&id(1)).expect("here");
            index.set_pinned(&slot, pinned).expect("room").expect("listed");
        }
    }
    assert_eq!(index.queue.len(), 3);
    // What was unpinned goes when it is its turn, and each goes once.
    let left: Vec<u64> = (3..14).flat_map(|block| put(&mut index, block)).collect();
    assert_eq!(left, [0, 1, 2, 3, 4, 5]);
    assert_eq!(index.used(), 8 * PAGE);
}

/// A write that a disk held up beyond the close of its cache gave back room that nobody had taken.
#[test]
fn what_is_under_way_when_the_books_are_closed_ends_in_order() {
    let mut index = Index::new(8 * PAGE, 4 * PAGE);
    put(&mut index, 0);
    let (fails, _) = index.reserve(id(1), 1, false).expect("room");
    let (ends, _) = index.reserve(id(2), 1, true).expect("room");
    index.close();
    assert_eq!((index.used(), index.pinned()), (2 * PAGE, PAGE));
    index.release(&fails);
    assert_eq!(index.commit(ends), Some(ends), "its file goes: the directory is others' by now");
    assert_eq!((index.used(), index.pinned(), index.peek(&id(2))), (0, 0, None));
    index.reserve(id(3), 1, false).expect_err("closed");
}

#[test]
fn pins_stop_at_their_ceiling_and_the_rest_still_turns_over() {
    let mut index = Index::new(4 * PAGE, 3 * PAGE);
    for block in 0..3 {
        let (slot, _) = index.reserve(id(block), 1, true).expect("room");
        index.commit(slot);
    }
    assert_eq!(index.reserve(id(3), 1, true).expect_err("full"), Full::Pins { ceiling: 3 * PAGE });
    for block in 4..9 {
        put(&mut index, block);
    }
    let too_large = 2 * PAGE as u32;
    assert_eq!(index.reserve(id(10), too_large, false).expect_err("full"), Full::Disk { ceiling: 4 * PAGE });
    assert_eq!(index.peek(&id(8)).map(|slot| slot.id), Some(id(8)), "a refused write evicts nobody");
    assert_eq!((index.used(), index.pinned()), (4 * PAGE, 3 * PAGE));
}

#[test]
fn a_full_disk_lowers_the_ceiling_and_writes_raise_it_again() {
    let mut index = Index::new(1000 * PAGE, 0);
    for block in 0..100 {
        assert!(put(&mut index, block).is_empty());
    }
    index.lower_ceiling();
    let left: usize = (100..101 + 2 * RECOVERY).map(|block| put(&mut index, block).len()).sum();
    assert_eq!(left as u64, 2 * RECOVERY - 1);
    assert_eq!(index.used(), 102 * PAGE);

    let mut empty = Index::new(1000 * PAGE, 0);
    empty.lower_ceiling();
    assert!(put(&mut empty, 0).is_empty(), "one write may find out");
    assert_eq!(put(&mut empty, 1), [0]);
}

/// Nothing can be evicted there, and no write succeeds that would raise the ceiling.
#[test]
fn a_full_disk_of_pins_is_tried_again_now_and_then() {
    let mut index = Index::new(1000 * PAGE, 900 * PAGE);
    for block in 0..3 {
        let (slot, _) = index.reserve(id(block), 1, true).expect("room");
        index.commit(slot);
    }
    index.lower_ceiling();
    let full = Err(Full::Disk { ceiling: 3 * PAGE });
    assert_eq!(index.may_pin(id(3), 1), full, "what would not fit is not fetched");
    let (at, slot) = (0..4 * RECOVERY)
        .find_map(|at| index.reserve(id(4), 1, false).ok().map(|(slot, _)| (at, slot)))
        .expect("it is tried again");
    assert_eq!(at, RECOVERY - 1, "one refusal was before");
    index.release(&slot);
    index.lower_ceiling();
    assert_eq!((0..4 * RECOVERY).find(|_| index.may_pin(id(5), 1).is_ok()), Some(RECOVERY));
}

/// One write passed over all of a cache that was read since, and a refused one evicted all of it and took it back, while
/// every reader waited.
#[test]
fn what_one_write_does_is_bounded() {
    const BLOCKS: u64 = 3 * CHANCES as u64;
    let mut index = Index::new(BLOCKS * PAGE, BLOCKS * PAGE);
    for block in 0..BLOCKS {
        put(&mut index, block);
        index.find(&id(block));
    }
    assert_eq!(put(&mut index, BLOCKS), [CHANCES as u64], "the first one after those that were passed over");
    // The next ones go on where it was.
    assert_eq!(put(&mut index, BLOCKS + 1), [2 * CHANCES as u64 + 1]);
    let (front, back) = (index.queue.front().copied(), index.queue.back().copied());
    let too_large = (BLOCKS * PAGE + 1) as u32;
    assert_eq!(
        index.reserve(id(0), too_large, false).expect_err("full"),
        Full::Disk { ceiling: BLOCKS * PAGE }
    );
    assert_eq!(
        (index.queue.front().copied(), index.queue.back().copied()),
        (front, back),
        "nobody was looked at"
    );
}

/// A cache took all of a disk that others write to as well, up to its own ceiling: these met a full disk.
#[test]
fn blocks_give_way_to_others_on_the_disk() {
    let mut index = Index::new(1000 * PAGE, 1000 * PAGE);
    for block in 0..700 {
        put(&mut index, block);
    }
    let pinned = index.peek(&id(0)).expect("here");
    index.set_pinned(&pinned, true).expect("room").expect("listed");
    assert!(index.give_way(11 * PAGE, 10 * PAGE).is_empty());
    assert!(put(&mut index, 700).is_empty(), "one is free");
    assert_eq!(put(&mut index, 701), [1]);
    // Others have written: they are left their part, at some blocks a time.
    let mut free = 0;
    for gone in [EVICTIONS, 500 - EVICTIONS, 0] {
        assert_eq!(index.give_way(free * PAGE, 500 * PAGE).len(), gone, "{free} are free");
        free += gone as u64;
    }
    assert_eq!(index.used(), 201 * PAGE);
    assert_eq!(index.peek(&id(0)).map(|slot| slot.pinned), Some(true));
    // What cannot give way keeps others out: nothing more is taken.
    assert_eq!(index.give_way(0, 1000 * PAGE).len(), 200);
    index.reserve(id(9), 1, false).expect_err("there is no room");
    assert_eq!(index.may_pin(id(9), 1), Err(Full::Disk { ceiling: 0 }));
    // And all that there is as soon as they have gone.
    assert!(index.give_way(2000 * PAGE, 10 * PAGE).is_empty());
    for block in 1000..1999 {
        assert!(put(&mut index, block).is_empty());
    }
    assert_eq!(put(&mut index, 2000), [1000], "up to its own ceiling");
}

#[test]
fn the_memory_of_the_books_is_known() {
    let mut index = Index::new(1 << 50, 0);
    assert_eq!(index.bytes(), 0);
    for block in 1..=100_000 {
        put(&mut index, block);
        let each = index.bytes() / block;
        assert!(block < 1000 || (70..=160).contains(&each), "{each} bytes for each of {block}");
    }
}

#[test]
fn files_found_are_taken_over_by_age_and_under_the_ceilings() {
    let slot = |block, serial, pinned| Slot { id: id(block), serial, size: 1, pinned };
    let mut index = Index::new(3 * PAGE, 2 * PAGE);
    let found = [
        slot(4, 9, false),
        slot(1, 3, false),
        slot(1, 5, false), // written twice
        slot(2, 4, true),
        slot(2, 4, false), // cut off while being pinned
        slot(3, 1, false),
        slot(5, 6, true),
        slot(6, 7, true), // one pin too many
    ];
    let mut leave: Vec<Slot> = found.into_iter().filter_map(|slot| index.adopt(slot)).collect();
    leave.extend(index.settle());
    leave.sort_by_key(|slot| (slot.id, slot.serial));
    let expected =
        [slot(1, 3, false), slot(1, 5, false), slot(2, 4, false), slot(3, 1, false), slot(6, 7, true)];
    assert_eq!(leave, expected);
    assert_eq!((index.used(), index.pinned()), (3 * PAGE, 2 * PAGE));
    assert_eq!(index.reserve(id(9), 1, false).expect("room").0.serial, 10);
}

/// Random use against a plain map: room adds up, ceilings hold, pinned blocks stay.
#[test]
fn the_books_add_up() {
    for seed in 0..rounds(100) {
        let random = Rng::seeded(seed);
        let mut index = Index::new(CEILING, PINS);
        let mut files: BTreeMap<BlockId, Slot> = BTreeMap::new();
        let mut writing: Vec<Slot> = Vec::new();
        for step in 0..300 {
            let block = id(between(&random, 0..30));
            match between(&random, 0..10) {
                0..4 => {
                    let size = between(&random, 1..8 * PAGE) as u32;
                    if let Ok((slot, leave)) = index.reserve(block, size, random.chance(0.3)) {
                        for slot in leave {
                            assert!(!slot.pinned, "seed {seed} step {step}: a pinned block was evicted");
                            assert_eq!(files.remove(&slot.id), Some(slot), "seed {seed} step {step}");
                        }
                        writing.push(slot);
                    }
                }
                4..7 if !writing.is_empty() => {
                    let slot = writing.swap_remove(between(&random, 0..writing.len() as u64) as usize);
                    if random.chance(0.8) {
                        assert_eq!(
                            index.commit(slot),
                            files.insert(slot.id, slot),
                            "seed {seed} step {step}"
                        );
                    } else {
                        index.release(&slot);
                    }
                }
                7 => assert_eq!(index.find(&block), files.get(&block).copied(), "seed {seed} step {step}"),
                8 if random.chance(0.5) => {
                    let free = between(&random, 0..2 * CEILING);
                    for slot in index.give_way(free, CEILING) {
                        assert_eq!(files.remove(&slot.id), Some(slot), "seed {seed} step {step}");
                    }
                }
                8 => {
                    if let Some(slot) = files.get(&block).copied()
                        && let Ok(changed) = index.set_pinned(&slot, random.chance(0.5))
                    {
                        files.insert(block, changed.expect("listed"));
                    }
                }
                _ => {
                    if let Some(slot) = files.remove(&block) {
                        assert!(index.remove(&slot) && !index.remove(&slot), "seed {seed} step {step}");
                    }
                }
            }
            let all = || files.values().chain(&writing);
            let used: u64 = all().map(Slot::cost).sum();
            let pinned: u64 = all().filter(|slot| slot.pinned).map(Slot::cost).sum();
            assert_eq!((index.used(), index.pinned()), (used, pinned), "seed {seed} step {step}");
            let evictable: u64 = files.values().map(Slot::evictable).sum();
            assert_eq!(index.evictable, evictable, "seed {seed} step {step}");
            assert!(used <= CEILING && pinned <= PINS, "seed {seed} step {step}: {used} and {pinned}");
        }
    }
}
