//! Counts requests, failures and body bytes.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::StreamExt;
use object_store::Result;

use super::body::map_body;
use crate::object::OperationKind;
use crate::object::counters::Meter;
use crate::object::request::{Reply, Request, Service, Shared};

#[derive(Debug)]
pub(in crate::object) struct Instrument {
    pub(in crate::object) next: Shared,
    pub(in crate::object) meter: Arc<Meter>,
}

#[async_trait]
impl Service for Instrument {
    async fn call(&self, request: Request) -> Result<Reply> {
        let kind = request.kind();
        self.meter.request(kind);
        self.meter.bytes(kind, request.sent_bytes());
        tracing::debug!(?kind, subject = %request.subject(), "store request");
        match self.next.call(request).await {
            Ok(reply) => Ok(self.count_reply(kind, reply)),
            Err(error) => {
                self.meter.failure(kind);
                tracing::debug!(?kind, %error, "store request failed");
                Err(error)
            }
        }
    }
}

impl Instrument {
    fn count_reply(&self, kind: OperationKind, reply: Reply) -> Reply {
        if let Reply::Page(page) = &reply
            && self.meter.skipped(page.skipped.keys)
        {
            tracing::warn!(
                keys = page.skipped.keys,
                first = ?page.skipped.first,
                "listing left out keys with empty, `.` or `..` segments or control characters"
            );
        }
        let meter = self.meter.clone();
        map_body(reply, |body| {
            body.inspect(move |chunk| match chunk {
                Ok(bytes) => meter.bytes(kind, bytes.len() as u64),
                Err(_) => meter.failure(kind),
            })
            .boxed()
        })
    }
}
