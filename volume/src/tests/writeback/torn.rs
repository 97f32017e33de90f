//! Staged files that are not what was written: torn by a failure of power, damaged, or not to be read at all.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use forebay_core::units::KIB;
use forebay_core::{ErrorKind, InodeId};
use forebay_metadata::tree::resolve;

use super::super::support::{Fixture, READ, create, object, open, pattern};
use super::{LATER, drain, fixture, owned, read, run, write};
use crate::Volume;
use crate::settings::SealPolicy;
use crate::staging::{Staged, Staging};

fn folder(fixture: &Fixture) -> PathBuf {
    fixture.writeback.as_ref().expect("it writes back").0.path().join("staging")
}

/// The files of staged blobs.
fn files(fixture: &Fixture) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder(fixture)).expect("a folder");
    let paths = entries.map(|entry| entry.expect("entry").path());
    paths.filter(|path| path.file_name().is_some_and(|name| name.len() > 16)).collect()
}

/// The file with the staged bytes of `name`.
async fn file_of(fixture: &Fixture, volume: &Arc<Volume>, name: &str) -> PathBuf {
    let ino = resolve(&**volume.tree(), name).await.expect("the file").ino;
    volume.staging().expect("it writes back").settle(ino);
    let ready = volume.staging().expect("it writes back").ready(ino);
    let [(key, _)] = ready.as_slice() else { panic!("{name}: {ready:?}") };
    folder(fixture)
        .join(key.as_str().strip_prefix(".forebay/blobs/").expect("an owned key").replace('/', "-"))
}

/// Flips a bit of the data.
fn damage(path: &PathBuf) {
    let mut bytes = fs::read(path).expect("read");
    bytes[70_000] ^= 1;
    fs::write(path, bytes).expect("written");
}

/// Promise S67: What was uploaded before is read from the bucket, whatever a failure of power brings back on the disk.
///
/// A blob was uploaded under its own key and its file deleted; power failed, and the local file system had the file again,
/// empty, torn or with other bytes: the file in the bucket could not be read on this host any more.
#[test]
fn a_staged_file_that_comes_back_torn_hides_nothing_of_the_bucket() {
    run(async {
        let mut fixture = fixture(LATER);
        fixture.write.seal = SealPolicy::Never;
        let volume = fixture.open().await;
        write(&volume, "f", pattern(1, 0..300 * KIB)).await;
        let path = file_of(&fixture, &volume, "f").await;
        let whole = fs::read(&path).expect("read");
        volume.bring_all_in().await.expect("it is uploaded");
        volume.close().await.expect("close");
        assert_eq!((owned(&fixture.bucket).await, files(&fixture).len()), (1, 0));

        let mut flipped = whole.clone();
        flipped[70_000] ^= 1;
        for (torn, what) in
            [(&whole[..0], "empty"), (&whole[..150_000], "cut short"), (&flipped[..], "other")]
        {
            fs::write(&path, torn).expect("written");
            let volume = fixture.open().await;
            assert!(read(&volume, "f").await == pattern(1, 0..300 * KIB), "{what}");
            drain(&volume).await;
            assert!(read(&volume, "f").await == pattern(1, 0..300 * KIB), "{what}");
            volume.close().await.expect("close");
            assert_eq!(files(&fixture).len(), 0, "{what}");
        }
        assert_eq!(owned(&fixture.bucket).await, 1);
    });
}

/// Promise S64: That mount says why, if some of them stay there.
///
/// The first that was damaged kept all others from the host that had the volume.
#[test]
fn one_damaged_file_keeps_no_other_from_the_next_host() {
    run(async {
        let mut fixture = fixture(LATER);
        let volume = fixture.open().await;
        for number in 0..3 {
            let file = create(&volume, &format!("f{number}")).await;
            file.write(0, pattern(number, 0..300 * KIB)).await.expect("write");
            file.fsync().await.expect("fsync");
            file.release().await.expect("release");
        }
        damage(&file_of(&fixture, &volume, "f0").await);
        volume.close().await.expect("close");

        let here = fixture.writeback.take();
        let volume = fixture.open().await;
        let staging = here.as_ref().expect("a folder").0.path().join("staging");
        let staging = Staging::open(staging, fixture.bucket.url(), 0, volume.clock().clone()).await;
        let staging = staging.expect("it is free");
        let told = crate::staging::upload_all(&staging, &fixture.bucket).await.expect_err("one is damaged");
        assert_eq!(told.kind(), ErrorKind::Corrupt, "{told}");
        for number in 1..3 {
            assert!(read(&volume, &format!("f{number}")).await == pattern(number, 0..300 * KIB), "f{number}");
        }
        let file = open(&volume, "f0", READ).await;
        file.read(0, 10).await.expect_err("it is damaged");
        file.release().await.expect("release");
        let told = crate::staging::upload_all(&staging, &fixture.bucket).await.expect_err("it still is");
        assert_eq!(told.kind(), ErrorKind::Corrupt, "{told}");
        staging.close();
        volume.close().await.expect("close");
    });
}

/// Promise S67: and nothing else waits for them.
///
/// A staged file that could not be read kept the volume from being opened.
#[test]
fn a_staged_file_that_cannot_be_read_keeps_nothing_else() {
    run(async {
        let fixture = fixture(LATER);
        let volume = fixture.open().await;
        for number in 0..2 {
            write(&volume, &format!("f{number}"), pattern(number, 0..300 * KIB)).await;
        }
        let path = file_of(&fixture, &volume, "f0").await;
        volume.close().await.expect("close");
        let aside = folder(&fixture).with_file_name("aside");
        fs::rename(&path, &aside).expect("renamed");
        fs::create_dir(&path).expect("a directory");

        let volume = fixture.open().await;
        assert_eq!((volume.staged().files, volume.staged().damaged), (1, 1));
        let told = volume.drain(|_| {}).await.expect_err("bytes are lost");
        assert_eq!(told.kind(), ErrorKind::Corrupt, "{told}");
        assert!(object(&fixture.bucket, "f1").await == pattern(1, 0..300 * KIB));
        let file = open(&volume, "f0", READ).await;
        file.read(0, 10).await.expect_err("its bytes are not here");
        file.release().await.expect("release");
        volume.close().await.expect("close");

        // A disk that fails for a time: what it has was kept.
        fs::remove_dir(&path).and_then(|()| fs::rename(&aside, &path)).expect("it is back");
        let volume = fixture.open().await;
        drain(&volume).await;
        assert!(object(&fixture.bucket, "f0").await == pattern(0, 0..300 * KIB));
        volume.unlink(InodeId::ROOT, b"f0").await.expect("unlink");
        assert_eq!(volume.staged(), Staged::default());
        volume.close().await.expect("close");
    });
}
