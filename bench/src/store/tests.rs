//! The server as object_store sees it, over a real connection.

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error, GetOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode,
    PutOptions, UpdateVersion,
};
use tokio::net::TcpListener;

use super::server::{ServerSettings, serve};

/// A client of a fresh server, which ends with the test's runtime.
async fn client() -> AmazonS3 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(serve(listener, ServerSettings { buckets: vec!["b".into()], ..Default::default() }));
    let builder = AmazonS3Builder::new().with_endpoint(endpoint).with_allow_http(true).with_bucket_name("b");
    let builder = builder.with_access_key_id("k").with_secret_access_key("s").with_region("us-east-1");
    builder.with_conditional_put(S3ConditionalPut::ETagMatch).build().unwrap()
}

fn create() -> PutOptions {
    PutOptions { mode: PutMode::Create, ..Default::default() }
}

#[tokio::test]
async fn objects_keep_bytes_ranges_and_metadata() {
    let store = client().await;
    let path = Path::from("dir/a b+c%é&<x>");
    let attributes = Attributes::from_iter([
        (Attribute::ContentType, "text/plain"),
        (Attribute::Metadata("mode".into()), "644"),
    ]);
    let options = PutOptions { attributes: attributes.clone(), ..Default::default() };
    let put = store.put_opts(&path, "0123456789".into(), options).await.unwrap();
    let got = store.get(&path).await.unwrap();
    assert_eq!((got.attributes.clone(), got.meta.e_tag.clone()), (attributes, put.e_tag.clone()));
    assert_eq!(got.bytes().await.unwrap(), "0123456789");
    assert_eq!(store.get_range(&path, 3..6).await.unwrap(), "345");
    let copy = Path::from("copy");
    store.copy(&path, &copy).await.unwrap();
    assert_eq!(store.head(&copy).await.unwrap().size, 10);
    let listed: Vec<Path> = store.list(None).map_ok(|meta| meta.location).try_collect().await.unwrap();
    assert_eq!(listed, [copy, path.clone()]);
    let gone = Path::from("gone");
    assert!(matches!(store.head(&gone).await, Err(Error::NotFound { .. })));
    let stale = GetOptions { if_match: Some("\"x\"".into()), ..Default::default() };
    assert!(matches!(store.get_opts(&path, stale).await, Err(Error::Precondition { .. })));
    let known = GetOptions { if_none_match: put.e_tag, ..Default::default() };
    assert!(matches!(store.get_opts(&path, known).await, Err(Error::NotModified { .. })));
}

#[tokio::test]
async fn one_of_many_conditional_puts_wins() {
    let store = Arc::new(client().await);
    let path = Path::from("race");
    let racers = (0..16).map(|n| {
        let (store, path) = (store.clone(), path.clone());
        async move { store.put_opts(&path, format!("{n}").into(), create()).await.is_ok() }
    });
    let won = futures::future::join_all(racers).await.into_iter().filter(|won| *won).count();
    assert_eq!(won, 1);
    let old = store.head(&path).await.unwrap();
    let version = UpdateVersion { e_tag: old.e_tag, version: None };
    let update = || PutOptions { mode: PutMode::Update(version.clone()), ..Default::default() };
    store.put_opts(&path, "second".into(), update()).await.unwrap();
    assert!(matches!(store.put_opts(&path, "third".into(), update()).await, Err(Error::Precondition { .. })));
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), "second");
}

#[tokio::test]
async fn multipart_uploads_show_whole_or_not_at_all() {
    let store = client().await;
    let path = Path::from("large");
    let part = |byte: u8| Bytes::from(vec![byte; 5 << 20]);
    let mut upload = store.put_multipart(&path).await.unwrap();
    upload.put_part(part(1).into()).await.unwrap();
    assert!(matches!(store.head(&path).await, Err(Error::NotFound { .. })));
    upload.put_part(part(2).into()).await.unwrap();
    upload.put_part("end".into()).await.unwrap();
    upload.complete().await.unwrap();
    let seam = store.get_range(&path, (5 << 20) - 1..(5 << 20) + 1).await.unwrap();
    assert_eq!(seam.as_ref(), [1, 2]);
    assert_eq!(store.get_range(&path, (10 << 20) - 1..(10 << 20) + 3).await.unwrap(), "\u{2}end");
    let mut aborted = store.put_multipart(&Path::from("aborted")).await.unwrap();
    aborted.put_part(part(1).into()).await.unwrap();
    aborted.abort().await.unwrap();
    assert!(aborted.complete().await.is_err());
    assert_eq!(store.list(None).count().await, 1);
}

#[tokio::test]
async fn listings_fold_directories_and_deletes_go_in_bulk() {
    let store = client().await;
    for n in 0..1100 {
        store.put(&Path::from(format!("d/{n:04}/x")), "x".into()).await.unwrap();
    }
    let folded = store.list_with_delimiter(Some(&Path::from("d"))).await.unwrap();
    assert_eq!((folded.common_prefixes.len(), folded.objects.len()), (1100, 0));
    let offset = Path::from("d/1050/x");
    assert_eq!(store.list_with_offset(None, &offset).count().await, 49);
    let all = store.list(None).map_ok(|meta| meta.location).boxed();
    let deleted: Vec<Path> = store.delete_stream(all).try_collect().await.unwrap();
    assert_eq!((deleted.len(), store.list(None).count().await), (1100, 0));
}
