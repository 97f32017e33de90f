//! Bounds the wait for one attempt: for its reply, and for each next piece of its body.
//!
//! The clients' own timeouts are off, because they count a large part on a slow link as a failure. Here the wait
//! for a reply grows with what was sent, or is copied inside the store, at a rate below which a link counts as broken, and
//! with the parts that the store puts together: S3 says that it may take minutes over 10,000.

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::StreamExt;
use object_store::Result;

use super::body::map_body;
use crate::object::error::Fault;
use crate::object::request::{Reply, Request, Service, Shared};

/// Bytes a second that any working link moves; slower ones time out.
const SLOWEST_BYTES_A_MS: u64 = 256;
/// What a store may need for each part of an object that it completes.
const SLOWEST_PART_MS: u64 = 50;

#[derive(Debug)]
pub(in crate::object) struct Patience {
    pub(in crate::object) next: Shared,
    pub(in crate::object) attempt_ms: u64,
}

#[async_trait]
impl Service for Patience {
    async fn call(&self, request: Request) -> Result<Reply> {
        let moved_ms = request.moved_bytes() / SLOWEST_BYTES_A_MS;
        let waited_ms = self.attempt_ms + moved_ms + request.joined_parts() as u64 * SLOWEST_PART_MS;
        let reply = tokio::time::timeout(Duration::from_millis(waited_ms), self.next.call(request)).await;
        let reply = reply.unwrap_or_else(|_| Err(Fault::Stalled { waited_ms }.into()))?;
        let waited_ms = self.attempt_ms;
        Ok(map_body(reply, |body| {
            let timed = futures::stream::unfold(Some(body), move |body| async move {
                let mut body = body?;
                match tokio::time::timeout(Duration::from_millis(waited_ms), body.next()).await {
                    Ok(chunk) => Some((chunk?, Some(body))),
                    Err(_) => Some((Err(Fault::Stalled { waited_ms }.into()), None)),
                }
            });
            timed.boxed()
        }))
    }
}
