//! Two ranks whose store fails, delays and loses replies by chance, and whose agents die by chance: every step of theirs
//! is there, once, and holds what was saved.

use std::convert::Infallible;

use forebay_io::object::Faults;
use forebay_io::rng::Rng;

use super::delta_tests::{expect_content, expect_whole, manifest, part_of};
use super::tests::{change, flusher, start, trainer};
use super::*;
use crate::agent::Member;
use crate::catalog::{list_ranks, list_steps};
use crate::testing::{chance, rounds};

/// Steps that a job saves.
const STEPS: u64 = 4;
/// Slices of the tensor, half of which each rank stores.
const SLICES: usize = 8;
/// Milliseconds until the store's own retries give a request up.
const DEADLINE_MS: u64 = 100;
/// How many of the requests fail, half of them after the store did its work.
const FAILING: f64 = 0.15;
/// Requests after which one may be held back: about what one save makes.
const MOMENTS: u64 = 14;
/// What passes for the agents in a millisecond.
const TICK: Duration = Duration::from_millis(50);

/// One rank of two: its way to the store, and its agent.
struct Rank {
    number: u32,
    faults: Faults,
    bucket: Bucket,
    clock: Clock,
    agent: Flusher,
}

impl Rank {
    fn new(number: u32, store: &Bucket, run: &Run, clock: &Clock, rng: &Rng) -> Self {
        let faults = Faults::random(rng.u64(), FAILING);
        let bucket = store.with_faults(&faults).with_deadline_ms(DEADLINE_MS);
        let agent = agent(number, &bucket, run, clock);
        Self { number, faults, bucket, clock: clock.clone(), agent }
    }

    /// Has the agent save it. An agent that dies in each of `lives` is replaced, as a trainer does; gives their number.
    async fn save(&mut self, run: &Run, mut save: Save, lives: &[u64], held: (u64, Duration)) -> Result<u64> {
        let gate = self.faults.gate(held.0);
        let (clock, opener) = (self.clock.clone(), gate.clone());
        let delay = async {
            gate.reached().await;
            clock.sleep(held.1).await;
            opener.open();
            std::future::pending::<Infallible>().await
        };
        tokio::pin!(delay);
        let mut deaths = 0;
        for life_ms in lives {
            tokio::select! {
                flushed = self.agent.flush(&save) => return flushed.map(|_| deaths),
                _ = &mut delay => {}
                () = tokio::time::sleep(Duration::from_millis(*life_ms)) => {
                    self.agent = agent(self.number, &self.bucket, run, &self.clock);
                    save.given = Given::Again;
                    deaths += 1;
                }
            }
        }
        tokio::select! {
            flushed = self.agent.flush(&save) => flushed.map(|_| deaths),
            never = &mut delay => match never {},
        }
    }
}

fn agent(rank: u32, bucket: &Bucket, run: &Run, clock: &Clock) -> Flusher {
    let mut agent = flusher(bucket, run, trainer().0);
    agent.clock = clock.clone();
    agent.hello.start = run.start.clone();
    agent.hello.member = Some(Member { run: run.clone(), rank, world_size: 2 });
    agent
}

/// A job that saves some steps; gives the faults that it met, and the agents that died.
async fn job(seed: u64) -> (u64, u64) {
    let (rng, clock, store) = (chance(seed), Clock::manual(), Bucket::in_memory());
    let run = begin_run(&store, start()).await.expect("run");
    let mut ranks = [0, 1].map(|number| Rank::new(number, &store, &run, &clock, &rng));
    let (mut fills, mut deaths) = ([0; SLICES], 0);
    for step in 1..=STEPS {
        for fill in &mut fills {
            *fill = if rng.chance(0.4) { rng.below(250) as u8 } else { *fill };
        }
        let round = Round::new(rng.u64());
        let [first, second] = &mut ranks;
        let halves = [(first, 0..SLICES / 2), (second, SLICES / 2..SLICES)].map(|(rank, own)| {
            let mut save = part_of("t", (step, step), &fills, own);
            change(&mut save, |seal| seal.round = Some(round));
            let lives: Vec<_> = (0..rng.below(3)).map(|_| rng.below(40)).collect();
            let held = (1 + rng.below(MOMENTS), Duration::from_millis(rng.below(8000)));
            let run = &run;
            async move { rank.save(run, save, &lives, held).await }
        });
        let [one, other] = halves;
        let time = async {
            loop {
                clock.advance(TICK);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let (one, other) = tokio::select! {
            both = async { tokio::join!(one, other) } => both,
            () = time => unreachable!("time never ends"),
        };
        for died in [one, other] {
            deaths += died.unwrap_or_else(|error| panic!("step {step}: {error}"));
        }
        expect_content(&store, step, &fills).await;
        let found = manifest(&store, step).await;
        assert_eq!((found.world_size, found.incarnation, found.step), (2, 1, step));
    }
    let steps: Vec<_> = list_steps(&store).await.expect("list").iter().map(|info| info.key.step).collect();
    assert_eq!(steps.len() as u64, STEPS, "{steps:?}");
    expect_whole(&store).await;
    // What a rank noted again, having lost the reply or its agent, once the other one had committed, is left to `ckpt gc`.
    for note in list_ranks(&store).await.expect("list") {
        assert!((1..=STEPS).contains(&note.save.step), "{note:?}");
    }
    (ranks.iter().map(|rank| rank.faults.injected()).sum(), deaths)
}

#[tokio::test]
async fn under_random_faults_every_step_of_two_ranks_holds_what_was_saved() {
    let (mut faults, mut deaths) = (0, 0);
    for seed in rounds(3) {
        let met = job(seed).await;
        (faults, deaths) = (faults + met.0, deaths + met.1);
    }
    assert!(faults > 0 && deaths > 0, "{faults} faults, {deaths} deaths");
}
