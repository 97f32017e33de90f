//! Bounds the requests in flight, the transfer of bodies included.
//!
//! A GET holds its place until its body was read to the end or dropped. So whoever holds a body must read it or
//! drop it before waiting for other requests of the same bucket.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::StreamExt;
use object_store::Result;
use tokio::sync::Semaphore;

use super::body::map_body;
use crate::object::request::{Reply, Request, Service, Shared};

#[derive(Debug)]
pub(in crate::object) struct Limit {
    pub(in crate::object) next: Shared,
    pub(in crate::object) places: Arc<Semaphore>,
}

#[async_trait]
impl Service for Limit {
    async fn call(&self, request: Request) -> Result<Reply> {
        let place = self.places.clone().acquire_owned().await.expect("the semaphore is never closed");
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
