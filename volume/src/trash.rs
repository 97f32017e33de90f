//! The trash of a volume by paths: what is in it, bringing back a file or all that was deleted below a directory,
//! emptying it.
//!
//! The tree keeps what was deleted, one by one, under names of its own; what belongs together is found here by the paths
//! that it had. A request and its report are plain data, as a mount's control socket carries them.

use std::collections::BTreeMap;

use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result, Timestamp};
use forebay_metadata::tree::{
    Existing, LocalTree, Lookup, NewInode, OutsideChange, TrashId, Trashed, Tree, resolve,
};
use serde::{Deserialize, Serialize};

use crate::Volume;
use crate::volume::local;

/// Entries in one page of a list.
const PAGE: usize = 1024;
/// Paths that a report names.
const MOST_REFUSED: usize = 1000;

/// What can be asked. Paths are from the volume's root, names joined by `/`, empty for the root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Request {
    /// What was deleted at or below a path, a page of it.
    List {
        /// The path.
        path: String,
        /// The last name in the trash of the page before.
        after: Option<String>,
    },
    /// Bring back what was deleted last at each path at or below one.
    Restore {
        /// The path.
        path: String,
        /// The name in the trash of the one thing that is meant.
        id: Option<String>,
        /// Where to instead.
        to: Option<String>,
    },
    /// Free everything that was deleted at or below a path.
    Empty {
        /// The path.
        path: String,
    },
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "done", rename_all = "snake_case")]
pub enum Report {
    /// A page of the trash.
    List(List),
    /// What came back.
    Restored(Restored),
    /// What was freed.
    Emptied {
        /// Files, directories and others.
        freed: u64,
        /// Those that stay because somebody reads them.
        busy: u64,
    },
}

/// A page of the trash, in the order of the times when they go.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// What is in it.
    pub entries: Vec<Entry>,
    /// Where the next page goes on, unless this is the last.
    pub next: Option<String>,
}

/// Something deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name in the trash.
    pub id: String,
    /// Where it was.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Bytes of a file.
    pub size: u64,
    /// When it was deleted.
    pub deleted: Timestamp,
    /// Until when it can be brought back.
    pub expires: Timestamp,
}

/// What was brought back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// Directories.
    pub directories: u64,
    /// Everything else.
    pub files: u64,
    /// Bytes of the files.
    pub bytes: u64,
    /// Paths whose names are taken by now, or lead through a file, the first thousand: what was deleted there stays in the
    /// trash.
    pub refused: Vec<String>,
    /// How many those are, all of them. Mounts that ran before this was told say nothing.
    #[serde(default)]
    pub taken: u64,
}

/// Does what is asked.
///
/// # Errors
/// `NotFound` when nothing was deleted there; `Unsupported` when the tree is served elsewhere. What came back before an
/// error stays, and is told with it.
pub async fn trash(volume: &Volume, request: &Request) -> Result<Report> {
    let tree = local(volume)?;
    match request {
        Request::List { path, after } => list(tree, path, after.as_deref()).await.map(Report::List),
        Request::Empty { path } => empty(tree, path).await,
        Request::Restore { path, id, to } => {
            let wanted = Wanted::find(tree, path, id.as_deref()).await?;
            let mut restored = Restored::default();
            let outcome = restore(tree, &wanted, (path, to.as_deref()), &mut restored).await;
            tree.outside().heard().await;
            let synced = volume.sync_names().await;
            match outcome.and(synced) {
                Ok(()) => Ok(Report::Restored(restored)),
                Err(error) => Err(restored.told_with(error)),
            }
        }
    }
}

impl Restored {
    /// `error` with what came back before it.
    fn told_with(&self, error: Error) -> Error {
        match (self.files, self.directories) {
            (0, 0) => error,
            (files, directories) => {
                error.context(format!("{files} files and {directories} directories came back, then"))
            }
        }
    }
}

/// The part of `path` after `above`, or `None` where that is not at or above it.
fn below<'p>(path: &'p [u8], above: &str) -> Option<&'p [u8]> {
    let rest = path.strip_prefix(above.as_bytes())?;
    (above.is_empty() || rest.is_empty() || rest[0] == b'/').then_some(rest)
}

/// `rest` below the directory at `to`, where either may be empty.
fn joined(to: &str, rest: &[u8]) -> Vec<u8> {
    let rest = rest.strip_prefix(b"/").unwrap_or(rest);
    let parts: Vec<&[u8]> = [to.as_bytes(), rest].into_iter().filter(|part| !part.is_empty()).collect();
    parts.join(&b'/')
}

/// Shows `each` everything in the trash.
async fn each(tree: &LocalTree, mut each: impl FnMut(Trashed)) -> Result<()> {
    let mut after = None;
    loop {
        let page = tree.trash(after, PAGE).await?;
        let Some(last) = page.last() else { return Ok(()) };
        after = Some(last.id);
        page.into_iter().for_each(&mut each);
    }
}

async fn list(tree: &LocalTree, path: &str, after: Option<&str>) -> Result<List> {
    let after = after.map(str::parse).transpose()?;
    let page = tree.trash(after, PAGE).await?;
    let next = page.last().map(|last| last.id.to_string());
    let found = page.into_iter().filter(|one| below(&one.path, path).is_some());
    let entries = found.map(|one| Entry {
        id: one.id.to_string(),
        path: String::from_utf8_lossy(&one.path).into_owned(),
        kind: one.attributes.kind,
        size: one.attributes.size,
        deleted: one.deleted,
        expires: Timestamp {
            seconds: (one.id.due_ms / 1000) as i64,
            nanos: (one.id.due_ms % 1000) as u32 * 1_000_000,
        },
    });
    Ok(List { entries: entries.collect(), next })
}

async fn empty(tree: &LocalTree, path: &str) -> Result<Report> {
    let (mut freed, mut busy) = (0, 0);
    let mut after = None;
    loop {
        // Freed page by page: what is gone does not come again.
        let page = tree.trash(after, PAGE).await?;
        let Some(last) = page.last() else { return Ok(Report::Emptied { freed, busy }) };
        after = Some(last.id);
        for one in page.iter().filter(|one| below(&one.path, path).is_some()) {
            match tree.purge(one.id).await? {
                true => freed += 1,
                false => busy += 1,
            }
        }
    }
}

/// What is wanted of the trash, the newest of each path, by path: so directories come before what they held. Holds a
/// path for each.
#[derive(Default)]
struct Wanted {
    found: BTreeMap<Vec<u8>, Trashed>,
    /// It is one, by its number in the trash.
    is_named: bool,
    /// Deleted directories above.
    above: BTreeMap<Vec<u8>, Trashed>,
}

impl Wanted {
    fn add(map: &mut BTreeMap<Vec<u8>, Trashed>, one: Trashed) {
        let newest = map.entry(one.path.to_vec()).or_insert_with(|| one.clone());
        if (one.deleted, one.id) > (newest.deleted, newest.id) {
            *newest = one;
        }
    }

    /// # Errors
    /// `NotFound` when there is nothing.
    async fn find(tree: &LocalTree, path: &str, id: Option<&str>) -> Result<Self> {
        let id: Option<TrashId> = id.map(str::parse).transpose()?;
        let mut wanted = Self { is_named: id.is_some(), ..Self::default() };
        each(tree, |one| {
            let is_directory = one.attributes.kind == FileKind::Directory;
            let is_above = std::str::from_utf8(&one.path)
                .is_ok_and(|above| below(path.as_bytes(), above).is_some_and(|rest| !rest.is_empty()));
            match id {
                Some(id) if one.id == id => Self::add(&mut wanted.found, one),
                None if below(&one.path, path).is_some() => Self::add(&mut wanted.found, one),
                _ if is_directory && is_above => Self::add(&mut wanted.above, one),
                _ => {}
            }
        })
        .await?;
        if wanted.found.is_empty() {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("nothing that was deleted at `{path}` is in the trash"),
            )
            .with_hint("`forebay trash ls` shows what is"));
        }
        Ok(wanted)
    }
}

/// Brings back what is wanted of `path`, below `to` if that is given, and counts it in `restored`, also where an error ends
/// it.
async fn restore(
    tree: &LocalTree,
    wanted: &Wanted,
    (path, to): (&str, Option<&str>),
    restored: &mut Restored,
) -> Result<()> {
    for (at, one) in &wanted.found {
        let target = match to {
            // One that is named goes to that very path.
            Some(to) if wanted.is_named => to.as_bytes().to_vec(),
            Some(to) => joined(to, below(at, path).unwrap_or_default()),
            None => at.clone(),
        };
        match bring_back(tree, one, &target, &wanted.above).await {
            Ok(false) => {}
            Ok(true) if one.attributes.kind == FileKind::Directory => restored.directories += 1,
            Ok(true) => {
                restored.files += 1;
                restored.bytes += one.attributes.size;
            }
            // There is something, or something that is no directory on the way.
            Err(error) if matches!(error.kind(), ErrorKind::Exists | ErrorKind::NotDirectory) => {
                restored.taken += 1;
                if restored.refused.len() < MOST_REFUSED {
                    restored.refused.push(String::from_utf8_lossy(&target).into_owned());
                }
            }
            // Purged since it was looked at.
            Err(error) if error.kind() == ErrorKind::NotFound && wanted.found.len() > 1 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Brings one thing back to `path`. Returns whether it did: a directory that is there already takes what it held.
async fn bring_back(
    tree: &LocalTree,
    one: &Trashed,
    path: &[u8],
    above: &BTreeMap<Vec<u8>, Trashed>,
) -> Result<bool> {
    let (parent, name) = make_way(tree, path, above).await?;
    let is_directory = one.attributes.kind == FileKind::Directory;
    if is_directory
        && let Lookup::Found(there) = tree.lookup(parent, name).await?
        && there.kind == FileKind::Directory
    {
        return Ok(false);
    }
    tree.restore(one.id, parent, name).await?;
    tell(tree, parent, name);
    Ok(true)
}

/// The directory that `path` lies in, and its last name. Directories on the way that are missing are brought back, or
/// made anew where they are gone for good.
async fn make_way<'p>(
    tree: &LocalTree,
    path: &'p [u8],
    above: &BTreeMap<Vec<u8>, Trashed>,
) -> Result<(InodeId, &'p [u8])> {
    let mut at = resolve(tree, "").await?.ino;
    let mut start = 0;
    while let Some(length) = path[start..].iter().position(|byte| *byte == b'/') {
        let (name, way) = (&path[start..start + length], &path[..start + length]);
        start += length + 1;
        at = match tree.lookup(at, name).await? {
            Lookup::Found(there) => there.ino,
            Lookup::Miss => {
                let made = match above.get(way) {
                    Some(deleted) => tree.restore(deleted.id, at, name).await?,
                    None => tree.create(at, name, directory(), Existing::Refuse).await?.0,
                };
                tell(tree, at, name);
                made.ino
            }
        };
    }
    Ok((at, &path[start..]))
}

/// A directory in place of one that nothing is known of any more.
fn directory() -> NewInode {
    let target = bytes::Bytes::new();
    NewInode { kind: FileKind::Directory, mode: 0o755, umask: 0, uid: 0, gid: 0, rdev: 0, target }
}

/// The kernel may know that there was no such name.
fn tell(tree: &LocalTree, directory: InodeId, name: &[u8]) {
    tree.outside().tell(OutsideChange::Name { directory, name: bytes::Bytes::copy_from_slice(name) });
}
