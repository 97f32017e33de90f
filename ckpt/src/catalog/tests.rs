//! What somebody else put into a run's place is refused as what it is, however long it is.

use std::path::Path;

use forebay_core::{Error, ErrorKind, ObjectKey, Result};
use forebay_io::object::{Bucket, StoreSettings};

use super::*;
use crate::manifest::Manifest;
use crate::verify::verify;

/// More than any host has memory, and no block of a disk.
const ENDLESS: u64 = 1 << 40;

/// A file that is a hole from front to back, in the place of an object.
fn put_endless(directory: &Path, key: &ObjectKey) {
    let path = directory.join(key.as_str());
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
    std::fs::File::create(path).and_then(|file| file.set_len(ENDLESS)).expect("a sparse file");
}

/// That it is damaged, and why.
fn expect_too_long<T>(read: Result<T>) {
    let error = read.err().expect("too long");
    let fact = format!("has {ENDLESS} bytes, more than");
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains(&fact), "{error}");
}

/// Memory was taken for all of an object's length before anybody looked at it: the process was aborted, and no earlier step
/// restored in its place.
#[tokio::test]
async fn an_object_longer_than_any_of_its_kind_is_damaged_and_is_not_read() {
    let directory = tempfile::tempdir().expect("directory");
    let url = format!("file://{}", directory.path().display()).parse().expect("url");
    let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("open");
    let start = Start { nonce: "ab".repeat(16), host: "h".into(), pid: 1, started_ms: 0 };
    let run = begin_run(&bucket, start.clone()).await.expect("run");
    let manifest = |step| Manifest {
        commit: "c0".repeat(16),
        run: run.run.clone(),
        incarnation: run.incarnation,
        step,
        created_ms: 0,
        world_size: 2,
        parents: Vec::new(),
        shards: Vec::new(),
        tensors: Vec::new(),
        extras: Vec::new(),
    };
    commit(&bucket, &run, &manifest(1)).await.expect("commit");
    let damaged = run.save(2);
    put_endless(directory.path(), &damaged.object());

    expect_too_long(load_manifest(&bucket, &damaged).await);
    expect_too_long(commit(&bucket, &run, &manifest(2)).await);
    let findings = verify(&bucket, None, &|_| {}).await.expect("looked");
    assert!(matches!(&findings[..], [finding] if finding.step == 2), "{findings:?}");
    expect_too_long::<()>(Err(Error::from(&findings[0])));
    load_manifest(&bucket, &run.save(1)).await.expect("the earlier one");

    let save = run.save(3);
    for (rank, note) in [(0, Note::Index), (1, Note::Intent), (1, Note::Failed(None))] {
        let key = RankKey { save: save.clone(), rank, note };
        put_endless(directory.path(), &key.object());
        match note {
            Note::Failed(_) => {
                let why = failure_of(&bucket, &key).await.expect("some reason");
                assert!(why.contains("more than"), "{why}");
            }
            _ => expect_too_long(ranks::shards_of_note(&bucket, &key).await),
        }
    }
    expect_too_long(merge_ranks(&bucket, &save, 2, &"c0".repeat(16), &mut None).await);

    put_endless(directory.path(), &incarnation_key(7));
    expect_too_long(newest_run(&bucket).await);
    let found = find_run(&bucket, &start.nonce).await.expect("passed over");
    assert_eq!(found.expect("the start").incarnation, run.incarnation);
}
