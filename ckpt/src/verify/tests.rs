//! Beside a job that deletes its old steps, what it deletes is not called damaged.

use std::path::PathBuf;

use bytes::Bytes;
use forebay_core::ObjectKey;
use forebay_io::object::{Condition, StoreSettings};

use super::*;
use crate::catalog::{Run, Start, begin_run, commit};
use crate::manifest::{Checksum, ShardKey};

/// More bytes than are asked for before any have come.
const LARGE: u64 = READ * PARALLEL as u64 + 1;

struct Place {
    directory: tempfile::TempDir,
    bucket: Bucket,
    run: Run,
}

impl Place {
    async fn new() -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let url = format!("file://{}", directory.path().display()).parse().expect("url");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("open");
        let start = Start { nonce: "ab".repeat(16), host: "h".into(), pid: 1, started_ms: 0 };
        let run = begin_run(&bucket, start).await.expect("run");
        Self { directory, bucket, run }
    }

    /// A step of a shard of each length, which is nothing but header.
    async fn save(&self, step: u64, lengths: &[u64]) -> Vec<ObjectKey> {
        let mut shards = Vec::new();
        for (rank, size) in (0..).zip(lengths.iter().copied()) {
            let (attempt, layout) = (self.run.attempt().to_owned(), "0a0a0a0a".to_owned());
            let incarnation = self.run.incarnation;
            let key = ShardKey { step, incarnation, attempt, rank, save: 1, layout }.object();
            let data = Bytes::from(vec![step as u8; size as usize]);
            let crc32c = Checksum(forebay_core::crc32c(&data));
            self.bucket.put(&key, data, Condition::Always).await.expect("put");
            shards.push(Shard { key: key.as_str().into(), size, header: size, crc32c, rank, step });
        }
        let objects = shards.iter().map(Shard::object).collect();
        let manifest = Manifest {
            commit: "c0".repeat(16),
            run: self.run.run.clone(),
            incarnation: self.run.incarnation,
            step,
            created_ms: 0,
            world_size: lengths.len() as u32,
            parents: Vec::new(),
            shards,
            tensors: Vec::new(),
            extras: Vec::new(),
        };
        commit(&self.bucket, &self.run, &manifest).await.expect("commit");
        objects
    }

    fn path(&self, key: &ObjectKey) -> PathBuf {
        self.directory.path().join(key.as_str())
    }

    /// What is found where these are gone once the first bytes were read.
    async fn verify(&self, name: Option<u64>, gone: &[PathBuf]) -> Result<Vec<Finding>> {
        let remove = |path| std::fs::remove_file(path).ok().unwrap_or_default();
        verify(&self.bucket, name.map(StepName::from), &|_| gone.iter().for_each(remove)).await
    }
}

#[tokio::test]
async fn a_step_that_is_deleted_meanwhile_is_not_damaged() {
    // The next step is gone when its turn comes, or all but its manifest of the one that is read.
    for (deleted, lengths) in [(2, vec![10]), (1, vec![10, 10]), (1, vec![LARGE])] {
        let place = Place::new().await;
        let mut objects = vec![place.run.save(deleted).object()];
        for step in [1, 2] {
            let shards = place.save(step, &lengths).await;
            objects.extend(shards.into_iter().filter(|_| step == deleted));
        }
        let gone: Vec<_> = objects.iter().map(|key| place.path(key)).collect();
        let findings = place.verify(None, &gone).await.expect("looked");
        assert_eq!(findings, [], "step {deleted} of {lengths:?}");
        let left = list_steps(&place.bucket).await.expect("steps");
        assert!(left.len() == 1 && left[0].key.step != deleted, "{left:?}");
    }
    // One that was asked for is told to be gone.
    let place = Place::new().await;
    let shards = place.save(1, &[10, 10]).await;
    let gone = [place.path(&place.run.save(1).object()), place.path(&shards[1])];
    let error = place.verify(Some(1), &gone).await.expect_err("gone");
    assert_eq!((error.kind(), error.message().contains("step 1")), (ErrorKind::NotFound, true), "{error}");
}

#[tokio::test]
async fn a_shard_that_goes_while_it_is_read_is_missing_where_its_step_stays() {
    for (lengths, place_of) in [(vec![10, 10], 1), (vec![LARGE], 0)] {
        let place = Place::new().await;
        let shards = place.save(1, &lengths).await;
        place.save(2, &[10]).await;
        let missing = &shards[place_of];
        let findings = place.verify(None, &[place.path(missing)]).await.expect("looked");
        let expected = Finding { step: 1, object: missing.as_str().into(), fact: "is missing".into() };
        assert_eq!(findings, [expected], "{lengths:?}");
    }
}
