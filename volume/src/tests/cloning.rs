//! Clones through a volume: what is being written goes with them, and who loses interest leaves nothing.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::units::{KIB, MIB};
use forebay_core::{ErrorKind, FileKind, InodeId};
use forebay_io::clock::Clock;
use forebay_io::object::Bucket;
use forebay_metadata::tree::{Existing, NewInode, resolve};
use tokio_util::sync::CancellationToken;

use super::support::{Fixture, READ_WRITE, create, pattern, run};
use crate::clone::clone;
use crate::staging::{Staged, WritebackSettings};
use crate::warmup::Progress;
use crate::{File, Volume};

const FILES: u64 = 30;

fn new(kind: FileKind) -> NewInode {
    NewInode { kind, mode: 0o755, umask: 0, uid: 0, gid: 0, rdev: 0, target: Bytes::new() }
}

/// A directory `d` of files that are open and hold bytes which nobody has committed.
async fn written(volume: &Arc<Volume>) -> Vec<Arc<File>> {
    let directory = new(FileKind::Directory);
    let made = volume.tree().create(InodeId::ROOT, b"d", directory, Existing::Refuse).await;
    let parent = made.expect("a directory").0.ino;
    let mut files = Vec::new();
    for number in 0..FILES {
        let name = number.to_string();
        let made = volume.create(parent, name.as_bytes(), new(FileKind::File), Existing::Refuse, READ_WRITE);
        let file = made.await.expect("a file").1;
        file.write(0, pattern(number, 0..number * KIB)).await.expect("write");
        files.push(file);
    }
    files
}

async fn is_clean(volume: &Volume) {
    let tree = volume.tree().local().expect("it is served here");
    let report = tree.fsck(false).await.expect("checked");
    assert!(report.is_clean(), "{:?}", report.findings);
}

/// Ctrl-C tells the mount to stop after the first of many steps.
#[test]
fn a_clone_that_is_cancelled_leaves_nothing() {
    run(async {
        let fixture = Fixture { clone_step: 4, ..Fixture::new(Bucket::in_memory()) };
        let volume = fixture.open().await;
        for file in written(&volume).await {
            file.release().await.expect("release");
        }
        let before = volume.tree().statistics().await.expect("counts");
        let cancel = CancellationToken::new();
        let told = parking_lot::Mutex::new(Progress::default());
        let tell = |progress: Progress| {
            *told.lock() = progress;
            if progress.done_bytes > 0 {
                cancel.cancel();
            }
        };
        let cancelled = clone(&volume, ("d", "copy"), tell, &cancel).await.expect_err("cancelled");
        assert!(cancelled.to_string().contains("nothing was made"), "{cancelled}");
        let told = *told.lock();
        assert_eq!(told.files, FILES);
        assert!(told.done_bytes > 0 && told.done_bytes < told.bytes, "{told:?}");
        let missing = resolve(&**volume.tree(), "copy").await.expect_err("nothing is made");
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        assert_eq!(volume.tree().statistics().await.expect("counts"), before);
        is_clean(&volume).await;
        volume.close().await.expect("close");
    });
}

/// A store that took three seconds to have the bytes of a file was not waited for.
#[test]
fn what_is_about_to_be_replaced_is_waited_for_as_long_as_a_write_may_take() {
    run(async {
        let mut fixture = Fixture::new(Bucket::in_memory());
        fixture.clock = Clock::manual();
        fixture.write.deadline_ms = 10_000;
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, pattern(1, 0..KIB)).await.expect("write");
        file.release().await.expect("release");
        let ino = file.ino();
        volume.tree().place(ino, false).await.expect("it is about to be written");
        let (cancel, mut waited) = (CancellationToken::new(), Duration::ZERO);
        let mut cloning = pin!(clone(&volume, ("f", "copy"), |_| {}, &cancel));
        let refused = loop {
            tokio::select! {
                cloned = &mut cloning => break cloned.expect_err("it is never written"),
                () = tokio::time::sleep(Duration::from_millis(1)) => {
                    fixture.clock.advance(Duration::from_millis(50));
                    waited += Duration::from_millis(50);
                }
            }
        };
        assert_eq!(refused.kind(), ErrorKind::Conflict);
        assert!(waited >= Duration::from_secs(10), "{waited:?}");
        volume.close().await.expect("close");
    });
}

/// With `--writeback` a clone shares what is staged, also of files that are still open; it is uploaded later.
#[test]
fn staged_bytes_are_cloned_in_steps() {
    run(async {
        let settings =
            WritebackSettings { enabled: true, bytes: 1 << 40, delay_ms: 3_600_000, open_ms: 3_600_000 };
        let fixture = Fixture::new(Bucket::in_memory()).writing_back(settings);
        let fixture = Fixture { clone_step: 4, ..fixture };
        let volume = fixture.open().await;
        let files = written(&volume).await;
        let cancel = CancellationToken::new();
        let cloned = clone(&volume, ("d", "copy"), |_| {}, &cancel).await.expect("cloned");
        assert_eq!((cloned.files, cloned.bytes), (FILES, FILES * (FILES - 1) / 2 * KIB));
        for (number, file) in (0..).zip(&files) {
            file.write(0, pattern(100 + number, 0..number * KIB)).await.expect("write");
            file.release().await.expect("release");
        }
        for number in 0..FILES / 2 {
            let parent = resolve(&**volume.tree(), "d").await.expect("found").ino;
            volume.tree().unlink(parent, number.to_string().as_bytes()).await.expect("unlinked");
        }
        volume.drain(|_| {}).await.expect("drain");
        assert_eq!(volume.staged(), Staged::default());
        for number in 0..FILES {
            let found = resolve(&**volume.tree(), &format!("copy/{number}")).await.expect("found");
            let file = volume.open(found.ino, super::support::READ).await.expect("open");
            let bytes = file.read(0, u32::MAX).await.expect("read");
            assert!(bytes == pattern(number, 0..number * KIB), "copy/{number}");
            file.release().await.expect("release");
        }
        is_clean(&volume).await;
        volume.close().await.expect("close");
    });
}

/// Many short files that were put together, as `cat` does it by copy_file_range, were as many extents: a minute for a thousand.
#[test]
fn what_is_short_is_copied_rather_than_shared() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        let (source, target) = (create(&volume, "source").await, create(&volume, "target").await);
        source.write(0, pattern(1, 0..8 * MIB)).await.expect("write");
        source.fsync().await.expect("fsync");
        let (all, rest) = (0..u64::MAX, 8 * MIB - 1000..u64::MAX);
        assert!(target.pays_to_share(&source, &all, 0) && target.pays_to_share(&source, &(0..256 * KIB), 7));
        assert!(!target.pays_to_share(&source, &rest, 0), "a short part");
        let short = create(&volume, "short").await;
        short.write(0, pattern(3, 0..1000)).await.expect("write");
        assert!(target.pays_to_share(&short, &all, 0), "a whole file into a new one is one extent");
        assert!(!target.pays_to_share(&short, &all, 5), "a short file into another");
        target.write(0, pattern(1, 0..8 * MIB - 1000)).await.expect("write");
        assert!(
            target.pays_to_share(&source, &rest, rest.start),
            "the end of a file that is copied in order"
        );
        short.release().await.expect("release");
        for at in 0..500 {
            target.write(at * 100, pattern(2, 0..50)).await.expect("write");
        }
        assert!(!target.pays_to_share(&source, &(0..MIB), MIB), "one that has many extents already");
        assert!(target.pays_to_share(&source, &all, MIB));
        source.release().await.expect("release");
        target.release().await.expect("release");
        volume.close().await.expect("close");
    });
}
