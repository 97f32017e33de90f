//! Random operations against a model: a map of inodes, as simple as POSIX allows.

use std::collections::BTreeMap;

use forebay_core::{ErrorKind, FileKind, InodeId, Result};

use super::world::*;
use crate::testing::{Chance, rounds};
use crate::tree::{Existing, RenameMode, Tree};

/// The model's inode: a directory's entries, a file, or a device.
#[derive(Debug, Clone, Default)]
struct Node {
    entries: Option<BTreeMap<String, usize>>,
    parent: usize,
    names: u32,
    openers: u32,
    is_file: bool,
}

/// A tree as a table of nodes; 0 is the root.
#[derive(Debug, Clone)]
struct Model(Vec<Node>);

type Outcome = Result<(), ErrorKind>;

impl Model {
    fn new() -> Self {
        Self(vec![Node { entries: Some(BTreeMap::new()), names: 1, ..Node::default() }])
    }

    fn find(&self, directory: usize, name: &str) -> Result<Option<usize>, ErrorKind> {
        match &self.0[directory].entries {
            Some(_) if self.0[directory].names == 0 => Err(ErrorKind::NotFound),
            Some(entries) => Ok(entries.get(name).copied()),
            None => Err(ErrorKind::NotDirectory),
        }
    }

    fn is_directory(&self, node: usize) -> bool {
        self.0[node].entries.is_some()
    }

    fn entries(&mut self, directory: usize) -> &mut BTreeMap<String, usize> {
        self.0[directory].entries.as_mut().expect("a directory")
    }

    fn create(&mut self, directory: usize, name: &str, is_directory: bool) -> Result<usize, ErrorKind> {
        if self.find(directory, name)?.is_some() {
            return Err(ErrorKind::Exists);
        }
        let node = self.0.len();
        let entries = is_directory.then(BTreeMap::new);
        self.0.push(Node { entries, parent: directory, names: 1, openers: 0, is_file: !is_directory });
        self.entries(directory).insert(name.to_owned(), node);
        Ok(node)
    }

    fn link(&mut self, node: usize, directory: usize, name: &str) -> Outcome {
        let found = self.find(directory, name)?;
        match () {
            () if self.is_directory(node) => Err(ErrorKind::Denied),
            () if self.0[node].names == 0 => Err(ErrorKind::NotFound),
            () if found.is_some() => Err(ErrorKind::Exists),
            () => {
                self.0[node].names += 1;
                self.entries(directory).insert(name.to_owned(), node);
                Ok(())
            }
        }
    }

    fn unlink(&mut self, directory: usize, name: &str) -> Outcome {
        let node = self.find(directory, name)?.ok_or(ErrorKind::NotFound)?;
        if self.is_directory(node) {
            return Err(ErrorKind::IsDirectory);
        }
        self.entries(directory).remove(name);
        self.0[node].names -= 1;
        Ok(())
    }

    fn remove_directory(&mut self, directory: usize, name: &str) -> Outcome {
        let node = self.find(directory, name)?.ok_or(ErrorKind::NotFound)?;
        match self.0[node].entries.as_ref().map(BTreeMap::is_empty) {
            None => Err(ErrorKind::NotDirectory),
            Some(false) => Err(ErrorKind::NotEmpty),
            Some(true) => {
                self.entries(directory).remove(name);
                self.0[node].names = 0;
                Ok(())
            }
        }
    }

    fn is_within(&self, mut directory: usize, node: usize) -> bool {
        while directory != node && directory != 0 {
            directory = self.0[directory].parent;
        }
        directory == node
    }

    fn rename(&mut self, from: (usize, &str), to: (usize, &str), mode: RenameMode) -> Outcome {
        self.find(from.0, from.1)?;
        let target = self.find(to.0, to.1)?;
        let source = self.find(from.0, from.1)?.ok_or(ErrorKind::NotFound)?;
        if self.is_directory(source) && self.is_within(to.0, source) {
            return Err(ErrorKind::Invalid);
        }
        match (mode, target) {
            (RenameMode::NoReplace | RenameMode::Whiteout { may_replace: false, .. }, Some(_)) => {
                return Err(ErrorKind::Exists);
            }
            (RenameMode::Exchange, None) => return Err(ErrorKind::NotFound),
            (_, Some(target)) if target == source => return Ok(()),
            (RenameMode::Exchange, Some(target)) => {
                if self.is_directory(target) && self.is_within(from.0, target) {
                    return Err(ErrorKind::Invalid);
                }
                self.place(from, target);
                self.place(to, source);
                return Ok(());
            }
            (_, Some(target)) => match (self.is_directory(source), self.is_directory(target)) {
                (true, false) => return Err(ErrorKind::NotDirectory),
                (false, true) => return Err(ErrorKind::IsDirectory),
                (true, true) => self.remove_directory(to.0, to.1)?,
                (false, false) => self.unlink(to.0, to.1)?,
            },
            (_, None) => {}
        }
        self.entries(from.0).remove(from.1);
        self.place(to, source);
        match mode {
            RenameMode::Whiteout { .. } => {
                let device = self.create(from.0, from.1, false)?;
                self.0[device].is_file = false;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn place(&mut self, (directory, name): (usize, &str), node: usize) {
        self.entries(directory).insert(name.to_owned(), node);
        if self.is_directory(node) {
            self.0[node].parent = directory;
        }
    }

    fn paths(&self) -> Vec<String> {
        let (mut paths, mut waiting) = (Vec::new(), vec![(0, String::new())]);
        while let Some((directory, prefix)) = waiting.pop() {
            for (name, node) in self.0[directory].entries.iter().flatten() {
                let path = format!("{prefix}{name}");
                if self.is_directory(*node) {
                    waiting.push((*node, format!("{path}/")));
                    paths.push(format!("{path}/"));
                } else {
                    paths.push(path);
                }
            }
        }
        paths.sort();
        paths
    }
}

/// The tree and the model side by side.
pub(super) struct Pair<'t> {
    /// The mounts that share it; each step is done by one.
    trees: Vec<&'t dyn Tree>,
    model: Model,
    /// The tree's inode of each node of the model.
    inodes: Vec<InodeId>,
}

impl<'t> Pair<'t> {
    pub(super) fn new(trees: Vec<&'t dyn Tree>) -> Self {
        Self { trees, model: Model::new(), inodes: vec![InodeId::ROOT] }
    }

    /// One operation, through any of the mounts.
    pub(super) async fn step(&mut self, chance: &mut Chance) {
        let tree = self.trees[chance.below(self.trees.len() as u64) as usize];
        let names = ["a", "b", "c", "d", "e"];
        let pick = |chance: &mut Chance, from: usize| chance.below(from as u64) as usize;
        let count = self.model.0.len();
        let (p, q, node) = (pick(chance, count), pick(chance, count), pick(chance, count));
        let (n, m) = (names[pick(chance, names.len())], names[pick(chance, names.len())]);
        // Inodes that are gone have no number to be called by.
        let gone = |node: usize| self.model.0[node].names == 0 && self.model.0[node].openers == 0;
        if gone(p) || gone(q) || gone(node) {
            return;
        }
        let (parent, other, ino) = (self.inodes[p], self.inodes[q], self.inodes[node]);
        let (expected, got) = match chance.below(10) {
            kind @ 0..=3 => {
                let is_directory = kind == 0;
                let kind = if is_directory { FileKind::Directory } else { FileKind::File };
                let made = tree.create(parent, n.as_bytes(), new_inode(kind), Existing::Refuse).await;
                let expected = self.model.create(p, n, is_directory);
                if let Ok((attributes, _)) = &made {
                    assert!(!self.inodes.contains(&attributes.ino), "an inode number was used again");
                    self.inodes.push(attributes.ino);
                }
                (expected.map(|_| ()), made.map(|_| ()))
            }
            4 => (self.model.link(node, q, m), tree.link(ino, other, m.as_bytes()).await.map(|_| ())),
            5 => (self.model.unlink(p, n), tree.unlink(parent, n.as_bytes()).await.map(drop)),
            6 => (
                self.model.remove_directory(p, n),
                tree.remove_directory(parent, n.as_bytes()).await.map(drop),
            ),
            7 => {
                if !self.model.0[node].is_file {
                    let kind = match self.model.is_directory(node) {
                        true => ErrorKind::IsDirectory,
                        false => ErrorKind::Invalid,
                    };
                    (Err(kind), self.opener(node).opened(ino).await.map(drop))
                } else if self.model.0[node].openers > 0 {
                    self.model.0[node].openers -= 1;
                    (Ok(()), self.opener(node).closed(ino).await)
                } else {
                    self.model.0[node].openers += 1;
                    (Ok(()), self.opener(node).opened(ino).await.map(drop))
                }
            }
            mode => {
                let mode = match (mode, chance.below(6)) {
                    (8, _) => RenameMode::Replace,
                    (_, 0) => RenameMode::NoReplace,
                    (_, 1) => RenameMode::Whiteout { uid: 1, gid: 2, may_replace: false },
                    (_, 2) => RenameMode::Whiteout { uid: 1, gid: 2, may_replace: true },
                    _ => RenameMode::Exchange,
                };
                let got = tree.rename((parent, n.as_bytes()), (other, m.as_bytes()), mode).await;
                let expected = self.model.rename((p, n), (q, m), mode);
                if self.model.0.len() > self.inodes.len() {
                    let left = found(tree, parent, n.as_bytes()).await;
                    assert_eq!((left.kind, left.mode, left.rdev), (FileKind::CharDevice, 0, 0));
                    assert!(!self.inodes.contains(&left.ino), "an inode number was used again");
                    self.inodes.push(left.ino);
                }
                (expected, got.map(drop))
            }
        };
        assert_eq!(got.map_err(|error| error.kind()), expected);
    }

    /// Who opens a file closes it.
    fn opener(&self, node: usize) -> &'t dyn Tree {
        self.trees[node % self.trees.len()]
    }

    pub(super) async fn check(&self) {
        for tree in &self.trees {
            self.check_one(*tree).await;
        }
    }

    async fn check_one(&self, tree: &dyn Tree) {
        assert_eq!(paths(tree).await, self.model.paths());
        let mut alive = 0;
        for (node, ino) in self.model.0.iter().zip(&self.inodes) {
            let attributes = tree.attributes(*ino).await;
            if node.names == 0 && node.openers == 0 {
                assert_eq!(kind_of(attributes), ErrorKind::NotFound);
                continue;
            }
            alive += 1;
            let attributes = attributes.expect("alive");
            let below =
                node.entries.iter().flatten().filter(|(_, node)| self.model.is_directory(**node)).count();
            match &node.entries {
                Some(_) if node.names == 0 => assert_eq!(attributes.nlink, 0),
                Some(_) => assert_eq!(attributes.nlink as usize, 2 + below),
                None => assert_eq!(attributes.nlink, node.names),
            }
        }
        assert_eq!(tree.statistics().await.expect("statistics").inodes, alive);
    }
}

#[tokio::test]
async fn random_operations_agree_with_the_model() {
    for round in 0..rounds(9) {
        let mut chance = Chance::fresh();
        let kind = [Kind::Memory, Kind::Lmdb, Kind::Slate][round as usize % 3];
        let world = World::new(kind).await;
        let tree = world.open().await;
        let mut pair = Pair::new(vec![&tree]);
        for _ in 0..300 {
            pair.step(&mut chance).await;
        }
        pair.check().await;
        tree.drain().await.expect("drained");
        pair.check().await;
        tree.close().await.expect("closed");
    }
}
