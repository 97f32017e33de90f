//! Whether a bucket seems to be a copy that nobody adopted.

use forebay_core::{Blob, Result};
use forebay_io::object::Bucket;

use crate::kv::Snapshot;
use crate::schema::{Inode, Keys, Tag};

/// Inodes among which files are looked for.
const INODES: usize = 256;
/// Files whose objects are asked for: the largest, as stores may give copies of small ones the same version.
const FILES: usize = 8;

/// Whether objects of files have other versions than the tree knows, and the same sizes, as far as a few of them tell.
///
/// # Errors
/// Those of the engine and of the store; `Corrupt` for a record that cannot be read.
pub async fn looks_copied(tree: &dyn Snapshot, keys: Keys, bucket: &Bucket) -> Result<bool> {
    let (start, end) = keys.family(Tag::Inode);
    let mut homes: Vec<Blob> = Vec::new();
    for (_, value) in tree.scan(&start, &end, INODES).await? {
        homes.extend(Inode::decode(value)?.home);
    }
    homes.sort_by_key(|home| std::cmp::Reverse(home.size));
    for home in homes.into_iter().take(FILES) {
        // One that is gone or of another size says nothing.
        let found = bucket.head(&home.key).await?.filter(|found| found.size == home.size);
        if found.is_some_and(|found| found.version != home.version) {
            return Ok(true);
        }
    }
    Ok(false)
}
