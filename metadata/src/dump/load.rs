//! Loading a dump: checked whole, then written behind a mark that stays until the last record is durable.

use std::io::{Read, Seek};

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, VolumeId};
use forebay_io::object::Bucket;
use forebay_io::task::blocking;
use futures::future::join;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::line::Header;
use super::sound::Sound;
use super::verify::Lines;
use crate::adopt::{Adopted, adopt_loaded};
use crate::commit::{Committer, Reads};
use crate::kv::{Durability, Pair};
use crate::schema::{Keys, Partial, Tag};

/// Records written or deleted in one transaction.
const STEP: usize = 256;
/// Steps between the reader and the one that writes.
const STEPS_AHEAD: usize = 8;

/// What was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    /// What the dump is of.
    pub header: Header,
    /// Records.
    pub records: u64,
}

/// What a load may do that is seldom meant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Replace the tree that is there.
    pub force: bool,
    /// Load the dump of a volume with another id.
    pub of_another_volume: bool,
}

/// Replaces the tree that `committer` serves by the dump `from`, which is read twice. Nobody else may use the tree
/// meanwhile, and no `LocalTree` may be open over it.
///
/// # Errors
/// `Corrupt` or `Unsupported` for a dump that cannot be read, before anything is changed; `Exists` when the tree is not
/// empty and `force` does not say that it may go; `Invalid` for the dump of another volume, unless that is meant. When it
/// is cut off later, the tree is refused until it is loaded again.
pub async fn load(
    committer: &Committer,
    keys: Keys,
    from: impl Read + Seek + Send + 'static,
    options: LoadOptions,
) -> Result<LoadReport> {
    let report = fill(committer, keys, from, options).await?;
    let mark = keys.loading();
    committer.transact(Durability::Durable, move |txn| txn.delete(mark.clone())).await?;
    Ok(report)
}

/// The same over `bucket`, which is a copy of the one that the dump was taken beside.
///
/// # Errors
/// As [`load`] and [`adopt`](crate::adopt::adopt).
pub async fn load_moved(
    committer: &Committer,
    keys: Keys,
    from: impl Read + Seek + Send + 'static,
    options: LoadOptions,
    bucket: &Bucket,
) -> Result<(LoadReport, Adopted)> {
    let report = fill(committer, keys, from, options).await?;
    Ok((report, adopt_loaded(committer, keys, bucket).await?))
}

/// Loads everything and leaves the mark.
async fn fill(
    committer: &Committer,
    keys: Keys,
    mut from: impl Read + Seek + Send + 'static,
    options: LoadOptions,
) -> Result<LoadReport> {
    if !options.force && !is_empty(committer, keys).await? {
        return Err(Error::new(ErrorKind::Exists, "the volume has a tree already")
            .with_hint("--force replaces it, all its names, attributes and layouts; dump it first"));
    }
    let checked = blocking(move || {
        let report = check(&mut from, keys)?;
        from.rewind()?;
        Ok::<_, Error>((report, from))
    });
    let (report, from) = checked.await??;
    if report.header.volume != keys.0 && !options.of_another_volume {
        return Err(another(report.header.volume, keys.0));
    }
    let mark = keys.loading();
    committer
        .transact(Durability::Durable, move |txn| txn.put(mark.clone(), Partial::Loading.encode()))
        .await?;
    clear(committer, keys).await?;
    let (steps, mut read) = mpsc::channel::<Vec<Pair>>(STEPS_AHEAD);
    let reader = blocking(move || send(keys, from, &steps));
    let writer = async {
        while let Some(step) = read.recv().await {
            let put = move |txn: &mut crate::commit::Txn<'_>| {
                step.iter().try_for_each(|(key, value)| txn.put(key.clone(), value.clone()))
            };
            committer.transact(Durability::Buffered, put).await?;
        }
        Ok(())
    };
    let (sent, written): (_, Result<()>) = join(reader, writer).await;
    written?;
    sent??;
    committer.sync().await?;
    Ok(report)
}

/// Whether nothing but a root is there.
async fn is_empty(committer: &Committer, keys: Keys) -> Result<bool> {
    let (entries, inodes) = (keys.family(Tag::Dentry), keys.family(Tag::Inode));
    let look = move |view: &crate::commit::View<'_>| {
        let is_loading = view.get(&keys.loading())?.is_some();
        let entries = view.scan(&entries.0, &entries.1, 1)?.len();
        let inodes = view.scan(&inodes.0, &inodes.1, 2)?.len();
        Ok(!is_loading && entries == 0 && inodes < 2)
    };
    committer.read(look).await
}

fn another(of: VolumeId, here: VolumeId) -> Error {
    Error::invalid(format!("the dump is of the volume {of}, and this is {here}")).with_hint(
        "a dump belongs to the objects that it was taken beside: over others, files lose their bytes, and gc frees those that \
         no name leads to any more. See whether file and URL are the right ones. --of-another-volume loads it all the same: \
         right only where these are the same objects, copied here, or under a new URL without their `.forebay/volume.json`",
    )
}

/// Reads a dump to its end.
fn check(from: &mut (impl Read + Seek), keys: Keys) -> Result<LoadReport> {
    let (header, mut lines) = Lines::begin(from)?;
    let (mut records, mut sound) = (0, Sound::new(keys));
    while let Some(line) = lines.next()? {
        sound.take(&line).map_err(|error| lines.damaged(error))?;
        records += 1;
    }
    sound.finish().map_err(|error| lines.damaged(error))?;
    Ok(LoadReport { header, records })
}

/// Deletes every record but the mark. Each step begins after the last: what was deleted is passed over nowhere again.
async fn clear(committer: &Committer, keys: Keys) -> Result<()> {
    let (mut start, end) = keys.all();
    loop {
        let (from, to, mark) = (start.clone(), end.clone(), keys.loading());
        let step = move |txn: &mut crate::commit::Txn<'_>| {
            let some: Vec<Bytes> = txn.scan(&from, &to, STEP)?.into_iter().map(|(key, _)| key).collect();
            let last = some.last().cloned();
            some.into_iter().filter(|key| *key != mark).try_for_each(|key| txn.delete(key))?;
            Ok(last)
        };
        let Some(last) = committer.transact(Durability::Buffered, step).await? else { return Ok(()) };
        start = [&last[..], &[0]].concat().into();
    }
}

fn send(keys: Keys, from: impl Read, steps: &mpsc::Sender<Vec<Pair>>) -> Result<()> {
    let gone = |_| Error::bug("what is loaded is not written any more");
    let (_, mut lines) = Lines::begin(from)?;
    let mut step = Vec::with_capacity(STEP);
    while let Some(line) = lines.next()? {
        step.push(line.record(keys)?);
        if step.len() == STEP {
            steps.blocking_send(std::mem::take(&mut step)).map_err(gone)?;
        }
    }
    steps.blocking_send(step).map_err(gone)
}
