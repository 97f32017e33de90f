//! One transaction of a clone.
//!
//! Whatever a step decides it hands over to what is kept of the clone at its very end, when nothing can fail any more: it
//! may run several times before it comes there, and what others change in between is noted as ever.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result};

use super::copy::{self, all};
use super::follow::follow;
use crate::records::{Building, Change, Changed, Charge, Cloned, Made, Read, Records, check_new_name};
use crate::schema::{Dentry, Inode};

/// Directories that one step begins with, and that are read side by side.
const MOST_DIRECTORIES: usize = 256;
/// Rounds of reading in one step, each of directories that the one before may have brought to light.
const MOST_ROUNDS: usize = 32;
/// Bytes of records after which a step reads no further.
const MOST_BYTES: usize = 4 << 20;
/// Times as many changes as a step copies entries: no more than these are left for a last step.
const LAST: usize = 16;
/// Runs of one step that take in what was changed since the one before.
const MOST_RUNS: u32 = 32;

/// What is to be cloned.
#[derive(Debug, Clone)]
pub(super) struct Job {
    /// What names the clone.
    pub(super) number: u64,
    pub(super) source: InodeId,
    /// The directory and the name of the copy.
    pub(super) to: (InodeId, Bytes),
    /// Entries of one step.
    pub(super) limit: usize,
}

/// What came of a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// There is more to do.
    More,
    /// These directories have to be listed first.
    Unlisted(Vec<InodeId>),
    /// Only files are left whose bytes are about to be replaced.
    HeldUp(Vec<InodeId>),
    /// The copy is there.
    Linked,
}

/// A directory whose entries are being copied.
#[derive(Debug, Clone)]
pub(super) struct Reading {
    pub(super) directory: InodeId,
    pub(super) copy: InodeId,
    /// The last name that was copied.
    pub(super) after: Option<Bytes>,
}

/// What a step adds right below the copy of a directory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tally {
    pub(super) directory: InodeId,
    pub(super) files: i64,
    pub(super) bytes: i64,
    pub(super) subdirectories: i32,
}

impl Default for Tally {
    fn default() -> Self {
        Self { directory: InodeId::ROOT, files: 0, bytes: 0, subdirectories: 0 }
    }
}

/// What a step has done so far.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) number: u64,
    /// Copies of directories, by what they are copies of.
    pub(super) made: HashMap<InodeId, Made>,
    /// By the copies of directories.
    pub(super) tallies: HashMap<InodeId, Tally>,
    /// Copies of directories that are no part of the clone any more.
    pub(super) dropped: HashSet<InodeId>,
    /// Directories to be read, the next one last; those of before this step are at the bottom.
    pub(super) waiting: Vec<Reading>,
    /// How many of them there were.
    taken: usize,
    /// The directories that were read, by their copies, and how far.
    read: HashMap<InodeId, (InodeId, Read)>,
    unlisted: Vec<Reading>,
    pub(super) held_up: Vec<(Changed, InodeId)>,
    /// Files of several names.
    pub(super) linked: Vec<InodeId>,
    /// Bytes of records.
    pub(super) weight: usize,
}

/// What a step begins with.
#[derive(Debug)]
struct Begun {
    top: Option<InodeId>,
    changed: Vec<Changed>,
    /// Whether changes are left for another step.
    is_behind: bool,
    /// Whether anything is, but for what this one brings to light.
    is_cut: bool,
    waiting: Vec<Reading>,
}

/// Does one step. It runs again, over the newest state, until all that it reads is in memory.
pub(super) fn step(change: &mut Change<'_, '_>, job: &Job, runs: &mut Runs) -> Result<Step> {
    let inode = change.inode(job.source)?;
    if inode.nlink == 0 {
        return Err(Error::new(ErrorKind::NotFound, "what was to be cloned was removed meanwhile"));
    }
    let target = check_target(change, job)?;
    if inode.kind != FileKind::Directory {
        return clone_file(change, job, (inode, target));
    }
    let begun = change.shared.clones.with(job.number, |building| begin(building, job.limit, runs))?;
    let mut work = Work::new(job.number, begun.waiting);
    let top = match begun.top {
        Some(top) => top,
        None => work.make_top(change, job, inode)?,
    };
    follow(change, &mut work, &begun.changed)?;
    work.read_on(change, job.limit.saturating_sub(begun.changed.len()))?;
    work.put_links(change)?;
    let after = change.shared.clones.with(job.number, |building| work.after(building));
    let is_whole = !begun.is_cut && work.is_done();
    match is_whole {
        true => {
            let below = change
                .shared
                .clones
                .with(job.number, |building| work.right_below(building, &after, job.source));
            link(change, job, (top, target), (&after.cloned, below))?;
        }
        // What was moved may count twice until all that was changed is followed.
        false if begun.is_behind => {}
        false => change.check_room(job.to.0, after.cloned.usage())?,
    }
    if begun.top.is_none() && !is_whole {
        change.mark_unfinished(change.shared.session, top)?;
    }
    if change.txn.has_missed() {
        // An error that somebody passed over: nothing of this run stays.
        return Err(Error::new(ErrorKind::Unavailable, "not all that the clone reads is in memory yet"));
    }
    // Nothing fails from here on: what was read was there.
    change.shared.clones.with(job.number, |building| building.top = Some(top));
    let step =
        change.shared.clones.with(job.number, |building| work.hand_over(building, begun.changed, after));
    Ok(if is_whole { Step::Linked } else { step })
}

/// What the runs of one step hand on.
#[derive(Debug, Default)]
pub(super) struct Runs {
    count: u32,
    /// What the last one followed.
    changed: Vec<Changed>,
}

fn begin(building: &Building, limit: usize, runs: &mut Runs) -> Result<Begun> {
    if building.is_overrun {
        return Err(Error::new(ErrorKind::Conflict, "the tree is changed faster than it can be cloned")
            .with_hint("try again when less is written there"));
    }
    let from = building.waiting.len().saturating_sub(MOST_DIRECTORIES);
    let reading = |directory: &InodeId| {
        let made = building.made.get(directory)?;
        let after = match &made.read {
            Read::UpTo(name) => Some(Bytes::copy_from_slice(name)),
            _ => None,
        };
        Some(Reading { directory: *directory, copy: made.copy, after })
    };
    let waiting: Vec<Reading> = building.waiting[from..].iter().filter_map(reading).collect();
    let is_last = building.waiting.is_empty() && building.changed.len() <= limit.saturating_mul(LAST);
    runs.count += 1;
    if runs.count <= MOST_RUNS {
        let most = if is_last { usize::MAX } else { limit };
        let all = building.changed.iter();
        runs.changed = all.take(most).cloned().collect();
        if building.waiting.is_empty() && building.changed.is_empty() {
            runs.changed = building.held_up.iter().cloned().collect();
        }
    }
    let left = building.changed.len() + building.held_up.len();
    let is_behind = left > runs.changed.len();
    let is_cut = from > 0 || is_behind;
    Ok(Begun { top: building.top, changed: runs.changed.clone(), is_behind, is_cut, waiting })
}

/// The directory that the copy is to be in.
///
/// # Errors
/// `Exists`; `Invalid` for a directory below itself.
fn check_target(change: &Change<'_, '_>, job: &Job) -> Result<Inode> {
    let (parent, name) = (job.to.0, &job.to.1);
    check_new_name(parent, name)?;
    let directory = change.directory(parent)?;
    if change.dentry(parent, name)?.is_some() {
        let name = String::from_utf8_lossy(name);
        return Err(Error::new(ErrorKind::Exists, format!("`{name}` exists"))
            .with_hint("name a path that does not exist yet"));
    }
    match change.is_within(parent, job.source)? {
        true => {
            Err(Error::invalid("a directory cannot be cloned into itself")
                .with_hint("name a path outside of it"))
        }
        false => Ok(directory),
    }
}

/// All of it, for something that is no directory.
fn clone_file(change: &mut Change<'_, '_>, job: &Job, (inode, directory): (Inode, Inode)) -> Result<Step> {
    let found = copy::read(change, vec![(job.source, inode)])?;
    if found.iter().any(|source| source.is_held_up) {
        return Ok(Step::HeldUp(vec![job.source]));
    }
    let (parent, name) = &job.to;
    let mut cloned = Cloned::default();
    for source in &found {
        cloned.files += 1;
        cloned.bytes = cloned.bytes.saturating_add(source.bytes());
        change.charge(*parent, cloned.usage(), Charge::Checked)?;
        copy::put_copy(change, source, (*parent, name))?;
    }
    change.put_changed_directory(*parent, directory)?;
    change.shared.clones.with(job.number, |building| building.cloned = cloned);
    Ok(Step::Linked)
}

/// Gives the whole copy its name.
fn link(
    change: &mut Change<'_, '_>,
    job: &Job,
    (top, mut directory): (InodeId, Inode),
    (cloned, subdirectories): (&Cloned, u32),
) -> Result<()> {
    let (parent, name) = &job.to;
    change.charge(*parent, cloned.usage(), Charge::Checked)?;
    let mut inode = change.inode(top)?;
    inode.nlink = 2 + subdirectories;
    change.put_inode(top, &inode)?;
    change.delete(change.keys().orphan(change.shared.session, top))?;
    change.put_dentry(*parent, name, Dentry { ino: top, kind: FileKind::Directory })?;
    directory.nlink += 1;
    change.put_changed_directory(*parent, directory)
}

/// What a step makes of a clone.
#[derive(Debug)]
pub(super) struct After {
    /// Directories whose copies are no part of it any more.
    gone: HashSet<InodeId>,
    cloned: Cloned,
}

impl Work {
    fn new(number: u64, waiting: Vec<Reading>) -> Self {
        Self {
            number,
            made: HashMap::new(),
            tallies: HashMap::new(),
            dropped: HashSet::new(),
            taken: waiting.len(),
            waiting,
            read: HashMap::new(),
            unlisted: Vec::new(),
            held_up: Vec::new(),
            linked: Vec::new(),
            weight: 0,
        }
    }

    /// Makes the copy of the topmost directory, without a name.
    fn make_top(&mut self, change: &mut Change<'_, '_>, job: &Job, inode: Inode) -> Result<InodeId> {
        let found = copy::read(change, vec![(job.source, inode)])?;
        let mut top = InodeId::ROOT;
        for source in &found {
            top = copy::put_inode(change, source, (job.to.0, &job.to.1))?;
            let mut inode = change.inode(top)?;
            inode.nlink = 0;
            change.put_inode(top, &inode)?;
        }
        let made =
            Made { copy: top, above: job.source, inside: top, files: 0, bytes: 0, read: Read::Nothing };
        self.made.insert(job.source, made);
        self.waiting.push(Reading { directory: job.source, copy: top, after: None });
        Ok(top)
    }

    /// Copies up to `left` further entries.
    fn read_on(&mut self, change: &mut Change<'_, '_>, mut left: usize) -> Result<()> {
        let mut width = 1;
        for _ in 0..MOST_ROUNDS {
            if left == 0 || self.waiting.is_empty() || self.weight >= MOST_BYTES {
                return Ok(());
            }
            let at = self.waiting.len().saturating_sub(width.min(left));
            let wave = self.waiting.split_off(at);
            left -= self.read_wave(change, wave, left)?;
            // Large directories one by one, small ones together.
            width = (width * 2).min(MOST_DIRECTORIES);
        }
        Ok(())
    }

    /// Copies entries of some directories, `most` of all together. Returns how many.
    fn read_wave(
        &mut self,
        change: &mut Change<'_, '_>,
        mut wave: Vec<Reading>,
        most: usize,
    ) -> Result<usize> {
        // One that was copied anew is read for that copy alone: what is below it has a place there already.
        wave.retain(|one| self.made.get(&one.directory).is_none_or(|made| made.copy == one.copy));
        let states: Vec<_> = wave.iter().map(|one| change.import_state(one.directory)).collect();
        let limit = (most / wave.len().max(1)).max(1);
        let entries = |one: &Reading| change.entries(one.directory, one.after.as_deref(), limit);
        let entries: Vec<_> = wave.iter().map(entries).collect();
        let copies: Vec<_> = wave.iter().map(|one| change.find(one.copy)).collect();
        let (states, entries) = (all(states)?, all(entries)?);
        all(copies)?;
        let mut names: Vec<(usize, Bytes)> = Vec::new();
        let mut found: Vec<Dentry> = Vec::new();
        let is_listed: Vec<bool> =
            states.iter().map(|state| state.prefix.is_none() || state.listed.is_some()).collect();
        let mut ends: Vec<Option<Bytes>> = vec![None; wave.len()];
        for (at, entries) in entries.into_iter().enumerate().filter(|(at, _)| is_listed[*at]) {
            if entries.len() >= limit {
                ends[at] = entries.last().map(|(name, _)| name.clone());
            }
            for (name, entry) in entries {
                names.push((at, name));
                found.push(entry);
            }
        }
        let inodes = copy::inodes(change, &found)?;
        let sources = copy::read(change, inodes)?;
        let count = sources.len();
        // Directories that are not done with come before those that are found in them.
        for (at, mut reading) in wave.iter().cloned().enumerate() {
            match (is_listed[at], ends[at].take()) {
                (false, _) => self.unlisted.push(reading),
                (true, None) => drop(self.read.insert(reading.copy, (reading.directory, Read::All))),
                (true, Some(last)) => {
                    let read = Read::UpTo(last[..].into());
                    self.read.insert(reading.copy, (reading.directory, read));
                    reading.after = Some(last);
                    self.waiting.push(reading);
                }
            }
        }
        for ((at, name), source) in names.into_iter().zip(&sources) {
            let Reading { directory, copy, .. } = &wave[at];
            self.add(change, &(*directory, name, *copy), source)?;
        }
        Ok(count)
    }

    /// Counts the directories below those that have a name.
    fn put_links(&self, change: &mut Change<'_, '_>) -> Result<()> {
        for (copy, tally) in self.tallies.iter().filter(|(_, tally)| tally.subdirectories != 0) {
            if let Some(mut inode) = change.find(*copy)?.filter(|inode| inode.nlink > 0) {
                inode.nlink = inode.nlink.saturating_add_signed(tally.subdirectories);
                change.put_inode(*copy, &inode)?;
            }
        }
        Ok(())
    }

    /// Whether nothing that this step began with or found is left.
    fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.unlisted.is_empty() && self.held_up.is_empty()
    }

    /// What the clone is after this step. Forgets what this step has made in copies that are no part of it any more: they are
    /// freed with those.
    fn after(&mut self, building: &Building) -> After {
        // Of a directory that was moved the copy at its old place is out of date, even if it is still to be removed.
        let moved = self.made.keys().filter_map(|source| building.made.get(source)).map(|made| made.copy);
        let gone = building.gone(&self.dropped.iter().copied().chain(moved).collect());
        let stray = self.stray(building, &gone);
        self.made.retain(|source, _| !stray.contains(source));
        let mut cloned = building.cloned;
        for made in gone.iter().filter_map(|source| building.made.get(source)) {
            cloned.files -= made.files;
            cloned.bytes = cloned.bytes.saturating_sub(made.bytes);
        }
        for (copy, tally) in &self.tallies {
            let is_there = |made: Option<&Made>| made.is_some_and(|made| made.copy == *copy);
            let (old, new) = (building.made.get(&tally.directory), self.made.get(&tally.directory));
            if is_there(old) && !gone.contains(&tally.directory) || is_there(new) {
                cloned.files = cloned.files.saturating_add_signed(tally.files);
                cloned.bytes = cloned.bytes.saturating_add_signed(tally.bytes);
            }
        }
        cloned.directories = (building.made.len() - gone.len() + self.made.len()) as u64;
        After { gone, cloned }
    }

    /// The directories that were copied in this step into copies that are no part of the clone after it: of directories in
    /// `gone`, or below those.
    fn stray(&self, building: &Building, gone: &HashSet<InodeId>) -> HashSet<InodeId> {
        let is_part = |source: &InodeId| {
            let mut at = *source;
            while let Some(made) = self.made.get(&at).filter(|made| made.above != at) {
                let new = self.made.get(&made.above);
                let old = building.made.get(&made.above).filter(|_| !gone.contains(&made.above));
                if new.or(old).is_none_or(|above| above.copy != made.inside) {
                    return false;
                }
                at = made.above;
            }
            true
        };
        self.made.keys().filter(|source| !is_part(source)).copied().collect()
    }

    /// How many directories lie right below the topmost one.
    fn right_below(&self, building: &Building, after: &After, top: InodeId) -> u32 {
        let stays = building.made.iter().filter(|(source, _)| !after.gone.contains(source));
        let is_below = |(source, made): &(&InodeId, &Made)| made.above == top && **source != top;
        stays.chain(&self.made).filter(is_below).count() as u32
    }

    /// Notes what was done.
    fn hand_over(self, building: &mut Building, followed: Vec<Changed>, after: After) -> Step {
        for one in followed {
            building.changed.remove(&one);
            building.held_up.remove(&one);
        }
        building.waiting.truncate(building.waiting.len().saturating_sub(self.taken));
        if !after.gone.is_empty() {
            building.made.retain(|source, _| !after.gone.contains(source));
            building.waiting.retain(|source| !after.gone.contains(source));
        }
        building.made.extend(self.made);
        for (copy, tally) in self.tallies {
            if let Some(made) = building.made.get_mut(&tally.directory).filter(|made| made.copy == copy) {
                made.files = made.files.saturating_add_signed(tally.files);
                made.bytes = made.bytes.saturating_add_signed(tally.bytes);
            }
        }
        building.cloned = after.cloned;
        building.linked.extend(self.linked);
        let unlisted: Vec<InodeId> = self.unlisted.iter().map(|reading| reading.directory).collect();
        let is_there = |reading: &Reading, building: &Building| {
            building.made.get(&reading.directory).is_some_and(|made| made.copy == reading.copy)
        };
        for reading in self.unlisted.into_iter().chain(self.waiting) {
            if is_there(&reading, building) {
                building.waiting.push(reading.directory);
            }
        }
        for (copy, (directory, read)) in self.read {
            if let Some(made) = building.made.get_mut(&directory).filter(|made| made.copy == copy) {
                made.read = read;
            }
        }
        let files: Vec<InodeId> = self.held_up.iter().map(|(_, ino)| *ino).collect();
        building.held_up.extend(self.held_up.into_iter().map(|(changed, _)| changed));
        let is_waiting = building.changed.is_empty() && building.waiting.is_empty();
        match (unlisted.is_empty(), is_waiting && !files.is_empty()) {
            (false, _) => Step::Unlisted(unlisted),
            (true, true) => Step::HeldUp(files),
            (true, false) => Step::More,
        }
    }
}
