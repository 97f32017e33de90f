//! A check from end to end, and the passes of mending.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, InodeId, Result};

use super::damage::{Damage, FsckReport, Mended};
use super::evidence::{Evidence, Known, Repair};
use super::facts::{Facts, Gather};
use super::judge::judge;
use super::lost::{find_losses, path_of};
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

/// What one look found.
struct Survey {
    /// The counts.
    report: FsckReport,
    damage: Vec<Damage>,
    /// The paths of files that lack bytes.
    paths: HashMap<InodeId, String>,
    known: Known,
}

/// Checks a tree against itself and its bucket, and mends what can be mended as `repair` says, which nobody else may use
/// meanwhile.
///
/// # Errors
/// `Unavailable` or `Corrupt` when engine or bucket cannot be read at all.
pub(crate) async fn check(mover: &Mover, repair: Repair) -> Result<FsckReport> {
    let Survey { mut report, mut damage, mut paths, mut known } = survey(mover).await?;
    let (mut seen, mut told) = (Vec::new(), HashSet::new());
    let mut lost = HashSet::new();
    for _ in 0..MOST_PASSES {
        if repair == Repair::No || damage.is_empty() {
            break;
        }
        let (mended, refused) = mend_all(mover, &damage, &known, repair).await;
        report.refused = report.refused.or(refused);
        // Frees what leaked, if nothing that cannot be read stands against it.
        if let Err(error) = collector(mover, false).collect().await {
            tracing::warn!(%error, "could not free what leaked");
        }
        for (one, is_mended) in damage.drain(..).zip(&mended) {
            // Bytes that came back without mending were never lost.
            let is_loss = matches!(one, Damage::DanglingExtent(_));
            if let Damage::DanglingExtent(loss) = &one
                && *is_mended
                && !loss.runs.is_empty()
            {
                lost.insert(loss.ino);
            }
            if (*is_mended || !is_loss) && told.insert(one.clone()) {
                seen.push(one);
            }
        }
        let left = survey(mover).await?;
        (damage, known) = (left.damage, left.known);
        (report.foreign, report.foreign_bytes) = (left.report.foreign, left.report.foreign_bytes);
        // Those that they had first.
        paths = left.paths.into_iter().chain(paths).collect();
        if !mended.contains(&true) {
            break;
        }
    }
    let left = damage;
    report.lost = lost.len() as u64;
    let still: HashSet<&Damage> = left.iter().collect();
    let mended = seen.iter().filter(|one| !still.contains(one)).map(|one| (one, true));
    let all: Vec<_> = mended.chain(left.iter().map(|one| (one, false))).collect();
    report.further = all.len().saturating_sub(MOST_FINDINGS) as u64;
    for (one, mended) in all.into_iter().take(MOST_FINDINGS) {
        let mut finding = one.finding();
        finding.mended = mended;
        if let Damage::DanglingExtent(loss) = one {
            finding.lost = loss.places();
            finding.detail = loss.told(paths.get(&loss.ino).map(String::as_str), mended);
        }
        report.findings.push(finding);
    }
    Ok(report)
}

/// Mends what can be mended: bytes that are gone last, so that there is work between the two looks at them. Returns of each
/// whether it could, and why bytes that are missing were not given up.
async fn mend_all(
    mover: &Mover,
    damage: &[Damage],
    known: &Known,
    repair: Repair,
) -> (Vec<bool>, Option<String>) {
    let is_unsure = damage.iter().any(Damage::hides_others);
    let misnamed: HashSet<InodeId> = damage.iter().filter_map(Damage::misnamed).collect();
    let mut losses = Vec::new();
    for one in damage {
        if let Damage::DanglingExtent(loss) = one {
            losses.push(loss);
        }
    }
    let mut evidence = Evidence::gather(mover, known, repair, losses).await;
    let mut mended = vec![false; damage.len()];
    let (last, first): (Vec<_>, Vec<_>) =
        damage.iter().zip(&mut mended).partition(|(one, _)| matches!(one, Damage::DanglingExtent(_)));
    for (one, is_mended) in first.into_iter().chain(last) {
        if is_unsure && one.takes_away() {
            continue;
        }
        if let Damage::DanglingExtent(loss) = one {
            // What leads to a file has to be known before it is all taken away: the next pass does.
            if misnamed.contains(&loss.ino) || !evidence.is_final(loss).await {
                continue;
            }
        }
        let wrong = one.clone();
        let work = mover.transact(Durability::Buffered, move |change| mend(change, &wrong)).await;
        *is_mended = match work {
            Ok(Mended::Done) => true,
            // Of bytes that need not be given up nothing is to be told.
            Ok(Mended::Nothing) => !matches!(one, Damage::DanglingExtent(_)),
            Ok(Mended::Cannot) => false,
            Err(error) => {
                tracing::warn!(%error, damage = ?one, "could not mend");
                false
            }
        };
    }
    let refused = evidence.refused;
    (mended, refused)
}

fn collector(mover: &Mover, dry_run: bool) -> Collector<'_> {
    Collector { mover, pause: Duration::ZERO, dry_run }
}

/// One look at everything.
async fn survey(mover: &Mover) -> Result<Survey> {
    let keys = mover.shared().keys;
    // A snapshot holds what was synced.
    mover.committer().sync().await?;
    let snapshot = mover.committer().engine().snapshot()?;
    let mut facts = Gather { snapshot: snapshot.as_ref(), keys }.facts().await?;
    let mut damage = judge(&mut facts);
    find_names(snapshot.as_ref(), keys, &mut damage).await?;
    drop(snapshot);
    facts.sessions.living.insert(mover.shared().session);
    let mut compared = compare(mover.bucket(), &facts).await?;
    for one in std::mem::take(&mut compared.damage) {
        if still_stands(mover, &one).await? {
            damage.push(one);
        }
    }
    let mut paths = HashMap::new();
    for loss in find_losses(mover, &facts, &compared.lacking).await? {
        paths.extend(path_of(mover, loss.ino).await.map(|path| (loss.ino, path)));
        damage.push(Damage::DanglingExtent(loss));
    }
    damage.extend(leaked_uploads(mover).await?);
    damage.sort_by_key(|one| one.finding().subject);
    let Facts { nodes, entries, .. } = facts;
    let inodes = nodes.len() as u64;
    let Compared { known, objects, changed_outside, foreign, foreign_bytes, .. } = compared;
    let counts = FsckReport { inodes, entries, objects, changed_outside, ..FsckReport::default() };
    let report = FsckReport { foreign, foreign_bytes, ..counts };
    Ok(Survey { report, damage, paths, known })
}

/// A file may have been written, moved or removed since the snapshot, and its older bytes be gone rightly.
async fn still_stands(mover: &Mover, damage: &Damage) -> Result<bool> {
    use crate::records::Records;
    let Damage::NotUploaded { ino, key, .. } = damage else { return Ok(true) };
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
        // Where another tree may use the bucket, or a session cannot be read, it is not known what leaked.
        Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Corrupt) => Ok(None),
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
            let (Ok(parent), Ok(name), Ok(entry)) =
                (keys.number_in(&key), keys.name_in(&key), Dentry::decode(value))
            else {
                continue;
            };
            if let Some(names) = wanted.get_mut(&entry.ino) {
                names.push((InodeId(parent), name));
            }
        }
    }
}

/// Refuses to check what has no bucket.
pub(crate) fn no_bucket() -> Error {
    Error::new(ErrorKind::Unsupported, "a tree without a bucket has nothing to be compared with")
}
