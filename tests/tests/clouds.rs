//! Buckets of Google's and Azure's stores, mounted.

use bytes::Bytes;
use forebay_core::{ErrorKind, ObjectKey};
use forebay_io::object::{Bucket, Condition, Upload, UploadOptions};
use forebay_tests::cloud::Cloud;
use forebay_tests::{Door, Mount, Names, Scratch, assert_same_trees, require_fuse, sample_tree, shell};
use futures::future::join_all;

/// Bytes of a part, and of an object of three and a bit.
const PART: usize = 1000;
const SIZE: usize = 3 * PART + 1;

/// An upload of `SIZE` bytes, all `fill`, of which only the completion is missing and what goes with it.
async fn started(bucket: &Bucket, key: &str, fill: u8) -> Upload {
    let options = UploadOptions { part_bytes: Some(PART as u64), ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&ObjectKey::new(key), options).expect("upload");
    upload.write(Bytes::from(vec![fill; SIZE])).await.expect("write");
    upload
}

/// Of uploads of one key that are completed at once, one wins, with all of its bytes and nothing else.
async fn one_completion_wins(bucket: &Bucket) {
    let (key, mut condition) = ("dir/contested", Condition::IfAbsent);
    for round in 0..3 {
        let uploads = join_all((0..5).map(|fill| started(bucket, key, fill))).await;
        let outcomes = join_all(uploads.into_iter().map(|upload| upload.complete(condition.clone()))).await;
        let winners = outcomes.iter().zip(0u8..).filter_map(|(done, fill)| Some((done.as_ref().ok()?, fill)));
        let winners: Vec<_> = winners.collect();
        let [(won, fill)] = winners[..] else { panic!("round {round}: {outcomes:?}") };
        let lost = outcomes.iter().filter_map(|done| done.as_ref().err());
        assert!(lost.into_iter().all(|error| error.kind() == ErrorKind::Conflict), "{outcomes:?}");
        let (bytes, found) = bucket.get_whole(&ObjectKey::new(key)).await.expect("get");
        assert!(bytes == vec![fill; SIZE] && found.version == won.version, "round {round}: torn");
        condition = Condition::IfVersion(won.version.clone());
    }
}

/// What is written after its first content was looked at, by an outsider at the last moment, is not replaced.
async fn a_late_outsider_is_not_replaced(bucket: &Bucket) {
    let key = ObjectKey::new("dir/late");
    let upload = started(bucket, key.as_str(), 1).await;
    let outsiders = bucket.put(&key, "theirs".into(), Condition::Always).await.expect("put");
    let refused = upload.complete(Condition::IfAbsent).await.expect_err("it is there");
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
    let upload = started(bucket, key.as_str(), 2).await;
    bucket.put(&key, "theirs again".into(), Condition::Always).await.expect("put");
    let refused = upload.complete(Condition::IfVersion(outsiders.version)).await.expect_err("it was changed");
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
    assert_eq!(whole(bucket, "dir/late").await, "theirs again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_on_azure_is_one_request_with_its_condition() {
    let Some(cloud) = Cloud::azure() else { return };
    let door = Door::new(cloud.address()).expect("loopback has free ports");
    let bucket = cloud.open(&cloud.create_bucket("data/set"), door.endpoint()).await;
    let name = "dir/ü b%2B+c";
    let upload = started(&bucket, name, 1).await;
    door.take_requests();
    let first = upload.complete(Condition::IfAbsent).await.expect("complete");
    let version = first.version.as_str().to_owned();
    assert_eq!(door.take_conditions(), ["if-none-match: *"]);
    let line = |request: &String| request.starts_with("PUT /") && request.ends_with("?comp=blocklist");
    let requests: Vec<String> =
        door.take_requests().into_iter().filter(|request| !request.contains("comp=block&")).collect();
    assert!(matches!(&requests[..], [request] if line(request)), "{requests:?}");
    let upload = started(&bucket, name, 2).await;
    upload.complete(Condition::IfVersion(first.version)).await.expect("complete");
    assert_eq!(door.take_conditions(), [format!("if-match: {version}")]);
    let heads = door.take_requests().into_iter().filter(|request| request.starts_with("HEAD")).count();
    assert_eq!(heads, 0, "nothing is looked up before");
    assert_eq!(bucket.get_whole(&ObjectKey::new(name)).await.expect("get").0, vec![2; SIZE]);
    one_completion_wins(&bucket).await;
    a_late_outsider_is_not_replaced(&bucket).await;
}

/// Reads an object that nobody prepared, copies a tree in, and finds it again on another machine and as plain objects.
async fn mounts_writes_and_mounts_again(cloud: &Cloud, homes: [&str; 2]) {
    let (scratch, bucket) = (Scratch::new(), cloud.bucket("data/set").await);
    let source = scratch.folder("source");
    sample_tree(&source, Names::Keys);
    bucket.put(&ObjectKey::new("there/before"), "bytes".into(), Condition::Always).await.expect("put");
    let (url, folder) = (bucket.url().to_string(), scratch.join("mnt"));
    let mut mount = Mount::new(&scratch.join(homes[0]), &url, &folder, &[], &cloud.envs());
    assert_eq!(
        shell(&folder, "ls -R && cat there/before").succeeded(),
        ".:\nthere\n\n./there:\nbefore\nbytes"
    );
    shell(&source, &format!("cp -a . {}/copied", folder.display())).succeeded();
    shell(&folder, "mv there/before there/after && echo changed >> there/after && mkdir empty").succeeded();
    assert_same_trees(&source, &folder.join("copied"), false);
    mount.unmount();
    let log = mount.log();
    assert_eq!(whole(&bucket, "there/after").await, "byteschanged\n", "{log}");
    let bytes = std::fs::read_to_string(source.join("text/lib.rs")).expect("a source");
    assert_eq!(whole(&bucket, "copied/text/lib.rs").await, bytes);
    mount.remount(&scratch.join(homes[1]));
    assert_same_trees(&source, &folder.join("copied"), false);
    assert_eq!(shell(&folder, "ls . there").succeeded(), ".:\ncopied\nempty\nthere\n\nthere:\nafter\n");
    mount.unmount();
}

async fn whole(bucket: &Bucket, key: &str) -> String {
    let (bytes, _) = bucket.get_whole(&ObjectKey::new(key)).await.expect("a plain object");
    String::from_utf8(bytes.to_vec()).expect("text")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_azure_container_is_mounted() {
    if !require_fuse("an_azure_container_is_mounted") {
        return;
    }
    let Some(cloud) = Cloud::azure() else { return };
    mounts_writes_and_mounts_again(cloud, ["home", "other-home"]).await;
}

/// fake-gcs-server cannot be written to by the protocol that Forebay writes with, so this only reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_google_bucket_is_mounted_for_reading() {
    if !require_fuse("a_google_bucket_is_mounted_for_reading") {
        return;
    }
    let Some(cloud) = Cloud::google() else { return };
    let (scratch, bucket) = (Scratch::new(), cloud.bucket("data/set").await);
    for (key, body) in [("a", "0123456789"), ("d/b", "bytes"), ("d/e/c", "")] {
        cloud.put_json(&bucket, key, body);
    }
    let found = bucket.head(&ObjectKey::new("a")).await.expect("head").expect("there");
    let read = bucket.get(&found.key, Some(&found.version), 3..7).await.expect("a range");
    assert_eq!(read.as_ref(), b"3456");
    let (url, folder) = (bucket.url().to_string(), scratch.join("mnt"));
    let mut mount = Mount::new(&scratch.join("home"), &url, &folder, &["--read-only"], &cloud.envs());
    assert_eq!(shell(&folder, "ls -R").succeeded(), ".:\na\nd\n\n./d:\nb\ne\n\n./d/e:\nc\n");
    let copied =
        shell(&folder, &format!("cp -a . {0} && cd {0} && cat a d/b", scratch.folder("copy").display()));
    assert_eq!(copied.succeeded(), "0123456789bytes");
    mount.unmount();
}
