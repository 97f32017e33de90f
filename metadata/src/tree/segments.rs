//! Packed directories, and what compaction asks the tree: which segments to look at, what of them is in use, and that it
//! lies elsewhere now.

use std::ops::Range;

use bytes::Bytes;
use forebay_core::{Blob, Error, ErrorKind, FileLayout, InodeId, Result, Source};

use super::local::LocalTree;
use crate::records::{Change, Look, Records};
use crate::schema::{Inode, Loose, Tag};

/// Files whose layouts are read, or changed, in one step.
const STEP: usize = 128;

impl LocalTree {
    /// Says whether small files that are made in a directory from now on share segments. Directories that are made in it
    /// later take that over; what is there stays as it is.
    pub async fn set_packed(&self, directory: InodeId, packed: bool) -> Result<()> {
        self.change(move |change| {
            let mut inode = change.directory(directory)?;
            (inode.packed, inode.kept, inode.ctime) = (packed, true, change.now);
            change.put_inode(directory, &inode)
        })
        .await
    }

    /// Whether small files in a directory share segments.
    pub async fn is_packed(&self, directory: InodeId) -> Result<bool> {
        self.look(move |look| Ok(look.directory(directory)?.packed)).await
    }

    /// Some of the segments that are new or lost bytes, those that are being written left out, and after which one to go
    /// on.
    pub async fn loose_segments(
        &self,
        after: Option<&Loose>,
        limit: usize,
    ) -> Result<(Vec<Loose>, Option<Loose>)> {
        let keys = self.shared.keys;
        let (mut start, end) = keys.family(Tag::Loose);
        if let Some(after) = after {
            start = [&keys.loose(after.blob.key.as_str())[..], &[0]].concat().into();
        }
        let found = self.look(move |look| look.reads().scan(&start, &end, limit)).await?;
        let mut found: Vec<Loose> =
            found.into_iter().map(|(_, value)| Loose::decode(value)).collect::<Result<_>>()?;
        let next = found.last().cloned().filter(|_| found.len() == limit);
        found.retain(|loose| !self.shared.segments.holds(&loose.blob.key));
        Ok((found, next))
    }

    /// The bytes of a segment that files refer to, in order, none twice, and the first of these files.
    pub async fn live_ranges(&self, segment: &Blob) -> Result<(Vec<Range<u64>>, Option<InodeId>)> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let (mut first, mut last) = (None, None);
        loop {
            let step = self.look(|look| live_step(look, segment, last)).await?;
            for layout in &step.layouts {
                ranges.extend(layout.extents().iter().filter_map(|extent| match &extent.source {
                    Source::Blob { blob, offset } if blob.key == segment.key => {
                        Some(*offset..*offset + extent.length)
                    }
                    _ => None,
                }));
            }
            ranges = merged(ranges);
            first = first.or(step.first);
            match step.last {
                Some(_) => last = step.last,
                None => return Ok((ranges, first)),
            }
        }
    }

    /// Says that nothing is to be done about a segment as it was looked at.
    pub async fn settle_segment(&self, looked_at: Loose) -> Result<()> {
        self.change(move |change| {
            let record = change.keys().loose(looked_at.blob.key.as_str());
            let now = change.reads().get(&record)?.map(Loose::decode).transpose()?;
            if now.as_ref() == Some(&looked_at) { change.delete(record) } else { Ok(()) }
        })
        .await
    }

    /// Says that bytes of a segment now lie where `to` has them, by their offsets in the segment: layouts change,
    /// generations and times do not. Returns how many files took them from there. What `to` has not stays where it is.
    pub async fn move_segment(&self, segment: &Blob, to: &FileLayout) -> Result<u64> {
        let mut moved = 0;
        let mut last = None;
        loop {
            let members = self.look(|look| members(look, segment, last)).await?;
            let Some(end) = members.last().copied() else { return Ok(moved) };
            let (base, to) = (FileLayout::of_blob(segment.clone()), to.clone());
            moved += self.change(move |change| move_step(change, &members, &base, &to)).await?;
            last = Some(end);
        }
    }
}

/// Whether the next content of a file goes into a segment: small files of packed directories, but for those that are
/// objects at their own paths, which are replaced there.
pub(super) fn packs(records: &dyn Records, ino: InodeId) -> Result<bool> {
    let inode = records.file(ino)?;
    if inode.home.is_some() || inode.nlink == 0 {
        return Ok(false);
    }
    Ok(records.find(inode.parent)?.is_some_and(|parent| parent.packed))
}

/// Some of the inodes that refer to a segment, after `last`.
fn members(records: &dyn Records, segment: &Blob, last: Option<InodeId>) -> Result<Vec<InodeId>> {
    let (keys, key) = (records.keys(), segment.key.as_str());
    let (mut start, end) = keys.members(key);
    if let Some(last) = last {
        start = [&keys.member(key, last)[..], &[0]].concat().into();
    }
    records.reads().scan(&start, &end, STEP)?.iter().map(|(key, _)| keys.member_in(key)).collect()
}

/// Inodes by their numbers, read side by side.
fn inodes(records: &dyn Records, members: &[InodeId]) -> Result<Vec<(InodeId, Inode)>> {
    let keys: Vec<Bytes> = members.iter().map(|ino| records.keys().inode(*ino)).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    let values = records.reads().get_many(&keys)?;
    let found = members.iter().zip(values);
    found
        .filter_map(|(ino, value)| value.map(|value| Inode::decode(value).map(|inode| (*ino, inode))))
        .collect()
}

/// Part of what refers to a segment.
struct LiveStep {
    layouts: Vec<FileLayout>,
    first: Option<InodeId>,
    /// Where the next step goes on, if there may be more.
    last: Option<InodeId>,
}

fn live_step(look: &Look<'_, '_>, segment: &Blob, last: Option<InodeId>) -> Result<LiveStep> {
    let members = members(look, segment, last)?;
    let found = inodes(look, &members)?;
    let layouts: Vec<_> = found.iter().map(|(ino, inode)| look.layout(*ino, inode)).collect();
    let (first, last) = (members.first().copied(), members.last().copied());
    let last = last.filter(|_| members.len() == STEP);
    Ok(LiveStep { layouts: layouts.into_iter().collect::<Result<_>>()?, first, last })
}

fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(before) if range.start <= before.end => before.end = before.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

fn move_step(
    change: &mut Change<'_, '_>,
    members: &[InodeId],
    base: &FileLayout,
    to: &FileLayout,
) -> Result<u64> {
    let found = inodes(change, members)?;
    let layouts: Vec<_> = found.iter().map(|(ino, inode)| change.layout(*ino, inode)).collect();
    let layouts: Vec<FileLayout> = layouts.into_iter().collect::<Result<_>>()?;
    if !change.has_segments(to.blobs(), |_| false) {
        return Err(Error::new(ErrorKind::Bug, "bytes are moved to a segment that nobody holds"));
    }
    let mut count = 0;
    for ((ino, mut inode), old) in found.into_iter().zip(layouts) {
        let new = old.moved_into(base, to);
        if new != old {
            let home = inode.home.clone();
            change.replace_layout((ino, &mut inode), &new, home)?;
            change.put_inode(ino, &inode)?;
            count += 1;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_in_order_and_none_is_counted_twice() {
        assert_eq!(merged(vec![5..9, 0..2, 8..12, 2..3, 20..21, 6..7]), [0..3, 5..12, 20..21]);
        assert_eq!(merged(Vec::new()), []);
    }
}
