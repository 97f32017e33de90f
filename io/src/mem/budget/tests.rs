//! Random tasks under one ceiling, and the rules of the classes one by one.

use std::time::Duration;

use super::*;
use crate::rng::Rng;
use crate::task::TaskGroup;

/// The sum never exceeds the ceiling (asserted at every grant), every request is granted in the end, all is given back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_tasks_stay_below_the_ceiling_and_all_finish() {
    let scale = std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    for round in 0..4 * scale {
        let seed = Rng::system().u64();
        let budget = Budget::new(1 << 20);
        let group = TaskGroup::new(format!("seed {seed} round {round}"));
        let tasks: Vec<_> = (0..64)
            .map(|n| {
                let (budget, rng) = (budget.clone(), Rng::seeded(seed ^ n));
                group.spawn(format!("task {n}"), async move {
                    for _ in 0..50 {
                        let class = Class::ALL[rng.below(5) as usize];
                        let bytes = rng.below(if rng.chance(0.1) { 2 << 20 } else { 64 << 10 });
                        let waiting = budget.acquire(class, bytes);
                        // Some callers lose patience: they must leave nothing behind.
                        let patience = Duration::from_micros(rng.below(2_000));
                        if rng.chance(0.2) {
                            drop(tokio::time::timeout(patience, waiting).await);
                            continue;
                        }
                        let mut permit = waiting.await;
                        assert_eq!(permit.bytes(), bytes.min(budget.largest()));
                        permit.shrink(bytes / 2);
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        for task in tasks {
            let ended = tokio::time::timeout(Duration::from_secs(60), task).await;
            ended.unwrap_or_else(|_| panic!("deadlock, seed {seed}")).expect("no panic");
        }
        assert_eq!(budget.total(), 0, "seed {seed}");
        assert!(budget.peak() <= budget.ceiling(), "seed {seed}");
    }
}

#[tokio::test]
async fn a_class_that_takes_all_it_can_leaves_the_others_their_reserve() {
    let budget = Budget::new(1600);
    let greedy = budget.acquire(Class::Read, u64::MAX).await;
    assert_eq!(greedy.bytes(), 1200, "its own reserve of 100 and the shared 1,100");
    for class in &Class::ALL[1..] {
        assert_eq!(budget.acquire(*class, 100).await.bytes(), 100, "{class:?}");
    }
    assert!(budget.try_acquire(Class::Read, 1).is_none());
}

#[tokio::test]
async fn a_large_request_is_not_overtaken_on_the_shared_part() {
    let budget = Budget::new(1600);
    let held = budget.acquire(Class::Write, 700).await;
    let large = budget.acquire(Class::Read, 1000);
    tokio::pin!(large);
    assert!(futures::poll!(&mut large).is_pending());
    let small = budget.acquire(Class::Fill, 150);
    tokio::pin!(small);
    assert!(futures::poll!(&mut small).is_pending(), "it needs shared bytes and came later");
    assert!(budget.try_acquire(Class::Fill, 1).is_none(), "its class waits already");
    assert!(budget.try_acquire(Class::Ckpt, 100).is_some(), "another class's reserve is free");
    drop(held);
    let large = large.await;
    assert!(futures::poll!(&mut small).is_ready(), "50 shared bytes are still free");
    drop(large);
    assert_eq!(budget.total(), 0);
}

#[tokio::test]
async fn a_waiter_that_leaves_unblocks_those_behind_it() {
    let budget = Budget::new(1600);
    let held = budget.acquire(Class::Write, 1000).await;
    let mut impatient = Box::pin(budget.acquire(Class::Read, 1200));
    assert!(futures::poll!(&mut impatient).is_pending());
    let patient = budget.acquire(Class::Read, 150);
    tokio::pin!(patient);
    assert!(futures::poll!(&mut patient).is_pending());
    drop(impatient);
    assert_eq!(patient.await.bytes(), 150);
    drop(held);
}
