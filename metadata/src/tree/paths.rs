//! Paths over any tree.

use bytes::Bytes;
use forebay_core::{Attributes, Error, ErrorKind, FileKind, InodeId, Result};
use futures::stream::{self, BoxStream, StreamExt};

use super::{DirectoryEntry, Lookup, Tree};

/// Entries asked for at once.
const PAGE: usize = 1024;

/// The attributes of what a path from the root leads to; symlinks are not followed. Empty components are skipped.
///
/// # Errors
/// `NotFound` naming the component that is missing.
pub async fn resolve(tree: &dyn Tree, path: &str) -> Result<Attributes> {
    let mut at = tree.attributes(InodeId::ROOT).await?;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        at = match tree.lookup(at.ino, name.as_bytes()).await? {
            Lookup::Found(attributes) => attributes,
            Lookup::Miss => {
                return Err(Error::new(ErrorKind::NotFound, format!("`{path}`: there is no `{name}`"))
                    .with_hint(
                        "check its spelling; what is new in the bucket shows after `forebay refresh`",
                    ));
            }
        };
    }
    Ok(at)
}

/// The directory at a path.
///
/// # Errors
/// As [`resolve`]; `NotDirectory`, with the path.
pub async fn resolve_directory(tree: &dyn Tree, path: &str) -> Result<InodeId> {
    let found = resolve(tree, path).await?;
    match found.kind {
        FileKind::Directory => Ok(found.ino),
        _ => Err(Error::new(ErrorKind::NotDirectory, format!("`{path}` is not a directory"))
            .with_hint("name the directory that it is in")),
    }
}

/// Something met on a walk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walked {
    /// Names from the start of the walk, joined by slashes; the start itself is not met.
    pub path: Bytes,
    /// What it is.
    pub attributes: Attributes,
}

/// Everything below a directory, each directory before what it holds. Holds one page, and a name for every directory
/// that is still to be entered.
pub fn walk<'a>(tree: &'a dyn Tree, start: InodeId) -> BoxStream<'a, Result<Walked>> {
    let first = Position { waiting: vec![(start, Bytes::new())], ..Position::default() };
    let steps = stream::try_unfold(first, move |mut position| async move {
        loop {
            if let Some(entry) = position.page.pop() {
                let walked = position.meet(entry);
                return Ok(Some((walked, position)));
            }
            if !position.turn_page(tree).await? {
                return Ok(None);
            }
        }
    });
    steps.boxed()
}

/// Where a walk is.
#[derive(Default)]
struct Position {
    /// Entries of the page at hand, last first.
    page: Vec<DirectoryEntry>,
    /// The directory that is being read, its path, and its last name so far, if more follow.
    reading: Option<(InodeId, Bytes, Bytes)>,
    path: Bytes,
    /// The next one comes last.
    waiting: Vec<(InodeId, Bytes)>,
    /// Those of the directory that is being read, in their order.
    met: Vec<(InodeId, Bytes)>,
}

impl Position {
    fn meet(&mut self, entry: DirectoryEntry) -> Walked {
        let path: Bytes = match self.path.is_empty() {
            true => entry.name,
            false => [&self.path[..], b"/", &entry.name[..]].concat().into(),
        };
        if entry.attributes.kind == FileKind::Directory {
            self.met.push((entry.attributes.ino, path.clone()));
        }
        Walked { path, attributes: entry.attributes }
    }

    /// Reads the next page. Returns whether there was one.
    async fn turn_page(&mut self, tree: &dyn Tree) -> Result<bool> {
        let (ino, path, after) = match self.reading.take() {
            Some((ino, path, after)) => (ino, path, Some(after)),
            None => {
                self.waiting.extend(self.met.drain(..).rev());
                let Some((ino, path)) = self.waiting.pop() else { return Ok(false) };
                (ino, path, None)
            }
        };
        let page = match tree.read_directory(ino, after.as_deref(), PAGE).await {
            // Removed since it was met.
            Err(error) if error.kind() == ErrorKind::NotFound && !path.is_empty() => return Ok(true),
            page => page?,
        };
        if let Some(last) = page.entries.last().filter(|_| !page.complete) {
            self.reading = Some((ino, path.clone(), last.name.clone()));
        }
        self.path = path;
        self.page = page.entries;
        self.page.reverse();
        Ok(true)
    }
}
