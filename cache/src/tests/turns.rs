//! Who goes first where the origin is asked for more than it may be asked at once.

use std::sync::Arc;

use forebay_core::BlockKey;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use super::support::World;
use crate::{Blocks, CacheSettings, Node};

/// A cache that asks the origin for one block at a time, so that blocks arrive in the order in which they were asked for.
struct Turns {
    world: World,
    node: Arc<Node>,
    arrived: Arc<Mutex<Vec<char>>>,
}

#[derive(Clone, Copy)]
enum By {
    Read,
    Warmup,
    Prefetch,
}

impl Turns {
    async fn new() -> Self {
        let world = World::new();
        // Longer than any test: what is held back is not asked for anew.
        let bucket = world.bucket.with_deadline_ms(3_600_000);
        let settings = CacheSettings { fetches: 1, ..CacheSettings::default() };
        let node = Node::open(bucket, settings).await.expect("open");
        Self { world, node, arrived: Arc::default() }
    }

    async fn blocks(&self, name: &str, count: usize) -> Vec<BlockKey> {
        let mut keys = Vec::new();
        for index in 0..count {
            keys.push(self.world.put(&format!("{name}-{index}"), 10).await.name.block(0));
        }
        keys
    }

    /// Brings blocks in, all at once, and notes when they arrive.
    fn bring(&self, by: By, keys: &[BlockKey], note: char) -> Vec<JoinHandle<()>> {
        let one = |key: &BlockKey| {
            let (node, key, arrived) = (self.node.clone(), key.clone(), self.arrived.clone());
            tokio::spawn(async move {
                let brought = match by {
                    By::Read => node.get(&key, 0..10).await.map(drop),
                    By::Warmup => node.fill(&key, false).await.map(drop),
                    By::Prefetch => node.fetch_ahead(&key).await,
                };
                brought.expect("it arrives");
                arrived.lock().push(note);
            })
        };
        keys.iter().map(one).collect()
    }

    async fn until_under_way(&self, flights: usize) {
        while self.node.flights() < flights {
            tokio::task::yield_now().await;
        }
    }

    fn arrived(&self) -> String {
        self.arrived.lock().iter().collect()
    }
}

async fn end(tasks: impl IntoIterator<Item = JoinHandle<()>>) {
    for task in tasks {
        task.await.expect("it ends");
    }
}

/// A read waited for all that a warmup, or other readers' windows, had asked for.
#[tokio::test]
async fn a_read_waits_for_one_block_at_most_that_nobody_waits_for() {
    for by in [By::Warmup, By::Prefetch] {
        let turns = Turns::new().await;
        let (ahead, read) = (turns.blocks("ahead", 20).await, turns.blocks("read", 5).await);
        let gate = turns.world.faults.gate(1);
        let mut bringing = turns.bring(by, &ahead[1..], 'a');
        bringing.extend(turns.bring(by, &ahead[..1], 'j'));
        gate.reached().await;
        turns.until_under_way(20).await;
        let reading = turns.bring(By::Read, &read, 'r');
        turns.until_under_way(25).await;
        // The last one that was asked for before is read, too.
        let mut joined = Box::pin(turns.node.get(&ahead[0], 0..10));
        assert!(futures::poll!(&mut joined).is_pending());
        gate.open();
        joined.await.expect("read");
        end(bringing.into_iter().chain(reading)).await;
        // After one on its way, and one in line.
        assert_eq!(turns.arrived()[..8], *"aarrrrrj", "{}", turns.arrived());
        assert_eq!(turns.world.gets(), 25, "each once");
    }
}

/// Readers that always wait leave a warmup its share.
#[tokio::test]
async fn a_warmup_gets_on_while_others_read() {
    let turns = Turns::new().await;
    let (ahead, read) = (turns.blocks("ahead", 20).await, turns.blocks("read", 100).await);
    let gate = turns.world.faults.gate(1);
    let reading: Vec<_> = read
        .chunks(50)
        .map(|keys| {
            let (node, keys, arrived) = (turns.node.clone(), keys.to_vec(), turns.arrived.clone());
            tokio::spawn(async move {
                for key in keys {
                    node.get(&key, 0..10).await.expect("read");
                    arrived.lock().push('r');
                }
            })
        })
        .collect();
    gate.reached().await;
    turns.until_under_way(2).await;
    let filling = turns.bring(By::Warmup, &ahead, 'w');
    turns.until_under_way(22).await;
    gate.open();
    end(filling).await;
    let arrived = turns.arrived();
    let last = arrived.rfind('w').expect("fills");
    let reads = arrived[..last].chars().filter(|whose| *whose == 'r').count();
    assert!((20..=65).contains(&reads), "two readers have two of three turns: {arrived}");
    end(reading).await;
    assert_eq!(turns.world.gets(), 120);
}
