//! Bounds the requests in flight, the transfer of bodies included.
//!
//! Those that are over in one round trip have places of their own, as many as those that carry many bytes: listing a
//! directory, or closing a small file, waits for no gigabytes that somebody else reads or writes.
//!
//! A GET holds its place until its body was read to the end or dropped. So whoever holds a body must read it or
//! drop it before waiting for other requests of the same bucket.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::StreamExt;
use object_store::{GetRange, Result};
use tokio::sync::Semaphore;

use super::body::map_body;
use crate::object::request::{Reply, Request, Service, Shared};

/// Bytes that a request which waits for no others may carry.
const SHORT_BYTES: u64 = 256 << 10;

/// Room for requests; clones share it.
#[derive(Debug, Clone)]
pub(in crate::object) struct Places {
    long: Arc<Semaphore>,
    short: Arc<Semaphore>,
}

impl Places {
    /// `count` of each kind.
    pub(in crate::object) fn new(count: usize) -> Self {
        let places = || Arc::new(Semaphore::new(count.clamp(1, Semaphore::MAX_PERMITS)));
        Self { long: places(), short: places() }
    }

    fn of(&self, request: &Request) -> Arc<Semaphore> {
        if is_short(request) { self.short.clone() } else { self.long.clone() }
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
        let place = self.places.of(&request).acquire_owned().await.expect("the semaphore is never closed");
        let reply = self.next.call(request).await?;
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
