//! Buckets of Google's and Azure's stores, mounted.

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, Condition};
use forebay_tests::cloud::Cloud;
use forebay_tests::{Mount, Names, Scratch, assert_same_trees, require_fuse, sample_tree, shell};

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
