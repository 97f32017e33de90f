//! Wrong input: one error each, with its cause and a hint.

use forebay_io::object::{Condition, UploadOptions};

use super::*;

async fn refused(url: &str, settings: &StoreSettings, kind: ErrorKind, cause: &str) {
    let parsed: BucketUrl = url.parse().expect("a valid URL");
    let error = Bucket::open(&parsed, settings).await.expect_err(url);
    assert_eq!(error.kind(), kind, "{url}: {error}");
    assert!(error.to_string().contains(cause), "{url}: {error}");
    assert!(error.hint().is_some_and(|hint| !hint.is_empty()), "{url}: no hint: {error}");
}

#[tokio::test]
async fn a_bucket_that_does_not_exist() {
    let settings = Server::shared().settings();
    refused("s3://no-such-bucket/x", &settings, ErrorKind::NotFound, "s3://no-such-bucket/x does not exist")
        .await;
}

#[tokio::test]
async fn an_endpoint_that_is_down_at_the_start_and_in_use() {
    let server = Server::start();
    let mut settings = server.settings();
    settings.deadline_ms = 700;
    let bucket = server.bucket("").await.with_deadline_ms(700);
    server.kill();
    refused("s3://any", &settings, ErrorKind::Unavailable, "gave up after").await;
    let error = bucket.get(&key("a"), None, 0..1).await.expect_err("down");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.hint().expect("hint").contains("endpoint"), "{error}");
}

#[tokio::test]
async fn a_directory_that_is_missing_or_is_none() {
    let scratch = Scratch::new();
    std::fs::write(scratch.join("file"), "x").expect("file");
    let settings = StoreSettings::default();
    let url = |name: &str| format!("file://{}", scratch.join(name).display());
    refused(&url("missing"), &settings, ErrorKind::NotFound, "missing").await;
    refused(&url("file"), &settings, ErrorKind::NotDirectory, "file is not a directory").await;
}

#[tokio::test]
async fn a_directory_that_goes_away_is_not_made_again() {
    let scratch = Scratch::new();
    let root = scratch.folder("root");
    let bucket = file_bucket(root.clone()).await.with_deadline_ms(50);
    std::fs::remove_dir(&root).expect("it is empty");
    assert_kind(bucket.put(&key("a"), "a".into(), Condition::Always).await, ErrorKind::Unavailable);
    let options = UploadOptions { part_bytes: Some(1), ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&key("a"), options).expect("upload");
    assert_kind(upload.write("two".into()).await, ErrorKind::Unavailable);
    assert!(!root.exists());
}

#[tokio::test]
async fn an_option_that_does_not_exist() {
    let mut settings = Server::shared().settings();
    settings.options.insert("aws_regoin".into(), "x".into());
    refused("s3://b", &settings, ErrorKind::Invalid, "`aws_regoin` is not an option").await;
}

#[tokio::test]
async fn credentials_that_are_wrong() {
    let Some(server) = fast() else { return };
    let url = format!("s3://{}", server.create_bucket());
    for (option, cause) in
        [("aws_secret_access_key", "SignatureDoesNotMatch"), ("aws_access_key_id", "InvalidAccessKeyId")]
    {
        let mut settings = server.settings();
        settings.options.insert(option.into(), "wrong".into());
        refused(&url, &settings, ErrorKind::Denied, cause).await;
    }
}

/// What a new user writes wrongly, each told apart from the others.
#[tokio::test]
async fn endpoints_regions_names_and_prefixes_that_are_wrong() {
    let Some(server) = fast() else { return };
    let name = server.create_bucket();
    let url = format!("s3://{name}");
    let with = |option: &str, value: &str| {
        let mut settings = server.settings();
        settings.options.insert(option.into(), value.into());
        settings.deadline_ms = 700;
        settings
    };
    let address = server.endpoint().trim_start_matches("http://").to_owned();
    refused(&url, &with("aws_endpoint", &address), ErrorKind::Invalid, "has no scheme").await;
    let path = format!("{}/{name}", server.endpoint());
    refused(&url, &with("aws_endpoint", &path), ErrorKind::NotFound, "the endpoint knows nothing of").await;
    let tls = with("aws_endpoint", &format!("https://{address}"));
    refused(&url, &tls, ErrorKind::Unavailable, "gave up after").await;
    let error = Bucket::open(&url.parse().expect("a URL"), &tls).await.expect_err("no TLS there");
    assert!(error.hint().is_some_and(|hint| hint.contains("http://")), "{error}: {:?}", error.hint());
    refused(&url, &with("aws_region", "eu-west-1"), ErrorKind::Invalid, "is in another region").await;
    refused("s3://Not_A_Name", &server.settings(), ErrorKind::Invalid, "cannot be the name").await;
    let bucket = Bucket::open(&url.parse().expect("a URL"), &server.settings()).await.expect("a bucket");
    bucket.put(&key("dir/object"), "x".into(), Condition::Always).await.expect("put");
    let object = format!("{url}/dir/object");
    refused(&object, &server.settings(), ErrorKind::NotDirectory, "is an object, not a prefix").await;
    let empty = format!("{url}/nothing/here/yet").parse().expect("a URL");
    Bucket::open(&empty, &server.settings()).await.expect("a prefix without objects is fine");
    // It may get, and not list.
    let account = server.account(&name, &["s3:GetObject"]);
    let id = account.iter().find(|(name, _)| name == "AWS_ACCESS_KEY_ID").expect("a key").1.clone();
    refused(&url, &with("aws_access_key_id", &id), ErrorKind::Denied, "is denied").await;
}
