//! Staged bytes that the disk does not give back.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::KIB;
use forebay_core::{ErrorKind, InodeId};
use forebay_io::clock::Clock;
use forebay_io::object::Bucket;

use super::super::REFUSES_SYNC;
use super::super::support::{Fixture, READ_WRITE, create, object, open, pattern, run};
use super::{LATER, read};
use crate::Access;

/// Most pauses of half a minute that a test waits for the tree.
const PAUSES: usize = 40;

/// A folder takes the place of each staged file: it can be opened, and not be read.
fn spoil(staging: &Path) {
    for entry in std::fs::read_dir(staging).expect("a folder") {
        let path = entry.expect("entry").path();
        if path.file_name().is_some_and(|name| name != "lock" && name != "bucket" && name != REFUSES_SYNC) {
            std::fs::remove_file(&path).expect("removed");
            std::fs::create_dir(&path).expect("a folder");
        }
    }
}

/// Promise S67: So are those that a disk neither keeps at fsync nor gives back when it is asked again for half a minute: fsync
/// or close of their file fails once with EIO, `forebay status` counts them, and nothing else waits for them.
///
/// They stopped the tree for good: no change of any file became durable any more, and past 32 MiB of them all waited.
#[test]
fn bytes_that_a_dead_disk_does_not_give_back_hold_up_nothing() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory()).writing_back(LATER);
        fixture.clock = Clock::manual();
        fixture.write.deadline_ms = 500;
        // Nothing is made durable before it is asked for.
        fixture.flush_interval = Duration::from_secs(3600);
        let folder = fixture.writeback.as_ref().expect("it writes back").0.path().join("staging");
        let volume = fixture.open().await;
        // Lists the directory.
        volume.lookup(InodeId::ROOT, b"f").await.expect("lookup");

        std::fs::write(folder.join(REFUSES_SYNC), "").expect("dead");
        let (lost, replaced) = (create(&volume, "lost").await, create(&volume, "replaced").await);
        for file in [&lost, &replaced] {
            file.write(0, pattern(1, 0..100 * KIB)).await.expect("write");
            file.flush().await.expect("staged");
        }
        assert_eq!(volume.staged().files, 2);
        spoil(&folder);
        let kept = create(&volume, "kept").await;
        kept.write(0, pattern(2, 0..100 * KIB)).await.expect("write");
        kept.flush().await.expect("close");

        let mut pauses = 0;
        while let Err(error) = kept.fsync().await {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(pauses < PAUSES, "it is held up: {error}");
            pauses += 1;
            fixture.clock.advance(Duration::from_secs(30));
        }
        assert!(pauses > 2, "the disk was asked more than once");
        let staged = volume.staged();
        assert_eq!(
            (staged.files, staged.damaged, staged.last_error),
            (0, 2, None),
            "the bucket has what the disk did not keep"
        );
        assert!(read(&volume, "kept").await == pattern(2, 0..100 * KIB));

        assert_eq!(lost.fsync().await.expect_err("its bytes are lost").kind(), ErrorKind::Corrupt);
        lost.fsync().await.expect("told once");
        assert_eq!(lost.read(0, 10).await.expect_err("its bytes are lost").kind(), ErrorKind::Corrupt);
        let again = open(&volume, "replaced", Access { truncate: true, ..READ_WRITE }).await;
        again.write(0, Bytes::from_static(b"again")).await.expect("write");
        again.fsync().await.expect("nothing of it is lost any more");
        for file in [lost, replaced, kept, again] {
            file.release().await.expect("release");
        }
        let drained = async || {
            let own = volume.clone();
            let drained = tokio::spawn(async move { own.drain(|_| {}).await });
            while !drained.is_finished() {
                fixture.clock.advance(Duration::from_secs(1));
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            drained.await.expect("it ends")
        };
        let told = drained().await.expect_err("a file is there that lost its bytes");
        assert!(told.kind() == ErrorKind::Corrupt && told.to_string().contains("1 staged blob"), "{told}");
        assert_eq!(volume.staged().files, 0, "nothing else is left");
        volume.unlink(InodeId::ROOT, b"lost").await.expect("unlink");
        drained().await.expect("nothing is lost any more");
        assert!(object(&fixture.bucket, "kept").await == pattern(2, 0..100 * KIB));
        assert_eq!(object(&fixture.bucket, "replaced").await, "again");
        volume.close().await.expect("close");
    });
}
