//! What every store does alike: whole objects, ranges, conditions, listings, the probe.

use forebay_core::Version;
use forebay_io::object::{Capabilities, Condition, OperationKind};
use futures::StreamExt;

use super::*;

#[test]
fn objects_are_written_read_and_deleted() {
    over_every_store(|Subject { bucket, .. }| async move {
        let a = key("dir/a");
        assert_eq!(bucket.head(&a).await.expect("head"), None);
        assert_kind(bucket.get(&a, None, 0..1).await, ErrorKind::NotFound);
        let written = bucket.put(&a, "0123456789".into(), Condition::Always).await.expect("put");
        assert_eq!((written.key.as_str(), written.size), ("dir/a", 10));
        let found = bucket.head(&a).await.expect("head").expect("there");
        assert_eq!((&found.version, found.size), (&written.version, 10));
        let (whole, info) = bucket.get_whole(&a).await.expect("get");
        assert_eq!((whole.as_ref(), &info.version), (b"0123456789".as_ref(), &written.version));
        assert_eq!(bucket.get(&a, Some(&written.version), 3..7).await.expect("range").as_ref(), b"3456");
        assert_eq!(bucket.get(&a, None, 8..100).await.expect("range").as_ref(), b"89");
        assert_eq!(bucket.get(&a, None, 5..5).await.expect("range").as_ref(), b"");
        assert_kind(bucket.get(&a, None, 10..11).await, ErrorKind::Invalid);
        let empty = bucket.put(&key("empty"), Bytes::new(), Condition::Always).await.expect("put");
        assert_eq!(bucket.get_whole(&key("empty")).await.expect("get").0.len(), 0);
        assert_eq!(empty.size, 0);
        let copy = bucket.copy(&a, &key("dir/b c"), 1, &Condition::Always).await.expect("copy");
        assert_eq!(copy.size, 10);
        bucket.delete(&a).await.expect("delete");
        bucket.delete(&a).await.expect("an object that is gone is no error");
        bucket.delete_many(&[key("dir/b c"), key("empty"), key("never")]).await.expect("delete");
        assert_eq!(keys_below(&bucket, "").await, Vec::<String>::new());
    });
}

/// What another tool said of an object is told from what stores say of every one.
#[tokio::test]
async fn what_objects_carry_is_known() {
    let server = Server::shared();
    let name = server.create_bucket();
    let url: BucketUrl = format!("s3://{name}").parse().expect("a valid URL");
    let bucket = Bucket::open(&url, &server.settings()).await.expect("the bucket is there");
    server.put_raw(&format!("{name}/typed"));
    bucket.put(&key("plain"), "x".into(), Condition::Always).await.expect("put");
    assert!(bucket.has_attributes(&key("typed")).await.expect("asked"));
    assert!(!bucket.has_attributes(&key("plain")).await.expect("asked"));
    assert!(!bucket.has_attributes(&key("never")).await.expect("asked"));
}

#[test]
fn conditions_hold() {
    over_every_store(|Subject { store, bucket, .. }| async move {
        let a = key("a");
        let first = bucket.put(&a, "first".into(), Condition::IfAbsent).await.expect("create");
        assert_kind(bucket.put(&a, "again".into(), Condition::IfAbsent).await, ErrorKind::Conflict);
        let at_first = Condition::IfVersion(first.version.clone());
        let second = bucket.put(&a, "second".into(), at_first.clone()).await.expect("update");
        assert_ne!(second.version, first.version);
        assert_kind(bucket.put(&a, "third".into(), at_first.clone()).await, ErrorKind::Conflict);
        assert_kind(bucket.put(&key("none"), "x".into(), at_first).await, ErrorKind::Conflict);
        assert_kind(bucket.get(&a, Some(&first.version), 0..1).await, ErrorKind::Stale);
        assert_eq!(bucket.get_whole(&a).await.expect("get").0.as_ref(), b"second");
        let racers = (0..16).map(|n| {
            let bucket = bucket.clone();
            async move { bucket.put(&key("race"), n.to_string().into(), Condition::IfAbsent).await.is_ok() }
        });
        // moto looks at the key and writes it in two steps, between which another of its threads may do the same.
        let at_once = if store == "moto" { 1 } else { 16 };
        let won: Vec<bool> = futures::stream::iter(racers).buffer_unordered(at_once).collect().await;
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "exactly one creates the key");
    });
}

#[test]
fn listings_are_in_order_and_page_by_page() {
    over_every_store(|Subject { store, bucket, .. }| async move {
        let mut wanted: Vec<String> = (0..1_003).map(|n| format!("many/{n:05}")).collect();
        wanted.extend(["a", "a-b", "a/b", "a.b/c", "dir/sub/x", "dir/y"].map(str::to_owned));
        let puts = wanted
            .iter()
            .map(async |name| bucket.put(&ObjectKey::new(name), "x".into(), Condition::Always).await);
        // A bucket may hold both `a` and `a/b`; a directory cannot.
        let puts = futures::stream::iter(puts).buffer_unordered(16).collect::<Vec<_>>().await;
        let refused = puts.iter().filter(|put| put.is_err()).count();
        if refused > 0 {
            assert!(store == "file" || store == "versitygw", "{store}");
            wanted.retain(|name| name != "a" && name != "a/b");
            bucket.delete_many(&[key("a"), key("a/b")]).await.expect("delete");
        }
        wanted.sort();
        let before = bucket.counters();
        assert_eq!(keys_below(&bucket, "").await, wanted);
        let pages = bucket.counters().since(&before).of(OperationKind::List).requests;
        assert!((1..=3).contains(&pages), "{pages} pages");
        assert_eq!(keys_below(&bucket, "dir").await, ["dir/sub/x", "dir/y"]);
        assert_eq!(keys_below(&bucket, "dir/").await, ["dir/sub/x", "dir/y"]);
        assert_eq!(keys_below(&bucket, "di").await, Vec::<String>::new());
        let listed = bucket.list_directory("dir").await.expect("listing");
        assert_eq!(listed.directories, ["sub"]);
        assert_eq!(listed.objects.iter().map(|o| o.key.as_str()).collect::<Vec<_>>(), ["dir/y"]);
        assert_eq!(bucket.list_directory("many").await.expect("listing").objects.len(), 1_003);
        assert_eq!(bucket.list_directory("none").await.expect("listing"), Default::default());
        assert_eq!(
            bucket.list_directory("").await.expect("listing").directories.last().expect("some"),
            "many"
        );
    });
}

#[test]
fn large_ranges_are_read_side_by_side() {
    over_every_store(|Subject { bucket, .. }| async move {
        let data = pattern((20 << 20) + 17);
        let size = data.len() as u64;
        let written = bucket.put(&key("large"), data.clone(), Condition::Always).await.expect("put");
        let mut buffer = vec![0; data.len() - 5];
        bucket.get_into(&key("large"), None, 5..size, &mut buffer).await.expect("get_into");
        assert_eq!(buffer, data[5..]);
        let before = bucket.counters();
        let parts = bucket.get_parallel(&key("large"), Some(&written.version), 1..size, 3 << 20);
        let parts: Vec<Bytes> = parts.try_collect().await.expect("get_parallel");
        assert_eq!(parts.concat(), data[1..]);
        let count = bucket.counters().since(&before).of(OperationKind::Get);
        assert_eq!((count.requests, count.bytes), (7, size - 1));
        let mut short = vec![0; 10];
        assert_kind(
            bucket.get_into(&key("large"), None, size - 5..size + 5, &mut short).await,
            ErrorKind::Invalid,
        );
        let wrong = Version::new("\"wrong\"");
        let stale = bucket.get_parallel(&key("large"), Some(&wrong), 0..10, 5).try_collect::<Vec<_>>().await;
        assert_kind(stale, ErrorKind::Stale);
    });
}

#[test]
fn a_read_only_handle_writes_nothing() {
    over_every_store(|Subject { bucket, .. }| async move {
        bucket.put(&key("a"), "a".into(), Condition::Always).await.expect("put");
        let reader = bucket.read_only();
        let before = reader.counters();
        assert!(reader.is_read_only());
        assert_kind(reader.put(&key("b"), "b".into(), Condition::Always).await, ErrorKind::ReadOnly);
        assert_kind(reader.delete(&key("a")).await, ErrorKind::ReadOnly);
        assert_kind(reader.copy(&key("a"), &key("b"), 1, &Condition::Always).await, ErrorKind::ReadOnly);
        let mut upload = reader.upload(&key("b")).await.expect("nothing is sent yet");
        assert_kind(upload.write(pattern(9 << 20)).await, ErrorKind::ReadOnly);
        drop(upload);
        assert_eq!(reader.counters().since(&before).requests(), 0);
        assert_eq!(reader.get_whole(&key("a")).await.expect("get").0.as_ref(), b"a");
        assert_eq!(reader.probe().await.expect("probe"), Capabilities::default());
    });
}

#[test]
fn the_probe_finds_everything_and_leaves_nothing() {
    over_every_store(|Subject { store, bucket, directory }| async move {
        let found = bucket.probe().await.expect("probe");
        // moto does not look at these two conditions; the probe must see that.
        let (is_cloud, checks_all) = (is_cloud(store), store != "moto");
        let all = Capabilities {
            writable: true,
            conditional_create: true,
            conditional_update: true,
            conditional_complete: true,
            conditional_complete_update: checks_all,
            part_copy: !is_cloud,
            conditional_part_copy: checks_all && !is_cloud,
            unequal_parts: true,
            list_uploads: !is_cloud,
            range_get: true,
            conditional_get: true,
            etag_stable: true,
            // versitygw decodes keys twice.
            exact_keys: store != "versitygw",
        };
        assert_eq!(found, all);
        assert!(found.safe_for_many_writers());
        assert_eq!(keys_below(&bucket, "").await, Vec::<String>::new());
        assert_eq!(unfinished(store, &bucket).await, Vec::new());
        if let Some(directory) = directory {
            let left: Vec<_> = std::fs::read_dir(directory.join(".forebay")).expect("folder").collect();
            assert_eq!(left.len(), 1, "only the staging folder stays");
        }
    });
}
