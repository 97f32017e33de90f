//! Making staged bytes durable before the tree refers to them: on the disk, or in the bucket where the disk does not.

use std::sync::Arc;

use async_trait::async_trait;
use forebay_core::Result;
use forebay_io::object::Bucket;
use forebay_metadata::kv::Before;

use super::bring::put;
use super::{Staging, pause};

/// What the tree waits for.
pub(crate) struct Durable {
    staging: Arc<Staging>,
    bucket: Bucket,
}

impl Durable {
    pub(crate) fn new(staging: &Arc<Staging>, bucket: &Bucket) -> Arc<Self> {
        Arc::new(Self { staging: staging.clone(), bucket: bucket.clone() })
    }

    /// Uploads what the disk does not make durable. What cannot be read back is lost after some tries, which is told, and holds
    /// up nothing.
    async fn upload_refused(&self) -> Result<()> {
        let mut outcome = Ok(());
        for (key, size) in self.staging.make_durable().await? {
            match self.staging.rescue(&key, size).await {
                Ok(Some(data)) => put(&self.staging, &self.bucket, key, data).await?,
                Ok(None) => {}
                // It is tried again, and keeps no other here meanwhile.
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }
}

#[async_trait]
impl Before for Durable {
    /// Returns when everything staged is durable: a tree whose write fails takes no more changes, so this does not give up
    /// while there may be room again, here or there.
    async fn sync(&self) -> Result<()> {
        for failures in 1.. {
            let Err(error) = self.upload_refused().await else {
                if failures > 1 {
                    self.staging.note_error(None);
                }
                break;
            };
            tracing::warn!(%error, "what was written is durable neither on the local disk nor in the store");
            self.staging.note_error(Some(error.to_string()));
            self.staging.clock().sleep(pause(failures)).await;
        }
        Ok(())
    }
}
