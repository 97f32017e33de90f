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
    let bucket = file_bucket(root.clone()).await;
    std::fs::remove_dir(&root).expect("it is empty");
    assert_kind(bucket.put(&key("a"), "a".into(), Condition::Always).await, ErrorKind::NotFound);
    let options = UploadOptions { part_bytes: Some(1), ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&key("a"), options).expect("upload");
    assert_kind(upload.write("two".into()).await, ErrorKind::NotFound);
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
