//! A store that is slow and whose PUTs fail, for tests.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_io::object::Bucket;
use futures::stream::BoxStream;
use parking_lot::Mutex;
use slatedb::object_store::path::Path;
use slatedb::object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use super::Chance;

/// PUTs fail now and then, half of them after they took effect; every request takes some milliseconds.
pub(crate) struct Unruly {
    store: Arc<dyn ObjectStore>,
    /// One PUT in this many fails; none when zero; all, without effect, when one.
    pub(crate) failing: AtomicU64,
    /// Requests take up to so many milliseconds before and after.
    pub(crate) slowest_ms: AtomicU64,
    chance: Mutex<Chance>,
}

impl Unruly {
    /// `below`, seen through a store that does as its fields say.
    pub(crate) fn over(below: &Bucket, failing: u64, slowest_ms: u64) -> (Bucket, Arc<Self>) {
        let store = Arc::new(Self {
            store: below.store(),
            failing: AtomicU64::new(failing),
            slowest_ms: AtomicU64::new(slowest_ms),
            chance: Mutex::new(Chance::fresh()),
        });
        (Bucket::from_store(below.url().clone(), store.clone()), store)
    }

    async fn pause(&self) {
        let pause = self.chance.lock().below(self.slowest_ms.load(Ordering::SeqCst) + 1);
        if pause > 0 {
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }
}

impl fmt::Debug for Unruly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unruly")
    }
}

impl fmt::Display for Unruly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a slow store whose PUTs fail")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Unruly {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.pause().await;
        let failed = || Error::Generic { store: "unruly", source: "injected".into() };
        let (fails, takes_effect) = match self.failing.load(Ordering::SeqCst) {
            0 => (false, true),
            1 => (true, false),
            failing => {
                let mut chance = self.chance.lock();
                (chance.below(failing) == 0, chance.below(2) == 0)
            }
        };
        if fails && !takes_effect {
            return Err(failed());
        }
        let put = self.store.put_opts(at, payload, options).await?;
        self.pause().await;
        if fails { Err(failed()) } else { Ok(put) }
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(at, options).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.pause().await;
        let got = self.store.get_opts(at, options).await;
        self.pause().await;
        got
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}
