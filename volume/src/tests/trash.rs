//! Bringing back what was deleted, where some of its names are taken by now.

use std::sync::Arc;

use forebay_core::{ErrorKind, FileKind, InodeId};
use forebay_io::object::{Bucket, OperationKind};
use forebay_metadata::tree::{Existing, NewInode, QuotaLimits, resolve};

use super::support::{Fixture, create, object, pattern, run};
use crate::Volume;
use crate::staging::WritebackSettings;
use crate::trash::{Report, Request, Restored, trash};
use crate::volume::local;

const ROOT: InodeId = InodeId::ROOT;

fn fixture() -> Fixture {
    Fixture { trash_ms: 3_600_000, ..Fixture::new(Bucket::in_memory()) }
}

async fn make(volume: &Arc<Volume>, parent: InodeId, name: &str, kind: FileKind) -> InodeId {
    let target = bytes::Bytes::new();
    let new = NewInode { kind, mode: 0o755, umask: 0, uid: 0, gid: 0, rdev: 0, target };
    volume.tree().create(parent, name.as_bytes(), new, Existing::Refuse).await.expect("made").0.ino
}

async fn restore(volume: &Volume, path: &str) -> Restored {
    let request = Request::Restore { path: path.into(), id: None, to: None };
    match trash(volume, &request).await.expect("restored") {
        Report::Restored(restored) => restored,
        other => panic!("{other:?}"),
    }
}

/// What lay below a directory whose name a file has by now ended the restoration of all that came after it.
#[test]
fn a_file_in_the_way_leaves_what_was_below_it_and_nothing_else() {
    run(async {
        let volume = fixture().open().await;
        let a = make(&volume, ROOT, "a", FileKind::Directory).await;
        let b = make(&volume, a, "b", FileKind::Directory).await;
        make(&volume, b, "c", FileKind::File).await;
        make(&volume, a, "z", FileKind::File).await;
        volume.unlink(b, b"c").await.expect("unlink");
        volume.unlink(a, b"z").await.expect("unlink");
        volume.tree().remove_directory(a, b"b").await.expect("rmdir");
        volume.tree().remove_directory(ROOT, b"a").await.expect("rmdir");
        let a = make(&volume, ROOT, "a", FileKind::Directory).await;
        make(&volume, a, "b", FileKind::File).await;

        let restored = restore(&volume, "a").await;
        assert_eq!(restored.refused, ["a/b", "a/b/c"]);
        assert_eq!((restored.files, restored.directories, restored.taken), (1, 0, 2));
        assert_eq!(resolve(&**volume.tree(), "a/z").await.expect("it came back").kind, FileKind::File);
        assert_eq!(resolve(&**volume.tree(), "a/b").await.expect("it stays").kind, FileKind::File);
        volume.unlink(a, b"b").await.expect("unlink");
        let restored = restore(&volume, "a/b/c").await;
        assert_eq!((restored.files, restored.taken), (1, 0), "it stayed in the trash: {restored:?}");
        resolve(&**volume.tree(), "a/b/c").await.expect("it came back");
        volume.close().await.expect("close");
    });
}

/// The first taken name past those that a report names ended the restoration.
#[test]
fn any_number_of_names_may_be_taken() {
    run(async {
        let volume = fixture().open().await;
        let names: Vec<String> = (0..1003).map(|number| format!("{number:04}")).collect();
        for name in &names {
            make(&volume, ROOT, name, FileKind::File).await;
            volume.unlink(ROOT, name.as_bytes()).await.expect("unlink");
        }
        let free = names.last().expect("some");
        for name in names.iter().filter(|name| *name != free) {
            make(&volume, ROOT, name, FileKind::File).await;
        }
        let restored = restore(&volume, "").await;
        assert_eq!((restored.files, restored.taken), (1, 1002));
        assert_eq!(restored.refused, names[..1000], "the first thousand are named");
        resolve(&**volume.tree(), free).await.expect("it came back");
        volume.close().await.expect("close");
    });
}

/// What came back before an error ended the restoration was neither durable nor told.
#[test]
fn an_error_tells_what_came_back_before_it() {
    run(async {
        let fixture = Fixture { tree_in_bucket: true, ..fixture() };
        let volume = fixture.open().await;
        for name in ["a", "b", "c"] {
            make(&volume, ROOT, name, FileKind::File).await;
            volume.unlink(ROOT, name.as_bytes()).await.expect("unlink");
        }
        let (tree, limits) = (local(&volume).expect("a tree"), QuotaLimits { bytes: None, inodes: Some(2) });
        tree.set_quota(ROOT, limits).await.expect("limited");
        let request = Request::Restore { path: String::new(), id: None, to: None };
        let before = fixture.bucket.counters();
        let told = trash(&volume, &request).await.expect_err("there is room for two");
        assert_eq!(told.kind(), ErrorKind::OverQuota, "{told}");
        assert!(told.to_string().starts_with("2 files and 0 directories came back, then"), "{told}");
        let asked = fixture.bucket.counters().since(&before);
        assert!(asked.of(OperationKind::Put).requests > 0, "what came back is durable: {asked:?}");
        volume.close().await.expect("close");
    });
}

/// A file that was deleted before its staged bytes were in the bucket, and brought back after they were, stayed without an
/// object at its path.
#[test]
fn what_was_staged_when_it_was_deleted_is_an_object_again() {
    let later = WritebackSettings { enabled: true, bytes: 1 << 40, delay_ms: 3_600_000, open_ms: 3_600_000 };
    run(async move {
        let fixture = fixture().writing_back(later);
        let volume = fixture.open().await;
        let file = create(&volume, "f").await;
        file.write(0, pattern(1, 0..10_000)).await.expect("write");
        file.flush().await.expect("close");
        file.release().await.expect("release");
        volume.unlink(ROOT, b"f").await.expect("unlink");
        volume.drain(|_| {}).await.expect("all is in the bucket");
        assert_eq!(restore(&volume, "f").await.files, 1);
        local(&volume).expect("a tree").drain().await.expect("drained");
        assert_eq!(object(&fixture.bucket, "f").await, pattern(1, 0..10_000));
        volume.close().await.expect("close");
    });
}
