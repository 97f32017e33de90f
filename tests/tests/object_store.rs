//! The contract of a bucket, over the store in memory, a directory, real servers of S3's and Azure's stores, and one of
//! S3's that is spoken to in Google's dialect.
#![allow(clippy::print_stderr, reason = "a failing test tells which store broke the contract")]

use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, ObjectKey};
use forebay_io::object::{Bucket, BucketUrl, StoreSettings, Unfinished};
use forebay_tests::Scratch;
use forebay_tests::cloud::Cloud;
use forebay_tests::s3::Server;
use futures::TryStreamExt;

#[path = "object_store/basics.rs"]
mod basics;
#[path = "object_store/answers.rs"]
mod answers;
#[path = "object_store/classes.rs"]
mod classes;
#[path = "object_store/faults.rs"]
mod faults;
#[path = "object_store/keys.rs"]
mod keys;
#[path = "object_store/mistakes.rs"]
mod mistakes;
#[path = "object_store/uploads.rs"]
mod uploads;

// What servers do otherwise, each named in the tests that it concerns:
//
// | store | does |
// |---|---|
// | memory, file | everything |
// | moto | ignores the version that a completion or a part copy is conditional on |
// | versitygw | decodes keys twice; a key cannot lie below another key |
// | azurite | as Azure: `\` in keys becomes `/`, no part copy, no list of unfinished uploads |
// | google | moto behind an interpreter: no part copy, no list of unfinished uploads |
//
// fake-gcs-server knows only the JSON protocol for writing, and object_store writes by the XML one: `clouds.rs` reads
// from it.

/// A bucket to test, with what it lives on.
struct Subject {
    store: &'static str,
    bucket: Bucket,
    /// The directory below a `file://` bucket.
    directory: Option<Arc<Scratch>>,
}

/// Runs a contract over every store, naming the one that breaks it.
fn over_every_store<F, R>(contract: F)
where
    F: Fn(Subject) -> R,
    R: Future<Output = ()>,
{
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime starts").block_on(async {
        for store in ["memory", "file", "moto", "versitygw", "azurite", "google"] {
            let Some(subject) = subject(store).await else { continue };
            eprintln!("store: {store}");
            let _directory = subject.directory.clone();
            contract(subject).await;
        }
    });
}

async fn subject(store: &'static str) -> Option<Subject> {
    let (bucket, directory) = match store {
        "memory" => (Bucket::in_memory(), None),
        "file" => {
            let scratch = Arc::new(Scratch::new());
            (file_bucket(scratch.path().into()).await, Some(scratch))
        }
        "moto" => (Server::shared().bucket("some/prefix").await, None),
        "versitygw" => (fast()?.bucket("some/prefix").await, None),
        "azurite" => (Cloud::azure()?.bucket("some/prefix").await, None),
        _ => (Cloud::google_in_dialect().bucket("some/prefix").await, None),
    };
    Some(Subject { store, bucket, directory })
}

/// Whether it is as Azure or Google, which neither copy parts nor list uploads.
fn is_cloud(store: &str) -> bool {
    ["azurite", "google"].contains(&store)
}

/// The fast server of this test program, where it is installed.
fn fast() -> Option<&'static Server> {
    static FAST: OnceLock<Option<Server>> = OnceLock::new();
    FAST.get_or_init(Server::fast).as_ref()
}

async fn file_bucket(directory: PathBuf) -> Bucket {
    let url: BucketUrl = format!("file://{}", directory.display()).parse().expect("a valid URL");
    Bucket::open(&url, &StoreSettings::default()).await.expect("the directory is there")
}

fn key(text: &str) -> ObjectKey {
    ObjectKey::new(text)
}

async fn keys_below(bucket: &Bucket, prefix: &str) -> Vec<String> {
    let listed = bucket.list(prefix).map_ok(|info| info.key.as_str().to_owned());
    listed.try_collect().await.expect("a listing")
}

/// Uploads that were neither completed nor aborted, where the store can tell.
async fn unfinished(store: &str, bucket: &Bucket) -> Vec<Unfinished> {
    if is_cloud(store) {
        return Vec::new();
    }
    bucket.list_uploads("").await.expect("uploads")
}

/// Bytes that differ from place to place, so that shifted ranges are noticed: a block of prime length, repeated.
fn pattern(length: usize) -> Bytes {
    let block: Vec<u8> =
        (0..65_537u64).map(|at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0]).collect();
    let mut bytes = block.repeat(length.div_ceil(block.len()));
    bytes.truncate(length);
    bytes.into()
}

#[track_caller]
fn assert_kind<T: std::fmt::Debug>(outcome: Result<T, Error>, kind: ErrorKind) {
    let error = outcome.expect_err("it must fail");
    assert_eq!(error.kind(), kind, "{error}");
}
