//! A store that fails, hangs, breaks off and loses replies.

use std::collections::BTreeMap;

use forebay_io::object::{Condition, Delay, FaultMode, Faults, MIN_PART_BYTES, OperationKind, UploadOptions};
use forebay_tests::{Seeded, scale};
use rand::RngExt;

use super::*;

#[test]
fn failed_requests_are_sent_again() {
    over_every_store(|Subject { bucket, .. }| async move {
        let faults = Faults::new();
        let bucket = bucket.with_faults(&faults);
        for kind in [OperationKind::Put, OperationKind::Head, OperationKind::Get, OperationKind::List] {
            faults.script(kind, 1, FaultMode::Before).script(kind, 2, FaultMode::LoseReply);
        }
        bucket.put(&key("a"), "a".into(), Condition::Always).await.expect("put");
        assert!(bucket.head(&key("a")).await.expect("head").is_some());
        assert_eq!(bucket.get_whole(&key("a")).await.expect("get").0.as_ref(), b"a");
        assert_eq!(keys_below(&bucket, "").await, ["a"]);
        let count = bucket.counters();
        assert_eq!((faults.injected(), count.retries), (8, 8));
        assert_eq!(count.of(OperationKind::Put).requests, 3);
        assert_eq!(count.of(OperationKind::Put).failures, 2);
    });
}

/// The write is carried out, its reply is lost, and its repetition is refused: it must count as done.
#[test]
fn a_conditional_write_whose_reply_was_lost_has_succeeded() {
    over_every_store(|Subject { bucket, .. }| async move {
        let faults = Faults::new();
        let bucket = bucket.with_faults(&faults);
        faults.script(OperationKind::Put, 1, FaultMode::LoseReply);
        let created = bucket.put(&key("a"), "a".into(), Condition::IfAbsent).await.expect("create");
        faults.script(OperationKind::Put, 1, FaultMode::LoseReply);
        let at_created = Condition::IfVersion(created.version.clone());
        let updated = bucket.put(&key("a"), "b".into(), at_created).await.expect("update");
        assert_ne!(created.version, updated.version);
        let found = bucket.head(&key("a")).await.expect("head").expect("there");
        assert_eq!(found.version, updated.version);
        for condition in [Condition::Always, Condition::IfAbsent] {
            let name = key(&format!("upload-{condition:?}"));
            faults.script(OperationKind::Complete, 1, FaultMode::LoseReply);
            let options = UploadOptions { part_bytes: Some(MIN_PART_BYTES), ..UploadOptions::default() };
            let mut upload = bucket.upload_with(&name, options).expect("upload");
            upload.write(pattern(MIN_PART_BYTES as usize + 1)).await.expect("write");
            let done = upload.complete(condition).await.expect("complete");
            assert_eq!(bucket.head(&name).await.expect("head").expect("there").version, done.version);
        }
    });
}

/// The store says that a condition does not hold which does, having done as it was told or not: what is there tells.
#[test]
fn a_refusal_without_ground_is_not_believed() {
    over_every_store(|Subject { store, bucket, .. }| async move {
        let faults = Faults::new();
        let bucket = bucket.with_faults(&faults);
        for mode in [FaultMode::Refuse, FaultMode::DoAndRefuse] {
            let (small, large) = (key(&format!("small-{mode:?}")), key(&format!("large-{mode:?}")));
            let mut versions = Vec::new();
            for text in ["one", "two"] {
                let replaced = versions.last().cloned();
                let condition = replaced.map_or(Condition::IfAbsent, Condition::IfVersion);
                faults.script(OperationKind::Put, 1, mode);
                let put = bucket.put(&small, text.into(), condition).await.expect("put");
                faults.script(OperationKind::Get, 1, mode);
                let read = bucket.get(&small, Some(&put.version), 0..3).await.expect("get");
                assert_eq!(read, text);
                versions.push(put.version);
            }
            faults.script(OperationKind::Put, 1, mode);
            let stale = Condition::IfVersion(versions[0].clone());
            assert_kind(bucket.put(&small, "three".into(), stale).await, ErrorKind::Conflict);
            assert_eq!(bucket.get_whole(&small).await.expect("get").0, "two");
            let options = UploadOptions { part_bytes: Some(MIN_PART_BYTES), ..UploadOptions::default() };
            let mut upload = bucket.upload_with(&large, options).expect("upload");
            let data = pattern(MIN_PART_BYTES as usize + 1);
            upload.write(data.clone()).await.expect("write");
            faults.script(OperationKind::Complete, 1, mode);
            let done = upload.complete(Condition::IfAbsent).await.expect("complete");
            // Where a body broke, the rest of it is asked for on a condition.
            faults.script(OperationKind::Get, 1, FaultMode::BreakBody(1000)).script(
                OperationKind::Get,
                2,
                mode,
            );
            let (read, info) = bucket.get_whole(&large).await.expect("get");
            assert!(read == data && info.version == done.version, "{mode:?}");
            assert_eq!(unfinished(store, &bucket).await.len(), 0);
        }
        // A completion that was sent twice: the upload of the second is gone.
        for condition in [Condition::IfAbsent, Condition::Always] {
            let options = UploadOptions { part_bytes: Some(MIN_PART_BYTES), ..UploadOptions::default() };
            let name = key(&format!("twice-{condition:?}"));
            let mut upload = bucket.upload_with(&name, options).expect("upload");
            upload.write(pattern(MIN_PART_BYTES as usize + 1)).await.expect("write");
            faults.script(OperationKind::Complete, 1, FaultMode::DoAndMiss);
            upload.complete(condition).await.expect("complete");
        }
        // A store that goes on with it knows no conditions: what it says stands.
        for nth in 1..20 {
            faults.script(OperationKind::Put, nth, FaultMode::Refuse);
        }
        assert_kind(bucket.put(&key("a"), "a".into(), Condition::IfAbsent).await, ErrorKind::Conflict);
        assert!(bucket.head(&key("a")).await.expect("head").is_none());
    });
}

/// The same refusal, but because somebody else was first: it must stay a refusal.
#[test]
fn a_conditional_write_that_lost_the_race_is_refused() {
    over_every_store(|Subject { bucket, .. }| async move {
        let faults = Faults::new();
        let failing = bucket.with_faults(&faults);
        bucket.put(&key("a"), "theirs".into(), Condition::Always).await.expect("put");
        faults.script(OperationKind::Put, 1, FaultMode::Before);
        assert_kind(failing.put(&key("a"), "ours".into(), Condition::IfAbsent).await, ErrorKind::Conflict);
        // Equal bytes are no proof that they are ours.
        faults.script(OperationKind::Put, 1, FaultMode::LoseReply);
        assert_kind(failing.put(&key("a"), "theirs".into(), Condition::IfAbsent).await, ErrorKind::Conflict);
        assert_eq!(bucket.get_whole(&key("a")).await.expect("get").0.as_ref(), b"theirs");
    });
}

#[test]
fn a_broken_body_is_resumed_from_the_same_version() {
    over_every_store(|Subject { bucket, .. }| async move {
        let data = pattern(1 << 20);
        bucket.put(&key("a"), data.clone(), Condition::Always).await.expect("put");
        let faults = Faults::new();
        let reader = bucket.with_faults(&faults);
        for (nth, after) in [(1, 1000), (2, 0), (3, 500_000)] {
            faults.script(OperationKind::Get, nth, FaultMode::BreakBody(after));
        }
        let before = reader.counters();
        assert!(reader.get_whole(&key("a")).await.expect("get").0 == data, "the bytes are the same");
        let count = reader.counters().since(&before);
        assert_eq!((count.of(OperationKind::Get).requests, count.retries), (4, 3));
        assert_eq!(count.of(OperationKind::Get).bytes, data.len() as u64, "no byte is asked for twice");
    });
}

#[test]
fn a_store_that_is_down_is_unavailable_after_the_deadline_and_says_why() {
    over_every_store(|Subject { bucket, .. }| async move {
        let faults = Faults::new();
        let bucket = bucket.with_faults(&faults);
        bucket.put(&key("a"), "a".into(), Condition::Always).await.expect("put");
        faults.set_down(true);
        let hasty = bucket.with_deadline_ms(300);
        let error = hasty.get_whole(&key("a")).await.expect_err("down");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("the store cannot be reached"), "the last cause: {error}");
        assert!(error.message().contains("gave up after"), "{error}");
        assert!(error.hint().is_some());
        faults.set_down(false);
        assert_eq!(bucket.get_whole(&key("a")).await.expect("up again").0.as_ref(), b"a");
    });
}

#[test]
fn silence_is_not_waited_for_longer_than_an_attempt() {
    over_every_store(|Subject { bucket, .. }| async move {
        let faults = Faults::new();
        bucket.put(&key("a"), "a".into(), Condition::Always).await.expect("put");
        let bucket = bucket.with_faults(&faults).with_deadline_ms(3_000);
        faults.script(OperationKind::Get, 1, FaultMode::Hang);
        assert_eq!(bucket.get_whole(&key("a")).await.expect("get").0.as_ref(), b"a");
        assert!(bucket.counters().retries >= 1, "what hung was given up");
    });
}

#[test]
fn a_slow_store_is_only_slow() {
    over_every_store(|Subject { bucket, .. }| async move {
        let slow = bucket.with_delay(Delay { request_us: 20_000, mib_us: 1_000 });
        slow.put(&key("a"), pattern(1 << 20), Condition::Always).await.expect("put");
        assert_eq!(slow.head(&key("a")).await.expect("head").expect("there").size, 1 << 20);
        assert_eq!(slow.counters().retries, 0);
    });
}

/// Random operations under random faults, against a map.
#[test]
fn nothing_is_lost_or_doubled_under_random_faults() {
    let mut seeded = Seeded::new();
    let rounds = 60 * scale();
    let seed: u64 = seeded.random();
    over_every_store(|Subject { bucket, .. }| async move {
        let bucket = bucket.with_faults(&Faults::random(seed, 0.15)).with_deadline_ms(60_000);
        let mut rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(seed);
        let mut model = BTreeMap::new();
        for round in 0..rounds {
            let name = format!("k{}", rng.random_range(0..6));
            let data = pattern(rng.random_range(0..5_000));
            let known: Option<&(_, Bytes)> = model.get(&name);
            let condition = match (known, rng.random_range(0..3)) {
                (_, 0) => Condition::Always,
                (None, _) => Condition::IfAbsent,
                (Some((version, _)), _) => Condition::IfVersion(Clone::clone(version)),
            };
            match rng.random_range(0..5) {
                0 => {
                    bucket.delete(&key(&name)).await.expect("delete");
                    model.remove(&name);
                }
                1 | 2 => {
                    let put = bucket.put(&key(&name), data.clone(), condition.clone()).await;
                    let put = put.unwrap_or_else(|error| panic!("round {round}, {condition:?}: {error}"));
                    model.insert(name, (put.version, data));
                }
                3 => match known {
                    Some((version, bytes)) => {
                        let (read, info) = bucket.get_whole(&key(&name)).await.expect("get");
                        assert!(read == *bytes && info.version == *version, "round {round}");
                    }
                    None => assert_eq!(bucket.head(&key(&name)).await.expect("head"), None),
                },
                _ => {
                    let names: Vec<_> = model.keys().cloned().collect();
                    assert_eq!(keys_below(&bucket, "").await, names, "round {round}");
                }
            }
        }
        assert!(bucket.counters().retries > 0);
    });
}

/// The store begins an upload and its answer is lost, and begins a second one: only what another program does stays.
#[test]
fn an_upload_whose_beginning_was_not_answered_ends() {
    over_every_store(|Subject { store, bucket, directory }| async move {
        let another = match (store, &directory) {
            ("file", Some(directory)) => Some(file_bucket(directory.path().into()).await),
            ("moto", _) => {
                let settings = Server::shared().settings();
                Some(Bucket::open(bucket.url(), &settings).await.expect("the same bucket"))
            }
            _ => None,
        };
        let options = UploadOptions { part_bytes: Some(MIN_PART_BYTES), ..UploadOptions::default() };
        let mut expected = 0;
        let mut theirs = Vec::new();
        if let Some(another) = another {
            // One part has arrived before the next one leaves.
            let one_by_one = UploadOptions { parts_in_flight: 1, ..options.clone() };
            let mut upload = another.upload_with(&key("a"), one_by_one).expect("upload");
            upload.write(pattern(2 * MIN_PART_BYTES as usize + 1)).await.expect("write");
            theirs.push(upload);
            expected = 1;
        }
        let faults = Faults::new();
        faults.script(OperationKind::Create, 1, FaultMode::LoseReply);
        let ours = bucket.with_faults(&faults);
        let mut upload = ours.upload_with(&key("a"), options).expect("upload");
        upload.write(pattern(MIN_PART_BYTES as usize + 1)).await.expect("write");
        upload.complete(Condition::Always).await.expect("complete");
        assert_eq!(unfinished(store, &bucket).await.len(), expected);
        for upload in theirs {
            upload.complete(Condition::Always).await.expect("it goes on");
        }
    });
}
