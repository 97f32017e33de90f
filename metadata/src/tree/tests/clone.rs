//! Copies of trees: whole, independent, counted, and gone without a trace.

use bytes::Bytes;
use forebay_core::{ErrorKind, FileKind};

use super::sharing::{no_loans, share};
use super::world::*;
use crate::schema::QuotaLimits;
use crate::tree::{Cloned, LocalTree, Tree, XattrMode, resolve};

/// Every path below `top` with what its entry is and holds, the path itself left out.
pub(super) async fn shape(world: &World, tree: &LocalTree, top: &str) -> Vec<String> {
    let mut shape = Vec::new();
    for path in paths(tree).await.iter().filter_map(|path| path.strip_prefix(top)) {
        let found = resolve(tree, &format!("{top}{path}")).await.expect("found");
        let bytes = match found.kind {
            FileKind::File => world.read(tree, found.ino).await.expect("bytes"),
            FileKind::Symlink => tree.read_link(found.ino).await.expect("a target").to_vec(),
            _ => Vec::new(),
        };
        let mut attributes = Vec::new();
        for name in tree.xattrs(found.ino).await.expect("names") {
            attributes.push((name.clone(), tree.xattr(found.ino, &name).await.expect("a value")));
        }
        let owner = (found.mode, found.uid, found.gid, found.mtime, found.atime, found.size);
        shape.push(format!("{path} {:?} {owner:?} {attributes:?} {bytes:?}", found.kind));
    }
    shape
}

/// A tree of all kinds of entries: written files, shared ones, a hard link, a symlink, attributes.
pub(super) async fn sample(world: &World, tree: &LocalTree, directories: u32) {
    if resolve(tree, "d").await.is_err() {
        make_directory(tree, "d").await.expect("made");
    }
    for directory in 0..directories {
        let path = format!("d/{}", directory % 5);
        if directory < 5 {
            make_directory(tree, &path).await.expect("made");
        }
        make_directory(tree, &format!("{path}/{directory}")).await.expect("made");
        for number in 0..8 {
            let path = format!("{path}/{directory}/f{number}");
            world.write_path(tree, &path, &format!("{path} {}", "x".repeat(number))).await.expect("written");
        }
    }
    let lender = if resolve(tree, "d/object").await.is_ok() { "d/object" } else { "d/3/3/f3" };
    share(world, tree, lender, "d/0/shared").await.expect("shared");
    share(world, tree, "d/0/0/f1", "d/4/shared").await.expect("shared");
    let first = resolve(tree, "d/1/1/f0").await.expect("found").ino;
    let below = resolve(tree, "d/2").await.expect("found").ino;
    tree.link(first, below, b"link").await.expect("linked");
    tree.set_xattr(first, b"user.a", Bytes::from_static(b"value"), XattrMode::Set).await.expect("set");
    let symlink =
        crate::tree::NewInode { target: Bytes::from_static(b"../elsewhere"), ..new_inode(FileKind::Symlink) };
    tree.create(below, b"symlink", symlink, crate::tree::Existing::Refuse).await.expect("made");
}

pub(super) async fn clone(tree: &LocalTree, from: &str, to: &str) -> forebay_core::Result<Cloned> {
    let source = resolve(tree, from).await.expect("found").ino;
    let (parent, name) = split(tree, to).await.expect("a directory");
    tree.clone_tree(source, (parent, name.as_bytes()), &Alone).await
}

/// The next session, after a crash where that can be had within one process.
async fn reopen(world: &World, tree: LocalTree) -> LocalTree {
    tree.sync().await.expect("synced");
    match world.kind {
        Kind::Memory => world.crash(tree, false).await,
        _ => tree.close().await.expect("closed"),
    }
    world.open().await
}

#[tokio::test]
async fn a_tree_is_cloned_whole_and_goes_its_own_way() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        let world = World::new(kind).await;
        world.put("d/object", b"of another tool").await;
        let tree = world.open().await;
        paths(&tree).await;
        sample(&world, &tree, 30).await;
        make_directory(&tree, "to").await.expect("made");
        let to = resolve(&tree, "to").await.expect("found").ino;
        let limits = |inodes| QuotaLimits { bytes: Some(1 << 20), inodes: Some(inodes) };
        tree.set_quota(to, limits(280)).await.expect("set");
        assert_eq!(kind_of(clone(&tree, "d", "to/copy").await), ErrorKind::OverQuota);
        tree.set_quota(to, limits(281)).await.expect("set");
        let before = shape(&world, &tree, "d/").await;
        let cloned = clone(&tree, "d", "to/copy").await.expect("cloned");
        assert_eq!((cloned.directories, cloned.files), (36, 245), "{kind:?}");
        let quota = tree.quota(to).await.expect("looked at").expect("a quota");
        assert_eq!((quota.usage.inodes, quota.usage.bytes), (281, cloned.bytes as i64));
        assert_eq!(shape(&world, &tree, "to/copy/").await, before);
        assert_eq!(kind_of(clone(&tree, "d", "to/copy").await), ErrorKind::Exists);
        assert_eq!(kind_of(clone(&tree, "d", "d/0/inside").await), ErrorKind::Invalid);

        // The copy stays as it is whatever becomes of the other, also over a crash.
        let tree = reopen(&world, tree).await;
        remove_all(&tree, "d").await;
        tree.drain().await.expect("drained");
        world.write_path(&tree, "d", "a file now").await.expect("written");
        tree.drain().await.expect("drained");
        world.pass_ttl();
        assert_eq!(shape(&world, &tree, "to/copy/").await, before, "{kind:?}");
        tree.sync().await.expect("synced");
        let report = tree.fsck(false).await.expect("checked");
        assert!(report.is_clean(), "{kind:?}: {:?}", report.findings);

        for path in ["to", "d"] {
            remove_all(&tree, path).await;
        }
        tree.drain().await.expect("drained");
        no_loans(&tree).await;
        let tree = reopen(&world, tree).await;
        tree.drain().await.expect("drained");
        world.check_objects(&[]).await;
    }
}

/// Removes what is at `path`, and all below it.
pub(super) async fn remove_all(tree: &LocalTree, path: &str) {
    let below: Vec<String> = paths(tree).await.into_iter().filter(|one| one.starts_with(path)).collect();
    for path in below.iter().rev() {
        let (parent, name) = split(tree, path.trim_end_matches('/')).await.expect("a directory");
        match path.ends_with('/') {
            true => drop(tree.remove_directory(parent, name.as_bytes()).await.expect("removed")),
            false => drop(tree.unlink(parent, name.as_bytes()).await.expect("removed")),
        }
    }
}

/// What is about to be replaced is no part of any moment yet.
#[tokio::test]
async fn what_is_on_its_way_is_waited_for() {
    let world = World::memory().await;
    world.put("d/a", b"old").await;
    world.put("e/f/b", b"b").await;
    let tree = world.open().await;
    let ino = resolve(&tree, "d/a").await.expect("found").ino;
    let placement = tree.place(ino, false).await.expect("placed");
    assert_eq!(kind_of(clone(&tree, "d", "copy").await), ErrorKind::Conflict);
    // What nobody has looked at is looked at.
    clone(&tree, "e", "copy-of-e").await.expect("cloned");
    assert_eq!(kind_of(resolve(&tree, "copy").await), ErrorKind::NotFound);
    drop(placement);
    world.write(&tree, ino, b"new").await.expect("written");
    clone(&tree, "d", "copy").await.expect("cloned");
    assert_eq!(world.read_path(&tree, "copy/a").await.expect("bytes"), "new");
    assert_eq!(world.read_path(&tree, "copy-of-e/f/b").await.expect("bytes"), "b");
}
