//! Files that other mounts write to as well.

use bytes::Bytes;
use forebay_core::{ErrorKind, FileLayout};
use forebay_io::object::Bucket;
use forebay_metadata::tree::resolve;

use super::support::{Fixture, READ_WRITE, create, open, run};

/// Where other mounts write to the tree, a file that is open shows what they commit, unless it is being written here; what was
/// committed here and is lost with the process that served the tree is told to each handle once.
#[test]
fn what_other_mounts_commit_is_shown_and_what_is_lost_is_told() {
    run(async {
        let fixture = Fixture { is_unlucky: true, ..Fixture::new(Bucket::in_memory()) };
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, Bytes::from_static(b"one")).await.expect("write");
        file.flush().await.expect("committed");
        let ino = resolve(&**volume.tree(), "f").await.expect("the file").ino;
        // It cannot be asked right after a commit.
        let layout = async || match volume.tree().layout(ino).await {
            Err(_) => volume.tree().layout(ino).await.expect("a layout"),
            Ok(found) => found,
        };
        let (first, generation) = layout().await;
        let other = open(&volume, "f", READ_WRITE).await;
        file.write(0, Bytes::from_static(b"two")).await.expect("write");
        let inode = volume.open_inodes().remove(0);
        let show =
            |layout: &FileLayout, generation: u64| *fixture.older.lock() = Some((layout.clone(), generation));
        show(&first, generation + 5);
        inode.catch_up_with_others().await;
        assert_eq!(file.read(0, 9).await.expect("read"), &b"two"[..], "it is being written");
        *fixture.older.lock() = None;
        file.flush().await.expect("committed");
        let (second, newest) = layout().await;
        show(&first, generation);
        inode.catch_up_with_others().await;
        assert_eq!(other.read(0, 9).await.expect("read"), &b"one"[..]);
        for handle in [&file, &other] {
            let told = handle.fsync().await.expect_err("lost");
            assert_eq!(told.kind(), ErrorKind::Unavailable, "{told}");
            handle.fsync().await.expect("told once");
        }
        show(&second, newest);
        inode.catch_up_with_others().await;
        assert_eq!(other.read(0, 9).await.expect("read"), &b"two"[..]);
        *fixture.older.lock() = None;
        for handle in [file, other] {
            handle.release().await.expect("release");
        }
    });
}

/// A copy is of what other mounts committed, also where they did while the file was being sealed here, and was not looked at.
#[test]
fn a_copy_is_of_what_other_mounts_committed() {
    run(async {
        let fixture = Fixture::new(Bucket::in_memory());
        let volume = fixture.open().await;
        for (name, content) in [("f", &b"one"[..]), ("other", b"longer text")] {
            let file = create(&volume, name).await;
            file.write(0, Bytes::from_static(content)).await.expect("write");
            file.flush().await.expect("committed");
            file.release().await.expect("release");
        }
        let (file, copy) = (open(&volume, "f", READ_WRITE).await, create(&volume, "copy").await);
        let number = async |name| resolve(&**volume.tree(), name).await.expect("the file").ino;
        let (ino, lender) = (number("f").await, number("other").await);
        let (_, generation) = volume.tree().layout(ino).await.expect("a layout");
        let (layout, _) = volume.tree().layout(lender).await.expect("a layout");
        let now = fixture.clock.wall();
        volume.tree().commit_shared(ino, generation, layout, now, lender).await.expect("committed elsewhere");
        let inode = volume.open_inodes().into_iter().find(|inode| inode.ino() == ino).expect("it is open");
        let turn = inode.turn().await;
        inode.catch_up_with_others().await;
        drop(turn);
        assert_eq!(copy.share(&file, 0..100, 0).await.expect("shared"), 11);
        assert_eq!(copy.read(0, 100).await.expect("read"), &b"longer text"[..]);
        for handle in [file, copy] {
            handle.release().await.expect("release");
        }
    });
}
