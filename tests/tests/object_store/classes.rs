//! Storage classes: which requests name one, and what the store makes of it.

use forebay_io::object::{Condition, MIN_PART_BYTES, UploadOptions};
use forebay_tests::Door;

use super::*;

/// A bucket of one of the clouds behind a door, of which what is written gets this class.
async fn classed(store: &'static str, class: &str) -> Option<(Bucket, Door)> {
    let (address, url, mut settings) = match store {
        "moto" => {
            let server = Server::shared();
            let url = format!("s3://{}/p", server.create_bucket()).parse().expect("a valid URL");
            (server.address(), url, server.settings())
        }
        "google" => {
            let cloud = Cloud::google_in_dialect();
            (cloud.address(), cloud.create_bucket("p"), StoreSettings::default())
        }
        _ => {
            let cloud = Cloud::azure()?;
            (cloud.address(), cloud.create_bucket("p"), StoreSettings::default())
        }
    };
    let door = Door::new(address).expect("loopback has free ports");
    match store {
        "moto" => drop(settings.options.insert("aws_endpoint".to_owned(), door.endpoint())),
        "google" => settings = Cloud::google_in_dialect().settings_at(door.endpoint()),
        _ => settings = Cloud::azure()?.settings_at(door.endpoint()),
    }
    settings.storage_class = Some(class.to_owned());
    let bucket = Bucket::open(&url, &settings).await.expect("open");
    Some((bucket, door))
}

/// What names a class in requests about `bucket`, without what is the same in all of them.
fn named(bucket: &Bucket, door: &Door) -> Vec<String> {
    let (name, prefix) = (&bucket.url().bucket, &bucket.url().prefix);
    let plain = |request: String| {
        let request = request.replace("%2F", "/").replace("%2E", ".").replace("%2D", "-");
        let (_, rest) = request.split_once(&format!("{name}/{prefix}/")).expect("about an object");
        rest.to_owned()
    };
    door.take_classes().into_iter().map(plain).collect()
}

/// All of what stays, and nothing of the tree, whose objects are replaced within minutes.
async fn writes_with(store: &'static str, class: &str, expected: [&str; 4]) {
    let Some((bucket, door)) = classed(store, class).await else { return };
    bucket.put(&key("a"), "bytes".into(), Condition::Always).await.expect("put");
    let options = UploadOptions { part_bytes: Some(MIN_PART_BYTES), ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&key("big"), options).expect("upload");
    upload.write(pattern(MIN_PART_BYTES as usize + 1)).await.expect("write");
    upload.complete(Condition::IfAbsent).await.expect("complete");
    bucket.copy(&key("a"), &key("b"), 5, &Condition::Always).await.expect("copy");
    bucket.put(&key(".forebay/blobs/0/1"), "blob".into(), Condition::IfAbsent).await.expect("put");
    bucket.put(&key(".forebay/tree/1"), "tree".into(), Condition::IfAbsent).await.expect("put");
    assert_eq!(bucket.get_whole(&key("b")).await.expect("get").0.as_ref(), b"bytes");
    assert_eq!(named(&bucket, &door), expected.map(|request| format!("{request} {class}")));
    if store != "azurite" {
        let class_of =
            |key: &str| Server::shared().storage_class(&format!("{}/p/{key}", bucket.url().bucket));
        for key in ["a", "big", "b", ".forebay/blobs/0/1"] {
            assert_eq!(class_of(key).as_deref(), Some(class), "{key}");
        }
        assert_eq!(class_of(".forebay/tree/1"), None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_written_gets_the_storage_class_that_was_asked_for() {
    writes_with("moto", "STANDARD_IA", ["a", "big?uploads=", "b", ".forebay/blobs/0/1"]).await;
    // An upload is completed aside, and its copy is what stays.
    writes_with("google", "STANDARD_IA", ["a", "big", "b", ".forebay/blobs/0/1"]).await;
    writes_with("azurite", "Cool", ["a", "big?comp=blocklist", "b?comp=tier", ".forebay/blobs/0/1"]).await;
}

/// A class that a store does not have is told by the first thing that is written with it, with what names it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storage_class_that_the_store_does_not_have_is_told() {
    let (bucket, _door) = classed("moto", "NO_SUCH").await.expect("moto is there");
    let refused = bucket.probe().await.expect_err("nothing can be written");
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
    assert!(refused.message().contains("InvalidStorageClass"), "{refused}");
    assert!(refused.hint().is_some_and(|hint| hint.contains("AWS_STORAGE_CLASS")), "{refused}");
    for (url, class) in [("s3://b", "GLACIER"), ("az://c", "Archive")] {
        let settings = StoreSettings { storage_class: Some(class.to_owned()), ..StoreSettings::default() };
        let url = url.parse().expect("a valid URL");
        let options =
            [("aws_access_key_id", "k"), ("aws_secret_access_key", "s")].map(|(a, b)| (a.into(), b.into()));
        let options = if class == "GLACIER" {
            options.into()
        } else {
            [("azure_storage_account_name".to_owned(), "a".to_owned())].into()
        };
        assert_kind(Bucket::open(&url, &StoreSettings { options, ..settings }).await, ErrorKind::Invalid);
    }
}

/// Encryption by a key that the store keeps goes with copies into a class as with object_store's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_into_a_class_are_encrypted_as_others_are() {
    let done = "<CopyObjectResult><ETag>\"v1\"</ETag></CopyObjectResult>";
    let answers = || vec![answers::answer("200 OK", "", done.len(), done), answers::found(1, "", "")];
    let options = [("aws_server_side_encryption", "aws:kms"), ("aws_sse_kms_key_id", "id")];
    let mut heads = Vec::new();
    for class in [None, Some("ONEZONE_IA")] {
        let (bucket, requests) = answers::told_as(answers(), &options, class).await;
        bucket.copy(&key("a b"), &key("c"), 1, &Condition::Always).await.expect("copy");
        let head = requests.recv().expect("a request").to_lowercase();
        let mut lines: Vec<_> =
            head.lines().filter(|line| line.starts_with("x-amz-")).map(str::to_owned).collect();
        lines.retain(|line| !line.starts_with("x-amz-date") && !line.starts_with("x-amz-content-sha256"));
        lines.sort_unstable();
        heads.push(lines);
    }
    let class = "x-amz-storage-class: onezone_ia";
    assert!(heads[1].iter().any(|line| line == class), "{heads:?}");
    heads[1].retain(|line| line != class);
    assert_eq!(heads[0], heads[1]);
    assert_eq!(heads[0].len(), 3, "source, encryption and its key: {heads:?}");
}
