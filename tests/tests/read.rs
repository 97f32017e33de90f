//! Reading a bucket that nobody prepared, with the programs people use.

use std::path::Path;

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, Condition};
use forebay_tests::s3::Server;
use forebay_tests::{Mount, Names, Scratch, assert_same_trees, require_fuse, sample_tree, shell};
use futures::StreamExt;

/// Promise S1: Every object of a bucket that nobody prepared is a file at the path its key spells, with the
/// object's bytes.
#[test]
fn cp_and_ls_out_of_an_unprepared_folder() {
    if !require_fuse("cp_and_ls_out_of_an_unprepared_folder") {
        return;
    }
    let scratch = Scratch::new();
    let (source, bucket) = (scratch.folder("source"), scratch.folder("bucket"));
    sample_tree(&source, Names::Keys);
    shell(&source, &format!("cp -a . {}", bucket.display())).succeeded();
    let url = format!("file://{}", bucket.display());
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &[], &[]);
    read_every_way(&source, mount.path(), &scratch.folder("copy"));
    mount.unmount();
}

/// Promise S2: A read-only mount writes nothing to the bucket.
#[test]
fn a_read_only_mount_leaves_the_bucket_alone() {
    if !require_fuse("a_read_only_mount_leaves_the_bucket_alone") {
        return;
    }
    let scratch = Scratch::new();
    let (source, bucket) = (scratch.folder("source"), scratch.folder("bucket"));
    sample_tree(&source, Names::Keys);
    shell(&source, &format!("cp -a . {}", bucket.display())).succeeded();
    let listing = || shell(&bucket, "find . -printf '%p %s %T@ %C@\\n' | sort").succeeded();
    let before = listing();
    let url = format!("file://{}", bucket.display());
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &["--read-only"], &[]);
    read_every_way(&source, mount.path(), &scratch.folder("copy"));
    let written = shell(mount.path(), "echo new > new-file");
    assert!(written.stderr.contains("Read-only file system"), "{written}");
    mount.unmount();
    assert_eq!(before, listing());
}

/// Promise S1: Every object of a bucket that nobody prepared is a file
/// Promise S2: A read-only mount writes nothing to the bucket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cp_and_ls_out_of_an_s3_bucket_that_may_only_be_read() {
    if !require_fuse("cp_and_ls_out_of_an_s3_bucket_that_may_only_be_read") {
        return;
    }
    let (scratch, server) = (Scratch::new(), Server::start());
    let source = scratch.folder("source");
    sample_tree(&source, Names::Keys);
    let bucket = server.bucket("data/set").await;
    upload(&source, &source, &bucket).await;
    let listing = async || bucket.list("").map(|info| info.expect("listing")).collect::<Vec<_>>().await;
    let before = listing().await;
    let url = bucket.url().to_string();
    let options = ["--read-only"];
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &options, &server.envs());
    read_every_way(&source, mount.path(), &scratch.folder("copy"));
    mount.unmount();
    assert_eq!(before, listing().await);
}

/// Puts every file below `folder` at its path from `root`.
async fn upload(root: &Path, folder: &Path, bucket: &Bucket) {
    for entry in std::fs::read_dir(folder).expect("folder").map(|entry| entry.expect("entry").path()) {
        if entry.is_dir() {
            Box::pin(upload(root, &entry, bucket)).await;
            continue;
        }
        let key = entry.strip_prefix(root).expect("below the root").to_str().expect("sample names are text");
        let bytes = std::fs::read(&entry).expect("file").into();
        bucket.put(&ObjectKey::new(key), bytes, Condition::Always).await.expect("put");
    }
}

/// Copies, lists and sums `mounted` and compares all of it with `source`.
fn read_every_way(source: &Path, mounted: &Path, copy: &Path) {
    shell(mounted, "tar -cf - . | tar -t > /dev/null").succeeded();
    shell(mounted, &format!("cp -a . {}", copy.display())).succeeded();
    assert_same_trees(source, copy, false);
    assert_same_trees(source, mounted, false);
    let names = |folder: &Path| shell(folder, "ls -AR . | grep -v '^total'").succeeded();
    assert_eq!(names(source), names(mounted));
    let sums =
        |folder: &Path| shell(folder, "find . -type f -print0 | sort -z | xargs -0 md5sum").succeeded();
    assert_eq!(sums(source), sums(mounted));
    shell(mounted, "ls -lR . > /dev/null").succeeded();
}
