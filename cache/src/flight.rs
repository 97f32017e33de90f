//! Single flight: however many ask for a block, one task brings it.
//!
//! The work runs where its first caller is, which saves two switches of tasks a block; when that caller goes away it
//! goes on as a task, so that nobody is stranded. A failure goes to everyone who waited and to nobody who comes later.
//! Work that still waits for its turn ends when the last waiter has left, so that cancelled callers leave no queue
//! behind; work that has begun is finished. Who joins one that nobody waited for yet has it know that somebody does.

use std::collections::HashMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use forebay_core::{Error, Result};
use forebay_io::task::TaskGroup;
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::block::{BlockId, BuildUniform};
use crate::demand::Demand;

/// What a flight brings; errors are shared, since all waiters get one.
type Outcome<T> = Option<std::result::Result<T, Arc<Error>>>;

/// The flight's end; the table and the flight's own task hold it, and it closes when both let go.
type Landing<T> = Arc<watch::Sender<Outcome<T>>>;

type Table<T> = HashMap<BlockId, Flight<T>, BuildUniform>;

/// A flight under way.
#[derive(Debug)]
struct Flight<T> {
    landing: Landing<T>,
    demand: Demand,
}

/// The flights of one kind of work.
#[derive(Debug)]
pub(crate) struct Flights<T> {
    adopter: Adopter,
    table: Arc<Mutex<Table<T>>>,
}

/// Takes over the work of callers that go away, wherever they do.
#[derive(Debug, Clone)]
struct Adopter {
    name: &'static str,
    tasks: TaskGroup,
    runtime: Handle,
}

/// Whether a caller's own flight brought the outcome, or one that was under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Led,
    Joined,
}

impl<T: Clone + Send + Sync + 'static> Flights<T> {
    /// Flights that go on as tasks of `tasks`, called `name` there, when their callers leave. To be called in an async
    /// runtime.
    pub(crate) fn new(name: &'static str, tasks: TaskGroup) -> Self {
        let adopter = Adopter { name, tasks, runtime: Handle::current() };
        Self { adopter, table: Arc::default() }
    }

    /// Joins the flight for `id`, or starts one that runs `work`; `demand` says whether somebody waits for it. Cancel-safe.
    pub(crate) async fn join<F>(
        &self,
        id: BlockId,
        demand: &Demand,
        work: impl FnOnce(Arc<Ticket<T>>) -> F + Send + 'static,
    ) -> Result<(T, Role)>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let (mut waiter, place) = self.board(id, demand);
        let role = if place.is_ok() { Role::Led } else { Role::Joined };
        match place {
            Ok(ticket) => {
                let ticket = Arc::new(ticket);
                let flight = async move {
                    let outcome = work(ticket.clone()).await;
                    ticket.land(outcome);
                };
                Own { flight: Some(Box::pin(flight)), adopter: &self.adopter }.await;
            }
            Err(theirs) => {
                // The flight may be waiting for just the room that this work holds.
                drop(work);
                tokio::select! {
                    biased;
                    () = demand.raised() => theirs.raise(),
                    _ = waiter.changed() => {}
                }
            }
        }
        let outcome = match waiter.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            Err(_) => None,
        };
        match outcome {
            Some(Ok(value)) => Ok((value, role)),
            Some(Err(error)) => Err(error.duplicate()),
            None => Err(Error::bug(format!("the flight for block {id:?} ended without an outcome"))),
        }
    }

    /// A place on the flight for `id`: with a ticket, the flight is the caller's to run, and else it has its own demand.
    fn board(
        &self,
        id: BlockId,
        demand: &Demand,
    ) -> (watch::Receiver<Outcome<T>>, Result<Ticket<T>, Demand>) {
        let mut table = self.table.lock();
        if let Some(flight) = table.get(&id) {
            return (flight.landing.subscribe(), Err(flight.demand.clone()));
        }
        let (landing, waiter) = watch::channel(None);
        let landing = Arc::new(landing);
        table.insert(id, Flight { landing: landing.clone(), demand: demand.clone() });
        (waiter, Ok(Ticket { id, landing, table: self.table.clone() }))
    }

    /// Flights under way.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.table.lock().len()
    }
}

/// A flight that its caller runs. Dropped before its end, it goes on as a task.
struct Own<'a> {
    flight: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    adopter: &'a Adopter,
}

impl Future for Own<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Some(flight) = &mut self.flight else { return Poll::Ready(()) };
        // A panic was told where it happened. It ends the flight, whose waiters see that it brought nothing.
        let _ = ready!(AssertUnwindSafe(flight).catch_unwind().poll_unpin(context));
        self.flight = None;
        Poll::Ready(())
    }
}

impl Drop for Own<'_> {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            let Adopter { name, tasks, runtime } = self.adopter;
            let _runtime = runtime.enter();
            tasks.spawn(*name, flight);
        }
    }
}

/// The right and the duty to end one flight. Dropped without landing (a panic), it frees the waiters.
#[derive(Debug)]
pub(crate) struct Ticket<T> {
    id: BlockId,
    landing: Landing<T>,
    table: Arc<Mutex<Table<T>>>,
}

impl<T> Ticket<T> {
    /// Waits for `turn`, unless everyone who waited for this flight leaves first: then the flight is over, and the
    /// error returned is seen by nobody.
    pub(crate) async fn wait<F: Future>(&self, turn: F) -> Result<F::Output> {
        tokio::pin!(turn);
        loop {
            tokio::select! {
                biased;
                output = &mut turn => return Ok(output),
                () = self.landing.closed() => {
                    let mut table = self.table.lock();
                    // Someone may have joined since; the table's lock makes this answer final.
                    if self.landing.receiver_count() == 0 {
                        self.leave(&mut table);
                        return Err(Error::bug("a flight that nobody waits for was asked for its outcome"));
                    }
                }
            }
        }
    }

    fn land(&self, outcome: Result<T>) {
        self.leave(&mut self.table.lock());
        self.landing.send_replace(Some(outcome.map_err(Arc::new)));
    }

    fn leave(&self, table: &mut Table<T>) {
        if table.get(&self.id).is_some_and(|flight| Arc::ptr_eq(&flight.landing, &self.landing)) {
            table.remove(&self.id);
        }
    }
}

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        self.leave(&mut self.table.lock());
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::{Blob, BlockKey, ObjectKey, Version, VolumeBlob, VolumeId};
    use tokio::sync::Semaphore;

    use super::*;

    /// A full cache disk hung at unmount: a write that had its room waited for the flight of the same block, which
    /// waited for room.
    #[tokio::test]
    async fn who_joins_a_flight_gives_back_what_it_brought() {
        let flights = Flights::new("test", TaskGroup::new("test"));
        let blob = Blob { key: ObjectKey::new("k"), version: Version::new("1"), size: 1 };
        let id = BlockId::of(&BlockKey { blob: VolumeBlob::new(VolumeId(1), blob), index: 0 });
        let room = Arc::new(Semaphore::new(1));
        let held = room.clone().try_acquire_owned().expect("room");
        let waiting = room.clone();
        let demand = Demand::now();
        let first = flights.join(id, &demand, move |_| async move {
            drop(waiting.acquire().await);
            Ok(())
        });
        let second = flights.join(id, &demand, move |_| async move {
            drop(held);
            Ok(())
        });
        let (first, second) = tokio::join!(first, second);
        assert_eq!((first.expect("first").1, second.expect("second").1), (Role::Led, Role::Joined));
    }

    /// A reader that joined what was read ahead waited behind all else that was.
    #[tokio::test]
    async fn who_waits_for_a_flight_is_known_to_those_that_it_joined() {
        let [outer, inner] =
            ["outer", "inner"].map(|name| Arc::new(Flights::new(name, TaskGroup::new(name))));
        let id = BlockId { digest: 1, index: 0 };
        let [ahead, warmed] = [(); 2].map(|()| Demand::later());
        let raised = warmed.clone();
        let mut leads = Box::pin(inner.join(id, &warmed, move |_| async move {
            raised.raised().await;
            Ok(7)
        }));
        assert!(futures::poll!(&mut leads).is_pending());
        let (joins, passed) = (inner.clone(), ahead.clone());
        let mut joined = Box::pin(outer.join(id, &ahead, move |_| async move {
            joins.join(id, &passed, |_| async { Ok(8) }).await.map(|(value, _)| value)
        }));
        assert!(futures::poll!(&mut joined).is_pending());
        assert!(futures::poll!(&mut leads).is_pending(), "nobody waits yet");
        let now = Demand::now();
        let reader = outer.join(id, &now, |_| async { Ok(9) });
        let (read, joined, led) = tokio::join!(reader, joined, leads);
        let values = [read, joined, led].map(|outcome| outcome.expect("all end").0);
        assert_eq!(values, [7; 3]);
    }
}
