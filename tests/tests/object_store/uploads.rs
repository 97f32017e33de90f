//! Objects written in parts.

use std::time::Duration;

use forebay_io::mem::{Budget, Class};
use forebay_io::object::{Condition, MIN_PART_BYTES, OperationKind, UploadOptions};
use forebay_tests::Door;

use super::*;

const PART: usize = MIN_PART_BYTES as usize;

fn small_parts() -> UploadOptions {
    UploadOptions { part_bytes: Some(MIN_PART_BYTES), ..UploadOptions::default() }
}

#[test]
fn a_small_object_is_one_put() {
    over_every_store(|Subject { bucket, .. }| async move {
        for length in [0, 5, 8 << 20] {
            let before = bucket.counters();
            let name = key(&format!("small/{length}"));
            let mut upload = bucket.upload(&name).await.expect("upload");
            let data = pattern(length);
            for piece in data.chunks(3 << 20) {
                upload.write(Bytes::copy_from_slice(piece)).await.expect("write");
            }
            assert_eq!(upload.written(), length as u64);
            let done = upload.complete(Condition::IfAbsent).await.expect("complete");
            let count = bucket.counters().since(&before);
            assert_eq!((count.of(OperationKind::Put).requests, count.requests()), (1, 1), "{length} bytes");
            let (read, info) = bucket.get_whole(&name).await.expect("get");
            assert!(read == data && info.version == done.version && done.size == length as u64);
        }
    });
}

#[test]
fn a_large_object_goes_in_parts_and_costs_no_extra_request() {
    over_every_store(|Subject { bucket, .. }| async move {
        let data = pattern(4 * PART + 3);
        let before = bucket.counters();
        let mut upload = bucket.upload_with(&key("large"), small_parts()).expect("upload");
        for piece in data.chunks(700_001) {
            upload.write(Bytes::copy_from_slice(piece)).await.expect("write");
        }
        let done = upload.complete(Condition::IfAbsent).await.expect("complete");
        let count = bucket.counters().since(&before);
        assert_eq!(count.of(OperationKind::Part).requests, 5);
        assert_eq!(count.of(OperationKind::Part).bytes, data.len() as u64);
        assert_eq!(count.requests(), 7, "create, five parts, complete: {count:?}");
        assert_eq!(done.size, data.len() as u64);
        let (read, info) = bucket.get_whole(&key("large")).await.expect("get");
        assert!(read == data, "the bytes are the same");
        assert_eq!(info.version, done.version);
    });
}

#[test]
fn completion_is_conditional() {
    over_every_store(|Subject { store, bucket, .. }| async move {
        let start = async |fill: u8| {
            let mut upload = bucket.upload_with(&key("a"), small_parts()).expect("upload");
            upload.write(Bytes::from(vec![fill; PART + 1])).await.expect("write");
            upload
        };
        let first = start(1).await.complete(Condition::IfAbsent).await.expect("complete");
        assert_kind(start(2).await.complete(Condition::IfAbsent).await, ErrorKind::Conflict);
        let at_first = Condition::IfVersion(first.version.clone());
        let second = start(3).await.complete(at_first.clone()).await.expect("complete");
        assert_ne!(second.version, first.version);
        assert_eq!(bucket.get(&key("a"), Some(&second.version), 0..1).await.expect("get").as_ref(), [3]);
        if store != "moto" {
            assert_kind(start(4).await.complete(at_first).await, ErrorKind::Conflict);
        }
        assert_eq!(unfinished(store, &bucket).await, Vec::new(), "refused uploads are aborted");
    });
}

#[test]
fn unfinished_uploads_are_found_and_freed() {
    over_every_store(|Subject { store, bucket, .. }| async move {
        if is_cloud(store) {
            return assert_kind(bucket.list_uploads("").await, ErrorKind::Unsupported);
        }
        let begin = async |name: &str| {
            let mut upload = bucket.upload_with(&key(name), small_parts()).expect("upload");
            upload.write(pattern(PART + 1)).await.expect("write");
            upload
        };
        let (dropped, aborted, left) = (begin("d/x").await, begin("d/y").await, begin("d/ü z").await);
        let mut names: Vec<_> =
            bucket.list_uploads("d").await.expect("uploads").into_iter().map(|found| found.key).collect();
        names.sort();
        assert_eq!(names, [key("d/x"), key("d/y"), key("d/ü z")]);
        assert_eq!(bucket.list_uploads("other").await.expect("uploads"), Vec::new());
        drop(dropped);
        aborted.abort().await.expect("abort");
        assert!(bucket.shutdown(Duration::from_secs(30)).await.is_empty(), "the drop's abort ends");
        let found = bucket.list_uploads("").await.expect("uploads");
        assert_eq!(found.iter().map(|found| found.key.as_str()).collect::<Vec<_>>(), ["d/ü z"]);
        // As another process would, that knows the upload only from the list.
        bucket.abort_upload(&found[0].key, &found[0].id).await.expect("abort");
        bucket.abort_upload(&found[0].key, &found[0].id).await.expect("one that is gone is no error");
        assert_eq!(bucket.list_uploads("").await.expect("uploads"), Vec::new());
        // moto answers 500, which is waited out until the deadline.
        if store != "moto" {
            assert!(left.complete(Condition::Always).await.is_err(), "its parts are gone");
        }
        assert_eq!(keys_below(&bucket, "").await, Vec::<String>::new());
    });
}

#[test]
fn ranges_of_other_objects_are_copied_inside_the_store() {
    over_every_store(|Subject { store, bucket, .. }| async move {
        let data = pattern(3 * PART);
        let source = bucket.put(&key("from it"), data.clone(), Condition::Always).await.expect("put");
        let mut upload = bucket.upload_with(&key("to"), small_parts()).expect("upload");
        if is_cloud(store) {
            let copied = upload.copy_from(&key("from it"), &source.version, 0..data.len() as u64).await;
            let done = copied.and(upload.complete(Condition::IfAbsent).await);
            return assert_kind(done, ErrorKind::Unsupported);
        }
        let mut wanted = Vec::new();
        let end = data.len();
        // A whole copy, a small write before a copy, a copy too small to be a part, a write after one.
        for (write, range) in [(0, 0..end), (10, 1..end), (0, 7..19), (PART, 100..end - 100), (3, 0..0)] {
            upload.write(pattern(write)).await.expect("write");
            wanted.extend_from_slice(&pattern(write));
            let range64 = range.start as u64..range.end as u64;
            upload.copy_from(&key("from it"), &source.version, range64).await.expect("copy");
            wanted.extend_from_slice(&data[range]);
        }
        let before = bucket.counters();
        let done = upload.complete(Condition::IfAbsent).await.expect("complete");
        assert_eq!(done.size, wanted.len() as u64);
        assert!(bucket.get_whole(&key("to")).await.expect("get").0 == wanted, "the bytes are the same");
        assert!(bucket.counters().of(OperationKind::CopyPart).requests >= 3, "{before:?}");
        if !bucket.probe().await.expect("probe").conditional_part_copy {
            return;
        }
        let mut stale = bucket.upload(&key("stale")).await.expect("upload");
        bucket.put(&key("from it"), pattern(3 * PART + 1), Condition::Always).await.expect("put");
        let copied = stale.copy_from(&key("from it"), &source.version, 0..end as u64).await;
        assert!(
            copied.is_err() || stale.complete(Condition::Always).await.is_err(),
            "the source was replaced"
        );
    });
}

#[test]
fn charged_bytes_are_given_back_as_the_store_gets_them() {
    over_every_store(|Subject { bucket, .. }| async move {
        // A budget far below the object: it goes through only if permits come back while it is written.
        let budget = Budget::new(3 * PART as u64);
        let mut upload = bucket.upload_with(&key("a"), small_parts()).expect("upload");
        let piece = PART / 3;
        for _ in 0..15 {
            let permit = match budget.try_acquire(Class::Write, piece as u64) {
                Some(permit) => permit,
                None => {
                    upload.relieve().await.expect("relieve");
                    budget.acquire(Class::Write, piece as u64).await
                }
            };
            upload.write_charged(pattern(piece), permit).await.expect("write");
        }
        upload.complete(Condition::Always).await.expect("complete");
        assert_eq!(budget.total(), 0);
        assert!(budget.peak() <= budget.ceiling());
        assert_eq!(bucket.get_whole(&key("a")).await.expect("get").1.size, 15 * piece as u64);
    });
}

#[test]
fn completion_goes_on_when_its_caller_leaves() {
    over_every_store(|Subject { bucket, .. }| async move {
        let mut upload = bucket.upload_with(&key("a"), small_parts()).expect("upload");
        upload.write(pattern(2 * PART)).await.expect("write");
        let mut completing = Box::pin(upload.complete(Condition::IfAbsent));
        // As good as always it has just begun; where it is done already, nothing had to go on.
        let _ = futures::poll!(&mut completing);
        drop(completing);
        assert!(bucket.shutdown(Duration::from_secs(30)).await.is_empty());
        assert_eq!(bucket.head(&key("a")).await.expect("head").expect("there").size, 2 * PART as u64);
    });
}

/// With `AWS_CHECKSUM_ALGORITHM` no upload in parts could be completed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_are_completed_with_the_checksums_that_are_asked_for() {
    let Some(server) = Server::fast() else { return };
    let mut settings = server.settings();
    settings.options.insert("aws_checksum_algorithm".into(), "SHA256".into());
    let url: BucketUrl = format!("s3://{}", server.create_bucket()).parse().expect("a URL");
    let bucket = Bucket::open(&url, &settings).await.expect("open");
    let data = pattern(2 * PART + 5);
    let mut upload = bucket.upload_with(&key("parts"), small_parts()).expect("upload");
    upload.write(data.clone()).await.expect("write");
    let done = upload.complete(Condition::IfAbsent).await.expect("complete");
    assert_eq!(done.size, data.len() as u64);
    assert_eq!(bucket.get(&key("parts"), None, 0..done.size).await.expect("get"), data);
}

/// Policies of buckets may refuse what is signed in the query (`s3:authType`): listings, completions and copies were.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_is_signed_in_its_query() {
    let server = Server::for_volume();
    let door = Door::new(server.address()).expect("loopback has free ports");
    let mut settings = server.settings();
    settings.options.insert("aws_endpoint".to_owned(), door.endpoint());
    let url = format!("s3://{}/a/prefix", server.create_bucket()).parse().expect("a URL");
    let bucket = Bucket::open(&url, &settings).await.expect("open");
    let name = key("a b/ü&=?/ß");
    let mut upload = bucket.upload_with(&name, small_parts()).expect("upload");
    upload.write(pattern(PART + 1)).await.expect("write");
    let there = bucket.uploads_to(&name).await.expect("unfinished uploads");
    assert_eq!(there.len(), 1);
    let first = upload.complete(Condition::IfAbsent).await.expect("complete");
    assert_eq!(keys_below(&bucket, "a b/ü&=?/").await, [name.as_str()]);
    let mut copy = bucket.upload_with(&key("copy"), small_parts()).expect("upload");
    copy.copy_from(&name, &first.version, 0..first.size).await.expect("copy");
    copy.complete(Condition::IfAbsent).await.expect("complete");
    assert!(bucket.get_whole(&key("copy")).await.expect("get").0 == pattern(PART + 1));
    let requests = door.take_requests();
    let of = |what: &str| requests.iter().filter(|request| request.contains(what)).count();
    assert!(of("list-type=2") > 0 && of("partNumber=") > 2 && of("uploads=&prefix=") > 0, "{requests:#?}");
    assert_eq!(of("X-Amz-"), 0, "{requests:#?}");
}
