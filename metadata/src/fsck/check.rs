//! A check from end to end, and the passes of mending.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, InodeId, Result};

use super::damage::{Damage, FsckReport};
use super::facts::{Facts, Gather};
use super::judge::judge;
use super::mend::mend;
use super::objects::{Compared, compare};
use crate::gc::Collector;
use crate::kv::{Durability, Snapshot};
use crate::mover::Mover;
use crate::schema::{Dentry, Keys, Tag};

/// Findings that a report lists.
const MOST_FINDINGS: usize = 10_000;
/// Passes of mending: what one brings to light the next mends.
const MOST_PASSES: usize = 4;

/// Checks a tree against itself and its bucket, and mends what can be mended if `repair`, which nobody else may use
/// meanwhile.
///
/// # Errors
/// `Unavailable` or `Corrupt` when engine or bucket cannot be read at all.
pub(crate) async fn check(mover: &Mover, repair: bool) -> Result<FsckReport> {
    let (mut report, mut damage) = survey(mover).await?;
    let mut seen: Vec<Damage> = Vec::new();
    for _ in 0..MOST_PASSES {
        if !repair || damage.is_empty() {
            break;
        }
        let mut mended = 0;
        let is_unsure = damage.iter().any(Damage::hides_others);
        for one in damage.iter().filter(|one| !(is_unsure && one.takes_away())) {
            let wrong = one.clone();
            let work = mover.transact(Durability::Buffered, move |change| mend(change, &wrong)).await;
            mended += usize::from(work.unwrap_or_else(|error| {
                tracing::warn!(%error, damage = ?one, "could not mend");
                false
            }));
        }
        // Frees what leaked, if nothing that cannot be read stands against it.
        if let Err(error) = collector(mover, false).collect().await {
            tracing::warn!(%error, "could not free what leaked");
        }
        seen.extend(damage.drain(..).filter(|one| !seen.contains(one)).collect::<Vec<_>>());
        damage = survey(mover).await?.1;
        if mended == 0 {
            break;
        }
    }
    let left = damage;
    let mended = seen.iter().filter(|one| !left.contains(one)).map(|one| (one, true));
    let all: Vec<_> = mended.chain(left.iter().map(|one| (one, false))).collect();
    report.further = all.len().saturating_sub(MOST_FINDINGS) as u64;
    for (one, mended) in all.into_iter().take(MOST_FINDINGS) {
        let mut finding = one.finding();
        finding.mended = mended;
        report.findings.push(finding);
    }
    Ok(report)
}

fn collector(mover: &Mover, dry_run: bool) -> Collector<'_> {
    Collector { mover, pause: Duration::ZERO, dry_run }
}

/// One look at everything.
async fn survey(mover: &Mover) -> Result<(FsckReport, Vec<Damage>)> {
    let keys = mover.shared().keys;
    // A snapshot holds what was synced.
    mover.committer().sync().await?;
    let snapshot = mover.committer().engine().snapshot()?;
    let mut facts = Gather { snapshot: snapshot.as_ref(), keys }.facts().await?;
    let mut damage = judge(&mut facts);
    find_names(snapshot.as_ref(), keys, &mut damage).await?;
    drop(snapshot);
    let mut living: HashSet<u64> = facts.sessions.clone();
    living.insert(mover.shared().session);
    let Compared { damage: lacking, objects, changed_outside } =
        compare(mover.bucket(), &facts, &living).await?;
    for one in lacking {
        if still_stands(mover, &one).await? {
            damage.push(one);
        }
    }
    damage.extend(leaked_uploads(mover).await?);
    damage.sort_by_key(|one| one.finding().subject);
    let Facts { nodes, entries, .. } = facts;
    let inodes = nodes.len() as u64;
    Ok((FsckReport { inodes, entries, objects, changed_outside, ..FsckReport::default() }, damage))
}

/// A file may have been written, moved or removed since the snapshot, and its older bytes be gone rightly.
async fn still_stands(mover: &Mover, damage: &Damage) -> Result<bool> {
    use crate::records::Records;
    let (Damage::DanglingExtent { ino, key, .. } | Damage::NotUploaded { ino, key, .. }) = damage else {
        return Ok(true);
    };
    let names_it = mover.look(|look| {
        let Some(inode) = look.find(*ino)? else { return Ok(false) };
        Ok(look.layout(*ino, &inode)?.blobs().any(|blob| blob.key == *key))
    });
    names_it.await
}

async fn leaked_uploads(mover: &Mover) -> Result<Option<Damage>> {
    match collector(mover, true).look_at_uploads().await {
        Ok((0, 0)) => Ok(None),
        Ok((uploads, leftovers)) => Ok(Some(Damage::LeakedUploads { uploads, leftovers })),
        // Where another tree may use the bucket it is not known what leaked.
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(error),
    }
}

/// Finds the entries that lead to inodes with wrong names.
async fn find_names(snapshot: &dyn Snapshot, keys: Keys, damage: &mut [Damage]) -> Result<()> {
    const PAGE: usize = 1024;
    let mut wanted: HashMap<InodeId, &mut Vec<(InodeId, Bytes)>> = HashMap::new();
    for one in damage {
        if let Damage::WrongNames { ino, names } = one {
            wanted.insert(*ino, names);
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    let (mut start, end) = keys.family(Tag::Dentry);
    loop {
        let page = snapshot.scan(&start, &end, PAGE).await?;
        let Some((last, _)) = page.last() else { return Ok(()) };
        start = [&last[..], &[0]].concat().into();
        for (key, value) in page {
            // Entries that cannot be read are damage of their own.
            let Ok(entry) = Dentry::decode(value) else { continue };
            if let Some(names) = wanted.get_mut(&entry.ino) {
                names.push((InodeId(keys.number_in(&key)?), keys.name_in(&key)?));
            }
        }
    }
}

/// Refuses to check what has no bucket.
pub(crate) fn no_bucket() -> Error {
    Error::new(ErrorKind::Unsupported, "a tree without a bucket has nothing to be compared with")
}
