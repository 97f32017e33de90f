//! Makes a store slow, for tests and for rehearsing a far away bucket.

use std::time::Duration;

use async_trait::async_trait;
use object_store::Result;

use crate::object::request::{Reply, Request, Service, Shared};

/// How slow a store is made.
#[derive(Debug, Clone, Copy, Default)]
pub struct Delay {
    /// Microseconds before each request.
    pub request_us: u64,
    /// Microseconds more for each MiB sent.
    pub mib_us: u64,
}

#[derive(Debug)]
pub(in crate::object) struct Delayed {
    pub(in crate::object) next: Shared,
    pub(in crate::object) delay: Delay,
}

#[async_trait]
impl Service for Delayed {
    async fn call(&self, request: Request) -> Result<Reply> {
        let wait_us = self.delay.request_us + self.delay.mib_us * request.sent_bytes() / (1 << 20);
        tokio::time::sleep(Duration::from_micros(wait_us)).await;
        self.next.call(request).await
    }
}
