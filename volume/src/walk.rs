//! Walking a tree file by file, in name order, with memory that does not grow with the number of files.

use std::sync::Arc;

use forebay_core::{Attributes, Error, FileKind, InodeId, Result};
use forebay_metadata::tree::{Lookup, Tree};
use futures::stream::{self, Stream, TryStreamExt};

/// Entries asked for at once.
const PAGE: usize = 1_000;
/// Directories below one another that a walk follows; POSIX paths of 4,096 bytes reach 2,048.
const MAX_DEPTH: usize = 4_096;

/// A file met on a walk.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its path from where the walk began, names joined by `/`.
    pub path: Vec<u8>,
    /// What it is.
    pub attributes: Attributes,
}

/// Finds what `path` (names joined by `/`, empty for the root) names, without following symlinks.
///
/// # Errors
/// `NotFound` naming the first part that does not exist.
pub async fn resolve(tree: &dyn Tree, path: &[u8]) -> Result<Attributes> {
    let mut at = tree.attributes(InodeId::ROOT).await?;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        at = match tree.lookup(at.ino, name).await? {
            Lookup::Found(attributes) => attributes,
            Lookup::Miss => {
                let (name, path) = (String::from_utf8_lossy(name), String::from_utf8_lossy(path));
                return Err(Error::new(
                    forebay_core::ErrorKind::NotFound,
                    format!("`{name}` of `/{path}` does not exist in the volume"),
                ));
            }
        };
    }
    Ok(at)
}

/// A directory that is being walked: how far, and what of the last page is left.
struct Level {
    ino: InodeId,
    path: Vec<u8>,
    after: Option<Vec<u8>>,
    page: std::vec::IntoIter<(Vec<u8>, Attributes)>,
    complete: bool,
}

impl Level {
    fn new(ino: InodeId, path: Vec<u8>) -> Self {
        Self { ino, path, after: None, page: Vec::new().into_iter(), complete: false }
    }

    /// The next entry; `None` at the end.
    async fn next(&mut self, tree: &dyn Tree) -> Result<Option<Found>> {
        loop {
            if let Some((name, attributes)) = self.page.next() {
                let mut path = self.path.clone();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(&name);
                return Ok(Some(Found { path, attributes }));
            }
            if self.complete {
                return Ok(None);
            }
            let page = tree.read_directory(self.ino, self.after.as_deref(), PAGE).await?;
            self.after = page.entries.last().map(|entry| entry.name.to_vec()).or(self.after.take());
            self.complete = page.complete;
            let entries: Vec<_> =
                page.entries.into_iter().map(|entry| (entry.name.to_vec(), entry.attributes)).collect();
            self.page = entries.into_iter();
        }
    }
}

/// Every file (no directory, no symlink) at or below `root`.
pub fn files(tree: Arc<dyn Tree>, root: Attributes) -> impl Stream<Item = Result<Found>> + Send {
    let single =
        (root.kind != FileKind::Directory).then(|| Found { path: Vec::new(), attributes: root.clone() });
    let stack = match root.kind {
        FileKind::Directory => vec![Level::new(root.ino, Vec::new())],
        _ => Vec::new(),
    };
    stream::try_unfold((tree, stack, single), async |(tree, mut stack, single)| {
        if let Some(found) = single {
            return Ok(Some((found, (tree, stack, None))));
        }
        while let Some(level) = stack.last_mut() {
            match level.next(&*tree).await? {
                None => {
                    stack.pop();
                }
                Some(found) if found.attributes.kind == FileKind::Directory => {
                    if stack.len() >= MAX_DEPTH {
                        return Err(Error::invalid(format!(
                            "more than {MAX_DEPTH} directories below one another"
                        )));
                    }
                    stack.push(Level::new(found.attributes.ino, found.path));
                }
                Some(found) => return Ok(Some((found, (tree, stack, None)))),
            }
        }
        Ok(None)
    })
    .try_filter(|found| std::future::ready(found.attributes.kind == FileKind::File))
}
