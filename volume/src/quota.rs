//! Quotas of a volume by paths. A request and its report are plain data, as a mount's control socket carries them.

use forebay_core::{Error, ErrorKind, Result};
use forebay_metadata::tree::{DirectoryQuota, LocalTree, QuotaLimits, resolve_directory};
use serde::{Deserialize, Serialize};

use crate::Volume;
use crate::volume::local;

/// Quotas read at once.
const PAGE: usize = 1024;

/// A limit as it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// There is to be none.
    None,
    /// So much.
    At(u64),
}

/// What can be asked. Paths are from the volume's root, names joined by `/`, empty for the root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Request {
    /// Limit what may lie below a directory. What is not given stays as it is; without any limit there is no quota.
    Set {
        /// The directory.
        path: String,
        /// Bytes.
        bytes: Option<Limit>,
        /// Inodes.
        inodes: Option<Limit>,
    },
    /// The quota of a directory.
    Get {
        /// The directory.
        path: String,
    },
    /// The directories at or below a path that have a quota.
    List {
        /// The path.
        path: String,
    },
}

/// The quota of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The directory, from the volume's root, which is `/`.
    pub path: String,
    /// Sizes of the files below it.
    pub bytes: u64,
    /// The limit of that.
    pub most_bytes: Option<u64>,
    /// Files, directories and others below it.
    pub inodes: u64,
    /// The limit of that.
    pub most_inodes: Option<u64>,
}

impl From<DirectoryQuota> for Entry {
    fn from(found: DirectoryQuota) -> Self {
        let (limits, usage) = (found.quota.limits, found.quota.usage);
        Self {
            path: format!("/{}", String::from_utf8_lossy(&found.path)),
            // Negative only while it is being counted.
            bytes: usage.bytes.max(0) as u64,
            most_bytes: limits.bytes,
            inodes: usage.inodes.max(0) as u64,
            most_inodes: limits.inodes,
        }
    }
}

/// Does what is asked, and tells the quotas that it is about.
///
/// # Errors
/// `NotFound` for a path that is missing, or a directory without a quota; `NotDirectory`; `Unsupported` when the tree is served
/// elsewhere.
pub async fn quota(volume: &Volume, request: &Request) -> Result<Vec<Entry>> {
    let tree = local(volume)?;
    match request {
        Request::Set { path, bytes, inodes } => {
            let directory = resolve_directory(tree, path).await?;
            let now = tree.quota(directory).await?.map(|quota| quota.limits).unwrap_or_default();
            let limits =
                QuotaLimits { bytes: chosen(*bytes, now.bytes), inodes: chosen(*inodes, now.inodes) };
            tree.set_quota(directory, limits).await?;
            Ok(of(tree, path).await?.into_iter().collect())
        }
        Request::Get { path } => {
            let none = || Error::new(ErrorKind::NotFound, format!("`/{path}` has no quota"));
            let hint = "`forebay quota ls` shows which directories have one";
            Ok(vec![of(tree, path).await?.ok_or_else(|| none().with_hint(hint))?])
        }
        Request::List { path } => list(tree, path).await,
    }
}

fn chosen(asked: Option<Limit>, now: Option<u64>) -> Option<u64> {
    match asked {
        None => now,
        Some(Limit::None) => None,
        Some(Limit::At(limit)) => Some(limit),
    }
}

async fn of(tree: &LocalTree, path: &str) -> Result<Option<Entry>> {
    let ino = resolve_directory(tree, path).await?;
    let quota = tree.quota(ino).await?;
    let path = bytes::Bytes::copy_from_slice(path.as_bytes());
    Ok(quota.map(|quota| DirectoryQuota { ino, path, quota }.into()))
}

async fn list(tree: &LocalTree, path: &str) -> Result<Vec<Entry>> {
    let (mut after, mut found) = (None, Vec::new());
    loop {
        let page = tree.quotas(after, PAGE).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.ino);
        let is_below = |at: &[u8]| {
            let rest = at.strip_prefix(path.as_bytes());
            rest.is_some_and(|rest| path.is_empty() || rest.is_empty() || rest[0] == b'/')
        };
        found.extend(page.into_iter().filter(|one| is_below(&one.path)).map(Entry::from));
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use forebay_io::object::Bucket;

    use super::*;
    use crate::packed::{Policy, policy};
    use crate::tests::support::{Fixture, create, run};

    /// It said `inode 3 is not a directory`, and a person knows no numbers.
    #[test]
    fn what_is_no_directory_is_named() {
        run(async {
            let volume = Fixture::new(Bucket::in_memory()).open().await;
            create(&volume, "file").await.release().await.expect("release");
            let path = "file".to_owned();
            let set = Request::Set { path: path.clone(), bytes: Some(Limit::At(1)), inodes: None };
            let told = [
                quota(&volume, &set).await.expect_err("a file"),
                quota(&volume, &Request::Get { path }).await.expect_err("a file"),
                policy(&volume, "file", None).await.expect_err("a file"),
                policy(&volume, "file", Some(Policy::Packed)).await.expect_err("a file"),
            ];
            for error in told {
                assert_eq!(error.kind(), ErrorKind::NotDirectory, "{error}");
                assert_eq!(error.to_string(), "`file` is not a directory");
            }
            volume.close().await.expect("close");
        });
    }
}
