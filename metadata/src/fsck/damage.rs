//! What can be wrong, and how it is told.

use std::ops::Range;

use bytes::Bytes;
use forebay_core::{Blob, FileKind, InodeId, ObjectKey};
use serde::{Deserialize, Serialize};

use crate::records::session_of;
use crate::schema::{Counters, Usage};

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Damage {
    /// A record that cannot be read.
    UnreadableRecord { key: Bytes, why: String },
    /// An entry whose inode is missing, or which lies in no directory.
    DanglingEntry { parent: InodeId, name: Bytes, ino: InodeId },
    /// An entry that gives its inode another type than it has.
    WrongType { parent: InodeId, name: Bytes, ino: InodeId, kind: FileKind },
    /// An inode that no entry leads to and nobody has open.
    LostInode { ino: InodeId, kind: FileKind, subdirectories: u32 },
    /// An inode that remembers other names than lead to it. These do.
    WrongNames { ino: InodeId, names: Vec<(InodeId, Bytes)> },
    /// An inode that counts other names, or a directory that counts other subdirectories, than there are.
    WrongLinkCount { ino: InodeId, recorded: u32, found: u32 },
    /// A layout whose extents overlap, pass its end or are missing.
    BadLayout { ino: InodeId, why: String },
    /// Bytes of a file that are not in the bucket as the layout says.
    DanglingExtent(Loss),
    /// Bytes of a file that a host staged and has not uploaded.
    NotUploaded { ino: InodeId, key: ObjectKey, host: String },
    /// A blob that more or fewer inodes refer to than is counted.
    WrongReferences { blob: forebay_core::Blob, recorded: u64, found: u64 },
    /// A file that refers to a segment and is not recorded there, or the other way round.
    WrongMember { segment: ObjectKey, ino: InodeId, is_recorded: bool },
    /// A plain object that more or fewer other files borrow than is counted.
    WrongLoan { blob: forebay_core::Blob, recorded: u64, found: u64 },
    /// A directory without a place to be listed from, or with one that is not its own.
    WrongImportState { ino: InodeId, why: &'static str },
    /// Something in the trash that is missing, or that was not deleted.
    StrayTrash { ino: InodeId, due_ms: u64 },
    /// A quota that counts other than what lies below its directory; nothing is found where there is no directory.
    WrongQuota { ino: InodeId, recorded: Usage, found: Option<Usage> },
    /// A claim on a key that nothing makes.
    EmptyClaim { key: ObjectKey },
    /// The counts of the volume.
    WrongCounters { recorded: Option<Counters>, found: Counters },
    /// An owned blob that nothing refers to, of a dead session of this tree or with a name that no session gives.
    LeakedBlob { key: ObjectKey, bytes: u64 },
    /// Unfinished uploads and staged files of dead sessions.
    LeakedUploads { uploads: u64, leftovers: u64 },
}

/// What mending came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mended {
    /// It was mended.
    Done,
    /// It is not wrong any more, by somebody else's doing.
    Nothing,
    /// It is as wrong as before.
    Cannot,
}

/// How an object is that is not there at all.
pub(super) const MISSING: &str = "missing";

/// A run of a file's bytes and where its object has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Run {
    /// First byte in the file.
    pub(super) at: u64,
    pub(super) length: u64,
    /// First byte in the object.
    pub(super) offset: u64,
}

/// Bytes of a file whose object is not in the bucket as the layout says.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Loss {
    pub(super) ino: InodeId,
    pub(super) blob: Blob,
    /// How the object is instead.
    pub(super) why: &'static str,
    /// The file's bytes; none when only an empty object is missed.
    pub(super) runs: Vec<Run>,
    /// Of a file in the trash, until when.
    pub(super) due_ms: Option<u64>,
}

/// Something that is wrong, as people and programs are told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What kind of damage, in words joined by dashes.
    pub kind: String,
    /// What it is about: an inode, an entry or a key.
    pub subject: String,
    /// The facts.
    pub detail: String,
    /// Whether it was mended.
    pub mended: bool,
    /// Of bytes that are not in the bucket, where they were: `FIRST-LAST KEY@OFFSET+LENGTH` for each run, first and last
    /// byte in the file, and which bytes of which object these were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<String>,
}

/// What a check came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckReport {
    /// Inodes looked at.
    pub inodes: u64,
    /// Entries looked at.
    pub entries: u64,
    /// Objects in the bucket that were compared with the tree.
    pub objects: u64,
    /// Plain objects that were changed or deleted in the bucket since they were listed. No damage: the next listing
    /// takes it over.
    pub changed_outside: u64,
    /// Owned blobs that no record names and no session of this tree put: another tree's over the same bucket, as of one
    /// that was lost, or an earlier version's. No damage, and nothing frees them.
    #[serde(default)]
    pub foreign: u64,
    /// Their bytes.
    #[serde(default)]
    pub foreign_bytes: u64,
    /// What is wrong, the first ten thousand.
    pub findings: Vec<Finding>,
    /// How much more is wrong.
    pub further: u64,
    /// Files whose bytes were given up by this check.
    #[serde(default)]
    pub lost: u64,
    /// Why bytes that are missing were not given up, though it was to mend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

impl FsckReport {
    /// Whether nothing is wrong, or nothing any more.
    pub fn is_clean(&self) -> bool {
        self.further == 0 && self.findings.iter().all(|finding| finding.mended)
    }
}

impl Damage {
    /// Whether there is something that cannot be read, and that may be what other damage seems to lack.
    pub(super) fn hides_others(&self) -> bool {
        matches!(self, Self::UnreadableRecord { .. } | Self::BadLayout { .. })
    }

    /// The inode of whose names more or fewer are there than it knows.
    pub(super) fn misnamed(&self) -> Option<InodeId> {
        match self {
            Self::LostInode { ino, .. } | Self::WrongNames { ino, .. } | Self::WrongLinkCount { ino, .. } => {
                Some(*ino)
            }
            _ => None,
        }
    }

    /// Whether mending takes something away because nothing was found that needs it. A name or its bytes are taken from
    /// their place where an entry may be among what cannot be read.
    pub(super) fn takes_away(&self) -> bool {
        match self {
            Self::WrongLinkCount { recorded, found, .. } => found < recorded,
            Self::WrongReferences { recorded, found, .. } | Self::WrongLoan { recorded, found, .. } => {
                found < recorded
            }
            Self::WrongMember { is_recorded, .. } => *is_recorded,
            Self::DanglingEntry { .. }
            | Self::LostInode { .. }
            | Self::WrongNames { .. }
            | Self::DanglingExtent(_)
            | Self::StrayTrash { .. }
            | Self::WrongQuota { .. }
            | Self::EmptyClaim { .. }
            | Self::WrongCounters { .. } => true,
            _ => false,
        }
    }

    /// In words.
    pub(super) fn finding(&self) -> Finding {
        let inode = |ino: &InodeId| format!("inode {ino}");
        let entry = |parent: &InodeId, name: &Bytes| {
            format!("`{}` in directory {parent}", String::from_utf8_lossy(name))
        };
        let (kind, subject, detail) = match self {
            Self::UnreadableRecord { key, why } => {
                let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
                ("unreadable-record", format!("record {key}"), why.clone())
            }
            Self::DanglingEntry { parent, name, ino } => {
                ("dangling-entry", entry(parent, name), format!("inode {ino} or the directory is missing"))
            }
            Self::WrongType { parent, name, ino, kind } => {
                ("wrong-type", entry(parent, name), format!("inode {ino} is a {kind:?}"))
            }
            Self::LostInode { ino, kind, .. } => {
                ("lost-inode", inode(ino), format!("no entry leads to this {kind:?}"))
            }
            Self::WrongNames { ino, names } => {
                ("wrong-names", inode(ino), format!("{} entries lead to it, it knows others", names.len()))
            }
            Self::WrongLinkCount { ino, recorded, found } => {
                ("wrong-link-count", inode(ino), format!("recorded {recorded}, found {found}"))
            }
            Self::BadLayout { ino, why } => ("bad-layout", inode(ino), why.clone()),
            Self::DanglingExtent(loss) => ("dangling-extent", inode(&loss.ino), loss.told(None, false)),
            Self::NotUploaded { ino, key, host } => {
                let detail =
                    format!("its bytes at `{key}` were staged with --writeback on host {host}, not uploaded");
                ("not-uploaded", inode(ino), detail)
            }
            Self::WrongReferences { blob, recorded, found } => {
                ("wrong-references", blob.key.to_string(), format!("recorded {recorded}, found {found}"))
            }
            Self::WrongMember { segment, ino, is_recorded } => {
                let fault = if *is_recorded { "lists it without need" } else { "does not list it" };
                ("wrong-member", inode(ino), format!("the segment `{segment}` {fault}"))
            }
            Self::WrongLoan { blob, recorded, found } => {
                ("wrong-loan", blob.key.to_string(), format!("recorded {recorded}, found {found}"))
            }
            Self::WrongImportState { ino, why } => ("wrong-import-state", inode(ino), (*why).to_owned()),
            Self::StrayTrash { ino, .. } => {
                ("stray-trash", inode(ino), "it is in the trash and missing, or not deleted".to_owned())
            }
            Self::WrongQuota { ino, recorded, found: Some(found) } => {
                ("wrong-quota", inode(ino), format!("recorded {recorded:?}, found {found:?}"))
            }
            Self::WrongQuota { ino, found: None, .. } => {
                ("wrong-quota", inode(ino), "it is no directory".to_owned())
            }
            Self::EmptyClaim { key } => {
                ("empty-claim", key.to_string(), "no file, write or deletion makes it".to_owned())
            }
            Self::WrongCounters { recorded, found } => {
                ("wrong-counters", "the volume".to_owned(), format!("recorded {recorded:?}, found {found:?}"))
            }
            Self::LeakedBlob { key, bytes } => ("leaked-blob", key.to_string(), leak_of(key, *bytes)),
            Self::LeakedUploads { uploads, leftovers } => {
                let detail = format!("{uploads} unfinished uploads, {leftovers} staged files");
                ("leaked-uploads", "the bucket".to_owned(), detail)
            }
        };
        Finding { kind: kind.to_owned(), subject, detail, mended: false, lost: Vec::new() }
    }
}

fn leak_of(key: &ObjectKey, bytes: u64) -> String {
    let whose = match session_of(key) {
        Some(_) => "",
        None => "; its name is none that Forebay gives: remove it by hand if it is nobody's",
    };
    format!("{bytes} bytes that nothing refers to{whose}")
}

impl Loss {
    /// The name that the file gets in `/lost+found`.
    pub(super) fn refuge(ino: InodeId) -> String {
        format!("damaged-inode-{ino}")
    }

    /// The bytes, first and last of each run: `0-4095,8192-8195`.
    pub(super) fn spelled(&self) -> String {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for run in &self.runs {
            match ranges.last_mut() {
                Some(last) if last.end == run.at => last.end += run.length,
                _ => ranges.push(run.at..run.at + run.length),
            }
        }
        let ranges: Vec<String> =
            ranges.iter().map(|range| format!("{}-{}", range.start, range.end - 1)).collect();
        ranges.join(",")
    }

    /// Where each run was.
    pub(super) fn places(&self) -> Vec<String> {
        let key = &self.blob.key;
        let place =
            |Run { at, length, offset }: &Run| format!("{at}-{} {key}@{offset}+{length}", at + length - 1);
        self.runs.iter().map(place).collect()
    }

    /// Which bytes of what, that the object is not there as it was, who can have done it, and what is to be done or was.
    pub(super) fn told(&self, path: Option<&str>, is_mended: bool) -> String {
        let of = path.map_or_else(String::new, |path| format!(" of `{path}`"));
        let (key, why) = (&self.blob.key, self.why);
        let (bytes, be) = match self.runs.is_empty() {
            true => (format!("the empty object{of}"), "is"),
            false => (format!("the bytes {}{of}", self.spelled()), "are"),
        };
        if is_mended {
            return match self.runs.is_empty() {
                true => format!("{bytes} at `{key}` was {why}: the file is one without an object now"),
                false => format!(
                    "{bytes} at `{key}` were {why} and read as zeros now; the file is `/lost+found/{}`",
                    Self::refuge(self.ino)
                ),
            };
        }
        let is_ours = key.as_str().starts_with(Blob::OWNED_PREFIX);
        let (who, advice) = match (is_ours, why) {
            (true, MISSING) => (
                "nobody but Forebay may write there",
                "restore that version of it, or give these bytes up with --repair and copy them in",
            ),
            (true, _) => (
                "nobody but Forebay may write there",
                "restore that version of it, or remove the file and copy it again",
            ),
            (false, MISSING) => (
                "another program deleted that object, which held bytes of this file",
                "restore that version of it, or give these bytes up with --repair and copy them in",
            ),
            (false, _) => (
                "another program replaced that object, which held bytes of this file",
                "restore that version of it, or remove the file and copy it again",
            ),
        };
        format!("{bytes} at `{key}` {be} {why}: {who}; {advice}")
    }
}
