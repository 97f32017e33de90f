//! What was changed of what is copied already: the copy is made to be the same again.
//!
//! A name of which anything changed loses what it led to in the copy and gets a copy of what it leads to now. A directory
//! that was moved goes with all below it and is copied anew from where it is: that is rare, and needs no second rule.

use std::collections::BTreeSet;

use bytes::Bytes;
use forebay_core::{FileKind, InodeId, Result};

use super::copy::{self, Source, all};
use super::step::{Reading, Work};
use crate::records::{Change, Changed, Made, Read, Records};
use crate::schema::{Dentry, Inode, Tag};

/// A name in a directory, and the copy of that directory.
type Place = (InodeId, Bytes, InodeId);

/// Follows `changed`.
pub(super) fn follow(change: &mut Change<'_, '_>, work: &mut Work, changed: &[Changed]) -> Result<()> {
    if changed.is_empty() {
        return Ok(());
    }
    let (number, mut names) = (work.number, BTreeSet::new());
    for (directory, name) in linked(change, changed)? {
        let copied = change.shared.clones.with(number, |building| building.copied(directory, &name));
        names.extend(copied.map(|copy| (directory, name, copy)));
    }
    let names: Vec<Place> = names.into_iter().collect();
    follow_names(change, work, &names)?;
    let is_directory = |one: &Changed| match one {
        Changed::Directory(directory) => Some(*directory),
        _ => None,
    };
    let copies: Vec<(InodeId, InodeId)> = changed
        .iter()
        .filter_map(is_directory)
        .filter_map(|directory| {
            let copy =
                change.shared.clones.with(number, |building| Some(building.made.get(&directory)?.copy));
            Some((directory, copy.filter(|copy| !work.dropped.contains(copy))?))
        })
        .collect();
    follow_directories(change, &copies)
}

/// The names that were changed, those of files that have several among them.
fn linked(change: &Change<'_, '_>, changed: &[Changed]) -> Result<Vec<(InodeId, Bytes)>> {
    let names = changed.iter().map(|one| match one {
        Changed::Name(directory, name) => Ok(vec![(*directory, name.clone())]),
        Changed::Directory(_) => Ok(Vec::new()),
        Changed::Links(ino) => {
            let (start, end) = change.keys().below(Tag::Link, ino.0);
            let (inode, further) = (change.find(*ino), change.reads().scan(&start, &end, usize::MAX));
            let (inode, further) = (inode?, further?);
            let Some(inode) = inode.filter(|inode| inode.nlink > 0) else { return Ok(Vec::new()) };
            let mut names = vec![(inode.parent, inode.name)];
            for (key, _) in further {
                names.push(change.keys().link_in(&key)?);
            }
            Ok(names)
        }
    });
    Ok(all(names.collect())?.into_iter().flatten().collect())
}

fn follow_names(change: &mut Change<'_, '_>, work: &mut Work, names: &[Place]) -> Result<()> {
    let now: Vec<_> = names.iter().map(|(directory, name, _)| change.dentry(*directory, name)).collect();
    let before: Vec<_> = names.iter().map(|(_, name, copy)| change.dentry(*copy, name)).collect();
    let copies: Vec<_> = names.iter().map(|(_, _, copy)| change.find(*copy)).collect();
    let (now, before): (Vec<Option<Dentry>>, Vec<Option<Dentry>>) = (all(now)?, all(before)?);
    all(copies)?;
    let is_same = |at: usize| match (now[at], before[at]) {
        (Some(now), Some(before)) if now.kind == FileKind::Directory => {
            let number = work.number;
            change.shared.clones.with(number, |building| {
                building.made.get(&now.ino).is_some_and(|made| made.copy == before.ino)
            })
        }
        _ => false,
    };
    let different: Vec<usize> = (0..names.len()).filter(|at| !is_same(*at)).collect();
    let entries = |side: &[Option<Dentry>]| different.iter().filter_map(|at| side[*at]).collect::<Vec<_>>();
    let (found, old) = (copy::inodes(change, &entries(&now)), copy::inodes(change, &entries(&before)));
    let (found, old) = (found?, old?);
    let freed = change.read_copies(old.iter().map(|(ino, inode)| (*ino, inode)));
    let found = copy::read(change, found)?;
    freed?;
    // All that goes goes first: a directory that was moved may be met at both places.
    let mut old = old.into_iter();
    for at in &different {
        if let (Some(_), Some((ino, inode))) = (before[*at], before[*at].and_then(|_| old.next())) {
            take_away(change, work, &names[*at], (ino, inode))?;
        }
    }
    let mut found = found.into_iter();
    for at in &different {
        if let Some(source) = now[*at].and_then(|_| found.next()) {
            work.add(change, &names[*at], &source)?;
        }
    }
    Ok(())
}

/// Removes what a name leads to in the copy.
fn take_away(
    change: &mut Change<'_, '_>,
    work: &mut Work,
    (directory, name, copy): &Place,
    (ino, inode): (InodeId, Inode),
) -> Result<()> {
    change.delete_dentry(*copy, name)?;
    let tally = work.tallies.entry(*copy).or_default();
    tally.directory = *directory;
    match inode.kind {
        FileKind::Directory => {
            tally.subdirectories -= 1;
            work.dropped.insert(ino);
        }
        kind => {
            tally.files -= 1;
            let bytes = if kind == FileKind::File { inode.size } else { 0 };
            tally.bytes = tally.bytes.saturating_sub_unsigned(bytes);
        }
    }
    change.free_copy(change.shared.session, ino, inode)
}

impl Work {
    /// Copies what a name leads to, unless its bytes are about to be replaced.
    pub(super) fn add(
        &mut self,
        change: &mut Change<'_, '_>,
        (directory, name, copy): &Place,
        source: &Source,
    ) -> Result<()> {
        if source.is_held_up {
            self.held_up.push((Changed::Name(*directory, name.clone()), source.ino));
            return Ok(());
        }
        self.weight += source.weight();
        let ino = copy::put_copy(change, source, (*copy, name))?;
        let tally = self.tallies.entry(*copy).or_default();
        tally.directory = *directory;
        if source.inode.kind == FileKind::Directory {
            tally.subdirectories += 1;
            let (above, inside) = (*directory, *copy);
            let made = Made { copy: ino, above, inside, files: 0, bytes: 0, read: Read::Nothing };
            self.made.insert(source.ino, made);
            self.waiting.push(Reading { directory: source.ino, copy: ino, after: None });
        } else {
            tally.files += 1;
            tally.bytes = tally.bytes.saturating_add_unsigned(source.bytes());
            if source.inode.nlink > 1 {
                self.linked.push(source.ino);
            }
        }
        Ok(())
    }
}

/// Gives the copies of directories the attributes that these have now.
fn follow_directories(change: &mut Change<'_, '_>, copies: &[(InodeId, InodeId)]) -> Result<()> {
    let sources: Vec<_> = copies.iter().map(|(directory, _)| change.find(*directory)).collect();
    let inodes: Vec<_> = copies.iter().map(|(_, copy)| change.find(*copy)).collect();
    let before: Vec<_> = copies.iter().map(|(_, copy)| change.attributes(*copy)).collect();
    let now: Vec<_> = copies.iter().map(|(directory, _)| change.attributes(*directory)).collect();
    let (sources, inodes, before, now) = (all(sources)?, all(inodes)?, all(before)?, all(now)?);
    let both = sources.into_iter().zip(inodes).zip(before.into_iter().zip(now));
    for ((directory, copy), ((source, inode), (before, attributes))) in copies.iter().zip(both) {
        let (Some(source), Some(inode)) = (source, inode) else { continue };
        let layout = forebay_core::FileLayout::empty();
        let source = Source { ino: *directory, inode: source, layout, attributes, is_held_up: false };
        copy::drop_attributes(change, *copy, (&before, &source))?;
        copy::follow_attributes(change, (*copy, inode), &source)?;
    }
    Ok(())
}
