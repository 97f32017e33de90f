//! Refuses every request that would change the bucket.

use async_trait::async_trait;
use object_store::Result;

use crate::object::error::Fault;
use crate::object::request::{Reply, Request, Service, Shared};

#[derive(Debug)]
pub(in crate::object) struct ReadOnly {
    pub(in crate::object) next: Shared,
}

#[async_trait]
impl Service for ReadOnly {
    async fn call(&self, request: Request) -> Result<Reply> {
        if request.is_write() {
            return Err(Fault::ReadOnly.into());
        }
        self.next.call(request).await
    }
}
