//! The lists and totals against a plain walk over all entries, after anything that may happen to blobs.

use std::collections::BTreeSet;

use forebay_io::rng::Rng;

use super::*;
use crate::tests::support::with_seeds;

const FILES: u64 = 6;

fn pick<T: Copy>(rng: &Rng, from: &[T]) -> T {
    from[rng.below(from.len() as u64) as usize]
}

/// What is here by a plain walk.
fn walk(entries: &Entries, is_wanted: impl Fn(&Entry) -> bool) -> BTreeSet<ObjectKey> {
    entries.all.values().filter(|entry| is_wanted(entry)).map(|entry| entry.key.clone()).collect()
}

/// What a list says. Nothing is on it twice.
fn listed<'a>(list: impl Iterator<Item = &'a Entry>) -> BTreeSet<ObjectKey> {
    let keys: Vec<_> = list.map(|entry| entry.key.clone()).collect();
    let distinct: BTreeSet<_> = keys.iter().cloned().collect();
    assert_eq!(keys.len(), distinct.len());
    distinct
}

fn waits(entry: &Entry) -> bool {
    matches!(entry.state, State::Fresh | State::Ready)
}

fn check_waiting(entries: &Entries, end: u64) {
    let below = || entries.all.range(..end).map(|(_, entry)| entry).filter(|entry| waits(entry));
    let files: BTreeSet<_> = below().map(|entry| entry.tail.ino).collect();
    let bytes = below().map(|entry| entry.tail.size).sum();
    let expected = Waiting { blobs: below().count() as u64, bytes, files: files.len() as u64 };
    assert_eq!(entries.waiting(end), expected, "below {end}");
}

fn check(entries: &Entries, keys: &BTreeSet<ObjectKey>, marks: &[u64]) {
    assert_eq!((&walk(entries, |_| true), &entries.keys().cloned().collect()), (keys, keys));
    for (number, entry) in &entries.all {
        assert_eq!(entries.numbers.get(&entry.key), Some(number));
    }
    for state in State::ALL {
        assert_eq!(listed(entries.in_state(state)), walk(entries, |entry| entry.state == state));
    }
    for ino in (0..FILES).map(InodeId) {
        for state in State::ALL {
            let expected = walk(entries, |entry| (entry.tail.ino, entry.state) == (ino, state));
            assert_eq!(listed(entries.of(ino, state)), expected, "{ino}, {state:?}");
        }
        let first = entries.all.values().find(|entry| entry.tail.ino == ino);
        assert_eq!(entries.first_of(ino).map(|entry| &entry.key), first.map(|entry| &entry.key));
    }
    let inodes: BTreeSet<_> = entries.all.values().map(|entry| entry.tail.ino).collect();
    assert_eq!(entries.inodes(), Vec::from_iter(inodes));
    assert_eq!(listed(entries.written()), walk(entries, |entry| entry.on_disk == OnDisk::Written));
    let is_refused = |entry: &Entry| entry.on_disk == OnDisk::Refused && entry.state != State::Damaged;
    assert_eq!(listed(entries.refused()), walk(entries, is_refused));
    let damaged = walk(entries, |entry| entry.state == State::Damaged);
    assert_eq!(entries.damaged(), damaged.len() as u64);
    let oldest = entries.all.values().find(|entry| waits(entry));
    assert_eq!(entries.oldest_waiting().map(|entry| &entry.key), oldest.map(|entry| &entry.key));
    marks.iter().chain([&u64::MAX]).for_each(|end| check_waiting(entries, *end));
}

/// Whatever happens to a blob that can: what cannot be uploaded any more never can again.
fn happen(entry: &mut Entry, rng: &Rng) {
    entry.is_settled |= rng.chance(0.3);
    entry.is_told |= rng.chance(0.1);
    if rng.chance(0.5) {
        entry.on_disk = pick(rng, &[OnDisk::Written, OnDisk::Durable, OnDisk::Refused, OnDisk::Lost]);
    }
    entry.state = match entry.state {
        State::Fresh => pick(rng, &[State::Fresh, State::Ready, State::Done, State::Damaged]),
        State::Ready => pick(rng, &[State::Ready, State::Done, State::Damaged]),
        gone => pick(rng, &[gone, State::Done, State::Damaged]),
    };
}

#[test]
fn lists_and_totals_say_what_a_walk_over_all_entries_does() {
    with_seeds(20, |seed| async move {
        let rng = Rng::seeded(seed);
        let (mut entries, mut keys, mut marks) = (Entries::default(), BTreeSet::new(), vec![0]);
        for number in 0..400_u64 {
            let known = (!keys.is_empty()).then(|| rng.below(keys.len() as u64) as usize);
            let known = known.and_then(|nth| keys.iter().nth(nth)).cloned();
            // Now it grows, now it shrinks.
            let adds = if number / 50 % 2 == 0 { 5 } else { 2 };
            match (rng.below(10), known) {
                (0..1, _) => marks.push(entries.mark()),
                (what, Some(key)) if what > adds => {
                    assert!(entries.remove(&key).is_some() && keys.remove(&key));
                    assert!(entries.remove(&key).is_none() && entries.get(&key).is_none());
                }
                (what, Some(key)) if what % 2 == 0 => {
                    assert!(entries.change(&key, |entry| happen(entry, &rng)).is_some());
                }
                _ => {
                    let key = ObjectKey::new(format!("{:x}", rng.u64()));
                    let mut tail = Tail::missing();
                    (tail.ino, tail.size) = (InodeId(rng.below(FILES)), rng.below(9));
                    let state = pick(&rng, &[State::Fresh, State::Fresh, State::Ready, State::Damaged]);
                    entries.add(key.clone(), tail, number as i64, state);
                    keys.insert(key);
                }
            }
            check(&entries, &keys, &marks);
        }
        keys.iter().for_each(|key| drop(entries.remove(key)));
        entries.mark();
        assert!(
            entries.waiting.len() <= 2,
            "marks that nothing waits below are forgotten: {:?}",
            entries.waiting
        );
    });
}
