//! A bucket that was copied or moved, mounted with the state directory of the one before.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_core::units::KIB;
use forebay_core::{ErrorKind, InodeId};

use super::super::support::{create, pattern, run};
use super::{LATER, drain, read};
use crate::settings::VolumeSettings;

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        match entry.file_type().expect("a type").is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).expect("copied")),
        }
    }
}

fn url(path: &Path) -> String {
    format!("file://{}", path.display())
}

/// The files in the folders of staged bytes, but for the lock.
fn kept(state: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(state.join("staging")).expect("a folder");
    let files = folders.flat_map(|folder| fs::read_dir(folder.expect("entry").path()).expect("a folder"));
    files.map(|file| file.expect("entry").path()).filter(|path| !path.ends_with("lock")).collect()
}

/// Promise S61: What was staged for one bucket is kept for it: while some is left, another one, such as a copy of that
/// bucket, is not mounted with the same state directory.
///
/// A copy of a bucket is the same volume by its record. Mounted with the state directory of the original it found staged
/// bytes that its own tree did not refer to, and deleted them.
#[test]
fn a_copy_of_the_bucket_gets_nothing_of_what_the_original_has_staged() {
    run(async {
        let scratch = tempfile::tempdir().expect("scratch");
        let [original, other, moved] = ["original", "copy", "moved"].map(|name| scratch.path().join(name));
        fs::create_dir(&original).expect("a bucket");
        let state_directory = scratch.path().join("state");
        let settings = VolumeSettings {
            state_directory: state_directory.clone(),
            writeback: LATER,
            ..VolumeSettings::default()
        };
        let connect = async |path: &Path| crate::connect(&url(path), settings.clone()).await;
        let volume = connect(&original).await.expect("a volume");
        volume.lookup(InodeId::ROOT, b"f").await.expect("lookup");
        volume.close().await.expect("close");
        copy(&original, &other);
        let volume = connect(&original).await.expect("a volume");
        let file = create(&volume, "f").await;
        file.write(0, pattern(1, 0..100 * KIB)).await.expect("write");
        file.fsync().await.expect("fsync");
        file.release().await.expect("release");
        volume.close().await.expect("close");
        let before = kept(&state_directory);
        assert_eq!(before.len(), 2, "{before:?}");

        let told = connect(&other).await.expect_err("the bytes are the original's");
        assert_eq!(told.kind(), ErrorKind::Invalid, "{told}");
        let hint = told.hint().expect("a hint").to_owned();
        let words = format!("{told} {hint}");
        assert!(words.contains(&url(&original)) && words.contains(&url(&other)), "{words}");
        assert_eq!(kept(&state_directory), before);

        // The same by another way.
        let link = scratch.path().join("link");
        std::os::unix::fs::symlink(&original, &link).expect("a link");
        let volume = connect(&link).await.expect("it is the same bucket");
        assert!(read(&volume, "f").await == pattern(1, 0..100 * KIB));
        volume.close().await.expect("close");

        // Moved on purpose, as the hint says.
        fs::rename(&original, &moved).expect("moved");
        connect(&moved).await.expect_err("nobody knows that it was moved");
        let mark = before.iter().find(|path| path.ends_with("bucket")).expect("it says whose they are");
        assert!(hint.contains(&mark.display().to_string()), "{hint}");
        fs::remove_file(mark).expect("removed");
        let volume = connect(&moved).await.expect("it is taken for the same");
        assert!(read(&volume, "f").await == pattern(1, 0..100 * KIB));
        drain(&volume).await;
        volume.close().await.expect("close");
        assert!(fs::read(moved.join("f")).expect("an object") == pattern(1, 0..100 * KIB));

        // Nothing is staged any more: anybody may stage.
        connect(&other).await.expect("a volume").close().await.expect("close");
    });
}
