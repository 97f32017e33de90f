//! Buckets of Google's and Azure's stores, mounted.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{ErrorKind, ObjectKey};
use forebay_io::object::{Bucket, Condition, MIN_PART_BYTES, Upload, UploadNotes, UploadOptions};
use forebay_tests::cloud::Cloud;
use forebay_tests::{
    Door, Forebay, Manner, Mount, Names, Scratch, assert_same_trees, require_fuse, sample_tree, shell,
};
use futures::TryStreamExt;
use futures::future::join_all;

/// Bytes of an object that needs two parts.
const SIZE: usize = MIN_PART_BYTES as usize + 1;

/// An upload of `SIZE` bytes, all `fill`, of which only a small part and the completion are missing.
async fn started(bucket: &Bucket, key: &str, fill: u8) -> Upload {
    started_with(bucket, key, fill, None).await
}

async fn started_with(bucket: &Bucket, key: &str, fill: u8, notes: Option<Arc<dyn UploadNotes>>) -> Upload {
    let options = UploadOptions { part_bytes: Some(MIN_PART_BYTES), notes, ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&ObjectKey::new(key), options).expect("upload");
    upload.write(Bytes::from(vec![fill; SIZE])).await.expect("write");
    upload
}

/// Of uploads of one key that are completed at once, one wins, with all of its bytes and nothing else.
async fn one_completion_wins(bucket: &Bucket) {
    let (key, mut condition) = ("dir/contested", Condition::IfAbsent);
    for round in [0u8, 10] {
        // Never what is there already: where versions are sums of bytes, it would keep its version.
        let fills = round..round + 4;
        let uploads = join_all(fills.clone().map(|fill| started(bucket, key, fill))).await;
        let outcomes = join_all(uploads.into_iter().map(|upload| upload.complete(condition.clone()))).await;
        let done = outcomes.iter().zip(fills).filter_map(|(done, fill)| Some((done.as_ref().ok()?, fill)));
        let winners: Vec<_> = done.collect();
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

/// The requests of a completion by their methods, without those of parts.
fn completing(door: &Door) -> Vec<String> {
    let requests = door.take_requests().into_iter().filter(|request| !request.contains("partNumber="));
    requests.map(|request| request.split(' ').next().unwrap_or_default().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_on_google_is_a_copy_with_its_condition() {
    let cloud = Cloud::google_in_dialect();
    let door = Door::new(cloud.address()).expect("loopback has free ports");
    let bucket = cloud.open(&cloud.create_bucket("data/set"), door.endpoint()).await;
    let name = "dir/ü b%2B+c";
    let upload = started(&bucket, name, 1).await;
    door.take_requests();
    let first = upload.complete(Condition::IfAbsent).await.expect("complete");
    assert_eq!(door.take_conditions(), ["x-goog-if-generation-match: 0"]);
    assert_eq!(completing(&door), ["POST", "PUT", "DELETE"], "completed aside, copied to its key, deleted");
    let upload = started(&bucket, name, 2).await;
    door.take_requests();
    upload.complete(Condition::IfVersion(first.version)).await.expect("complete");
    let conditions = door.take_conditions();
    let names_one = |text: &String| text.starts_with("x-goog-if-generation-match: ") && !text.ends_with(" 0");
    assert!(matches!(&conditions[..], [condition] if names_one(condition)), "{conditions:?}");
    assert_eq!(completing(&door), ["POST", "HEAD", "PUT", "DELETE"], "the version is looked up by its ETag");
    assert_eq!(bucket.get_whole(&ObjectKey::new(name)).await.expect("get").0, vec![2; SIZE]);
    one_completion_wins(&bucket).await;
    a_late_outsider_is_not_replaced(&bucket).await;
    let options = UploadOptions { conditional: false, ..UploadOptions::default() };
    let mut upload = bucket.upload_with(&ObjectKey::new("plain"), options).expect("upload");
    upload.write(Bytes::from(vec![3; 9 << 20])).await.expect("write");
    door.take_requests();
    upload.complete(Condition::Always).await.expect("complete");
    assert_eq!(completing(&door), ["POST"], "without a condition there is no copy");
    assert_eq!(staged(&bucket).await, 0, "nothing is left aside");
    door.set(Manner::IgnoreConditions);
    let found = bucket.probe().await.expect("probe");
    assert!(!found.conditional_complete && !found.safe_for_many_writers(), "the probe sees through it");
}

async fn staged(bucket: &Bucket) -> usize {
    bucket.list(".forebay/uploads").try_collect::<Vec<_>>().await.expect("a listing").len()
}

/// Remembers the uploads that were begun, as the tree does for a mount that may die.
#[derive(Debug, Default)]
struct Noted(Mutex<Vec<String>>);

#[async_trait]
impl UploadNotes for Noted {
    async fn started(&self, _: &ObjectKey, id: &str) {
        self.0.lock().expect("notes").push(id.to_owned());
    }

    async fn ended(&self, _: &str) {}
}

/// A process that dies between the completion of an upload aside and its copy leaves an object there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_process_left_aside_on_google_is_freed() {
    let cloud = Cloud::google_in_dialect();
    let door = Door::new(cloud.address()).expect("loopback has free ports");
    let url = cloud.create_bucket("data/set");
    let dying = cloud.open(&url, door.endpoint()).await;
    let bucket = cloud.bucket_at(&url).await;
    let noted = Arc::new(Noted::default());
    for name in ["first", "second"] {
        let upload = started_with(&dying, name, 1, Some(noted.clone())).await;
        while !door.take_requests().iter().any(|request| request.contains("partNumber=1")) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The copy is not made, nor is anything tidied up.
        door.set(Manner::Parts);
        let lost = upload.complete(Condition::IfAbsent).await.expect_err("the copy cannot be made");
        assert_eq!(lost.kind(), ErrorKind::Denied, "{lost}");
        door.set(Manner::Pass);
        assert_eq!(
            (staged(&bucket).await, bucket.head(&ObjectKey::new(name)).await.expect("head")),
            (1, None)
        );
        if name == "first" {
            // The next mount knows it from the notes of the dead one.
            let id = noted.0.lock().expect("notes")[0].clone();
            bucket.abort_upload(&ObjectKey::new(name), &id).await.expect("abort");
            bucket.abort_upload(&ObjectKey::new(name), &id).await.expect("one that is gone is no error");
            assert_eq!(staged(&bucket).await, 0);
        }
    }
    // What no note names goes when it is old.
    let sweep =
        async |seconds, keep| bucket.sweep_staging(Duration::from_secs(seconds), keep).await.expect("swept");
    assert_eq!(sweep(3600, false).await, Vec::new());
    let found = sweep(0, true).await;
    assert!(matches!(&found[..], [left] if left.bytes == SIZE as u64), "{found:?}");
    assert_eq!(sweep(0, false).await, found);
    assert_eq!(staged(&bucket).await, 0);
}

/// Reads an object that nobody prepared, copies a tree in, and finds it again on another machine and as plain objects;
/// and what was synced before the mount is killed, on a third one.
async fn mounts_writes_and_mounts_again(cloud: &Cloud) {
    let (scratch, bucket) = (Scratch::new(), cloud.bucket("data/set").await);
    let source = scratch.folder("source");
    sample_tree(&source, Names::Keys);
    bucket.put(&ObjectKey::new("there/before"), "bytes".into(), Condition::Always).await.expect("put");
    let (url, folder) = (bucket.url().to_string(), scratch.join("mnt"));
    let mut mount = Mount::new(&scratch.join("home"), &url, &folder, &["--take-over"], &cloud.envs());
    assert_eq!(
        shell(&folder, "ls -R && cat there/before").succeeded(),
        ".:\nthere\n\n./there:\nbefore\nbytes"
    );
    shell(&source, &format!("cp -a . {}/copied", folder.display())).succeeded();
    shell(&folder, "mv there/before there/after && echo changed >> there/after && mkdir empty").succeeded();
    // Large enough to go in parts, written, synced and moved, and written anew.
    let large = "head -c 9000000 /dev/urandom > large && sync large && mkdir d && mv large d/one && \
                 head -c 10000000 /dev/urandom | tee d/two > d/three && cat d/two > d/one && cmp d/one d/three && rm d/two";
    shell(&folder, large).succeeded();
    assert_same_trees(&source, &folder.join("copied"), false);
    mount.unmount();
    let log = mount.log();
    assert_eq!(whole(&bucket, "there/after").await, "byteschanged\n", "{log}");
    let bytes = std::fs::read_to_string(source.join("text/lib.rs")).expect("a source");
    assert_eq!(whole(&bucket, "copied/text/lib.rs").await, bytes);
    mount.remount(&scratch.join("other-home"));
    assert_same_trees(&source, &folder.join("copied"), false);
    assert_eq!(shell(&folder, "ls . there").succeeded(), ".:\ncopied\nd\nempty\nthere\n\nthere:\nafter\n");
    shell(&folder, "cmp d/one d/three && test $(stat -c %s d/one) = 10000000").succeeded();
    let kept = scratch.join("kept");
    let synced = format!("head -c 9000000 /dev/urandom | tee {0} > kept && sync kept", kept.display());
    shell(&folder, &synced).succeeded();
    mount.kill();
    mount.remount(&scratch.join("third-home"));
    shell(&folder, &format!("cmp kept {}", kept.display())).succeeded();
    mount.unmount();
    assert_eq!(bucket.head(&ObjectKey::new("d/one")).await.expect("head").expect("there").size, 10_000_000);
    assert_eq!(staged(&bucket).await, 0, "nothing is left aside");
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
    mounts_writes_and_mounts_again(cloud).await;
}

/// moto keeps the objects, and an interpreter of ours speaks Google's dialect to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_google_bucket_is_mounted() {
    if require_fuse("a_google_bucket_is_mounted") {
        mounts_writes_and_mounts_again(Cloud::google_in_dialect()).await;
    }
}

/// One key that cannot be named made its whole directory one that could not be listed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_a_google_bucket_that_have_no_address_are_left_out() {
    let Some(cloud) = Cloud::google() else { return };
    let bucket = cloud.bucket("data/set").await;
    for key in ["d/plain", "d//inner", "d/./inner", "d/sub/file", "d/twice//"] {
        cloud.put_json(&bucket, key, "");
    }
    let below = bucket.list("d").map_ok(|object| object.key).try_collect::<Vec<_>>().await.expect("list");
    assert_eq!(below.iter().map(ObjectKey::as_str).collect::<Vec<_>>(), ["d/plain", "d/sub/file"]);
    let page = bucket.list_directory("d").await.expect("a directory");
    assert_eq!(page.directories, ["sub", "twice"]);
    assert_eq!(page.objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), ["d/plain"]);
}

/// A pod's login that nobody here understands was "no variant" of something, and kept public buckets from being read as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_federated_login_to_google_is_told_and_a_public_bucket_needs_none() {
    let Some(cloud) = Cloud::google() else { return };
    let (scratch, url) = (Scratch::new(), cloud.create_bucket("data"));
    cloud.put_json(&cloud.bucket_at(&url).await, "a", "bytes");
    let login = scratch.join("federation.json");
    let text = r#"{"type": "external_account", "audience": "//iam.googleapis.com/projects/1", "token_url": "https://sts.googleapis.com",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "credential_source": {"file": "/var/run/token"}}"#;
    std::fs::write(&login, text).expect("writable");
    let mut settings = cloud.anonymous_settings();
    settings.options.insert("google_application_credentials".to_owned(), login.display().to_string());
    let bucket = Bucket::open(&url, &settings).await.expect("it needs no login");
    assert_eq!(whole(&bucket, "a").await, "bytes");
    settings.anonymous = false;
    let refused = Bucket::open(&url, &settings).await.expect_err("a login of another kind");
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    let variables = [("GOOGLE_APPLICATION_CREDENTIALS".to_owned(), login.display().to_string())];
    let line =
        ["doctor", &url.to_string(), "--read-only", "--state-dir", scratch.path().to_str().expect("text")];
    let told = Forebay::new(&scratch.join("home"), line).envs(&variables).run();
    for part in [
        "federation.json is a workload identity federation (`external_account`), which is not supported for gs://",
        "hint: on GKE, unset GOOGLE_APPLICATION_CREDENTIALS",
        "the key of a service account",
    ] {
        assert!(told.stdout.contains(part), "{part}: {told}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_azure_container_that_anybody_may_read_is_read_without_a_key() {
    let Some(cloud) = Cloud::azure() else { return };
    let url = cloud.create_public_bucket("data");
    let own = cloud.bucket_at(&url).await;
    for key in ["a", "d/b"] {
        own.put(&ObjectKey::new(key), "bytes".into(), Condition::Always).await.expect("put");
    }
    let bucket = Bucket::open(&url, &cloud.anonymous_settings()).await.expect("anybody may");
    assert_eq!(whole(&bucket, "d/b").await, "bytes");
    assert_eq!(bucket.list_directory("").await.expect("listed").directories, ["d"]);
    let closed = Bucket::open(&cloud.create_bucket("data"), &cloud.anonymous_settings()).await;
    closed.expect_err("nobody but its owner");
}

/// Google unpacks what is marked as compressed, unless it is told that the reader takes it so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_google_object_is_read_as_it_is_stored() {
    let Some(cloud) = Cloud::google() else { return };
    let bucket = cloud.bucket("data/set").await;
    let stored = "not what gzip would unpack";
    cloud.put_json(&bucket, "zipped&contentEncoding=gzip", stored);
    let (read, found) = bucket.get_whole(&ObjectKey::new("zipped")).await.expect("read");
    assert_eq!((read.as_ref(), found.size), (stored.as_bytes(), stored.len() as u64));
    let range = bucket.get(&found.key, Some(&found.version), 4..8).await.expect("a range");
    assert_eq!(range.as_ref(), b"what");
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
