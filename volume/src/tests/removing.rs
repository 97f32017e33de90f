//! Files that cannot be written any more are removed and replaced all the same.

use forebay_core::units::MIB;
use forebay_core::{ErrorKind, InodeId};
use forebay_io::object::{Bucket, FaultMode, Faults, OperationKind};
use forebay_metadata::tree::RenameMode;

use super::support::{Fixture, READ_WRITE, create, object, pattern, run, until};
use crate::{Access, File, Volume};

const ROOT: InodeId = InodeId::ROOT;

/// A file whose upload is running, and will be refused.
async fn doomed(volume: &std::sync::Arc<Volume>, name: &str, faults: &Faults) -> std::sync::Arc<File> {
    let file = create(volume, name).await;
    for at in 0..10 {
        file.write(at * MIB, pattern(1, at * MIB..(at + 1) * MIB)).await.expect("write");
    }
    faults.script(OperationKind::Complete, 1, FaultMode::Deny);
    file
}

/// What an upload failed with came out of unlink and rename, and the file stayed.
#[test]
fn a_file_whose_upload_fails_is_removed_and_replaced() {
    run(async {
        let faults = Faults::new();
        let fixture = Fixture::new(Bucket::in_memory().with_faults(&faults));
        let volume = fixture.open().await;
        let removed = doomed(&volume, "removed", &faults).await;
        volume.unlink(ROOT, b"removed").await.expect("unlinked");
        let replaced = doomed(&volume, "replaced", &faults).await;
        let other = create(&volume, "other").await;
        other.write(0, "other".into()).await.expect("write");
        let (from, to) = ((ROOT, &b"other"[..]), (ROOT, &b"replaced"[..]));
        volume.rename(from, to, RenameMode::Replace).await.expect("renamed");
        for file in [removed, replaced] {
            let told = file.flush().await.expect_err("the loss is told to those who wrote");
            assert_eq!(told.kind(), ErrorKind::Denied);
            file.release().await.expect("release");
        }
        other.release().await.expect("release");
        volume.close().await.expect("close");
        assert_eq!(object(&fixture.bucket, "replaced").await, "other");
    });
}

/// An open that failed left a handle and a writer behind, for which everything waited from then on.
#[test]
fn an_open_that_cannot_empty_the_file_leaves_nothing_behind() {
    run(async {
        let faults = Faults::new();
        let fixture = Fixture::new(Bucket::in_memory().with_faults(&faults));
        let volume = fixture.open().await;
        let file = doomed(&volume, "f", &faults).await;
        let emptied = volume.open(file.ino(), Access { truncate: true, ..READ_WRITE }).await;
        assert_eq!(emptied.expect_err("the upload is refused").kind(), ErrorKind::Denied);
        let inode = volume.open_inodes().pop().expect("one handle");
        file.flush().await.expect_err("the loss is told to those who wrote");
        file.release().await.expect("release");
        assert!(!inode.has_writers());
        // It may have been sealed behind its last handle.
        volume.close().await.expect("close");
        assert_eq!(volume.open_inodes().len(), 0);
    });
}

/// What a program writes to a file that it has removed already, as those for temporary data are, was uploaded when it was closed, and stayed
/// in the bucket for a day.
#[test]
fn what_is_written_to_a_removed_file_is_not_uploaded() {
    run(async {
        for keeps in [false, true] {
            let fixture =
                Fixture { trash_ms: if keeps { 3_600_000 } else { 0 }, ..Fixture::new(Bucket::in_memory()) };
            let volume = fixture.open().await;
            let (file, other) = (create(&volume, "f").await, create(&volume, "other").await);
            volume.unlink(ROOT, b"f").await.expect("unlinked");
            let before = fixture.bucket.counters();
            file.write(0, "temporary".into()).await.expect("write");
            file.flush().await.expect("closed");
            file.fsync().await.expect("fsync");
            assert_eq!(file.read(0, 100).await.expect("read"), "temporary");
            let copy = volume.open(file.ino(), READ_WRITE).await.expect("by its descriptor");
            assert_eq!(copy.read(0, 100).await.expect("read"), "temporary");
            copy.write(0, "T".into()).await.expect("write");
            for handle in [file, copy] {
                handle.flush().await.expect("closed");
                handle.release().await.expect("release");
            }
            other.flush().await.expect("closed");
            other.release().await.expect("release");
            let puts = fixture.bucket.counters().since(&before).of(OperationKind::Put).requests;
            assert_eq!(puts > 1, keeps, "{puts} puts: that of the other file, and of what goes to the trash");
            until("nobody has them open", async || volume.open_inodes().is_empty()).await;
            volume.close().await.expect("close");
        }
    });
}
