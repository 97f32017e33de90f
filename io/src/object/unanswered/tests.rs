//! Lost answers, beside uploads of others to the same key.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use super::*;
use crate::object::{BucketUrl, Condition, FaultMode, Faults, OperationKind, StoreSettings, Upload};

const KEY: &str = "d/a";

/// Over memory and over a folder.
async fn over_stores(work: impl AsyncFn(Bucket, Option<&std::path::Path>)) {
    work(Bucket::in_memory(), None).await;
    let folder = tempfile::tempdir().expect("scratch");
    let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
    let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
    work(bucket, Some(folder.path())).await;
}

/// Begins an upload to the key as another program does.
async fn outsider(bucket: &Bucket) -> UploadId {
    let (key, options) = (Path::from(KEY), Default::default());
    let request = Request::Create { key, options, token: "theirs".into(), conditional: true };
    bucket.call(request).await.expect("begun").upload().expect("an upload")
}

/// An upload of ours of which a part is sent; `Err` once that fails.
async fn begin(bucket: &Bucket) -> Result<Upload> {
    let mut upload = bucket.upload(&ObjectKey::new(KEY)).await?;
    upload.write(Bytes::from(vec![7; 9 << 20])).await.map(|()| upload)
}

async fn left(bucket: &Bucket) -> Vec<String> {
    let found = bucket.uploads_to(&ObjectKey::new(KEY)).await.expect("uploads");
    let mut ids: Vec<String> = found.into_iter().map(|upload| upload.id).collect();
    ids.sort();
    ids
}

fn requests(bucket: &Bucket, kind: OperationKind) -> u64 {
    bucket.counters().of(kind).requests
}

#[tokio::test]
async fn an_upload_that_was_begun_twice_leaves_nothing_and_those_of_others_go_on() {
    over_stores(async |bucket, folder| {
        for ends_well in [true, false] {
            let faults = Faults::new();
            let ours = bucket.with_faults(&faults);
            let theirs = outsider(&bucket).await;
            let part = Request::Part {
                upload: theirs.clone(),
                index: 0,
                offset: 0,
                payload: Bytes::from("x").into(),
            };
            bucket.call(part).await.expect("a part");
            let mut expected = vec![theirs.id];
            if let Some(folder) = folder {
                // One that was begun long before, of which nothing was sent yet.
                let old = outsider(&bucket).await;
                let data = folder.join(".forebay/staging/uploads").join(&old.id);
                let before = SystemTime::now() - Duration::from_secs(3600);
                std::fs::File::open(data).expect("open").set_modified(before).expect("set");
                expected.push(old.id);
            }
            expected.sort();
            faults.script(OperationKind::Create, 1, FaultMode::LoseReply);
            let upload = begin(&ours).await.expect("begun");
            assert_eq!(left(&bucket).await.len(), expected.len() + 2, "the store has begun two");
            let (lists, aborts) =
                (requests(&bucket, OperationKind::ListUploads), requests(&bucket, OperationKind::Abort));
            match ends_well {
                true => drop(upload.complete(Condition::Always).await.expect("complete")),
                false => upload.abort().await.expect("abort"),
            }
            assert_eq!(requests(&bucket, OperationKind::ListUploads) - lists, 3, "a page, and parts of two");
            let ended = requests(&bucket, OperationKind::Abort) - aborts;
            assert_eq!(ended, if ends_well { 1 } else { 2 });
            assert_eq!(left(&bucket).await, expected);
            for id in expected {
                bucket.abort_upload(&ObjectKey::new(KEY), &id).await.expect("abort");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn where_ours_cannot_be_told_from_anothers_both_stay() {
    over_stores(async |bucket, _| {
        let faults = Faults::new();
        let ours = bucket.with_faults(&faults);
        let theirs = outsider(&bucket).await;
        faults.script(OperationKind::Create, 1, FaultMode::LoseReply);
        let upload = begin(&ours).await.expect("begun");
        upload.complete(Condition::IfAbsent).await.expect("complete");
        let left = left(&bucket).await;
        assert!(left.len() == 2 && left.contains(&theirs.id), "{left:?}");
    })
    .await;
}

#[tokio::test]
async fn what_was_given_up_is_ended_later() {
    over_stores(async |bucket, _| {
        let faults = Faults::new();
        let ours = bucket.with_faults(&faults).with_deadline_ms(150);
        for nth in 1..20 {
            faults.script(OperationKind::Create, nth, FaultMode::LoseReply);
        }
        assert_eq!(begin(&ours).await.map(drop).expect_err("no answer").kind(), ErrorKind::Unavailable);
        faults.clear();
        let lost = left(&bucket).await.len();
        assert!(lost > 0);
        // While another upload goes on, nothing is looked at; that one does when it ends, unless nothing answers then.
        let other = begin(&ours).await.expect("begun");
        let before = bucket.counters();
        assert_eq!(ours.end_unanswered().await.expect("nothing to be done"), 0);
        assert_eq!(bucket.counters().since(&before).requests(), 0);
        for nth in 1..20 {
            faults.script(OperationKind::ListUploads, nth, FaultMode::Before);
        }
        other.complete(Condition::IfAbsent).await.expect("complete");
        faults.clear();
        assert_eq!(left(&bucket).await.len(), lost);
        assert_eq!(ours.end_unanswered().await.expect("ended"), lost);
        assert_eq!(left(&bucket).await, Vec::<String>::new());
        let before = bucket.counters();
        assert_eq!(ours.end_unanswered().await.expect("nothing is left"), 0);
        assert_eq!(bucket.counters().since(&before).requests(), 0);
        assert!(bucket.unanswered().0.lock().is_empty(), "nothing is remembered");
    })
    .await;
}

#[test]
fn times_are_told_by_the_stores_clock() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let second = 1_000_000_000;
    let doubt = Doubt { since: at(100), until: at(110), count: 2 };
    // Of the request that was answered in the end, with the store's clock far ahead.
    let own = begun(5000 * second, (at(100), at(111)), doubt);
    assert_eq!(own, (5000 - 11 - 1) * second..=5000 * second);
    // Of one that was given up before that was sent.
    let before = begun(5000 * second, (at(150), at(151)), doubt);
    assert_eq!(before, (5000 - 51 - 1) * second..=(5000 - 40 + 1) * second);
}

/// What begins uploads to find others would leave more of them in a store that does not answer.
#[tokio::test]
async fn nothing_is_begun_while_the_store_does_not_answer() {
    over_stores(async |bucket, _| {
        let faults = Faults::new();
        let ours = bucket.with_faults(&faults).with_deadline_ms(150);
        for key in ["d/a", "d/b", "d/c"] {
            let active = bucket.unanswered().enter(&Path::from(key));
            let (options, token) = (Default::default(), "lost".into());
            let request = Request::Create { key: Path::from(key), options, token, conditional: true };
            let sent = Instant::now();
            bucket.call(request).await.expect("begun");
            bucket.unanswered().note(&active.key, sent);
        }
        for nth in 1..20 {
            faults.script(OperationKind::ListUploads, nth, FaultMode::Before);
        }
        let begun = requests(&bucket, OperationKind::Create);
        let told = ours.end_unanswered().await.expect_err("no answer");
        assert_eq!(told.kind(), ErrorKind::Unavailable);
        assert_eq!(requests(&bucket, OperationKind::Create), begun);
        faults.clear();
        assert_eq!(ours.end_unanswered().await.expect("all of them"), 3);
        assert_eq!(requests(&bucket, OperationKind::Create) - begun, 3);
        assert!(bucket.unanswered().0.lock().is_empty(), "nothing is remembered");
    })
    .await;
}
