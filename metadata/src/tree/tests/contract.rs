//! What every tree promises, over every engine.

use bytes::Bytes;
use forebay_core::{Blob, ErrorKind, Extent, FileKind, FileLayout, InodeId, ObjectKey, Source, Version};

use super::world::*;
use crate::tree::{Existing, Lookup, RenameMode, SetAttributes, SetIds, Tree, XattrMode, resolve};

const ROOT: InodeId = InodeId::ROOT;

async fn make(tree: &dyn Tree, parent: InodeId, name: &str, kind: FileKind) -> InodeId {
    let made = tree.create(parent, name.as_bytes(), new_inode(kind), Existing::Refuse).await;
    made.expect("made").0.ino
}

async fn names_are_made_found_and_removed(tree: &dyn Tree) {
    assert_eq!(tree.lookup(ROOT, b"a").await.expect("lookup"), Lookup::Miss);
    let (file, is_new) = tree.create(ROOT, b"a", new_file(), Existing::Refuse).await.expect("create");
    assert!(is_new && file.ino != ROOT && file.nlink == 1 && file.mode == 0o644 && file.uid == 1);
    assert_eq!(tree.lookup(ROOT, b"a").await.expect("lookup"), Lookup::Found(file.clone()));
    assert_eq!(kind_of(tree.create(ROOT, b"a", new_file(), Existing::Refuse).await), ErrorKind::Exists);
    let again = tree.create(ROOT, b"a", new_file(), Existing::Accept).await.expect("accepted");
    assert_eq!(again, (file.clone(), false));
    let directory = make(tree, ROOT, "d", FileKind::Directory).await;
    let accepted = tree.create(ROOT, b"d", new_file(), Existing::Accept).await;
    assert_eq!(kind_of(accepted), ErrorKind::Exists);
    let inner = make(tree, directory, "inner", FileKind::Directory).await;
    assert_eq!(tree.attributes(directory).await.expect("attributes").nlink, 3);
    assert_eq!(tree.parent(inner).await.expect("parent"), directory);
    assert_eq!(tree.parent(ROOT).await.expect("parent"), ROOT);

    assert_eq!(kind_of(tree.unlink(ROOT, b"d").await), ErrorKind::IsDirectory);
    assert_eq!(kind_of(tree.remove_directory(ROOT, b"a").await), ErrorKind::NotDirectory);
    assert_eq!(kind_of(tree.remove_directory(ROOT, b"d").await), ErrorKind::NotEmpty);
    assert_eq!(kind_of(tree.unlink(ROOT, b"none").await), ErrorKind::NotFound);
    assert_eq!(kind_of(tree.lookup(file.ino, b"x").await), ErrorKind::NotDirectory);
    tree.remove_directory(directory, b"inner").await.expect("removed");
    assert_eq!(tree.attributes(directory).await.expect("attributes").nlink, 2);
    let gone = tree.remove_directory(ROOT, b"d").await.expect("removed").expect("told").attributes;
    assert_eq!((gone.ino, gone.kind, gone.nlink), (directory, FileKind::Directory, 0));
    let gone = tree.unlink(ROOT, b"a").await.expect("unlinked").expect("told").attributes;
    assert_eq!((gone.ino, gone.kind, gone.nlink), (file.ino, FileKind::File, 0));
    assert_eq!(kind_of(tree.attributes(file.ino).await), ErrorKind::NotFound);
    let next = make(tree, ROOT, "a", FileKind::File).await;
    assert!(![file.ino, directory, inner].contains(&next), "inode numbers are never used again");
    tree.unlink(ROOT, b"a").await.expect("unlinked");
    assert_eq!(tree.statistics().await.expect("statistics").inodes, 1);
}

async fn bad_names_are_refused(tree: &dyn Tree) {
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0"] {
        assert_eq!(kind_of(tree.create(ROOT, name, new_file(), Existing::Refuse).await), ErrorKind::Invalid);
        assert_eq!(kind_of(tree.lookup(ROOT, name).await), ErrorKind::Invalid);
    }
    let long = [b'n'; 256];
    assert_eq!(kind_of(tree.create(ROOT, &long, new_file(), Existing::Refuse).await), ErrorKind::NameTooLong);
    assert_eq!(
        kind_of(tree.create(ROOT, b".forebay", new_file(), Existing::Refuse).await),
        ErrorKind::Denied
    );
    assert_eq!(tree.lookup(ROOT, b".forebay").await.expect("lookup"), Lookup::Miss);
    for name in [&long[..255], b"\xff\xfe", b"a b#7"] {
        tree.create(ROOT, name, new_file(), Existing::Refuse).await.expect("any other byte is a name");
        tree.unlink(ROOT, name).await.expect("unlinked");
    }
}

async fn directories_are_read_in_pages(tree: &dyn Tree) {
    let mut made = Vec::new();
    for n in 0..10 {
        made.push((format!("f{n}"), make(tree, ROOT, &format!("f{n}"), FileKind::File).await));
    }
    let mut read = Vec::new();
    let mut after: Option<Bytes> = None;
    loop {
        let page = tree.read_directory(ROOT, after.as_deref(), 3).await.expect("page");
        assert!(page.entries.len() <= 3);
        let names =
            page.entries.iter().map(|e| (String::from_utf8_lossy(&e.name).into_owned(), e.attributes.ino));
        read.extend(names);
        after = page.entries.last().map(|entry| entry.name.clone());
        if page.complete {
            break;
        }
    }
    assert_eq!(read, made);
    assert_eq!(kind_of(tree.read_directory(made[0].1, None, 3).await), ErrorKind::NotDirectory);
    for (name, _) in made {
        tree.unlink(ROOT, name.as_bytes()).await.expect("unlinked");
    }
}

async fn links_share_one_inode(tree: &dyn Tree) {
    let file = make(tree, ROOT, "a", FileKind::File).await;
    let directory = make(tree, ROOT, "d", FileKind::Directory).await;
    assert_eq!(tree.link(file, directory, b"b").await.expect("link").nlink, 2);
    assert_eq!(kind_of(tree.link(file, directory, b"b").await), ErrorKind::Exists);
    assert_eq!(kind_of(tree.link(directory, ROOT, b"e").await), ErrorKind::Denied);
    assert_eq!(tree.link(file, ROOT, b"c").await.expect("link").nlink, 3);
    tree.rename((directory, b"b"), (ROOT, b"b"), RenameMode::Replace).await.expect("renamed");
    tree.unlink(ROOT, b"a").await.expect("unlinked");
    tree.rename((ROOT, b"b"), (ROOT, b"c"), RenameMode::Replace).await.expect("two names of one file");
    for name in [b"b", b"c"] {
        let attributes = found(tree, ROOT, name).await;
        assert_eq!((attributes.ino, attributes.nlink), (file, 2), "rename onto the same inode does nothing");
    }
    assert_eq!(tree.parent(file).await.expect("parent"), ROOT);
    assert_eq!(tree.unlink(ROOT, b"c").await.expect("unlinked"), None, "it has another name");
    let gone = tree.unlink(ROOT, b"b").await.expect("unlinked").expect("told").attributes;
    assert_eq!((gone.ino, gone.nlink), (file, 0));
    assert_eq!(kind_of(tree.link(file, ROOT, b"z").await), ErrorKind::NotFound);
    tree.remove_directory(ROOT, b"d").await.expect("removed");
}

async fn renames_follow_posix(tree: &dyn Tree) {
    let (a, d) =
        (make(tree, ROOT, "a", FileKind::File).await, make(tree, ROOT, "d", FileKind::Directory).await);
    let e = make(tree, d, "e", FileKind::Directory).await;
    let rename = |from, to, mode| async move { tree.rename(from, to, mode).await };
    use RenameMode::{Exchange, NoReplace, Replace};
    assert_eq!(kind_of(rename((ROOT, b"a"), (ROOT, b"d"), Replace).await), ErrorKind::IsDirectory);
    assert_eq!(kind_of(rename((ROOT, b"d"), (ROOT, b"a"), Replace).await), ErrorKind::NotDirectory);
    assert_eq!(kind_of(rename((ROOT, b"d"), (e, b"x"), Replace).await), ErrorKind::Invalid);
    assert_eq!(kind_of(rename((ROOT, b"d"), (d, b"e"), Exchange).await), ErrorKind::Invalid);
    assert_eq!(kind_of(rename((d, b"e"), (ROOT, b"d"), Exchange).await), ErrorKind::Invalid);
    assert_eq!(kind_of(rename((d, b"e"), (ROOT, b"d"), Replace).await), ErrorKind::NotEmpty);
    assert_eq!(kind_of(rename((ROOT, b"a"), (ROOT, b"d"), NoReplace).await), ErrorKind::Exists);
    assert_eq!(kind_of(rename((ROOT, b"a"), (ROOT, b"none"), Exchange).await), ErrorKind::NotFound);
    assert_eq!(kind_of(rename((ROOT, b"none"), (ROOT, b"x"), Replace).await), ErrorKind::NotFound);
    assert_eq!(kind_of(rename((ROOT, b"a"), (ROOT, b".forebay"), Replace).await), ErrorKind::Denied);
    rename((ROOT, b"a"), (d, b"a"), NoReplace).await.expect("moved");
    assert_eq!(found(tree, d, b"a").await.ino, a);
    rename((d, b"a"), (ROOT, b"d"), Exchange).await.expect_err("a parent cannot go below its child");
    let f = make(tree, ROOT, "f", FileKind::Directory).await;
    assert_eq!(rename((ROOT, b"f"), (d, b"a"), Exchange).await.expect("exchanged"), None);
    assert_eq!((found(tree, ROOT, b"f").await.ino, found(tree, d, b"a").await.ino), (a, f));
    assert_eq!(tree.attributes(d).await.expect("attributes").nlink, 4);
    assert_eq!(tree.attributes(ROOT).await.expect("attributes").nlink, 3);
    assert_eq!((tree.parent(f).await.expect("p"), tree.parent(a).await.expect("p")), (d, ROOT));
    let gone = rename((d, b"a"), (d, b"e"), Replace).await.expect("an empty directory is replaced");
    assert_eq!(gone.map(|gone| (gone.attributes.ino, gone.attributes.nlink)), Some((e, 0)));
    assert_eq!(kind_of(tree.attributes(e).await), ErrorKind::NotFound);
    assert_eq!(tree.attributes(d).await.expect("attributes").nlink, 3);
    let b = make(tree, ROOT, "b", FileKind::File).await;
    let gone = rename((ROOT, b"f"), (ROOT, b"b"), Replace).await.expect("a file is replaced");
    assert_eq!(gone.map(|gone| (gone.attributes.ino, gone.attributes.nlink)), Some((b, 0)));
    assert_eq!(kind_of(tree.attributes(b).await), ErrorKind::NotFound);
    assert_eq!(found(tree, ROOT, b"b").await.ino, a);
    tree.unlink(ROOT, b"b").await.expect("unlinked");
    tree.remove_directory(d, b"e").await.expect("removed");
    tree.remove_directory(ROOT, b"d").await.expect("removed");
    assert_eq!(tree.attributes(ROOT).await.expect("attributes").nlink, 2);
}

async fn attributes_are_set(tree: &dyn Tree) {
    let file = make(tree, ROOT, "a", FileKind::File).await;
    let set = |changes: SetAttributes| async move { tree.set_attributes(file, changes).await.expect("set") };
    let mode = |mode| SetAttributes { mode: Some(mode), ..SetAttributes::default() };
    assert_eq!(set(mode(0o6755)).await.mode, 0o6755);
    let owner = SetAttributes { uid: Some(9), ..SetAttributes::default() };
    assert_eq!(set(owner.clone()).await.mode, 0o755, "a new owner clears the set-id bits");
    set(mode(0o2644)).await;
    let owned = set(owner).await;
    assert_eq!((owned.mode, owned.uid, owned.gid), (0o2644, 9, 2), "but not the lock bit");
    set_ids_are_cleared(tree, file).await;
    let pipe = make(tree, ROOT, "p", FileKind::Fifo).await;
    let owner = SetAttributes { mode: Some(0o6755), uid: Some(9), ..SetAttributes::default() };
    tree.set_attributes(pipe, SetAttributes { uid: None, ..owner.clone() }).await.expect("set");
    let owner = SetAttributes { mode: None, ..owner };
    assert_eq!(tree.set_attributes(pipe, owner).await.expect("set").mode, 0o755, "nor has a pipe any");
    tree.unlink(ROOT, b"p").await.expect("unlinked");
    let times = SetAttributes { atime: Some(time(-3)), mtime: Some(time(4)), ..SetAttributes::default() };
    let timed = set(times).await;
    assert_eq!((timed.atime, timed.mtime), (time(-3), time(4)));
    assert_eq!(tree.attributes(file).await.expect("attributes"), timed);
    let directory = make(tree, ROOT, "d", FileKind::Directory).await;
    tree.set_attributes(
        directory,
        SetAttributes { mode: Some(0o2755), gid: Some(77), ..SetAttributes::default() },
    )
    .await
    .expect("set");
    let inner = make(tree, directory, "inner", FileKind::Directory).await;
    let inner = tree.attributes(inner).await.expect("attributes");
    assert_eq!((inner.gid, inner.mode), (77, 0o2644), "a set-gid directory passes its group on");
    tree.remove_directory(directory, b"inner").await.expect("removed");
    tree.remove_directory(ROOT, b"d").await.expect("removed");
    tree.unlink(ROOT, b"a").await.expect("unlinked");
}

/// Of the mode that the file has by then: who found them set, and took them off what it had found, undid a chmod that came
/// between.
async fn set_ids_are_cleared(tree: &dyn Tree, file: InodeId) {
    let cleared = async |mode, clears| {
        let mode = SetAttributes { mode: Some(mode), ..SetAttributes::default() };
        let gid = tree.set_attributes(file, mode).await.expect("set").gid;
        let clears = if clears { SetIds::All } else { SetIds::GroupUnless(gid + 1) };
        let changes = SetAttributes { clears: Some(clears), ..SetAttributes::default() };
        let mode = tree.set_attributes(file, changes).await.expect("cleared").mode;
        let own = SetAttributes { clears: Some(SetIds::GroupUnless(gid)), ..SetAttributes::default() };
        assert_eq!(tree.set_attributes(file, own).await.expect("its own group").mode, mode);
        mode
    };
    assert_eq!(cleared(0o6755, true).await, 0o755);
    assert_eq!(cleared(0o700, true).await, 0o700);
    assert_eq!(cleared(0o6744, true).await, 0o2744, "but not the lock bit");
    assert_eq!(cleared(0o6755, false).await, 0o4755);
}

async fn extended_attributes(tree: &dyn Tree) {
    let file = make(tree, ROOT, "a", FileKind::File).await;
    let set = |name: &'static [u8], value: &'static [u8], mode| async move {
        tree.set_xattr(file, name, Bytes::from_static(value), mode).await
    };
    assert_eq!(kind_of(tree.xattr(file, b"user.a").await), ErrorKind::NoAttribute);
    assert_eq!(kind_of(set(b"user.a", b"1", XattrMode::Replace).await), ErrorKind::NoAttribute);
    set(b"user.a", b"1", XattrMode::Create).await.expect("created");
    assert_eq!(kind_of(set(b"user.a", b"2", XattrMode::Create).await), ErrorKind::Exists);
    set(b"user.a", b"2", XattrMode::Replace).await.expect("replaced");
    set(b"user.b", b"", XattrMode::Set).await.expect("set");
    assert_eq!(tree.xattr(file, b"user.a").await.expect("value"), "2");
    assert_eq!(tree.xattr(file, b"user.b").await.expect("value"), "");
    assert_eq!(tree.xattrs(file).await.expect("names"), ["user.a", "user.b"]);
    let large = Bytes::from(vec![0; (64 << 10) + 1]);
    let refused = tree.set_xattr(file, b"user.c", large, XattrMode::Set).await;
    assert_eq!(kind_of(refused), ErrorKind::TooLarge);
    tree.remove_xattr(file, b"user.a").await.expect("removed");
    assert_eq!(kind_of(tree.remove_xattr(file, b"user.a").await), ErrorKind::NoAttribute);
    tree.unlink(ROOT, b"a").await.expect("unlinked");
    assert_eq!(kind_of(tree.xattr(file, b"user.b").await), ErrorKind::NotFound);
}

async fn symlinks_and_nodes(tree: &dyn Tree) {
    let mut link = new_inode(FileKind::Symlink);
    link.target = Bytes::from_static(b"../else");
    let (link, _) = tree.create(ROOT, b"l", link, Existing::Refuse).await.expect("made");
    assert_eq!(link.size, 7);
    assert_eq!(tree.read_link(link.ino).await.expect("target"), "../else");
    let mut node = new_inode(FileKind::CharDevice);
    node.rdev = 0x0103;
    let (node, _) = tree.create(ROOT, b"n", node, Existing::Refuse).await.expect("made");
    assert_eq!((node.rdev, node.kind), (0x0103, FileKind::CharDevice));
    assert_eq!(kind_of(tree.read_link(node.ino).await), ErrorKind::Invalid);
    assert_eq!(kind_of(tree.layout(link.ino).await), ErrorKind::Invalid);
    tree.unlink(ROOT, b"l").await.expect("unlinked");
    tree.unlink(ROOT, b"n").await.expect("unlinked");
}

fn owned(n: u64, size: u64) -> Blob {
    Blob { key: ObjectKey::new(format!(".forebay/blobs/{n:032x}")), version: Version::new("1"), size }
}

async fn layouts_are_committed_once(tree: &dyn Tree) {
    let file = make(tree, ROOT, "a", FileKind::File).await;
    assert_eq!(tree.layout(file).await.expect("layout"), (FileLayout::empty(), 0));
    let mut layout = FileLayout::empty();
    for n in 0..300u64 {
        let source = Source::Blob { blob: owned(n, 8), offset: 0 };
        layout.write(Extent { offset: n * 10, length: 8, source });
    }
    let committed = tree.commit_layout(file, 0, layout.clone(), time(3)).await.expect("committed");
    assert_eq!((committed.size, committed.generation, committed.mtime), (2998, 1, time(3)));
    assert_eq!(tree.layout(file).await.expect("layout"), (layout.clone(), 1));
    assert_eq!(tree.statistics().await.expect("statistics").bytes, 2998);
    assert_eq!(kind_of(tree.commit_layout(file, 0, FileLayout::empty(), time(4)).await), ErrorKind::Conflict);
    layout.truncate(1000);
    tree.relocate(file, 1, layout.clone()).await.expect("relocated");
    assert_eq!(tree.layout(file).await.expect("layout"), (layout, 1));
    assert_eq!(tree.attributes(file).await.expect("attributes").mtime, time(3));
    let foreign = Blob { key: ObjectKey::new("other"), version: Version::new("1"), size: 8 };
    let refused = tree.commit_layout(file, 1, FileLayout::of_blob(foreign), time(4)).await;
    assert_eq!(kind_of(refused), ErrorKind::Conflict, "an object that was not placed for this file");
    tree.unlink(ROOT, b"a").await.expect("unlinked");
    assert_eq!(tree.statistics().await.expect("statistics").bytes, 0);
}

async fn open_files_outlive_their_names(tree: &dyn Tree) {
    let file = make(tree, ROOT, "a", FileKind::File).await;
    tree.opened(file).await.expect("opened");
    tree.opened(file).await.expect("opened");
    tree.unlink(ROOT, b"a").await.expect("unlinked");
    assert_eq!(tree.attributes(file).await.expect("still there").nlink, 0);
    let layout = FileLayout::of_blob(owned(1, 5));
    tree.commit_layout(file, 0, layout, time(1)).await.expect("it can be written");
    tree.closed(file).await.expect("closed");
    assert_eq!(tree.attributes(file).await.expect("still there").size, 5);
    tree.closed(file).await.expect("closed");
    assert_eq!(kind_of(tree.attributes(file).await), ErrorKind::NotFound);
    assert_eq!(kind_of(tree.opened(file).await), ErrorKind::NotFound);
    let other = make(tree, ROOT, "b", FileKind::File).await;
    tree.opened(other).await.expect("opened");
    tree.closed(other).await.expect("closed");
    assert_eq!(found(tree, ROOT, b"b").await.ino, other);
    tree.unlink(ROOT, b"b").await.expect("unlinked");
    let gone = make(tree, ROOT, "d", FileKind::Directory).await;
    assert_eq!(kind_of(tree.opened(gone).await), ErrorKind::IsDirectory);
    tree.remove_directory(ROOT, b"d").await.expect("removed");
    assert_eq!(kind_of(tree.create(gone, b"x", new_file(), Existing::Refuse).await), ErrorKind::NotFound);
}

async fn files_are_made_and_opened_at_once(tree: &dyn Tree) {
    let open = async |existing| tree.create_opened(ROOT, b"a", new_file(), existing).await;
    let made = open(Existing::Refuse).await.expect("made");
    assert_eq!((made.is_new, &made.layout, made.generation), (true, &FileLayout::empty(), 0));
    assert_eq!(kind_of(open(Existing::Refuse).await), ErrorKind::Exists);
    let (file, layout) = (made.attributes.ino, FileLayout::of_blob(owned(1, 5)));
    tree.commit_layout(file, 0, layout.clone(), time(1)).await.expect("committed");
    let found = open(Existing::Accept).await.expect("found");
    assert_eq!((found.attributes.ino, found.is_new), (file, false));
    assert_eq!((found.layout, found.generation), (layout, 1));
    tree.unlink(ROOT, b"a").await.expect("unlinked");
    tree.closed(file).await.expect("closed");
    assert_eq!(tree.attributes(file).await.expect("it was opened twice").size, 5);
    tree.closed(file).await.expect("closed");
    assert_eq!(kind_of(tree.attributes(file).await), ErrorKind::NotFound);
    make(tree, ROOT, "d", FileKind::Directory).await;
    let refused = tree.create_opened(ROOT, b"d", new_file(), Existing::Accept).await;
    assert_eq!(kind_of(refused), ErrorKind::Exists);
    tree.remove_directory(ROOT, b"d").await.expect("removed");
}

async fn answers_at_once_agree(tree: &dyn Tree) {
    let file = make(tree, ROOT, "a", FileKind::File).await;
    let waited =
        (tree.lookup(ROOT, b"a").await.expect("lookup"), tree.attributes(file).await.expect("attributes"));
    if let Some(at_once) = tree.lookup_now(ROOT, b"a") {
        assert_eq!(at_once.expect("lookup"), waited.0);
    }
    if let Some(at_once) = tree.attributes_now(file) {
        assert_eq!(at_once.expect("attributes"), waited.1);
    }
    tree.unlink(ROOT, b"a").await.expect("unlinked");
}

/// Everything above on one tree, one after the other: each leaves the root empty.
pub(super) async fn check_all(tree: &dyn Tree) {
    names_are_made_found_and_removed(tree).await;
    bad_names_are_refused(tree).await;
    directories_are_read_in_pages(tree).await;
    links_share_one_inode(tree).await;
    renames_follow_posix(tree).await;
    attributes_are_set(tree).await;
    extended_attributes(tree).await;
    symlinks_and_nodes(tree).await;
    layouts_are_committed_once(tree).await;
    open_files_outlive_their_names(tree).await;
    files_are_made_and_opened_at_once(tree).await;
    answers_at_once_agree(tree).await;
    assert_eq!(paths(tree).await, Vec::<String>::new());
    assert_eq!(tree.statistics().await.expect("statistics").inodes, 1);
}

#[tokio::test]
async fn every_engine_serves_the_contract() {
    for kind in Kind::ALL {
        println!("on {kind:?}");
        let world = World::new(kind).await;
        let tree = world.open().await;
        check_all(&tree).await;
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_tree_is_the_same_after_it_was_closed() {
    for kind in Kind::ALL {
        let world = World::new(kind).await;
        let tree = world.open().await;
        let directory = make_directory(&tree, "d").await.expect("made");
        let file = make(&tree, directory.ino, "f", FileKind::File).await;
        let attributes =
            tree.commit_layout(file, 0, FileLayout::of_blob(owned(1, 5)), time(1)).await.expect("written");
        assert_eq!(tree.ino_path(file).await.expect("path"), ["d", "f"]);
        tree.close().await.expect("closed");
        let tree = world.open().await;
        assert_eq!(resolve(&tree, "/d//f").await.expect("found"), attributes);
        assert_eq!(kind_of(resolve(&tree, "d/none").await), ErrorKind::NotFound);
        tree.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_dead_session_leaves_no_open_files_behind() {
    let world = World::new(Kind::Alone).await;
    let tree = world.open().await;
    let file = make(&tree, ROOT, "a", FileKind::File).await;
    tree.opened(file).await.expect("opened");
    tree.unlink(ROOT, b"a").await.expect("unlinked");
    tree.sync().await.expect("synced");
    world.crash(tree, false).await;
    let tree = world.open().await;
    assert_eq!(kind_of(tree.attributes(file).await), ErrorKind::NotFound);
    assert_eq!(tree.statistics().await.expect("statistics").inodes, 1);
}
