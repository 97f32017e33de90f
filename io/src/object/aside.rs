//! A store whose changes stay in this process: an engine opens the tree that it keeps there, as it is, and the bucket is only
//! read.
//!
//! Where an engine numbers what it puts, and has put one here, what the bucket has of that number and later is another's
//! and hidden: whoever writes to the bucket goes on from the same number, and neither is to follow the other.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;

/// What is put is in memory, and hides what the bucket has under the same name.
#[derive(Debug)]
pub(super) struct Aside {
    bucket: Arc<dyn ObjectStore>,
    memory: Arc<InMemory>,
    firsts: Arc<Firsts>,
}

/// The least number that was put into each directory of numbered objects.
type Firsts = Mutex<HashMap<Path, u64>>;

impl Aside {
    pub(super) fn over(bucket: Arc<dyn ObjectStore>) -> Self {
        Self { bucket, memory: Arc::new(InMemory::new()), firsts: Arc::default() }
    }

    /// What the bucket says of one object.
    async fn below(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if is_later(&self.firsts, location) {
            let (path, source) = (location.to_string(), "it is another writer's".into());
            return Err(Error::NotFound { path, source });
        }
        self.bucket.get_opts(location, options).await
    }
}

/// The directory and the number of an object such as `manifest/00000000000000000007.manifest`.
fn numbered(location: &Path) -> Option<(Path, u64)> {
    let number = location.filename()?.split('.').next()?.parse().ok()?;
    let (directory, _) = location.as_ref().rsplit_once('/')?;
    Some((Path::from(directory), number))
}

/// Whether an object in the bucket has the number of one that was put here, or a later one.
fn is_later(firsts: &Firsts, location: &Path) -> bool {
    let Some((directory, number)) = numbered(location) else { return false };
    firsts.lock().get(&directory).is_some_and(|first| number >= *first)
}

impl std::fmt::Display for Aside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, with changes in memory", self.bucket)
    }
}

/// The answer of memory, unless it has no such object.
fn unless_missing<T>(answer: Result<T>) -> Option<Result<T>> {
    if matches!(answer, Err(Error::NotFound { .. })) { None } else { Some(answer) }
}

fn not_offered(what: &str) -> Error {
    Error::NotSupported { source: format!("{what} what is in the bucket").into() }
}

#[async_trait]
impl ObjectStore for Aside {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let is_changed = unless_missing(self.memory.head(location).await).is_some();
        match (&options.mode, is_changed) {
            (PutMode::Create, false) => match unless_missing(
                self.below(location, GetOptions { head: true, ..GetOptions::default() }).await,
            ) {
                Some(Ok(_)) => {
                    let (path, source) = (location.to_string(), "it is in the bucket".into());
                    return Err(Error::AlreadyExists { path, source });
                }
                Some(Err(error)) => return Err(error),
                None => {}
            },
            (PutMode::Update(_), false) => return Err(not_offered("to replace")),
            _ => {}
        }
        let put = self.memory.put_opts(location, payload, options).await?;
        if let Some((directory, number)) = numbered(location) {
            let mut firsts = self.firsts.lock();
            let first = firsts.entry(directory).or_insert(number);
            *first = number.min(*first);
        }
        Ok(put)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.memory.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        match unless_missing(self.memory.get_opts(location, options.clone()).await) {
            Some(answer) => answer,
            None => self.below(location, options).await,
        }
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        // Nobody but this process sees them.
        self.memory.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (memory, firsts) = (self.memory.clone(), self.firsts.clone());
        let others = self.bucket.list(prefix).try_filter_map(move |object| {
            let (memory, firsts) = (memory.clone(), firsts.clone());
            async move {
                let is_hidden = is_later(&firsts, &object.location)
                    || unless_missing(memory.head(&object.location).await).is_some();
                Ok((!is_hidden).then_some(object))
            }
        });
        self.memory.list(prefix).chain(others).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let mut found = self.memory.list_with_delimiter(prefix).await?;
        let more = self.bucket.list_with_delimiter(prefix).await?;
        let others = more
            .objects
            .into_iter()
            .filter(|object| found.objects.iter().all(|changed| changed.location != object.location))
            .filter(|object| !is_later(&self.firsts, &object.location));
        let others: Vec<ObjectMeta> = others.collect();
        found.objects.extend(others);
        for prefix in more.common_prefixes {
            if !found.common_prefixes.contains(&prefix) {
                found.common_prefixes.push(prefix);
            }
        }
        Ok(found)
    }

    async fn copy_opts(&self, _from: &Path, _to: &Path, _options: CopyOptions) -> Result<()> {
        Err(not_offered("to copy"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine went on from its own third manifest to the writer's fourth, which says nothing of it.
    #[tokio::test]
    async fn what_another_writer_numbers_meanwhile_is_not_there() {
        let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let at = |number: u64| Path::from(format!("tree/manifest/{number:020}.manifest"));
        for number in [1, 2] {
            bucket.put(&at(number), "old".into()).await.expect("put");
        }
        let aside = Aside::over(bucket.clone());
        aside.put_opts(&at(3), "own".into(), PutOptions::from(PutMode::Create)).await.expect("free");
        for (path, text) in [(at(3), "theirs"), (at(4), "theirs"), (Path::from("tree/wal/4"), "log")] {
            bucket.put(&path, text.into()).await.expect("put");
        }
        let mut listed: Vec<Path> =
            aside.list(None).map_ok(|object| object.location).try_collect().await.expect("listed");
        listed.sort();
        assert_eq!(listed, [at(1), at(2), at(3), Path::from("tree/wal/4")]);
        let level = aside.list_with_delimiter(Some(&Path::from("tree/manifest"))).await.expect("listed");
        assert_eq!(level.objects.len(), 3);
        assert_eq!(aside.get(&at(3)).await.expect("get").bytes().await.expect("bytes"), "own");
        let hidden = aside.get(&at(4)).await.expect_err("another's");
        assert!(matches!(hidden, Error::NotFound { .. }), "{hidden}");
        aside.put_opts(&at(4), "own".into(), PutOptions::from(PutMode::Create)).await.expect("free here");
    }

    #[tokio::test]
    async fn changes_hide_what_is_in_the_bucket_and_never_reach_it() {
        let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let (old, new) = (Path::from("a/old"), Path::from("a/new"));
        bucket.put(&old, "old".into()).await.expect("put");
        let aside = Aside::over(bucket.clone());
        let create = || PutOptions::from(PutMode::Create);
        let taken = aside.put_opts(&old, "x".into(), create()).await.expect_err("it is there");
        assert!(matches!(taken, Error::AlreadyExists { .. }), "{taken}");
        aside.put_opts(&new, "new".into(), create()).await.expect("free");
        let taken = aside.put_opts(&new, "x".into(), create()).await.expect_err("it is there by now");
        assert!(matches!(taken, Error::AlreadyExists { .. }), "{taken}");
        aside.put(&old, "changed".into()).await.expect("put");
        for (path, text) in [(&old, "changed"), (&new, "new")] {
            assert_eq!(aside.get(path).await.expect("get").bytes().await.expect("bytes"), text);
        }
        let mut listed: Vec<ObjectMeta> = aside.list(None).try_collect().await.expect("listed");
        listed.sort_by(|one, other| one.location.cmp(&other.location));
        assert_eq!(
            listed.iter().map(|object| (object.location.as_ref(), object.size)).collect::<Vec<_>>(),
            [("a/new", 3), ("a/old", 7)]
        );
        let level = aside.list_with_delimiter(Some(&Path::from("a"))).await.expect("listed");
        assert_eq!(level.objects.len(), 2);
        let there: Vec<ObjectMeta> = bucket.list(None).try_collect().await.expect("listed");
        assert_eq!(there.len(), 1);
        assert_eq!(bucket.get(&old).await.expect("get").bytes().await.expect("bytes"), "old");
    }
}
