//! Clones beside whatever else may be done to a tree, at random.

use forebay_core::{ErrorKind, InodeId};
use futures::poll;

use super::clone::{remove_all, sample, shape};
use super::cloning::{Patient, begin, is_clean, unfinished, world_of};
use super::segments::{compact, write_packed};
use super::sharing::{no_loans, share};
use super::world::*;
use crate::schema::QuotaLimits;
use crate::testing::{Chance, rounds};
use crate::tree::{LocalTree, Placement, RenameMode, SetAttributes, Tree, XattrMode, resolve};

/// Something that somebody else does meanwhile. What cannot be done is not.
struct Others {
    chance: Chance,
    writing: Option<(InodeId, Placement)>,
    open: Vec<InodeId>,
    count: u64,
    cloned: u64,
}

impl Others {
    fn path(&mut self) -> String {
        let directories = ["d", "d/0", "d/1", "d/0/0", "d/1/1", "d/new", "e", "e/0", "d/0/new"];
        let names = ["f0", "f1", "shared", "link", "new", "0", "1"];
        let directory = directories[self.chance.below(directories.len() as u64) as usize];
        format!("{directory}/{}", names[self.chance.below(names.len() as u64) as usize])
    }

    async fn act(&mut self, world: &World, tree: &LocalTree) {
        let (one, other) = (self.path(), self.path());
        self.count += 1;
        let text = format!("{} {}", self.count, "y".repeat(self.chance.below(30) as usize));
        match self.chance.below(20) {
            0..=2 if self.writing.is_none() => drop(world.write_path(tree, &one, &text).await),
            3 => drop(unlink(tree, &one).await),
            4..=6 => drop(rename(tree, &one, &other, RenameMode::Replace).await),
            7 => drop(rename(tree, &one, &other, RenameMode::Exchange).await),
            8 => drop(make_directory(tree, &one).await),
            9 => {
                if let Ok((parent, name)) = split(tree, &one).await {
                    let _ = tree.remove_directory(parent, name.as_bytes()).await;
                }
            }
            10 => {
                if let (Ok(found), Ok((parent, name))) =
                    (resolve(tree, &one).await, split(tree, &other).await)
                {
                    let _ = tree.link(found.ino, parent, name.as_bytes()).await;
                }
            }
            11 | 12 => self.change_attributes(tree, &one, text).await,
            13 => drop(share(world, tree, &one, &other).await),
            14 => self.write_slowly(world, tree, &one).await,
            15 => self.keep_open(tree, &one).await,
            16 | 17 => self.write_packed(world, tree, [one, other]).await,
            18 => drop(compact(world, tree, || self.chance.below(2) == 0).await),
            _ => {
                match self.chance.below(2) {
                    // What somebody else replaces is lost to whoever shares it.
                    0 => world.put(&format!("d/outside-{}", self.count), text.as_bytes()).await,
                    _ => tree.drain().await.expect("drained"),
                }
                world.pass_ttl();
                paths(tree).await;
            }
        }
    }

    /// Two files that share a segment.
    async fn write_packed(&mut self, world: &World, tree: &LocalTree, to: [String; 2]) {
        let bytes = self.count.to_be_bytes();
        write_packed(world, tree, &[("p0", &bytes), ("p1", &bytes[1..])]).await;
        for (from, to) in ["p0", "p1"].into_iter().zip(to) {
            if rename(tree, from, &to, RenameMode::Replace).await.is_err() {
                unlink(tree, from).await.expect("unlinked");
            }
        }
    }

    async fn change_attributes(&mut self, tree: &LocalTree, path: &str, text: String) {
        let Ok(found) = resolve(tree, path).await else { return };
        let mode = Some(0o600 + self.chance.below(8) as u16);
        let changes =
            SetAttributes { mode, mtime: Some(time(self.count as i64)), ..SetAttributes::default() };
        tree.set_attributes(found.ino, changes).await.expect("set");
        match self.chance.below(2) {
            0 => drop(tree.remove_xattr(found.ino, b"user.o").await),
            _ => drop(tree.set_xattr(found.ino, b"user.o", text.into(), XattrMode::Set).await),
        }
    }

    /// A write that others see begin, and end a while later.
    async fn write_slowly(&mut self, world: &World, tree: &LocalTree, path: &str) {
        if self.writing.is_some() {
            return self.end_writing(world, tree).await;
        }
        let Ok(found) = resolve(tree, path).await else { return };
        if found.kind == forebay_core::FileKind::File {
            self.writing = tree.place(found.ino, false).await.ok().map(|placement| (found.ino, placement));
        }
    }

    async fn end_writing(&mut self, world: &World, tree: &LocalTree) {
        let Some((ino, _)) = self.writing.take() else { return };
        if tree.attributes(ino).await.is_ok() {
            let _ = world.write(tree, ino, format!("slow {}", self.count).as_bytes()).await;
        }
    }

    /// A file that is open and loses its name.
    async fn keep_open(&mut self, tree: &LocalTree, path: &str) {
        if let Some(ino) = self.open.pop() {
            return tree.closed(ino).await.expect("closed");
        }
        let Ok(found) = resolve(tree, path).await else { return };
        if found.kind == forebay_core::FileKind::File && tree.opened(found.ino).await.is_ok() {
            self.open.push(found.ino);
            let _ = unlink(tree, path).await;
        }
    }

    async fn end(&mut self, world: &World, tree: &LocalTree) {
        self.end_writing(world, tree).await;
        while let Some(ino) = self.open.pop() {
            tree.closed(ino).await.expect("closed");
        }
    }
}

/// One clone with others beside it, perhaps cut off; returns the tree, which may be one of the next session.
async fn clone_beside(world: &World, mut tree: LocalTree, others: &mut Others, copy: &str) -> LocalTree {
    let guide = Patient::default();
    let mut cloning = begin(&tree, &guide, ("d", copy)).await;
    let is_cut = others.chance.below(3) == 0;
    let (cut, mut polls) = (others.chance.below(40), 0);
    let outcome = loop {
        if let std::task::Poll::Ready(outcome) = poll!(cloning.as_mut()) {
            break Some(outcome);
        }
        polls += 1;
        for _ in 0..others.chance.below(3) {
            others.act(world, &tree).await;
        }
        if others.chance.below(12) == 0 {
            is_clean(&tree, "between two steps").await;
        }
        if is_cut && polls > cut {
            break None;
        }
    };
    drop(cloning);
    match outcome {
        Some(Ok(_)) => {
            others.cloned += 1;
            assert_eq!(shape(world, &tree, "d/").await, shape(world, &tree, &format!("{copy}/")).await);
        }
        Some(Err(error)) => {
            assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
            assert!(resolve(&tree, copy).await.is_err());
            assert_eq!(unfinished(&tree).await, 0);
        }
        None => {
            if others.chance.below(2) == 0 && world.kind == Kind::Memory {
                others.end(world, &tree).await;
                tree.sync().await.expect("synced");
                world.crash(tree, others.chance.below(2) == 0).await;
                tree = world.open().await;
                is_clean(&tree, "after a crash").await;
            }
            tree.drain().await.expect("drained");
            assert_eq!(unfinished(&tree).await, 0);
            assert!(resolve(&tree, copy).await.is_err());
        }
    }
    is_clean(&tree, "after a clone").await;
    tree
}

/// Whatever others do between the steps, the copy is the tree as it was at the last one; what was cut off leaves nothing.
#[tokio::test]
async fn random_histories_beside_a_clone_show_one_moment() {
    let (count, mut cloned) = (rounds(10), 0);
    for round in 0..count {
        let mut chance = Chance::fresh();
        let step = [1, 2, 5, 40][chance.below(4) as usize];
        let kind = if round % 10 == 9 { Kind::Slate } else { Kind::Memory };
        let world = world_of(kind, step).await;
        world.put("d/object", b"of another tool").await;
        let mut tree = world.open().await;
        paths(&tree).await;
        sample(&world, &tree, 6).await;
        for path in ["e", "to"] {
            make_directory(&tree, path).await.expect("made");
        }
        let to = resolve(&tree, "to").await.expect("found").ino;
        let limits = QuotaLimits { bytes: Some(1 << 20), inodes: Some(10_000) };
        for directory in [InodeId::ROOT, to] {
            tree.set_quota(directory, limits).await.expect("set");
        }
        let mut others = Others { chance, writing: None, open: Vec::new(), count: 0, cloned: 0 };
        for number in 0..4 {
            tree = clone_beside(&world, tree, &mut others, &format!("to/{number}")).await;
        }
        others.end(&world, &tree).await;
        cloned += others.cloned;
        for path in ["to", "d", "e"] {
            remove_all(&tree, path).await;
        }
        tree.drain().await.expect("drained");
        no_loans(&tree).await;
        is_clean(&tree, "in the end").await;
        tree.close().await.expect("closed");
        let tree = world.open().await;
        tree.drain().await.expect("drained");
        world.check_objects(&[]).await;
    }
    assert!(cloned > count, "{cloned} of {} clones came to their end", count * 4);
}
