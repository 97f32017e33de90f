//! `I` and `E`: an inode with the head of its layout, and the rest of long layouts.

use bytes::Bytes;
use forebay_core::{
    Attributes, Blob, Extent, FileKind, InodeId, Result, Source, Timestamp, UNSET_ID, UNSET_MODE,
};
use serde::{Deserialize, Serialize};

use super::codec::{Decoder, Encoder, kind_byte};

pub(crate) const SET_UID: u16 = 0o4000;
pub(crate) const SET_GID: u16 = 0o2000;
const GROUP_EXECUTE: u16 = 0o010;

/// Inode numbers that a directory may still give to what is made in it, so that its files lie side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumberRun {
    /// The next number.
    pub next: u64,
    /// The first number past the run.
    pub end: u64,
}

/// The first inode number that a read-only mount gives out itself, to what it finds by listing beside a tree that it follows: no
/// mount for writing comes to it.
pub const OWN_NUMBERS: u64 = 1 << 62;

/// All that is kept of an inode, but for the rest of long layouts and for extended attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inode {
    /// Its type.
    pub kind: FileKind,
    /// Permission, set-id and sticky bits, or [`UNSET_MODE`].
    pub mode: u16,
    /// Owner, or [`UNSET_ID`].
    pub uid: u32,
    /// Group, or [`UNSET_ID`].
    pub gid: u32,
    /// Names; for directories 2 plus subdirectories.
    pub nlink: u32,
    /// Device number of device nodes.
    pub rdev: u32,
    /// Bytes of a file or of a symlink's target.
    pub size: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of anything.
    pub ctime: Timestamp,
    /// Counts changes of content.
    pub generation: u64,
    /// The directory that holds the first name; itself for the root.
    pub parent: InodeId,
    /// The first name; `P` records hold the others.
    #[serde(with = "super::text")]
    pub name: Bytes,
    /// Of a file: the plain object that is this file's, whether or not its bytes still come from there.
    pub home: Option<Blob>,
    /// Of a file: the first extents.
    pub extents: Vec<Extent>,
    /// Of a file: how many `E` records there are, numbered from 0, whose order says nothing.
    pub further: u32,
    /// Of a file: since when, in seconds, its path has the content that it has, where `mtime` does not tell, as programs set
    /// that. [`Inode::since`] is to be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<i64>,
    /// Of a symlink: where it points.
    #[serde(with = "super::text")]
    pub target: Bytes,
    /// Of a directory: inode numbers set aside for it.
    pub run: NumberRun,
    /// Of a directory: whether it stays when the bucket has nothing below it any more.
    pub kept: bool,
    /// Of a directory: whether small files in it share segments.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packed: bool,
}

/// Seconds that a store's clock may be behind this host's, with the second that it rounds to.
pub const CLOCKS_APART: i64 = 2;

/// What may follow in a file's record.
const SINCE: u8 = 1;

/// The bits of a directory's flags.
const KEPT: u8 = 1;
const PACKED: u8 = 2;

impl Inode {
    /// Whether a file never had content. What was imported has some of generation 0, wherever that lies since.
    pub fn is_blank(&self) -> bool {
        self.generation == 0
            && self.home.is_none()
            && self.size == 0
            && self.extents.is_empty()
            && self.further == 0
    }

    /// A new inode without content.
    pub fn new(kind: FileKind, mode: u16, (uid, gid): (u32, u32), now: Timestamp) -> Self {
        Self {
            kind,
            mode,
            uid,
            gid,
            nlink: if kind == FileKind::Directory { 2 } else { 1 },
            rdev: 0,
            size: 0,
            atime: now,
            mtime: now,
            ctime: now,
            generation: 0,
            parent: InodeId::ROOT,
            name: Bytes::new(),
            home: None,
            extents: Vec::new(),
            further: 0,
            since: None,
            target: Bytes::new(),
            run: NumberRun::default(),
            kept: false,
            packed: false,
        }
    }

    /// One that nobody gave an owner or a mode: each mount shows its own.
    pub fn unset(kind: FileKind, now: Timestamp) -> Self {
        Self::new(kind, UNSET_MODE, (UNSET_ID, UNSET_ID), now)
    }

    /// Takes the bits away that lend a program its owner's rights, as a new owner does, and new content. Of a directory they
    /// mean something else.
    pub fn drop_set_id(&mut self) {
        if self.kind == FileKind::Directory {
            return;
        }
        self.mode &= !SET_UID;
        // Without group execution the bit means mandatory locking.
        if self.mode & GROUP_EXECUTE != 0 {
            self.mode &= !SET_GID;
        }
    }

    /// Since when a file's path has the content that it has, in seconds: what was there before is older.
    pub fn since(&self) -> i64 {
        self.since.unwrap_or(self.mtime.seconds)
    }

    /// Notes since when that is.
    pub fn note_since(&mut self, since: i64) {
        let is_told = self.mtime.seconds.abs_diff(since) <= CLOCKS_APART.unsigned_abs();
        self.since = (!is_told).then_some(since);
    }

    /// What stat shows, but for what nobody has set.
    pub fn attributes(&self, ino: InodeId) -> Attributes {
        Attributes {
            ino,
            kind: self.kind,
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            nlink: self.nlink,
            rdev: self.rdev,
            size: self.size,
            allocated: self.allocated(),
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            generation: self.generation,
        }
    }

    /// Bytes that are not holes, as far as this record alone tells: what further records hold counts whole.
    fn allocated(&self) -> u64 {
        let here: u64 = self.extents.iter().map(|extent| extent.length).sum();
        let end = self.extents.last().map_or(0, Extent::end);
        match self.kind {
            FileKind::File if self.further > 0 => here + self.size.saturating_sub(end),
            _ => here,
        }
    }

    /// The `I` record.
    pub fn encode(&self) -> Bytes {
        let mut out = Encoder::new();
        out.byte(kind_byte(self.kind));
        for number in [self.mode.into(), self.uid, self.gid, self.nlink, self.rdev] {
            out.number(u64::from(number));
        }
        out.number(self.size);
        out.time(self.atime);
        out.time(self.mtime);
        out.time(self.ctime);
        out.number(self.generation);
        out.number(self.parent.0);
        out.bytes(&self.name);
        match self.kind {
            FileKind::File => {
                encode_list(&mut out, self.home.as_ref(), &self.extents);
                out.number(u64::from(self.further));
                if let Some(since) = self.since {
                    out.byte(SINCE);
                    out.signed(since);
                }
            }
            FileKind::Directory => {
                out.byte(if self.kept { KEPT } else { 0 } | if self.packed { PACKED } else { 0 });
                out.number(self.run.next);
                out.number(self.run.end);
            }
            FileKind::Symlink => out.bytes(&self.target),
            _ => {}
        }
        out.finish()
    }

    /// Reads an `I` record.
    pub fn decode(value: Bytes) -> Result<Self> {
        let mut from = Decoder::new(value, "inode")?;
        let kind = from.kind()?;
        let mut inode = Self::new(kind, from.small()?, (from.small()?, from.small()?), Timestamp::default());
        inode.nlink = from.small()?;
        inode.rdev = from.small()?;
        inode.size = from.number()?;
        inode.atime = from.time()?;
        inode.mtime = from.time()?;
        inode.ctime = from.time()?;
        inode.generation = from.number()?;
        inode.parent = from.ino()?;
        inode.name = from.bytes()?;
        match kind {
            FileKind::File => {
                (inode.home, inode.extents) = decode_list(&mut from)?;
                inode.further = from.small()?;
                if from.has_more() {
                    inode.since = match from.byte()? {
                        SINCE => Some(from.signed()?),
                        other => return Err(from.bad(&format!("has a field of type {other}"))),
                    };
                }
            }
            FileKind::Directory => {
                let flags = from.byte()?;
                if flags & !(KEPT | PACKED) != 0 {
                    return Err(from.bad(&format!("has the flags {flags}")));
                }
                (inode.kept, inode.packed) = (flags & KEPT != 0, flags & PACKED != 0);
                inode.run = NumberRun { next: from.number()?, end: from.number()? };
            }
            FileKind::Symlink => inode.target = from.bytes()?,
            _ => {}
        }
        from.finish()?;
        Ok(inode)
    }
}

/// An `E` record.
pub fn encode_extents(extents: &[Extent]) -> Bytes {
    let mut out = Encoder::new();
    encode_list(&mut out, None, extents);
    out.finish()
}

/// Reads an `E` record.
pub fn decode_extents(value: Bytes) -> Result<Vec<Extent>> {
    let mut from = Decoder::new(value, "extents")?;
    let (_, extents) = decode_list(&mut from)?;
    from.finish()?;
    Ok(extents)
}

const INLINE: u8 = 0;
const BLOB: u8 = 1;

/// A table of the blobs (the home first, if there is one), then the extents, which name them by position.
fn encode_list(out: &mut Encoder, home: Option<&Blob>, extents: &[Extent]) {
    let mut table: Vec<&Blob> = home.into_iter().collect();
    for extent in extents {
        if let Source::Blob { blob, .. } = &extent.source
            && !table.contains(&blob)
        {
            table.push(blob);
        }
    }
    out.byte(u8::from(home.is_some()));
    out.number(table.len() as u64);
    table.iter().for_each(|blob| out.blob(blob));
    out.number(extents.len() as u64);
    let mut end = 0;
    for extent in extents {
        out.number(extent.offset - end);
        match &extent.source {
            Source::Inline(bytes) => {
                out.byte(INLINE);
                out.bytes(bytes);
            }
            Source::Blob { blob, offset } => {
                let position = table.iter().position(|known| *known == blob).unwrap_or_default();
                out.byte(BLOB);
                out.number(extent.length);
                out.number(position as u64);
                out.number(*offset);
            }
        }
        end = extent.end();
    }
}

fn decode_list(from: &mut Decoder) -> Result<(Option<Blob>, Vec<Extent>)> {
    let has_home = from.flag()?;
    let mut table = Vec::new();
    for _ in 0..from.number()? {
        table.push(from.blob()?);
    }
    let mut extents = Vec::new();
    let mut end = 0u64;
    for _ in 0..from.number()? {
        let overflow = |from: &Decoder| from.bad("has an extent past 2^64");
        let offset = end.checked_add(from.number()?).ok_or_else(|| overflow(from))?;
        let (length, source) = match from.byte()? {
            INLINE => {
                let bytes = from.bytes()?;
                (bytes.len() as u64, Source::Inline(bytes))
            }
            BLOB => {
                let (length, position, offset) = (from.number()?, from.small::<usize>()?, from.number()?);
                let blob = table.get(position).cloned();
                let blob =
                    blob.ok_or_else(|| from.bad(&format!("names blob {position} of {}", table.len())))?;
                (length, Source::Blob { blob, offset })
            }
            other => return Err(from.bad(&format!("has an extent of type {other}"))),
        };
        end = offset.checked_add(length).ok_or_else(|| overflow(from))?;
        extents.push(Extent { offset, length, source });
    }
    let home = if has_home { table.into_iter().next() } else { None };
    match has_home && home.is_none() {
        true => Err(from.bad("has no home")),
        false => Ok((home, extents)),
    }
}
