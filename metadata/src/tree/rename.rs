//! Moving and exchanging names.

use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};

use super::RenameMode;
use super::remove_directory::check_empty;
use crate::records::{Change, Records, check_name, check_new_name};
use crate::schema::{Dentry, Inode};

/// A directory and a name in it.
type Place<'n> = (InodeId, &'n [u8]);

/// As [`super::Tree::rename`].
pub(super) fn rename(
    change: &mut Change<'_, '_>,
    from: Place<'_>,
    to: Place<'_>,
    mode: RenameMode,
) -> Result<()> {
    check_name(from.1)?;
    check_new_name(to.0, to.1)?;
    change.directory(from.0)?;
    change.directory(to.0)?;
    let source = change.entry(from.0, from.1)?;
    check_not_below(change, source, to.0)?;
    let target = change.dentry(to.0, to.1)?;
    match (mode, target) {
        (RenameMode::NoReplace, Some(_)) => {
            let name = String::from_utf8_lossy(to.1);
            Err(Error::new(ErrorKind::Exists, format!("`{name}` is in directory {} already", to.0)))
        }
        (RenameMode::Exchange, None) => change.entry(to.0, to.1).map(|_| ()),
        (_, Some(target)) if target.ino == source.ino => Ok(()),
        (RenameMode::Exchange, Some(target)) => {
            check_not_below(change, target, from.0)?;
            exchange(change, (from, source), (to, target))
        }
        (RenameMode::Replace | RenameMode::NoReplace, target) => replace(change, (from, source), to, target),
    }
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
) -> Result<()> {
    if let Some(target) = target {
        match (source.kind == FileKind::Directory, target.kind == FileKind::Directory) {
            (true, false) => {
                return Err(Error::new(ErrorKind::NotDirectory, "the target is not a directory"));
            }
            (false, true) => return Err(Error::new(ErrorKind::IsDirectory, "the target is a directory")),
            (true, true) => check_empty(change, target.ino)?,
            (false, false) => {}
        }
        take_away(change, to, target)?;
    }
    // Claims are made by the path before the move.
    claim_if_directory(change, source)?;
    change.delete_dentry(from.0, from.1)?;
    change.put_dentry(to.0, to.1, source)?;
    change_parents(change, from.0, to.0, source.kind == FileKind::Directory)?;
    arrive(change, source.ino, from, to)
}

/// Removes what the move replaces.
fn take_away(change: &mut Change<'_, '_>, (parent, name): Place<'_>, target: Dentry) -> Result<()> {
    if target.kind != FileKind::Directory {
        return change.remove_name(parent, name, target.ino);
    }
    let inode = change.inode(target.ino)?;
    change.lose(target.ino, inode)?;
    let mut directory = change.directory(parent)?;
    directory.nlink = directory.nlink.saturating_sub(1);
    change.put_inode(parent, &directory)
}

fn exchange(
    change: &mut Change<'_, '_>,
    (from, source): (Place<'_>, Dentry),
    (to, target): (Place<'_>, Dentry),
) -> Result<()> {
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
    change.change_name((ino, &mut inode), from, to)?;
    change.put_inode(ino, &inode)?;
    change.settle_home(ino, &inode)
}
