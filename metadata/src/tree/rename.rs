//! Moving and exchanging names.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};

use super::create::create;
use super::local::LocalTree;
use super::remove_directory::check_empty;
use super::{Existing, NewInode, RenameMode};
use crate::records::{Change, Charge, Records, Removed, check_name, check_new_name, usage_of};
use crate::schema::{Dentry, Inode, Usage};

/// A directory and a name in it.
type Place<'n> = (InodeId, &'n [u8]);

/// How often what moves is counted before the move gives up: others make and remove quotas meanwhile.
const MOST_COUNTS: u32 = 8;

/// What came of a rename that was tried.
#[derive(Debug)]
pub(super) enum Renamed {
    /// It is done, and may have replaced something that had no other name.
    Done(Option<Removed>),
    /// Nothing has changed: these directories have to be counted first, since quotas part from them what they hold.
    Uncounted(Vec<InodeId>),
}

/// As [`super::Tree::rename`], after what has to be counted first. That goes to `counted`, whatever comes of it.
pub(super) async fn rename_counted(
    tree: &LocalTree,
    from: &(InodeId, Bytes),
    to: &(InodeId, Bytes),
    mode: RenameMode,
    counted: &mut Vec<InodeId>,
) -> Result<Option<Removed>> {
    for _ in 0..MOST_COUNTS {
        let (from, to) = (from.clone(), to.clone());
        let rename =
            move |change: &mut Change<'_, '_>| rename(change, (from.0, &from.1), (to.0, &to.1), mode);
        let uncounted = match tree.change(rename).await? {
            Renamed::Done(removed) => return Ok(removed),
            Renamed::Uncounted(directories) => directories,
        };
        for directory in uncounted {
            counted.push(directory);
            tree.count_below(directory).await?;
        }
    }
    Err(Error::new(ErrorKind::Unavailable, format!("what moves from directory {} cannot be counted", from.0)))
}

/// As [`super::Tree::rename`], but for what has to be counted first.
pub(super) fn rename(
    change: &mut Change<'_, '_>,
    from: Place<'_>,
    to: Place<'_>,
    mode: RenameMode,
) -> Result<Renamed> {
    check_name(from.1)?;
    check_new_name(to.0, to.1)?;
    change.directory(from.0)?;
    change.directory(to.0)?;
    let source = change.entry(from.0, from.1)?;
    check_not_below(change, source, to.0)?;
    let target = change.dentry(to.0, to.1)?;
    let uncounted =
        uncounted(change, (from.0, to.0), source, target.filter(|_| mode == RenameMode::Exchange))?;
    if !uncounted.is_empty() {
        return Ok(Renamed::Uncounted(uncounted));
    }
    let done = match (mode, target) {
        (RenameMode::NoReplace | RenameMode::Whiteout { may_replace: false, .. }, Some(_)) => {
            let name = String::from_utf8_lossy(to.1);
            Err(Error::new(ErrorKind::Exists, format!("`{name}` is in directory {} already", to.0)))
        }
        (RenameMode::Exchange, None) => change.entry(to.0, to.1).map(|_| None),
        (_, Some(target)) if target.ino == source.ino => Ok(None),
        (RenameMode::Exchange, Some(target)) => {
            check_not_below(change, target, from.0)?;
            exchange(change, (from, source), (to, target)).map(|()| None)
        }
        (RenameMode::Whiteout { uid, gid, .. }, target) => {
            let removed = replace(change, (from, source), to, target)?;
            leave_whiteout(change, from, (uid, gid)).map(|()| removed)
        }
        (RenameMode::Replace | RenameMode::NoReplace, target) => replace(change, (from, source), to, target),
    };
    done.map(Renamed::Done)
}

/// Makes what an overlay takes for the absence of a name (Linux, Documentation/filesystems/overlayfs.rst), as ext4 does: with
/// no permission for anybody.
fn leave_whiteout(
    change: &mut Change<'_, '_>,
    (parent, name): Place<'_>,
    (uid, gid): (u32, u32),
) -> Result<()> {
    let kind = FileKind::CharDevice;
    let whiteout = NewInode { kind, mode: 0, umask: 0, uid, gid, rdev: 0, target: Bytes::new() };
    create(change, parent, name, &whiteout, Existing::Refuse).map(drop)
}

/// The moved directories whose content other quotas are going to count, and which are not counted themselves.
fn uncounted(
    change: &Change<'_, '_>,
    (from, to): (InodeId, InodeId),
    source: Dentry,
    target: Option<Dentry>,
) -> Result<Vec<InodeId>> {
    let (left, entered) = change.parted(from, to)?;
    let mut uncounted = Vec::new();
    if left.is_empty() && entered.is_empty() {
        return Ok(uncounted);
    }
    for moved in [Some(source), target].into_iter().flatten() {
        if moved.kind == FileKind::Directory
            && !change.quota(moved.ino)?.is_some_and(|quota| quota.is_counted)
        {
            uncounted.push(moved.ino);
        }
    }
    Ok(uncounted)
}

/// What counts elsewhere when a name moves: an inode counts where its first name is, with all below it.
fn weight(change: &Change<'_, '_>, moved: Dentry, place: Place<'_>) -> Result<Usage> {
    let inode = change.inode(moved.ino)?;
    if inode.parent != place.0 || inode.name != place.1 {
        return Ok(Usage::default());
    }
    let below = change.quota(moved.ino)?.map(|quota| quota.usage);
    Ok(usage_of(&inode) + below.unwrap_or_default())
}

/// Refuses to put a directory below itself.
fn check_not_below(change: &Change<'_, '_>, moved: Dentry, into: InodeId) -> Result<()> {
    if moved.kind == FileKind::Directory && change.is_within(into, moved.ino)? {
        return Err(Error::invalid("a directory cannot move below itself"));
    }
    Ok(())
}

fn replace(
    change: &mut Change<'_, '_>,
    (from, source): (Place<'_>, Dentry),
    to: Place<'_>,
    target: Option<Dentry>,
) -> Result<Option<Removed>> {
    let mut removed = None;
    if let Some(target) = target {
        match (source.kind == FileKind::Directory, target.kind == FileKind::Directory) {
            (true, false) => {
                return Err(Error::new(ErrorKind::NotDirectory, "the target is not a directory"));
            }
            (false, true) => return Err(Error::new(ErrorKind::IsDirectory, "the target is a directory")),
            (true, true) => check_empty(change, target.ino)?,
            (false, false) => {}
        }
        removed = take_away(change, to, target)?;
    }
    let weight = weight(change, source, from)?;
    change.recharge(from.0, to.0, weight, Charge::Checked)?;
    // Claims are made by the path before the move.
    claim_if_directory(change, source)?;
    change.delete_dentry(from.0, from.1)?;
    change.put_dentry(to.0, to.1, source)?;
    change_parents(change, from.0, to.0, source.kind == FileKind::Directory)?;
    arrive(change, source.ino, from, to)?;
    Ok(removed)
}

/// Removes what the move replaces.
fn take_away(
    change: &mut Change<'_, '_>,
    (parent, name): Place<'_>,
    target: Dentry,
) -> Result<Option<Removed>> {
    if target.kind != FileKind::Directory {
        return change.remove_name(parent, name, target.ino);
    }
    let inode = change.inode(target.ino)?;
    let removed = change.lose(target.ino, inode)?;
    let mut directory = change.directory(parent)?;
    directory.nlink = directory.nlink.saturating_sub(1);
    change.put_inode(parent, &directory)?;
    Ok(Some(removed))
}

fn exchange(
    change: &mut Change<'_, '_>,
    (from, source): (Place<'_>, Dentry),
    (to, target): (Place<'_>, Dentry),
) -> Result<()> {
    let weight = weight(change, source, from)? - weight(change, target, to)?;
    change.recharge(from.0, to.0, weight, Charge::Checked)?;
    claim_if_directory(change, source)?;
    claim_if_directory(change, target)?;
    change.put_dentry(from.0, from.1, target)?;
    change.put_dentry(to.0, to.1, source)?;
    change_parents(change, from.0, to.0, source.kind == FileKind::Directory)?;
    if target.kind == FileKind::Directory {
        change_parents(change, to.0, from.0, true)?;
    }
    arrive(change, source.ino, from, to)?;
    arrive(change, target.ino, to, from)
}

fn claim_if_directory(change: &mut Change<'_, '_>, moved: Dentry) -> Result<()> {
    if moved.kind != FileKind::Directory {
        return Ok(());
    }
    let directory = change.inode(moved.ino)?;
    change.claim_subtree(moved.ino, &directory)
}

/// Times of both directories, and the link that a moved directory takes along.
fn change_parents(change: &mut Change<'_, '_>, from: InodeId, to: InodeId, takes_link: bool) -> Result<()> {
    let mut old = change.directory(from)?;
    if from != to {
        let mut new = change.directory(to)?;
        if takes_link {
            old.nlink = old.nlink.saturating_sub(1);
            new.nlink += 1;
        }
        change.put_changed_directory(to, new)?;
    }
    change.put_changed_directory(from, old)
}

/// Tells the moved inode its new name.
fn arrive(change: &mut Change<'_, '_>, ino: InodeId, from: Place<'_>, to: Place<'_>) -> Result<()> {
    let mut inode: Inode = change.inode(ino)?;
    inode.ctime = change.now;
    // What made it a directory for a listing stays behind.
    inode.kept |= inode.kind == FileKind::Directory;
    change.change_name((ino, &mut inode), from, to)?;
    if inode.kind == FileKind::File && (inode.parent, &inode.name[..]) == to {
        inode.note_since(change.now.seconds);
    }
    change.put_inode(ino, &inode)?;
    change.settle_home(ino, &inode)
}
