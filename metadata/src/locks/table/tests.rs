//! Locks of several sessions on a few files, and a table of bytes that they are compared with.

use super::*;
use crate::testing::{Chance, rounds};

const FILE: InodeId = InodeId(7);
const OTHER: InodeId = InodeId(8);

fn lock(owner: u64, first: u64, last: u64, kind: LockKind) -> Lock {
    Lock { owner, pid: 100 + owner as u32 % 100, range: LockRange { first, last }, kind }
}

fn whole(owner: u64, kind: LockKind) -> Lock {
    lock(owner, 0, u64::MAX, kind)
}

/// A table, and a time that stands still unless it is told to go on.
struct Site {
    table: Table,
    now: Instant,
}

impl Site {
    fn new() -> Self {
        Self { table: Table::default(), now: Instant::now() }
    }

    fn ask(&mut self, session: u64, ino: InodeId, lock: Lock, asking: Asking) -> LockAnswer {
        let (answer, offers) = self.table.ask(session, ino, lock, asking, self.now);
        assert_eq!(offers, [], "nothing was given up");
        answer
    }

    fn try_lock(&mut self, session: u64, lock: Lock) -> bool {
        match self.ask(session, FILE, lock, Asking::Try) {
            LockAnswer::Granted => true,
            LockAnswer::Held(_) => false,
            other => panic!("{other:?}"),
        }
    }

    fn waits(&mut self, session: u64, ino: InodeId, lock: Lock, ticket: u64) {
        assert_eq!(self.ask(session, ino, lock, Asking::Wait(ticket)), LockAnswer::Waits);
    }

    fn unlock(&mut self, session: u64, owner: u64) -> Vec<(u64, u64)> {
        pairs(self.table.unlock(session, FILE, owner, LockRange::ALL))
    }
}

fn pairs(offers: Vec<Offer>) -> Vec<(u64, u64)> {
    offers.into_iter().map(|offer| (offer.session, offer.ticket)).collect()
}

#[test]
fn owners_of_one_session_and_of_several_exclude_each_other() {
    let mut site = Site::new();
    assert!(site.try_lock(1, whole(1, LockKind::Write)));
    assert!(!site.try_lock(1, whole(2, LockKind::Write)) && !site.try_lock(2, whole(1, LockKind::Read)));
    assert!(site.try_lock(1, whole(1, LockKind::Read)), "its own is in nobody's way");
    assert!(site.try_lock(2, whole(1, LockKind::Read)) && !site.try_lock(2, whole(1, LockKind::Write)));
    assert_eq!(site.unlock(1, 1), []);
    assert!(site.try_lock(2, whole(1, LockKind::Write)));
    assert_eq!(site.unlock(2, 1), []);
    assert!(site.table.files.is_empty() && site.table.counts.is_empty(), "{:?}", site.table);
}

#[test]
fn who_looks_is_told_what_is_in_the_way_and_by_whom_on_its_own_host() {
    let mut site = Site::new();
    assert!(
        site.try_lock(1, lock(1, 10, 19, LockKind::Write))
            && site.try_lock(1, lock(2, 30, 39, LockKind::Read))
    );
    let held =
        |first, last, kind, pid| LockAnswer::Held(Blocker { range: LockRange { first, last }, kind, pid });
    let look = |site: &mut Site, session, wanted| site.ask(session, FILE, wanted, Asking::Look);
    assert_eq!(look(&mut site, 2, whole(1, LockKind::Write)), held(10, 19, LockKind::Write, 0));
    assert_eq!(look(&mut site, 1, whole(1, LockKind::Write)), held(30, 39, LockKind::Read, 102));
    assert_eq!(look(&mut site, 2, lock(1, 20, 39, LockKind::Read)), LockAnswer::Free);
    assert!(site.try_lock(2, lock(1, 20, 39, LockKind::Read)), "nothing was set by looking");
}

#[test]
fn who_waits_is_served_in_order_and_nobody_comes_between() {
    let mut site = Site::new();
    assert!(site.try_lock(1, whole(1, LockKind::Write)));
    site.waits(2, FILE, whole(1, LockKind::Read), 7);
    site.waits(3, FILE, whole(1, LockKind::Write), 8);
    site.waits(4, FILE, whole(1, LockKind::Read), 9);
    // The readers can have it together; the writer cannot.
    assert_eq!(site.unlock(1, 1), [(2, 7), (4, 9)]);
    assert!(!site.try_lock(1, whole(1, LockKind::Write)), "it is as good as given away");
    assert_eq!(site.ask(2, FILE, whole(1, LockKind::Read), Asking::Wait(7)), LockAnswer::Granted);
    assert_eq!(site.ask(4, FILE, whole(1, LockKind::Read), Asking::Wait(9)), LockAnswer::Granted);
    site.waits(3, FILE, whole(1, LockKind::Write), 8);
    assert_eq!((site.unlock(2, 1), site.unlock(4, 1)), (vec![], vec![(3, 8)]));
    // One who gives up what it was offered leaves it to the next.
    site.waits(5, FILE, whole(1, LockKind::Write), 1);
    assert_eq!(pairs(site.table.leave(3, FILE, 8)), [(5, 1)]);
    assert_eq!(site.ask(5, FILE, whole(1, LockKind::Write), Asking::Wait(1)), LockAnswer::Granted);
    assert_eq!(site.unlock(5, 1), []);
    assert!(site.table.files.is_empty() && site.table.waiting.is_empty(), "{:?}", site.table);
}

#[test]
fn who_waits_and_asks_no_more_is_passed_over() {
    let mut site = Site::new();
    assert!(site.try_lock(1, whole(1, LockKind::Write)));
    site.waits(2, FILE, whole(1, LockKind::Write), 7);
    site.now += LAPSE - RENEW;
    site.waits(3, FILE, whole(1, LockKind::Write), 8);
    assert_eq!(site.unlock(1, 1), [(2, 7)]);
    assert!(!site.try_lock(1, whole(1, LockKind::Write)), "it may come yet");
    site.now += RENEW;
    assert_eq!(site.ask(3, FILE, whole(1, LockKind::Write), Asking::Wait(8)), LockAnswer::Granted);
}

#[test]
fn who_would_wait_for_itself_is_told() {
    let mut site = Site::new();
    let write = |owner| whole(owner, LockKind::Write);
    let wait = |site: &mut Site, session, ino, lock| site.ask(session, ino, lock, Asking::Wait(1));
    for (session, ino) in [(1, InodeId(1)), (2, InodeId(2)), (3, InodeId(3))] {
        assert_eq!(site.ask(session, ino, write(1), Asking::Try), LockAnswer::Granted);
    }
    assert_eq!(wait(&mut site, 1, InodeId(2), write(1)), LockAnswer::Waits);
    assert_eq!(wait(&mut site, 2, InodeId(3), write(1)), LockAnswer::Waits);
    assert_eq!(wait(&mut site, 3, InodeId(1), write(1)), LockAnswer::Deadlock);
    assert_eq!(
        wait(&mut site, 3, InodeId(1), write(2)),
        LockAnswer::Waits,
        "another owner, which has nothing"
    );
    // Two who read, and both want to write.
    for session in [1, 2] {
        assert_eq!(site.ask(session, OTHER, whole(9, LockKind::Read), Asking::Try), LockAnswer::Granted);
    }
    assert_eq!(wait(&mut site, 1, OTHER, write(9)), LockAnswer::Waits);
    assert_eq!(wait(&mut site, 2, OTHER, write(9)), LockAnswer::Deadlock);
}

#[test]
fn a_session_that_ends_leaves_nothing_and_one_that_comes_back_has_what_it_had() {
    let mut site = Site::new();
    assert!(
        site.try_lock(1, lock(1, 0, 9, LockKind::Write)) && site.try_lock(1, lock(2, 20, 29, LockKind::Read))
    );
    site.waits(1, FILE, lock(2, 0, 4, LockKind::Read), 3);
    site.waits(2, FILE, lock(1, 0, 4, LockKind::Write), 5);
    assert_eq!(pairs(site.table.end(1)), [(2, 5)]);
    assert_eq!(site.ask(2, FILE, lock(1, 0, 4, LockKind::Write), Asking::Wait(5)), LockAnswer::Granted);
    // All that an owner had on a file, or nothing.
    let had = vec![
        (FILE, lock(1, 3, 9, LockKind::Write)),
        (FILE, lock(1, 12, 15, LockKind::Write)),
        (FILE, lock(2, 20, 29, LockKind::Read)),
        (OTHER, lock(1, 0, 9, LockKind::Write)),
    ];
    for _ in 0..2 {
        let (lost, offers) = site.table.relock(1, had.clone());
        assert_eq!((lost, offers), (vec![(FILE, 1)], vec![]));
        assert_eq!(site.table.counts[&1], 2);
    }
    assert!(
        site.try_lock(2, lock(2, 5, 19, LockKind::Write))
            && !site.try_lock(2, lock(2, 25, 25, LockKind::Write))
    );
    assert_eq!((pairs(site.table.end(1)), pairs(site.table.end(2))), (vec![], vec![]));
    assert!(site.table.files.is_empty() && site.table.counts.is_empty() && site.table.waiting.is_empty());
}

#[test]
fn a_session_waits_so_often_and_no_more() {
    let mut site = Site::new();
    assert!(site.try_lock(1, whole(1, LockKind::Write)));
    for ticket in 0..MOST_WAITS as u64 {
        site.waits(2, FILE, whole(ticket, LockKind::Write), ticket);
    }
    let more = whole(u64::MAX, LockKind::Write);
    assert_eq!(site.ask(2, FILE, more, Asking::Wait(u64::MAX)), LockAnswer::Full);
    site.waits(2, FILE, whole(0, LockKind::Write), 0);
    site.waits(3, FILE, more, 0);
}

/// Against what each owner has of each byte.
#[test]
fn what_is_granted_is_what_a_table_of_bytes_grants() {
    const BYTES: u64 = 10;
    for _ in 0..rounds(100) {
        let mut chance = Chance::fresh();
        let mut site = Site::new();
        let mut model: BTreeMap<(u64, u64), [Option<LockKind>; BYTES as usize]> = BTreeMap::new();
        for _ in 0..200 {
            let (session, owner) = (chance.below(2), chance.below(2));
            let (one, other) = (chance.below(BYTES), chance.below(BYTES));
            let (first, last) = (one.min(other), one.max(other));
            let kind = if chance.below(2) == 0 { LockKind::Read } else { LockKind::Write };
            let bytes = first as usize..=last as usize;
            let meets = |has: &[Option<LockKind>]| has.iter().flatten().any(|held| held.excludes(kind));
            let is_free =
                !model.iter().any(|(by, has)| *by != (session, owner) && meets(&has[bytes.clone()]));
            match chance.below(8) {
                0 => {
                    site.table.unlock(session, FILE, owner, LockRange { first, last });
                    model.entry((session, owner)).or_default()[bytes].fill(None);
                }
                1 if chance.below(8) == 0 => {
                    site.table.end(session);
                    model.retain(|(by, _), _| *by != session);
                }
                2 => {
                    let answer = site.ask(session, FILE, lock(owner, first, last, kind), Asking::Look);
                    assert_eq!(answer == LockAnswer::Free, is_free, "{chance:?}");
                }
                _ => {
                    assert_eq!(site.try_lock(session, lock(owner, first, last, kind)), is_free, "{chance:?}");
                    if is_free {
                        model.entry((session, owner)).or_default()[bytes].fill(Some(kind));
                    }
                }
            }
            let counted: usize = site.table.counts.values().sum();
            let kept = site.table.files.values().flat_map(|file| file.owners.values());
            assert_eq!(counted, kept.map(Ranges::len).sum::<usize>(), "{chance:?}");
        }
    }
}
