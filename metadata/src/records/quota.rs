//! Quotas: how much may lie below a directory, and how much does.
//!
//! A directory with a `Q` record is counted: every change of names and sizes below it changes the record in the same
//! transaction, so that no crash parts them. An inode counts where its first name is, a file with its size; what has no
//! name counts nowhere. The directories that are counted are known in memory: where there are none, nothing is read.
//!
//! Bytes are let in before they are written ([`Change::reserve`]): when they are committed they are in the bucket already,
//! and can be refused no more.

use forebay_core::{Error, ErrorKind, FileKind, InodeId, Result, units::format_bytes};

use super::counted::Reservation;
use super::{Change, Records};
use crate::schema::{Inode, Quota, QuotaLimits, Usage};

/// Deepest path, as for keys.
const MOST_DEPTH: usize = 4096;

/// Whether what does not fit is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Charge {
    /// It is.
    Checked,
    /// It is there already: it only counts.
    Forced,
}

/// What an inode counts.
pub(crate) fn usage_of(inode: &Inode) -> Usage {
    let bytes = if inode.kind == FileKind::File { inode.size } else { 0 };
    Usage { inodes: 1, ..Usage::of_bytes(bytes) }
}

impl Change<'_, '_> {
    /// The quota of a directory, if it has one.
    pub(crate) fn quota(&self, directory: InodeId) -> Result<Option<Quota>> {
        match self.shared.quotas.may_have(directory) {
            true => self.reads().get(&self.keys().quota(directory))?.map(Quota::decode).transpose(),
            false => Ok(None),
        }
    }

    pub(crate) fn put_quota(&mut self, directory: InodeId, quota: &Quota) -> Result<()> {
        self.shared.quotas.add(directory);
        self.put(self.keys().quota(directory), quota.encode())
    }

    /// The directories at and above `directory` that are counted.
    fn counted_above(&self, directory: InodeId) -> Result<Vec<InodeId>> {
        let quotas = &self.shared.quotas;
        if quotas.is_empty() {
            return Ok(Vec::new());
        }
        if quotas.only_the_root() {
            return Ok(vec![InodeId::ROOT]);
        }
        let (mut at, mut found) = (directory, Vec::new());
        for _ in 0..MOST_DEPTH {
            if quotas.may_have(at) {
                found.push(at);
            }
            if at == InodeId::ROOT {
                return Ok(found);
            }
            at = self.inode(at)?.parent;
        }
        Err(Error::corrupt(format!("directory {at} lies below itself")))
    }

    /// Counts what comes into `directory`, or with negative numbers what leaves it.
    ///
    /// # Errors
    /// `OverQuota` when it is checked and does not fit.
    pub(crate) fn charge(&mut self, directory: InodeId, usage: Usage, charge: Charge) -> Result<()> {
        for counted in self.counted_above(directory)? {
            self.charge_one(counted, usage, charge)?;
        }
        Ok(())
    }

    /// Whether `usage` would fit into `directory` now.
    ///
    /// # Errors
    /// `OverQuota` when it would not.
    pub(crate) fn check_room(&self, directory: InodeId, usage: Usage) -> Result<()> {
        for counted in self.counted_above(directory)? {
            if let Some(quota) = self.quota(counted)? {
                check(counted, &quota, usage, self.shared.quotas.promised(counted))?;
            }
        }
        Ok(())
    }

    fn charge_one(&mut self, directory: InodeId, usage: Usage, charge: Charge) -> Result<()> {
        let Some(mut quota) = self.quota(directory)? else { return Ok(()) };
        if charge == Charge::Checked {
            check(directory, &quota, usage, self.shared.quotas.promised(directory))?;
        }
        quota.usage = quota.usage + usage;
        self.put(self.keys().quota(directory), quota.encode())
    }

    /// Counts what moves from one directory to another, less what moves the other way: only in those that do not hold
    /// both.
    pub(crate) fn recharge(
        &mut self,
        from: InodeId,
        to: InodeId,
        usage: Usage,
        charge: Charge,
    ) -> Result<()> {
        let (left, entered) = self.parted(from, to)?;
        for directory in left {
            self.charge_one(directory, -usage, charge)?;
        }
        for directory in entered {
            self.charge_one(directory, usage, charge)?;
        }
        Ok(())
    }

    /// The counted directories that hold only the one, and only the other.
    pub(crate) fn parted(&self, from: InodeId, to: InodeId) -> Result<(Vec<InodeId>, Vec<InodeId>)> {
        if from == to || self.shared.quotas.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let (mut left, mut entered) = (self.counted_above(from)?, self.counted_above(to)?);
        let both: Vec<InodeId> = left.iter().copied().filter(|one| entered.contains(one)).collect();
        left.retain(|one| !both.contains(one));
        entered.retain(|one| !both.contains(one));
        Ok((left, entered))
    }

    /// Lets an open file grow to `size`, before a byte of it leaves. What it may grow by is kept for it until it is
    /// committed or closed.
    ///
    /// # Errors
    /// `OverQuota`.
    pub(crate) fn reserve(&mut self, ino: InodeId, size: u64) -> Result<()> {
        let inode = self.file(ino)?;
        if inode.nlink == 0 {
            return Ok(());
        }
        let directories = self.counted_above(inode.parent)?;
        let bytes = size.saturating_sub(inode.size);
        let held = self.shared.quotas.reservation(ino);
        let held = held.filter(|held| held.directories == directories).map_or(0, |held| held.bytes);
        if bytes <= held {
            return Ok(());
        }
        let more = Usage::of_bytes(bytes - held);
        for directory in &directories {
            if let Some(quota) = self.quota(*directory)? {
                check(*directory, &quota, more, self.shared.quotas.promised(*directory))?;
            }
        }
        self.shared.quotas.hold(ino, Reservation { bytes, directories });
        Ok(())
    }

    /// Counts a file's new size, which was let in before.
    pub(crate) fn charge_size(&mut self, inode: &Inode, size: u64) -> Result<()> {
        let more = Usage::of_bytes(size) - Usage::of_bytes(inode.size);
        match more.bytes == 0 || inode.nlink == 0 {
            true => Ok(()),
            false => self.charge(inode.parent, more, Charge::Forced),
        }
    }

    /// Begins to count a directory, or goes on: from here on its record sees every change. What was there before comes
    /// with [`Self::finish_count`].
    pub(crate) fn begin_count(&mut self, directory: InodeId, limits: Option<QuotaLimits>) -> Result<Quota> {
        let mut inode = self.directory(directory)?;
        let mut quota = self.quota(directory)?.unwrap_or_default();
        if let Some(limits) = limits {
            quota.limits = limits;
            // What somebody set on a directory is not to vanish with its last object.
            inode.kept = true;
            self.put_inode(directory, &inode)?;
        }
        self.put_quota(directory, &quota)?;
        Ok(quota)
    }

    /// Adds what a count found beyond what the record said at the same moment, unless all is counted by now.
    pub(crate) fn finish_count(&mut self, directory: InodeId, beyond: Usage) -> Result<()> {
        match self.quota(directory)? {
            Some(quota) if !quota.is_counted => self.correct_quota(directory, beyond),
            _ => Ok(()),
        }
    }

    /// Counts a directory that has no entries, if that was not done yet.
    pub(crate) fn count_empty(&mut self, directory: InodeId) -> Result<()> {
        match self.quota(directory)? {
            Some(quota) if !quota.is_counted => self.correct_quota(directory, -quota.usage),
            _ => Ok(()),
        }
    }

    /// Adds what a count is off by.
    pub(crate) fn correct_quota(&mut self, directory: InodeId, beyond: Usage) -> Result<()> {
        let Some(mut quota) = self.quota(directory)? else { return Ok(()) };
        quota.usage = quota.usage + beyond;
        quota.is_counted = true;
        self.put_quota(directory, &quota)
    }

    /// Ends the counting of a directory that has no limits.
    pub(crate) fn end_count(&mut self, directory: InodeId) -> Result<()> {
        match self.quota(directory)? {
            Some(quota) if quota.limits == QuotaLimits::default() => self.delete_quota(directory),
            _ => Ok(()),
        }
    }

    /// The end of a directory is that of its quota.
    pub(crate) fn delete_quota(&mut self, directory: InodeId) -> Result<()> {
        match self.shared.quotas.may_have(directory) {
            true => self.delete(self.keys().quota(directory)),
            false => Ok(()),
        }
    }
}

/// Whether `more` fits beside what is there and `promised` bytes.
fn check(directory: InodeId, quota: &Quota, more: Usage, promised: u64) -> Result<()> {
    // While it is still being counted nobody can tell.
    if !quota.is_counted {
        return Ok(());
    }
    let QuotaLimits { bytes, inodes } = quota.limits;
    let is_over = |used: i64, more: i64, limit: Option<u64>| {
        more > 0 && limit.is_some_and(|limit| i128::from(used) + i128::from(more) > i128::from(limit))
    };
    let over = |what: String| {
        let hint = "delete something there, or raise it with `forebay quota set`";
        Err(Error::new(ErrorKind::OverQuota, format!("directory {directory} may hold {what}"))
            .with_hint(hint))
    };
    if is_over(quota.usage.bytes.saturating_add_unsigned(promised), more.bytes, bytes) {
        return over(format_bytes(bytes.unwrap_or_default()));
    }
    if is_over(quota.usage.inodes, more.inodes, inodes) {
        return over(format!("{} files and directories", inodes.unwrap_or_default()));
    }
    Ok(())
}
