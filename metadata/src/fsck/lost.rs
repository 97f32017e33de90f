//! Bytes of files that are not in the bucket: whose they are, and giving them up.
//!
//! What is gone becomes a hole only in a file that nobody takes for whole: it loses all its names, goes to
//! `/lost+found`, and carries in extended attributes what it lost and what it was called. Given up are only bytes whose
//! object is gone; where another one has its place it may be a copy of what is missed, and the layout is all that
//! says which bytes of it are meant.

use std::collections::{BTreeSet, HashMap, HashSet};

use bytes::Bytes;
use forebay_core::{Blob, ErrorKind, Extent, FileKind, FileLayout, InodeId, ObjectKey, Result, Source};

use super::damage::{Loss, Mended, Run};
use super::facts::Facts;
use super::refuge::{forget_links, lost_and_found};
use crate::gc::names_in;
use crate::mover::Mover;
use crate::records::{Change, Charge, LOST_OBJECTS, Look, Records, path_or_name, usage_of};
use crate::schema::{Dentry, HolderState, Inode, Tag, decode_plain, encode_plain};

/// The attribute that names the bytes that a file lost: first and last of each run, counted from 0.
const LOST: &[u8] = b"user.forebay.lost";
/// The attribute that has the paths of such a file, with NUL between them, which no name has.
const NAMES: &[u8] = b"user.forebay.lost-names";
/// Longest value of an extended attribute.
const MOST_VALUE_BYTES: usize = 64 << 10;

/// Looks for the files that need what is `lacking`, as they are now.
pub(super) async fn find_losses(
    mover: &Mover,
    facts: &Facts,
    lacking: &HashMap<Blob, &'static str>,
) -> Result<Vec<Loss>> {
    let mut losses = Vec::new();
    if lacking.is_empty() {
        return Ok(losses);
    }
    let copied =
        |loan: &&crate::schema::Loan| loan.moved.as_ref().is_some_and(|copy| lacking.contains_key(copy));
    let lent = facts.loans.values().filter(copied).map(|loan| &loan.blob.key);
    let named: HashSet<&ObjectKey> = lacking.keys().map(|blob| &blob.key).chain(lent).collect();
    let (keys, mut users) = (mover.shared().keys, BTreeSet::new());
    for tag in [Tag::Inode, Tag::Extents] {
        let look_through = |key: Bytes, value| {
            // What cannot be read is damage of its own.
            if names_in(tag, value).is_ok_and(|found| found.iter().any(|key| named.contains(key))) {
                users.extend(keys.number_in(&key).map(InodeId));
            }
            Ok(())
        };
        mover.pages(std::time::Duration::ZERO).each(tag, look_through).await?;
    }
    for ino in users {
        let due_ms = facts.trashed.get(&ino).copied();
        losses.extend(mover.look(|look| losses_of(look, ino, due_ms, lacking)).await?);
    }
    Ok(losses)
}

/// The path of a file, or where it was before it came to the trash.
pub(super) async fn path_of(mover: &Mover, ino: InodeId) -> Option<String> {
    let path = mover.look(|look| path_or_name(look, &look.inode(ino)?)).await.ok()?;
    Some(String::from_utf8_lossy(&path).into_owned())
}

fn losses_of(
    look: &Look<'_, '_>,
    ino: InodeId,
    due_ms: Option<u64>,
    lacking: &HashMap<Blob, &'static str>,
) -> Result<Vec<Loss>> {
    let Some(inode) = look.find(ino)?.filter(|inode| inode.kind == FileKind::File) else {
        return Ok(Vec::new());
    };
    let layout = match look.layout(ino, &inode) {
        // A layout that cannot be is told as such.
        Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(Vec::new()),
        layout => layout?,
    };
    let mut losses: Vec<Loss> = Vec::new();
    for extent in layout.extents().iter() {
        let Source::Blob { blob, .. } = &extent.source else { continue };
        let Some(why) = lacking.get(blob) else { continue };
        if is_listed(look, ino, &inode, blob)? {
            continue;
        }
        let known = losses.iter().position(|loss| loss.blob == *blob);
        let at = known.unwrap_or_else(|| {
            losses.push(Loss { ino, blob: blob.clone(), why, runs: Vec::new(), due_ms });
            losses.len() - 1
        });
        add_run(&mut losses[at].runs, extent);
    }
    Ok(losses)
}

/// Adds the bytes of an extent to the runs, to the last of them where it goes on in file and object.
fn add_run(runs: &mut Vec<Run>, extent: &Extent) {
    let Source::Blob { offset, .. } = extent.source else { return };
    let (at, length) = (extent.offset, extent.length);
    match runs.last_mut() {
        _ if length == 0 => {}
        Some(last) if last.at + last.length == at && last.offset + last.length == offset => {
            last.length += length;
        }
        _ => runs.push(Run { at, length, offset }),
    }
}

/// Whether it is the object at the file's own path: the user's to change, and the next listing sees to it.
fn is_listed(records: &dyn Records, ino: InodeId, inode: &Inode, blob: &Blob) -> Result<bool> {
    let is_home = inode.home.as_ref() == Some(blob);
    let claim = if is_home { records.claim(blob.key.as_str())? } else { None };
    Ok(is_home && claim.is_none_or(|claim| claim.state != HolderState::Held(ino)))
}

/// Makes a hole of bytes that are gone, in a file that was brought to `/lost+found` before. All other bytes of the
/// file stay as they are. There is nothing to do where the file is gone meanwhile, or has its bytes elsewhere.
pub(super) fn give_up(change: &mut Change<'_, '_>, loss: &Loss) -> Result<Mended> {
    let ino = loss.ino;
    let Some(mut inode) = change.find(ino)? else { return Ok(Mended::Nothing) };
    let layout = change.layout(ino, &inode)?;
    let is_lost = |extent: &Extent| matches!(&extent.source, Source::Blob { blob, .. } if *blob == loss.blob);
    let (lost, kept): (Vec<_>, Vec<_>) = layout.extents().iter().cloned().partition(is_lost);
    if lost.is_empty() || is_listed(change, ino, &inode, &loss.blob)? {
        return Ok(Mended::Nothing);
    }
    // As it is now.
    let mut loss = Loss { runs: Vec::new(), ..loss.clone() };
    lost.iter().for_each(|extent| add_run(&mut loss.runs, extent));
    if !loss.runs.is_empty() {
        if !seclude(change, ino, &mut inode, loss.due_ms)? {
            return Ok(Mended::Cannot);
        }
        append(change, ino, LOST, b",", loss.spelled().as_bytes())?;
        append(change, ino, LOST_OBJECTS, b"\0", loss.places().join("\0").as_bytes())?;
    }
    let home = inode.home.clone().filter(|home| *home != loss.blob);
    let is_gone = inode.home != home;
    change.is_gone = true;
    change.replace_layout((ino, &mut inode), &FileLayout::from_parts(layout.size(), kept)?, home)?;
    if is_gone {
        change.delete_claim(loss.blob.key.as_str())?;
    }
    inode.generation = change.next_generation(&inode);
    inode.ctime = change.now;
    change.put_inode(ino, &inode)?;
    change.settle_home(ino, &inode)?;
    Ok(Mended::Done)
}

/// Takes a file away under all its names, and out of the trash, to the one that says what became of it. Returns whether
/// it could; the caller puts the inode.
fn seclude(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    inode: &mut Inode,
    due_ms: Option<u64>,
) -> Result<bool> {
    // Who has it open without a name gets an error rather than zeros.
    if inode.nlink == 0 && due_ms.is_none() {
        return Ok(false);
    }
    let names = names(change, ino, inode)?;
    if names.len() != inode.nlink as usize {
        return Ok(false);
    }
    for (parent, name) in &names {
        // Names that are wrong are put right first.
        if change.dentry(*parent, name)?.is_none_or(|entry| entry.ino != ino) {
            return Ok(false);
        }
    }
    let Some(refuge_in) = lost_and_found(change)? else { return Ok(false) };
    let name = Bytes::from(Loss::refuge(ino));
    if names == [(refuge_in, name.clone())] {
        return Ok(true);
    }
    if change.dentry(refuge_in, &name)?.is_some() {
        return Ok(false);
    }
    note_names(change, ino, inode, &names)?;
    for (parent, name) in &names {
        change.delete_dentry(*parent, name)?;
        let directory = change.directory(*parent)?;
        change.put_changed_directory(*parent, directory)?;
    }
    forget_links(change, ino)?;
    if let Some(due_ms) = due_ms {
        change.delete(change.keys().trash(due_ms, ino))?;
    }
    // What has no name counts nowhere.
    match inode.nlink {
        0 => change.charge(refuge_in, usage_of(inode), Charge::Forced)?,
        _ => change.recharge(inode.parent, refuge_in, usage_of(inode), Charge::Forced)?,
    }
    change.put_dentry(refuge_in, &name, Dentry { ino, kind: inode.kind })?;
    let directory = change.directory(refuge_in)?;
    change.put_changed_directory(refuge_in, directory)?;
    (inode.parent, inode.name, inode.nlink) = (refuge_in, name, 1);
    Ok(true)
}

/// The names that an inode knows; none in the trash.
fn names(change: &Change<'_, '_>, ino: InodeId, inode: &Inode) -> Result<Vec<(InodeId, Bytes)>> {
    if inode.nlink == 0 {
        return Ok(Vec::new());
    }
    let (start, end) = change.keys().below(Tag::Link, ino.0);
    let further = change.reads().scan(&start, &end, inode.nlink as usize)?;
    let further: Result<Vec<_>> = further.iter().map(|(key, _)| change.keys().link_in(key)).collect();
    Ok([(inode.parent, inode.name.clone())].into_iter().chain(further?).collect())
}

/// Notes the paths that lead to a file, or did before it came to the trash.
fn note_names(
    change: &mut Change<'_, '_>,
    ino: InodeId,
    inode: &Inode,
    names: &[(InodeId, Bytes)],
) -> Result<()> {
    let last = [(inode.parent, inode.name.clone())];
    for (parent, name) in if names.is_empty() { &last } else { names } {
        let named = Inode { parent: *parent, name: name.clone(), ..inode.clone() };
        append(change, ino, NAMES, b"\0", &path_or_name(change, &named)?)?;
    }
    Ok(())
}

/// Adds to an extended attribute of the file. A value that would become too long ends in `...` instead.
fn append(change: &mut Change<'_, '_>, ino: InodeId, name: &[u8], between: &[u8], more: &[u8]) -> Result<()> {
    let key = change.keys().xattr(ino, name);
    let known = change.reads().get(&key)?;
    let mut value = known
        .map(|value| decode_plain(value, "extended attribute"))
        .transpose()?
        .unwrap_or_default()
        .to_vec();
    if !value.is_empty() {
        value.extend_from_slice(between);
    }
    value.extend_from_slice(more);
    if value.len() > MOST_VALUE_BYTES {
        let cut = MOST_VALUE_BYTES - 4;
        let whole = value[..cut].windows(between.len()).rposition(|found| found == between).unwrap_or(0);
        value.truncate(whole);
        value.extend_from_slice(between);
        value.extend_from_slice(b"...");
    }
    change.put(key, encode_plain(&value))
}
