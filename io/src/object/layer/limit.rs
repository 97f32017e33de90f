//! Bounds the requests in flight, the transfer of bodies included.
//!
//! Those that are over in one round trip have places of their own, as many as those that carry many bytes: listing a
//! directory, or closing a small file, waits for no gigabytes that somebody else reads or writes.
//!
//! Where the store asks for fewer requests (503 SlowDown, 429), each one that it puts off takes its place away, down to a few;
//! as many answers as there are places bring one back. So those who share a store come to what it carries, as senders come to
//! what a network does (additive increase, multiplicative decrease: RFC 5681).
//!
//! A GET holds its place until its body was read to the end or dropped. So whoever holds a body must read it or
//! drop it before waiting for other requests of the same bucket.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use async_trait::async_trait;
use futures::stream::StreamExt;
use object_store::{GetRange, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::body::map_body;
use crate::object::error::is_put_off;
use crate::object::request::{Reply, Request, Service, Shared};

/// Bytes that a request which waits for no others may carry.
const SHORT_BYTES: u64 = 256 << 10;

/// Places that are left whatever the store says.
const LEAST: usize = 4;

/// Room for requests; clones share it.
#[derive(Debug, Clone)]
pub(in crate::object) struct Places {
    long: Arc<Room>,
    short: Arc<Room>,
}

impl Places {
    /// `count` of each kind.
    pub(in crate::object) fn new(count: usize) -> Self {
        let room = || Arc::new(Room::new(count.clamp(1, Semaphore::MAX_PERMITS)));
        Self { long: room(), short: room() }
    }

    fn of(&self, request: &Request) -> &Room {
        if is_short(request) { &self.short } else { &self.long }
    }
}

/// Places of one kind.
#[derive(Debug)]
struct Room {
    places: Arc<Semaphore>,
    most: usize,
    /// Places that the store has taken away.
    withheld: AtomicUsize,
    /// Answers since one was brought back.
    answers: AtomicUsize,
    is_told: AtomicBool,
}

impl Room {
    fn new(most: usize) -> Self {
        let (withheld, answers, is_told) = Default::default();
        Self { places: Arc::new(Semaphore::new(most)), most, withheld, answers, is_told }
    }

    fn left(&self) -> usize {
        self.most - self.withheld.load(Relaxed)
    }

    /// The store put a request off.
    fn shrink(&self, place: OwnedSemaphorePermit) {
        let most = self.most.saturating_sub(LEAST);
        let more = |withheld| (withheld < most).then_some(withheld + 1);
        if self.withheld.fetch_update(Relaxed, Relaxed, more).is_ok() {
            place.forget();
        }
        self.answers.store(0, Relaxed);
        if !self.is_told.swap(true, Relaxed) {
            let most = self.most;
            tracing::warn!(
                most,
                "the store asks for fewer requests: fewer are in flight until it takes them again"
            );
        }
    }

    /// The store answered one.
    fn grow(&self) {
        if self.withheld.load(Relaxed) == 0 || self.answers.fetch_add(1, Relaxed) + 1 < self.left() {
            return;
        }
        self.answers.store(0, Relaxed);
        let fewer = |withheld: usize| withheld.checked_sub(1);
        // Another answer may have brought the last one back.
        let Ok(withheld) = self.withheld.fetch_update(Relaxed, Relaxed, fewer) else { return };
        self.places.add_permits(1);
        if withheld == 1 {
            self.is_told.store(false, Relaxed);
            tracing::info!("the store takes as many requests as before");
        }
    }
}

/// Whether a request is known to carry few bytes.
fn is_short(request: &Request) -> bool {
    match request {
        Request::Get { options, .. } => {
            let is_short = |range: &GetRange| match range {
                GetRange::Bounded(range) => range.end.saturating_sub(range.start) <= SHORT_BYTES,
                GetRange::Offset(_) | GetRange::Suffix(_) => false,
            };
            // Whole objects are asked for where they are small: records and manifests.
            options.head || options.range.as_ref().is_none_or(is_short)
        }
        Request::Put { payload, .. } | Request::Part { payload, .. } => {
            payload.content_length() as u64 <= SHORT_BYTES
        }
        // The store takes its time for these.
        Request::Copy { .. } | Request::CopyPart { .. } | Request::Complete { .. } => false,
        Request::Delete { .. }
        | Request::DeleteMarker { .. }
        | Request::List(_)
        | Request::Create { .. }
        | Request::Abort { .. }
        | Request::ListUploads { .. }
        | Request::ListParts { .. } => true,
    }
}

#[derive(Debug)]
pub(in crate::object) struct Limit {
    pub(in crate::object) next: Shared,
    pub(in crate::object) places: Places,
}

#[async_trait]
impl Service for Limit {
    async fn call(&self, request: Request) -> Result<Reply> {
        let room = self.places.of(&request);
        let place = room.places.clone().acquire_owned().await.expect("the semaphore is never closed");
        let reply = match self.next.call(request).await {
            Err(error) if is_put_off(&error) => {
                room.shrink(place);
                return Err(error);
            }
            // A refusal is an answer, too.
            answered => {
                room.grow();
                answered?
            }
        };
        Ok(map_body(reply, |body| {
            // The place goes with the body: it is free when the stream ends or is dropped.
            let held = futures::stream::unfold(Some((body, place)), |state| async move {
                let (mut body, place) = state?;
                let chunk = body.next().await?;
                Some((chunk, Some((body, place))))
            });
            held.boxed()
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::stream;
    use object_store::path::Path;

    use super::*;
    use crate::object::error::Fault;

    /// A store that carries so many requests at once, each for a second, and puts others off.
    #[derive(Debug)]
    struct Narrow {
        width: AtomicUsize,
        now: AtomicUsize,
        put_off: AtomicUsize,
        most: AtomicUsize,
    }

    #[async_trait]
    impl Service for Narrow {
        async fn call(&self, _: Request) -> Result<Reply> {
            let now = self.now.fetch_add(1, Relaxed) + 1;
            self.most.fetch_max(now, Relaxed);
            let is_put_off = now > self.width.load(Relaxed);
            if !is_put_off {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            self.now.fetch_sub(1, Relaxed);
            if !is_put_off {
                return Ok(Reply::Done);
            }
            self.put_off.fetch_add(1, Relaxed);
            let fault = Fault::Service { status: 503, code: "SlowDown".into(), message: String::new() };
            Err(object_store::Error::Generic { store: "test", source: Box::new(fault) })
        }
    }

    /// Carries `count` requests through, each tried until it is, and gives how often one was put off, and most at once.
    async fn carry(limit: &Limit, narrow: &Narrow, count: usize) -> (usize, usize) {
        narrow.put_off.store(0, Relaxed);
        narrow.most.store(0, Relaxed);
        let one = |_| async {
            while limit.call(Request::Delete { keys: vec![Path::from("k")], once: false }).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        stream::iter(0..count).map(one).buffer_unordered(200).collect::<Vec<_>>().await;
        (narrow.put_off.load(Relaxed), narrow.most.load(Relaxed))
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_store_puts_off_is_asked_less_at_once_until_it_takes_more() {
        let narrow = Arc::new(Narrow {
            width: AtomicUsize::new(10),
            now: AtomicUsize::default(),
            put_off: AtomicUsize::default(),
            most: AtomicUsize::default(),
        });
        let limit = Limit { next: narrow.clone(), places: Places::new(64) };
        carry(&limit, &narrow, 200).await;
        // Found out by now: of those that follow, one in ten or so is put off, as one place more is tried each second.
        let (put_off, most) = carry(&limit, &narrow, 1000).await;
        assert!(put_off <= 110 && most <= 12, "{put_off} of 1000, {most} at once");
        narrow.width.store(1000, Relaxed);
        let (put_off, _) = carry(&limit, &narrow, 4000).await;
        assert_eq!(put_off, 0);
        let (_, most) = carry(&limit, &narrow, 200).await;
        assert_eq!(most, 64, "all places are there again");
        // However often it refuses, a few stay.
        narrow.width.store(0, Relaxed);
        let refused = tokio::time::timeout(Duration::from_secs(60), carry(&limit, &narrow, 1)).await;
        assert!(refused.is_err() && limit.places.short.left() == LEAST);
        narrow.width.store(1000, Relaxed);
        carry(&limit, &narrow, 1).await;
    }
}
