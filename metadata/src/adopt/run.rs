//! One adoption: what is named, one listing, and the records written anew behind a mark.

use std::collections::{BTreeMap, HashSet};

use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, InodeId, Result};
use forebay_io::object::Bucket;
use serde::{Deserialize, Serialize};

use super::matched::{Lacking, Matched, Why, look_up};
use super::named::Named;
use super::naming::{NAMING, Naming, Role};
use crate::commit::{Committer, Reads, Txn, View};
use crate::kv::{Durability, Pair};
use crate::records::{Look, Records, path_or_name};
use crate::schema::{Keys, Loan, Partial, Tag, encode_plain};

/// Records read, and at most as many written, at once.
const PAGE: usize = 256;
/// Files that are named of those that cannot be read.
const MOST_NAMED: usize = 100;

/// What came of an adoption.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adopted {
    /// Objects that the tree names and that are there with the same size.
    pub objects: u64,
    /// Those of them that had another version where the tree was written.
    pub changed: u64,
    /// Objects that files need and that are not what they need.
    pub lacking: u64,
    /// Files that need those.
    pub files: u64,
    /// The first of these files.
    pub named: Vec<Lacking>,
}

/// Has the tree that `committer` serves name the objects of `bucket`, which is a copy of the one that the tree was written
/// over. Nobody else may use the tree meanwhile, and no `LocalTree` may be open over it. Takes memory in proportion to the
/// objects that the tree names.
///
/// # Errors
/// `NotFound` where there is no tree; `Corrupt` for one that is not whole because loading it was cut off; those of bucket and
/// engine. When it is cut off the tree is refused until it is adopted again.
pub async fn adopt(committer: &Committer, keys: Keys, bucket: &Bucket) -> Result<Adopted> {
    let found = committer.read(move |view: &View<'_>| {
        let mark = view.get(&keys.loading())?.map(Partial::decode).transpose()?;
        Ok((mark, view.get(&keys.inode(InodeId::ROOT))?.is_some()))
    });
    match found.await? {
        (Some(Partial::Adopting { replaced }), _) => {
            rewrite(committer, keys, bucket, Some(replaced.into_iter().collect())).await
        }
        (Some(mark), _) => Err(not_whole(&mark)),
        (None, false) => Err(Error::new(
            ErrorKind::NotFound,
            format!("there is no tree of the volume {} here", keys.0),
        )
        .with_hint(
            "copy all of `.forebay/`, `volume.json` included; a bucket that was copied to another kind of store takes a dump \
             of the tree: `forebay volume load --moved`",
        )),
        (None, true) => rewrite(committer, keys, bucket, None).await,
    }
}

/// Why a tree with such a mark is refused.
pub(crate) fn not_whole(mark: &Partial) -> Error {
    match mark {
        Partial::Loading => Error::corrupt("the tree is not whole: loading it was cut off")
            .with_hint("load it again with `forebay volume load --force`"),
        Partial::Adopting { .. } => Error::corrupt("the tree is not whole: adopting the bucket was cut off")
            .with_hint("run `forebay volume adopt` again"),
    }
}

/// As [`adopt`], for a tree that was just loaded and still has the mark of that.
pub(crate) async fn adopt_loaded(committer: &Committer, keys: Keys, bucket: &Bucket) -> Result<Adopted> {
    rewrite(committer, keys, bucket, None).await
}

/// Goes on from where `replaced` was decided, which half of the records would not tell any more.
async fn rewrite(
    committer: &Committer,
    keys: Keys,
    bucket: &Bucket,
    replaced: Option<HashSet<Blob>>,
) -> Result<Adopted> {
    committer.sync().await?;
    let mut named = Named::default();
    for tag in NAMING {
        each_page(committer, keys, tag, async |page| {
            page.into_iter().try_for_each(|(_, value)| {
                named.take(Naming::decode(tag, value)?);
                Ok(())
            })
        })
        .await?;
    }
    let replaced = replaced.unwrap_or_else(|| named.replaced());
    let matched = look_up(bucket, named, &replaced).await?;
    let mark = Partial::Adopting { replaced: replaced.into_iter().collect() }.encode();
    let begin = move |txn: &mut Txn<'_>| txn.put(keys.loading(), mark.clone());
    committer.transact(Durability::Durable, begin).await?;
    let mut needs = Needs::default();
    for tag in NAMING {
        each_page(committer, keys, tag, async |page| {
            let mut changed = Vec::new();
            for (key, value) in page {
                let mut record = Naming::decode(tag, value.clone())?;
                needs.look_at(keys, &key, &mut record, &matched)?;
                replace(&mut record, &matched);
                let (new_key, new_value) = record.encode(keys, &key);
                if (&new_key, &new_value) != (&key, &value) {
                    changed.push((key, (new_key, new_value)));
                }
            }
            let write = move |txn: &mut Txn<'_>| changed.iter().try_for_each(|change| put(txn, change));
            committer.transact(Durability::Buffered, write).await
        })
        .await?;
    }
    committer.sync().await?;
    let url = encode_plain(bucket.url().to_string().as_bytes());
    let end = move |txn: &mut Txn<'_>| {
        txn.put(keys.home(), url.clone())?;
        txn.delete(keys.loading())
    };
    committer.transact(Durability::Durable, end).await?;
    needs.report(committer, keys, &matched).await
}

/// Calls `work` with all records of a family, page by page. They are read from the engine: what was changed on pages before
/// is not looked at again, or means the same when it is.
async fn each_page(
    committer: &Committer,
    keys: Keys,
    tag: Tag,
    mut work: impl AsyncFnMut(Vec<Pair>) -> Result<()>,
) -> Result<()> {
    let (mut start, end) = keys.family(tag);
    loop {
        let page = committer.engine().scan(&start, &end, PAGE).await?;
        let Some((last, _)) = page.last() else { return Ok(()) };
        start = [&last[..], &[0]].concat().into();
        work(page).await?;
    }
}

/// Gives what a record names the versions that are here.
fn replace(record: &mut Naming, matched: &Matched) {
    if let Naming::Intent(intent) = record
        && let (Some(replaces), Some(version)) = (&mut intent.replaces, matched.replaceable(&intent.key))
    {
        // Taken for one that has not happened: then nothing there is taken for new content that is none. If it has, the
        // file's own object, of that size, is this one all the same, and what is to be copied there is copied again.
        *replaces = version.clone();
    }
    for (_, blob) in record.blobs() {
        if let Some(version) = matched.version(blob) {
            blob.version = version.clone();
        }
    }
}

/// Writes one record. Two loans may come to be one, where a copy has one version for contents that had two, and are the same.
fn put(txn: &mut Txn<'_>, (key, (new_key, new_value)): &(Bytes, Pair)) -> Result<()> {
    let mut value = new_value.clone();
    if new_key != key {
        if let Some(other) = txn.get(new_key)? {
            let (other, loan) = (Loan::decode(other)?, Loan::decode(value)?);
            let count = loan.count.saturating_add(other.count);
            value = Loan { count, moved: loan.moved.or(other.moved), ..loan }.encode();
        }
        txn.delete(key.clone())?;
    }
    txn.put(new_key.clone(), value)
}

/// The files that need what is not there.
#[derive(Debug, Default)]
struct Needs {
    objects: HashSet<Blob>,
    files: HashSet<InodeId>,
    first: BTreeMap<InodeId, (Blob, Why)>,
}

impl Needs {
    fn look_at(&mut self, keys: Keys, key: &Bytes, record: &mut Naming, matched: &Matched) -> Result<()> {
        if !matches!(record, Naming::Extents(_) | Naming::Inode(_)) {
            return Ok(());
        }
        for (role, blob) in record.blobs() {
            let lacking = if role == Role::Other { None } else { matched.lacks(blob) };
            let Some((meant, why)) = lacking else { continue };
            let ino = InodeId(keys.number_in(key)?);
            if !self.objects.contains(meant) {
                self.objects.insert(meant.clone());
            }
            if self.files.insert(ino) && self.first.len() < MOST_NAMED {
                self.first.insert(ino, (meant.clone(), why));
            }
        }
        Ok(())
    }

    async fn report(self, committer: &Committer, keys: Keys, matched: &Matched) -> Result<Adopted> {
        let mut named = Vec::with_capacity(self.first.len());
        for (ino, (blob, why)) in self.first {
            let path = committer.read(move |view| {
                let look = Look::plain(view, keys);
                path_or_name(&look, &look.inode(ino)?)
            });
            let path = match path.await {
                Ok(path) => String::from_utf8_lossy(&path).into_owned(),
                // Its directories are fsck's to mend.
                Err(_) => format!("inode {ino}"),
            };
            named.push(Lacking { path, key: blob.key.into(), why });
        }
        let (lacking, files) = (self.objects.len() as u64, self.files.len() as u64);
        Ok(Adopted { objects: matched.found, changed: matched.changed(), lacking, files, named })
    }
}
