//! Dumps and loads beside staged bytes: a dump names nothing that is on this host only, and a load takes nothing away.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use forebay_core::units::KIB;
use forebay_core::{Error, ErrorKind, InodeId};
use forebay_metadata::commit::{Committer, CommitterSettings};
use forebay_metadata::dump;
use forebay_metadata::kv::MemEngine;
use forebay_metadata::schema::Keys;

use super::super::support::{Fixture, VOLUME, pattern, run};
use super::{LATER, drain, fixture, read, write};
use crate::backup::LoadOptions;
use crate::settings::VolumeSettings;
use crate::upkeep::{Report, Request, upkeep};
use crate::volume::local;
use crate::{Volume, dumping};

const FORCE: LoadOptions = LoadOptions { force: true, of_another_volume: false };

async fn dumped(volume: &Volume, file: &Path) -> Result<(), Error> {
    match upkeep(volume, &Request::Dump { file: file.to_owned() }).await? {
        Report::Dump(_) => Ok(()),
        other => panic!("{other:?}"),
    }
}

/// Replaces the tree by a dump, as on another day and another host: nothing is staged there.
async fn load(fixture: &Fixture, file: &Path) -> Arc<Volume> {
    let committer = Committer::start(Arc::new(MemEngine::open(&fixture.store)), CommitterSettings::default());
    let from = File::open(file).expect("a dump");
    dump::load(&committer, Keys(VOLUME), from, FORCE).await.expect("loaded");
    committer.close().await.expect("closed");
    fixture.open().await
}

fn names(folder: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("entry").file_name());
    names.map(|name| name.to_string_lossy().into_owned()).collect()
}

/// The dump of a mount named the staged blobs of packed files, which came to the bucket in a segment: once it was loaded, all
/// three were gone.
#[test]
fn a_mount_brings_in_what_is_staged_before_it_dumps() {
    run(async {
        let (fixture, scratch) = (fixture(LATER), tempfile::tempdir().expect("scratch"));
        let file = scratch.path().join("dump");
        let volume = fixture.open().await;
        local(&volume).expect("local").set_packed(InodeId::ROOT, true).await.expect("packed");
        for number in 0..3 {
            write(&volume, &format!("f{number}"), pattern(number, 0..10 * KIB)).await;
        }
        assert_eq!(volume.staged().files, 3);
        dumped(&volume, &file).await.expect("dumped");
        drain(&volume).await;
        volume.close().await.expect("close");
        let volume = load(&fixture, &file).await;
        for number in 0..3 {
            assert!(read(&volume, &format!("f{number}")).await == pattern(number, 0..10 * KIB));
        }
        volume.close().await.expect("close");
    });
}

/// What writers stage after all was brought in, before or after a look at what is staged, is not named either.
#[test]
fn a_dump_beside_writers_names_nothing_that_is_staged() {
    run(async {
        let (fixture, scratch) = (fixture(LATER), tempfile::tempdir().expect("scratch"));
        let file = scratch.path().join("dump");
        let volume = fixture.open().await;
        let mut times = 0;
        let told = dumping::dump(&volume, &file, async || {
            times += 1;
            if times % 2 == 1 {
                write(&volume, "before", pattern(times, 0..KIB)).await;
            }
        });
        assert_eq!(told.await.expect_err("it is staged each time").kind(), ErrorKind::Unavailable);
        assert_eq!((times, names(scratch.path()).len()), (8, 0), "it gives up, and leaves nothing");
        let mut times = 0;
        let told = dumping::dump(&volume, &file, async || {
            times += 1;
            if times % 2 == 0 {
                write(&volume, "after", pattern(times, 0..KIB)).await;
                volume.bring_all_in().await.expect("brought in");
            }
        });
        assert_eq!(told.await.expect_err("it may be in the tree").kind(), ErrorKind::Unavailable);
        let mut times = 0;
        let dumped = dumping::dump(&volume, &file, async || {
            times += 1;
            if times <= 4 {
                write(&volume, "once", pattern(times, 0..KIB)).await;
            }
        });
        dumped.await.expect("they write no more");
        assert_eq!((times, names(scratch.path())), (6, ["dump".to_owned()].into()));
        drain(&volume).await;
        volume.close().await.expect("close");
        let volume = load(&fixture, &file).await;
        assert!(read(&volume, "once").await == pattern(4, 0..KIB));
        volume.close().await.expect("close");
    });
}

/// Bytes that are lost never come to the bucket: no dump waits for them, nor names them. A refused one left an empty file,
/// which refused the next try.
#[test]
fn a_dump_that_would_name_damaged_bytes_is_refused_and_leaves_no_file() {
    run(async {
        let (fixture, scratch) = (fixture(LATER), tempfile::tempdir().expect("scratch"));
        let folder = fixture.writeback.as_ref().expect("it writes back").0.path().join("staging");
        let file = scratch.path().join("dump");
        let volume = fixture.open().await;
        write(&volume, "f", pattern(1, 0..KIB)).await;
        let staged = names(&folder).into_iter().find(|name| name.contains('-')).expect("a staged file");
        volume.close().await.expect("close");
        fs::write(folder.join(staged), "damaged").expect("written");
        let volume = fixture.open().await;
        assert_eq!(volume.staged().damaged, 1);
        let told = dumped(&volume, &file).await.expect_err("it is damaged");
        assert_eq!(told.kind(), ErrorKind::Corrupt, "{told}");
        assert!(names(scratch.path()).is_empty());
        volume.unlink(InodeId::ROOT, b"f").await.expect("unlink");
        dumped(&volume, &file).await.expect("nothing is lost any more");
        let told = dumped(&volume, &file).await.expect_err("it is there");
        assert_eq!(told.kind(), ErrorKind::Exists, "{told}");
        assert!(told.hint().is_some_and(|hint| hint.contains("a new file only")), "{told:?}");
        assert_eq!(names(scratch.path()), ["dump".to_owned()].into());
        volume.close().await.expect("close");
    });
}

/// `load --force` over staged bytes: the next mount found nothing that refers to them, and deleted them. Nor is anything adopted.
#[test]
fn a_load_is_refused_while_bytes_are_staged() {
    run(async {
        let scratch = tempfile::tempdir().expect("scratch");
        fs::create_dir(scratch.path().join("bucket")).expect("a bucket");
        let source = format!("file://{}", scratch.path().join("bucket").display());
        let state_directory = scratch.path().join("state");
        let settings = VolumeSettings {
            state_directory: state_directory.clone(),
            writeback: LATER,
            ..VolumeSettings::default()
        };
        let file = scratch.path().join("dump");
        let volume = crate::connect(&source, settings.clone()).await.expect("a volume");
        dumped(&volume, &file).await.expect("nothing is staged");
        write(&volume, "f", pattern(1, 0..KIB)).await;
        volume.close().await.expect("close");
        let folder = fs::read_dir(state_directory.join("staging")).expect("staged").next();
        let folder = folder.expect("one").expect("entry").path();
        let before = names(&folder);
        for force in [false, true] {
            let from = File::open(&file).expect("a dump");
            let options = LoadOptions { force, ..FORCE };
            let told = crate::backup::load(&source, &settings, from, options).await.expect_err("staged");
            assert_eq!(told.kind(), ErrorKind::Unavailable, "{told}");
            assert!(told.hint().is_some_and(|hint| hint.contains(&*folder.to_string_lossy())), "{told:?}");
        }
        let told = crate::backup::adopt(&source, &settings).await.expect_err("staged");
        assert_eq!(told.kind(), ErrorKind::Unavailable, "{told}");
        // Nor is a copy of the bucket adopted here, of which they are not.
        let copy = scratch.path().join("copy");
        fs::create_dir_all(copy.join(".forebay/tree.lmdb")).expect("made");
        for name in [".forebay/volume.json", ".forebay/tree.lmdb/data.mdb"] {
            fs::copy(scratch.path().join("bucket").join(name), copy.join(name)).expect("copied");
        }
        let copy = format!("file://{}", copy.display());
        let told = crate::backup::adopt(&copy, &settings).await.expect_err("another's");
        assert!(told.message().contains("that are not uploaded yet"), "{told}");
        assert_eq!(names(&folder), before);
        let volume = crate::connect(&source, settings).await.expect("a volume");
        assert!(read(&volume, "f").await == pattern(1, 0..KIB));
        drain(&volume).await;
        volume.close().await.expect("close");
    });
}
