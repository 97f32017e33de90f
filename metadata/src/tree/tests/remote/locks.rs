//! Advisory locks of several mounts of one tree.

use futures::poll;

use super::*;
use crate::remote::RemoteTree;
use crate::tree::{Blocker, Lock, LockAnswer, LockKind, LockRange};

fn lock(owner: u64, first: u64, last: u64, kind: LockKind) -> Lock {
    Lock { owner, pid: 1000 + owner as u32, range: LockRange { first, last }, kind }
}

fn whole(owner: u64) -> Lock {
    lock(owner, 0, i64::MAX as u64, LockKind::Write)
}

async fn is_granted(tree: &dyn Tree, ino: InodeId, lock: Lock) -> bool {
    match tree.lock(ino, lock, false).await.expect("answered") {
        LockAnswer::Granted => true,
        LockAnswer::Held(_) => false,
        other => panic!("{other:?}"),
    }
}

async fn unlock(tree: &dyn Tree, ino: InodeId, owner: u64) {
    tree.unlock(ino, owner, LockRange::ALL).await.expect("unlocked");
}

async fn end(guests: &[&RemoteTree], served: Served) {
    for guest in guests {
        guest.close().await.expect("closed");
    }
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_mount_locks_no_other_one_does() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let [one, other] = [site.join().await, site.join().await];
    let trees: [&dyn Tree; 3] = [&*served.tree, &one, &other];
    let file = create(&one, "a").await;
    for (number, holder) in trees.iter().enumerate() {
        assert!(is_granted(*holder, file, lock(7, 10, 19, LockKind::Write)).await);
        for (at, tree) in trees.iter().enumerate().filter(|(at, _)| *at != number) {
            // Owners of several mounts may have one number.
            assert!(!is_granted(*tree, file, lock(7, 19, 19, LockKind::Read)).await, "{at}");
            assert!(is_granted(*tree, file, lock(7, 20 + at as u64, 20 + at as u64, LockKind::Write)).await);
            let range = LockRange { first: 10, last: 19 };
            let blocker = Blocker { range, kind: LockKind::Write, pid: 0 };
            let asked = lock(7, 0, 19, LockKind::Read);
            assert_eq!(tree.blocker(file, asked).await.expect("answered"), Some(blocker));
        }
        let own = holder.blocker(file, lock(8, 0, 19, LockKind::Read)).await.expect("answered");
        assert_eq!(own.expect("there is one").pid, 1007);
        for tree in trees {
            unlock(tree, file, 7).await;
        }
    }
    // Who has none asks nothing when it closes the file.
    let asked = one.requests();
    for owner in 0..100 {
        unlock(&one, file, owner).await;
    }
    assert!(one.requests() < asked + 10, "but for what is synced beside");
    end(&[&one, &other], served).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_handed_to_who_waits_for_it_and_to_nobody_who_gave_up() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let [one, other] = [site.join().await, site.join().await];
    let trees: [&dyn Tree; 3] = [&*served.tree, &one, &other];
    let file = create(&one, "a").await;
    for (holder, waiter) in [(0, 1), (1, 0), (1, 2), (2, 1)] {
        let [holder, waiter] = [holder, waiter].map(|at: usize| trees[at]);
        assert!(is_granted(holder, file, whole(1)).await);
        // Given up at some moment, each time another one.
        for moment in 0..20 {
            let patience = Duration::from_micros(200 * moment);
            let waited = tokio::time::timeout(patience, waiter.lock(file, whole(1), true)).await;
            assert!(waited.is_err(), "it is held");
        }
        let ((), locked) = tokio::join!(
            async {
                tokio::task::yield_now().await;
                unlock(holder, file, 1).await;
            },
            waiter.lock(file, whole(1), true)
        );
        assert_eq!(locked.expect("answered"), LockAnswer::Granted);
        assert!(!is_granted(holder, file, whole(1)).await);
        unlock(waiter, file, 1).await;
        // Also while it may be granted: it is then taken back, in full.
        for moment in 0..40 {
            let patience = Duration::from_micros(25 * moment);
            let read = lock(1, 0, 9, LockKind::Read);
            assert!(is_granted(waiter, file, read).await);
            let write = lock(1, 5, 14, LockKind::Write);
            let locked = tokio::time::timeout(patience, waiter.lock(file, write, true)).await;
            if locked.is_err() {
                until("what it had before", async || {
                    is_granted(holder, file, lock(2, 5, 14, LockKind::Read)).await
                })
                .await;
                assert!(!is_granted(holder, file, lock(2, 5, 14, LockKind::Write)).await);
                unlock(holder, file, 2).await;
            }
            unlock(waiter, file, 1).await;
            assert!(is_granted(holder, file, whole(2)).await);
            unlock(holder, file, 2).await;
        }
    }
    end(&[&one, &other], served).await;
}

/// Who gave it up had left by then: nobody ended that wait, and all others were kept out until it lapsed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_is_given_up_before_it_is_asked_for_keeps_nobody_out() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let guest = site.join().await;
    let file = create(&guest, "a").await;
    assert!(is_granted(&*served.tree, file, whole(1)).await);
    {
        let mut waiting = guest.lock(file, whole(1), true);
        let held_up = guest.hold_up_locks();
        assert!(poll!(&mut waiting).is_pending());
        while !guest.is_at_locks(file) {
            std::thread::yield_now();
        }
        drop(waiting);
        drop(held_up);
    }
    // In their turns, and on one stream.
    unlock(&guest, file, 2).await;
    unlock(&*served.tree, file, 1).await;
    assert!(is_granted(&guest, file, whole(2)).await);
    end(&[&guest], served).await;
}

/// The unlock, which nobody waits for while the tree is not served, came after it, and took it away.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_locked_again_while_nobody_serves_the_tree_stays_locked() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let [one, other] = [site.join().await, site.join().await].map(Arc::new);
    let file = create(&*one, "a").await;
    assert!(is_granted(&*one, file, whole(1)).await);
    one.sync().await.expect("synced");
    let address = std::mem::take(&mut *site.address.lock());
    served.server.cut();
    until("the cut", async || one.reached().is_none() && other.reached().is_none()).await;
    let (asked, program) = (one.requests(), one.clone());
    // Of what is begun there the last comes first: the one thread is at it.
    let locked = served.tasks.spawn("program", async move {
        unlock(&*program, file, 1).await;
        is_granted(&*program, file, whole(1)).await
    });
    until("its asking", async || one.requests() > asked).await;
    *site.address.lock() = address;
    assert!(locked.await.expect("no panic"));
    // Behind whatever is to be done there.
    unlock(&*one, file, 2).await;
    assert!(!is_granted(&*other, file, whole(2)).await);
    end(&[&one, &other], served).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_takes_the_tree_over_has_the_locks_of_its_mounts_before_any_other() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let [one, other] = [site.join().await, site.join().await];
    let (file, free) = (create(&one, "a").await, create(&one, "b").await);
    assert!(is_granted(&one, file, whole(1)).await);
    assert!(is_granted(&one, free, whole(1)).await && is_granted(&other, file, whole(2)).await.eq(&false));
    unlock(&one, free, 1).await;
    one.sync().await.expect("synced");
    let waiting = async { other.lock(file, whole(2), true).await.expect("answered") };
    let taking = async {
        site.crash(served).await;
        until("its loss", async || one.reached().is_none() && other.reached().is_none()).await;
        // What is let go while nobody serves the tree is told to nobody as locked.
        assert!(is_granted_later(&one, free).await.is_none());
        let served = site.serve().await;
        // Of whoever asks first, before any has said what it has: it waits.
        assert!(!is_granted(&*served.tree, file, whole(9)).await);
        assert!(is_granted(&*served.tree, free, whole(9)).await);
        assert_eq!(one.lock(file, whole(1), false).await.expect("answered"), LockAnswer::Granted, "its own");
        unlock(&one, file, 1).await;
        served
    };
    let (locked, served) = tokio::join!(waiting, taking);
    assert_eq!(locked, LockAnswer::Granted, "it has waited since before");
    assert!(!is_granted(&one, file, whole(1)).await);
    end(&[&one, &other], served).await;
}

/// Whether a lock comes within a moment; none where nobody answers.
async fn is_granted_later(tree: &dyn Tree, ino: InodeId) -> Option<bool> {
    let moment = Duration::from_millis(300);
    tokio::time::timeout(moment, is_granted(tree, ino, whole(1))).await.ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_that_is_lost_has_nothing_locked_and_is_told_when_it_comes_back() {
    let mut site = Site::new(Kind::Memory).await;
    // Many times what a mount takes to come back.
    site.patience = Duration::from_secs(3);
    let served = site.serve().await;
    let [one, other] = [site.join().await, site.join().await];
    let file = create(&one, "a").await;
    assert!(is_granted(&one, file, whole(1)).await);
    // Cut for a moment it keeps it.
    served.server.cut();
    assert!(!is_granted(&other, file, whole(2)).await);
    assert!(is_granted(&one, file, whole(1)).await);
    // Cut for longer than it is waited for.
    let address = std::mem::take(&mut *site.address.lock());
    served.server.cut();
    until("the end of its session", async || is_granted(&*served.tree, file, whole(3)).await).await;
    *site.address.lock() = address;
    until("its coming back", async || one.has_lost_locks(file, 1)).await;
    assert_eq!(kind_of(one.lock(file, whole(1), false).await), ErrorKind::Unavailable);
    assert_eq!(kind_of(one.unlock(file, 1, LockRange { first: 0, last: 9 }).await), ErrorKind::Unavailable);
    assert_eq!(kind_of(one.unlock(file, 1, LockRange::ALL).await), ErrorKind::Unavailable);
    // It has heard of it, and begins anew.
    assert!(!is_granted(&one, file, whole(1)).await);
    unlock(&*served.tree, file, 3).await;
    assert!(is_granted(&one, file, whole(1)).await);
    // One that ends, or is killed, leaves nothing.
    one.close().await.expect("closed");
    assert!(is_granted(&other, file, whole(2)).await);
    drop(other);
    until("the end of its session", async || is_granted(&*served.tree, file, whole(3)).await).await;
    served.end().await;
}

/// Mounts that do not come back are waited for, and no longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_wait_for_mounts_that_may_come_back_until_they_are_given_up() {
    let mut site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let lost = site.join().await;
    let file = create(&lost, "a").await;
    assert!(is_granted(&lost, file, whole(1)).await);
    lost.sync().await.expect("synced");
    site.crash(served).await;
    drop(lost);
    site.patience = Duration::from_secs(4);
    let served = site.serve().await;
    let asked =
        tokio::time::timeout(Duration::from_millis(500), is_granted(&*served.tree, file, whole(2))).await;
    assert!(asked.is_err(), "it may have locked it");
    assert!(is_granted(&*served.tree, file, whole(2)).await);
    served.end().await;
}

/// Each adds one to what it reads, many times: none is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_owners_on_many_mounts_take_turns() {
    let site = Arc::new(Site::new(Kind::Memory).await);
    let served = site.serve().await;
    let guests = [Arc::new(site.join().await), Arc::new(site.join().await)];
    let file = create(&*guests[0], "a").await;
    let (inside, entered) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for owner in 0..12 {
        let tree: Arc<dyn Tree> = match owner % 3 {
            0 => served.tree.clone(),
            at => guests[at as usize - 1].clone(),
        };
        let (inside, entered) = (inside.clone(), entered.clone());
        tasks.spawn(async move {
            for _ in 0..20 {
                let locked = tree.lock(file, whole(owner), true).await.expect("answered");
                assert_eq!(locked, LockAnswer::Granted);
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "nobody else is in");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                entered.fetch_add(1, Ordering::SeqCst);
                unlock(&*tree, file, owner).await;
            }
        });
    }
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        served.server.cut();
    }
    tasks.join_all().await;
    assert_eq!(entered.load(Ordering::SeqCst), 12 * 20);
    end(&[&guests[0], &guests[1]], served).await;
}
