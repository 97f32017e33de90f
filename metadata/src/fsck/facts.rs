//! What the records say, gathered from one snapshot of them.

use std::collections::{BTreeMap, HashMap, HashSet};

use bytes::Bytes;
use forebay_core::{Blob, Extent, FileKind, FileLayout, InodeId, ObjectKey, Result, Source};

use super::damage::Damage;
use crate::gc::Sessions;
use crate::kv::Snapshot;
use crate::records::given_up_in;
use crate::schema::{
    Claim, Counters, Dentry, HolderState, ImportState, Inode, Intent, Keys, Loan, Member, Move, Orphan,
    Parts, Quota, References, SessionRecord, Tag, UploadRecord, decode_extents,
};

/// Records read at once.
const PAGE: usize = 1024;

/// What is kept of an inode.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) kind: FileKind,
    pub(super) nlink: u32,
    pub(super) parent: InodeId,
    pub(super) name: Bytes,
    pub(super) home: Option<Blob>,
    /// Bytes of a file.
    pub(super) size: u64,
    /// Entries that lead to it.
    pub(super) names: u32,
    /// Whether the first name that it remembers is one of them.
    pub(super) is_first_there: bool,
    /// Further names that it remembers and that lead to it, and those that do not.
    pub(super) links: u32,
    pub(super) bad_links: u32,
    pub(super) subdirectories: u32,
}

/// A blob that layouts name.
#[derive(Debug)]
pub(super) struct Use {
    /// One of the inodes.
    pub(super) ino: InodeId,
    /// How many there are.
    pub(super) inodes: u64,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) nodes: HashMap<InodeId, Node>,
    /// Inodes that are there and cannot be read: entries lead to them, and what lies below them is not lost.
    pub(super) unreadable: HashSet<InodeId>,
    pub(super) entries: u64,
    pub(super) bytes: u64,
    pub(super) blobs: HashMap<Blob, Use>,
    /// Plain objects in layouts of files that they are not the own object of, and how many of those there are.
    pub(super) lent: HashMap<Blob, u64>,
    pub(super) loans: HashMap<Blob, Loan>,
    pub(super) references: HashMap<ObjectKey, u64>,
    /// Segments and the inodes whose layouts name them, and as they are recorded.
    pub(super) in_segments: HashSet<(ObjectKey, InodeId)>,
    pub(super) members: HashSet<(ObjectKey, InodeId)>,
    pub(super) claims: HashMap<ObjectKey, HolderState>,
    pub(super) intents: HashMap<InodeId, ObjectKey>,
    /// Inodes whose intents cannot be read.
    pub(super) unreadable_intents: HashSet<InodeId>,
    pub(super) imports: HashMap<InodeId, ImportState>,
    pub(super) moving: HashSet<InodeId>,
    pub(super) open: HashSet<InodeId>,
    /// Deleted inodes that can be brought back, and until when.
    pub(super) trashed: HashMap<InodeId, u64>,
    pub(super) quotas: HashMap<InodeId, Quota>,
    pub(super) sessions: Sessions,
    /// Keys of objects that are to be deleted, with the times.
    pub(super) deletions: HashSet<(ObjectKey, u64)>,
    /// Keys that intents and loans name.
    pub(super) named: HashSet<ObjectKey>,
    /// Objects that damaged files say they lost.
    pub(super) given_up: HashSet<ObjectKey>,
    pub(super) counters: Option<Counters>,
    /// The first inode number that no inode has and no directory has set aside.
    pub(super) first_free: u64,
    /// What was wrong with single records.
    pub(super) damage: Vec<Damage>,
}

/// The records at one moment.
pub(super) struct Gather<'a> {
    pub(super) snapshot: &'a dyn Snapshot,
    pub(super) keys: Keys,
}

impl Gather<'_> {
    /// Reads everything.
    pub(super) async fn facts(&self) -> Result<Facts> {
        let mut facts = Facts::default();
        self.inodes(&mut facts).await?;
        self.each(&mut facts, Tag::Dentry, |facts, keys, key, value| {
            let (parent, name) = (InodeId(keys.number_in(&key)?), keys.name_in(&key)?);
            facts.entry(parent, name, Dentry::decode(value)?);
            Ok(())
        })
        .await?;
        self.links(&mut facts).await?;
        self.references(&mut facts).await?;
        self.rest(&mut facts).await?;
        facts.follow_loans();
        Ok(facts)
    }

    /// Shows `each` every record of a family; what cannot be read is damage.
    async fn each(
        &self,
        facts: &mut Facts,
        tag: Tag,
        each: impl Fn(&mut Facts, Keys, Bytes, Bytes) -> Result<()>,
    ) -> Result<()> {
        let (mut start, end) = self.keys.family(tag);
        loop {
            let page = self.snapshot.scan(&start, &end, PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            start = [&last[..], &[0]].concat().into();
            for (key, value) in page {
                if let Err(error) = each(facts, self.keys, key.clone(), value) {
                    facts.damage.push(Damage::UnreadableRecord { key, why: error.to_string() });
                }
            }
        }
    }

    async fn inodes(&self, facts: &mut Facts) -> Result<()> {
        let (mut start, end) = self.keys.family(Tag::Inode);
        loop {
            let page = self.snapshot.scan(&start, &end, PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            start = [&last[..], &[0]].concat().into();
            for (key, value) in page {
                let ino = self.keys.number_in(&key).map(InodeId);
                match ino.and_then(|ino| Ok((ino, Inode::decode(value)?))) {
                    Err(error) => {
                        facts.unreadable.extend(self.keys.number_in(&key).map(InodeId));
                        facts.damage.push(Damage::UnreadableRecord { key, why: error.to_string() });
                    }
                    Ok((ino, inode)) => {
                        let (extents, missing) = self.extents(ino, &inode).await?;
                        facts.layout(ino, &inode, extents, missing);
                        facts.node(ino, inode);
                    }
                }
            }
        }
    }

    /// All extents that can be read, and why there are not more.
    async fn extents(&self, ino: InodeId, inode: &Inode) -> Result<(Vec<Extent>, Option<String>)> {
        let (mut parts, mut missing) = (Parts { head: inode.extents.clone(), further: Vec::new() }, None);
        for n in 0..inode.further {
            match self.snapshot.get(&self.keys.extents(ino, n)).await?.map(decode_extents) {
                Some(Ok(run)) => parts.further.push(run),
                Some(Err(error)) => missing = Some(error.to_string()),
                None => {
                    missing = Some(format!("part {n} of its extents is missing"));
                    break;
                }
            }
        }
        Ok((parts.joined(), missing))
    }

    /// Further names: each must be an entry that leads to the inode.
    async fn links(&self, facts: &mut Facts) -> Result<()> {
        let (mut start, end) = self.keys.family(Tag::Link);
        loop {
            let page = self.snapshot.scan(&start, &end, PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            start = [&last[..], &[0]].concat().into();
            for (key, _) in page {
                let named =
                    self.keys.number_in(&key).and_then(|ino| Ok((InodeId(ino), self.keys.link_in(&key)?)));
                let (ino, (parent, name)) = match named {
                    Ok(named) => named,
                    Err(error) => {
                        facts.damage.push(Damage::UnreadableRecord { key, why: error.to_string() });
                        continue;
                    }
                };
                let entry = self.snapshot.get(&self.keys.dentry(parent, &name)).await?;
                let leads =
                    entry.is_some_and(|entry| Dentry::decode(entry).is_ok_and(|entry| entry.ino == ino));
                match facts.nodes.get_mut(&ino) {
                    Some(node) if leads => node.links += 1,
                    Some(node) => node.bad_links += 1,
                    None if facts.unreadable.contains(&ino) => {}
                    None => {
                        let why = format!("a name of inode {ino}, which is missing");
                        facts.damage.push(Damage::UnreadableRecord { key, why });
                    }
                }
            }
        }
    }

    /// Who refers to blobs.
    async fn references(&self, facts: &mut Facts) -> Result<()> {
        self.each(facts, Tag::References, |facts, _, _, value| {
            let references = References::decode(value)?;
            facts.references.insert(references.key, references.count);
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Member, |facts, keys, key, value| {
            facts.members.insert((Member::decode(value)?.key, keys.member_in(&key)?));
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Loan, |facts, _, _, value| {
            let loan = Loan::decode(value)?;
            facts.named.extend(loan.moved.iter().map(|copy| copy.key.clone()));
            facts.loans.insert(loan.blob.clone(), loan);
            Ok(())
        })
        .await
    }

    async fn rest(&self, facts: &mut Facts) -> Result<()> {
        self.each(facts, Tag::Claim, |facts, _, _, value| {
            let claim = Claim::decode(value)?;
            facts.claims.insert(claim.key, claim.state);
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Intent, |facts, keys, key, value| {
            facts.intent(InodeId(keys.number_in(&key)?), value)
        })
        .await?;
        self.each(facts, Tag::Import, |facts, keys, key, value| {
            facts.imports.insert(InodeId(keys.number_in(&key)?), ImportState::decode(value)?);
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Move, |facts, keys, key, value| {
            if matches!(Move::decode(value)?, Move::Subtree { .. }) {
                facts.moving.insert(InodeId(keys.number_in(&key)?));
            }
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Deletion, |facts, keys, key, value| {
            let deletion = crate::schema::Deletion::decode(value)?;
            facts.deletions.insert((deletion.blob.key, keys.number_in(&key)?));
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Orphan, |facts, keys, key, value| {
            facts.open.insert(keys.number_and_ino_in(&key)?.1);
            Orphan::decode(value).map(drop)
        })
        .await?;
        self.each(facts, Tag::Trash, |facts, keys, key, _| {
            let (due_ms, ino) = keys.number_and_ino_in(&key)?;
            facts.trashed.insert(ino, due_ms);
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Quota, |facts, keys, key, value| {
            facts.quotas.insert(InodeId(keys.number_in(&key)?), Quota::decode(value)?);
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Xattr, |facts, keys, key, value| {
            keys.name_in(&key)?;
            facts.given_up.extend(given_up_in(&key, value)?);
            Ok(())
        })
        .await?;
        self.each(facts, Tag::Session, |facts, keys, key, value| {
            if keys.is_upload(&key) {
                return UploadRecord::decode(value).map(drop);
            }
            facts.sessions.living.insert(keys.number_in(&key)?);
            SessionRecord::decode(value).map(drop)
        })
        .await?;
        self.each(facts, Tag::Known, |facts, keys, key, _| {
            facts.sessions.known.insert(keys.number_in(&key)?);
            Ok(())
        })
        .await?;
        let counters = self.snapshot.get(&self.keys.counters()).await?;
        facts.counters = counters.and_then(|value| Counters::decode(value).ok());
        Ok(())
    }
}

impl Facts {
    fn node(&mut self, ino: InodeId, inode: Inode) {
        if inode.kind == FileKind::File {
            self.bytes = self.bytes.saturating_add(inode.size);
        }
        self.first_free = self.first_free.max(ino.0.saturating_add(1)).max(inode.run.end);
        let node = Node {
            kind: inode.kind,
            nlink: inode.nlink,
            parent: inode.parent,
            name: inode.name,
            home: inode.home,
            size: if inode.kind == FileKind::File { inode.size } else { 0 },
            names: 0,
            is_first_there: false,
            links: 0,
            bad_links: 0,
            subdirectories: 0,
        };
        self.nodes.insert(ino, node);
    }

    fn intent(&mut self, ino: InodeId, value: Bytes) -> Result<()> {
        let intent = Intent::decode(value);
        match &intent {
            Ok(intent) => {
                let copied = intent.copies.iter().map(|blob| blob.key.clone());
                self.named.extend(copied.chain([intent.key.clone()]));
                self.intents.insert(ino, intent.key.clone());
            }
            Err(_) => drop(self.unreadable_intents.insert(ino)),
        }
        intent.map(drop)
    }

    /// What a damaged layout still names is in use all the same.
    fn layout(&mut self, ino: InodeId, inode: &Inode, extents: Vec<Extent>, missing: Option<String>) {
        let named = extents.iter().filter_map(|extent| match &extent.source {
            Source::Blob { blob, .. } => Some(((blob.key.as_str(), blob.version.as_str()), blob)),
            Source::Inline(_) => None,
        });
        for blob in named.collect::<BTreeMap<_, _>>().into_values() {
            self.blobs.entry(blob.clone()).or_insert(Use { ino, inodes: 0 }).inodes += 1;
            if blob.is_segment() {
                self.in_segments.insert((blob.key.clone(), ino));
            }
            if !blob.is_owned() && inode.home.as_ref() != Some(blob) {
                *self.lent.entry(blob.clone()).or_default() += 1;
            }
        }
        let size = if inode.kind == FileKind::File { inode.size } else { 0 };
        let bad =
            missing.or_else(|| FileLayout::from_parts(size, extents).err().map(|error| error.to_string()));
        self.damage.extend(bad.map(|why| Damage::BadLayout { ino, why }));
    }

    /// What borrowers of an object that was moved mean is its copy.
    fn follow_loans(&mut self) {
        for (blob, loan) in &self.loans {
            let (Some(copy), Some(lent)) = (&loan.moved, self.lent.get(blob)) else { continue };
            let Some(used) = self.blobs.get_mut(blob) else { continue };
            let ino = used.ino;
            used.inodes -= lent;
            if used.inodes == 0 {
                self.blobs.remove(blob);
            }
            self.blobs.entry(copy.clone()).or_insert(Use { ino, inodes: 0 }).inodes += lent;
        }
    }

    fn entry(&mut self, parent: InodeId, name: Bytes, entry: Dentry) {
        self.entries += 1;
        let ino = entry.ino;
        let is_directory = |node: &Node| node.kind == FileKind::Directory;
        let is_in_directory =
            self.unreadable.contains(&parent) || self.nodes.get(&parent).is_some_and(is_directory);
        let kind = match self.nodes.get_mut(&ino).filter(|_| is_in_directory) {
            Some(node) => {
                node.names += 1;
                node.is_first_there |= node.parent == parent && node.name == name;
                node.kind
            }
            None if is_in_directory && self.unreadable.contains(&ino) => entry.kind,
            None => return self.damage.push(Damage::DanglingEntry { parent, name, ino }),
        };
        if kind != entry.kind {
            self.damage.push(Damage::WrongType { parent, name, ino, kind });
        }
        if kind == FileKind::Directory
            && let Some(directory) = self.nodes.get_mut(&parent)
        {
            directory.subdirectories += 1;
        }
    }

    /// The names from the root to a directory, joined as a key; `None` for what is not UTF-8 or hangs in the air.
    pub(super) fn path(&self, ino: InodeId) -> Option<String> {
        /// Deeper than any path that a program can open.
        const MOST_DEPTH: usize = 4096;
        let (mut at, mut names) = (ino, Vec::new());
        while at != InodeId::ROOT {
            let node = self.nodes.get(&at)?;
            names.push(std::str::from_utf8(&node.name).ok()?);
            at = node.parent;
            if names.len() > MOST_DEPTH {
                return None;
            }
        }
        names.reverse();
        Some(names.join("/"))
    }
}
