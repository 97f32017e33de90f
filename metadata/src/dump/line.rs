//! The lines of a dump: one record each, by the names of its fields.

use bytes::Bytes;
use forebay_core::{Error, Extent, InodeId, Result, Timestamp, VolumeId};
use serde::{Deserialize, Serialize};

use crate::schema::{
    Claim, Counters, Deletion, Dentry, ImportState, Inode, Intent, Keys, Loan, Loose, Member, Move, Orphan,
    Quota, References, Tag, decode_extents, decode_plain, encode_extents, encode_plain, text,
};

/// The version of the format that this program writes.
pub(super) const FORMAT: u32 = 1;

/// The first line: what the dump is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the format.
    pub forebay_dump: u32,
    /// The volume it was taken of.
    pub volume: VolumeId,
    /// When, by the clock of the host that took it.
    pub taken: Timestamp,
}

/// The last line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct End {
    /// Lines between header and end.
    pub(super) records: u64,
    /// BLAKE3 of all lines before this one, in hexadecimal.
    pub(super) blake3: String,
}

/// A line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Line {
    Header(Header),
    Entry {
        parent: InodeId,
        #[serde(with = "text")]
        name: Bytes,
        entry: Dentry,
    },
    Inode {
        ino: InodeId,
        inode: Box<Inode>,
    },
    Extents {
        ino: InodeId,
        n: u32,
        extents: Vec<Extent>,
    },
    Link {
        ino: InodeId,
        parent: InodeId,
        #[serde(with = "text")]
        name: Bytes,
    },
    Xattr {
        ino: InodeId,
        #[serde(with = "text")]
        name: Bytes,
        #[serde(with = "text")]
        value: Bytes,
    },
    Intent {
        ino: InodeId,
        intent: Intent,
    },
    Claim(Claim),
    References(References),
    Member {
        ino: InodeId,
        segment: Member,
    },
    Loose(Loose),
    Loan(Loan),
    Orphan {
        session: u64,
        ino: InodeId,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_unfinished: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kept_ms: Option<u64>,
    },
    Known {
        session: u64,
    },
    Trash {
        due_ms: u64,
        ino: InodeId,
    },
    Deletion {
        due_ms: u64,
        deletion: Deletion,
    },
    Move {
        ino: InodeId,
        what: Move,
    },
    Import {
        ino: InodeId,
        state: ImportState,
    },
    Quota {
        ino: InodeId,
        quota: Quota,
    },
    Counters(Counters),
    End(End),
}

impl Line {
    /// The line of a record; `None` for those that belong to a process and not to the tree.
    pub(super) fn of(keys: Keys, key: &Bytes, value: Bytes) -> Result<Option<Self>> {
        let ino = || keys.number_in(key).map(InodeId);
        Ok(Some(match keys.tag_in(key)? {
            Tag::Dentry => {
                Self::Entry { parent: ino()?, name: keys.name_in(key)?, entry: Dentry::decode(value)? }
            }
            Tag::Inode => Self::Inode { ino: ino()?, inode: Box::new(Inode::decode(value)?) },
            Tag::Extents => {
                let (ino, n) = keys.extents_in(key)?;
                Self::Extents { ino, n, extents: decode_extents(value)? }
            }
            Tag::Link => {
                let (parent, name) = keys.link_in(key)?;
                Self::Link { ino: ino()?, parent, name }
            }
            Tag::Xattr => {
                let value = decode_plain(value, "extended attribute")?;
                Self::Xattr { ino: ino()?, name: keys.name_in(key)?, value }
            }
            Tag::Intent => Self::Intent { ino: ino()?, intent: Intent::decode(value)? },
            Tag::Claim => Self::Claim(Claim::decode(value)?),
            Tag::References => Self::References(References::decode(value)?),
            Tag::Member => Self::Member { ino: keys.member_in(key)?, segment: Member::decode(value)? },
            Tag::Loose => Self::Loose(Loose::decode(value)?),
            Tag::Loan => Self::Loan(Loan::decode(value)?),
            Tag::Orphan => {
                let (session, ino) = keys.number_and_ino_in(key)?;
                let (is_unfinished, kept_ms) = match Orphan::decode(value)? {
                    Orphan::Unfinished => (true, None),
                    Orphan::Open { kept_ms } => (false, kept_ms),
                };
                Self::Orphan { session, ino, is_unfinished, kept_ms }
            }
            Tag::Known => Self::Known { session: keys.number_in(key)? },
            Tag::Trash => {
                let (due_ms, ino) = keys.number_and_ino_in(key)?;
                Self::Trash { due_ms, ino }
            }
            Tag::Deletion => {
                Self::Deletion { due_ms: keys.number_in(key)?, deletion: Deletion::decode(value)? }
            }
            Tag::Move => Self::Move { ino: ino()?, what: Move::decode(value)? },
            Tag::Import => Self::Import { ino: ino()?, state: ImportState::decode(value)? },
            Tag::Quota => Self::Quota { ino: ino()?, quota: Quota::decode(value)? },
            Tag::Counters => Self::Counters(Counters::decode(value)?),
            Tag::Session | Tag::Loading | Tag::Home | Tag::Copied | Tag::Beneath => return Ok(None),
        }))
    }

    /// The record of a line.
    ///
    /// # Errors
    /// `Corrupt` for a header or an end in between.
    pub(super) fn record(&self, keys: Keys) -> Result<(Bytes, Bytes)> {
        Ok(match self {
            Self::Entry { parent, name, entry } => (keys.dentry(*parent, name), entry.encode()),
            Self::Inode { ino, inode } => (keys.inode(*ino), inode.encode()),
            Self::Extents { ino, n, extents } => (keys.extents(*ino, *n), encode_extents(extents)),
            Self::Link { ino, parent, name } => (keys.link(*ino, *parent, name), encode_plain(b"")),
            Self::Xattr { ino, name, value } => (keys.xattr(*ino, name), encode_plain(value)),
            Self::Intent { ino, intent } => (keys.intent(*ino), intent.encode()),
            Self::Claim(claim) => (keys.claim(claim.key.as_str()), claim.encode()),
            Self::References(references) => (keys.references(references.key.as_str()), references.encode()),
            Self::Member { ino, segment } => (keys.member(segment.key.as_str(), *ino), segment.encode()),
            Self::Loose(loose) => (keys.loose(loose.blob.key.as_str()), loose.encode()),
            Self::Loan(loan) => (keys.loan(&loan.blob), loan.encode()),
            Self::Orphan { session, ino, is_unfinished, kept_ms } => {
                let orphan = match is_unfinished {
                    true => Orphan::Unfinished,
                    false => Orphan::Open { kept_ms: *kept_ms },
                };
                (keys.orphan(*session, *ino), orphan.encode())
            }
            Self::Known { session } => (keys.known(*session), encode_plain(b"")),
            Self::Trash { due_ms, ino } => (keys.trash(*due_ms, *ino), encode_plain(b"")),
            Self::Deletion { due_ms, deletion } => {
                (keys.deletion(*due_ms, deletion.blob.key.as_str()), deletion.encode())
            }
            Self::Move { ino, what } => (keys.movement(*ino), what.encode()),
            Self::Import { ino, state } => (keys.import(*ino), state.encode()),
            Self::Quota { ino, quota } => (keys.quota(*ino), quota.encode()),
            Self::Counters(counters) => (keys.counters(), counters.encode()),
            Self::Header(_) | Self::End(_) => {
                return Err(Error::corrupt("a header or an end among the records"));
            }
        })
    }

    /// Its text, with the newline.
    pub(super) fn text(&self) -> Result<Vec<u8>> {
        let mut text = serde_json::to_vec(self).map_err(|error| Error::bug(error.to_string()))?;
        text.push(b'\n');
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::{Blob, FileKind, ObjectKey, Source, Version};

    use super::*;
    use crate::schema::HolderState;

    #[test]
    fn the_text_is_pinned() {
        let check = |line: Line, golden: &str| {
            assert_eq!(String::from_utf8(line.text().expect("text")).expect("UTF-8").trim_end(), golden);
            assert_eq!(serde_json::from_str::<Line>(golden).expect("a line"), line);
        };
        let header =
            Header { forebay_dump: FORMAT, volume: VolumeId(7), taken: Timestamp { seconds: 5, nanos: 6 } };
        check(
            Line::Header(header),
            r#"{"header":{"forebay_dump":1,"volume":7,"taken":{"seconds":5,"nanos":6}}}"#,
        );
        let entry = Dentry { ino: InodeId(2), kind: FileKind::File };
        check(
            Line::Entry { parent: InodeId::ROOT, name: Bytes::from_static(b"\xff"), entry },
            r#"{"entry":{"parent":1,"name":{"hex":"ff"},"entry":{"ino":2,"kind":"File"}}}"#,
        );
        let blob = Blob { key: ObjectKey::new("k"), version: Version::new("v"), size: 9 };
        let mut inode = Inode::new(FileKind::File, 0o644, (1, 2), Timestamp::default());
        inode.name = Bytes::from_static(b"n");
        inode.size = 3;
        inode.extents = vec![Extent { offset: 0, length: 3, source: Source::Blob { blob, offset: 6 } }];
        check(
            Line::Inode { ino: InodeId(2), inode: Box::new(inode) },
            concat!(
                r#"{"inode":{"ino":2,"inode":{"kind":"File","mode":420,"uid":1,"gid":2,"nlink":1,"rdev":0,"size":3,"#,
                r#""atime":{"seconds":0,"nanos":0},"mtime":{"seconds":0,"nanos":0},"ctime":{"seconds":0,"nanos":0},"#,
                r#""generation":0,"parent":1,"name":"n","home":null,"extents":[{"offset":0,"length":3,"#,
                r#""source":{"Blob":{"blob":{"key":"k","version":"v","size":9},"offset":6}}}],"further":0,"#,
                r#""target":"","run":{"next":0,"end":0},"kept":false}}}"#,
            ),
        );
        let claim = Claim { key: ObjectKey::new("k"), state: HolderState::Doomed { due_ms: 4 } };
        check(Line::Claim(claim), r#"{"claim":{"key":"k","state":{"doomed":{"due_ms":4}}}}"#);
        let segment = Member { key: ObjectKey::new("k") };
        check(Line::Member { ino: InodeId(2), segment }, r#"{"member":{"ino":2,"segment":{"key":"k"}}}"#);
        let blob = Blob { key: ObjectKey::new("k"), version: Version::new("v"), size: 9 };
        check(
            Line::Loose(Loose { blob, changes: 4 }),
            r#"{"loose":{"blob":{"key":"k","version":"v","size":9},"changes":4}}"#,
        );
        let what = Move::Subtree { prefixes: vec!["a/".into()] };
        check(
            Line::Move { ino: InodeId(2), what },
            r#"{"move":{"ino":2,"what":{"subtree":{"prefixes":["a/"]}}}}"#,
        );
        let orphan = |is_unfinished, kept_ms| {
            let ino = InodeId(2);
            Line::Orphan { session: 3, ino, is_unfinished, kept_ms }
        };
        check(orphan(false, None), r#"{"orphan":{"session":3,"ino":2}}"#);
        check(orphan(true, None), r#"{"orphan":{"session":3,"ino":2,"is_unfinished":true}}"#);
        check(orphan(false, Some(5)), r#"{"orphan":{"session":3,"ino":2,"kept_ms":5}}"#);
        check(Line::Known { session: 3 }, r#"{"known":{"session":3}}"#);
        check(Line::Trash { due_ms: 4, ino: InodeId(2) }, r#"{"trash":{"due_ms":4,"ino":2}}"#);
        let end = End { records: 1, blake3: "00".into() };
        check(Line::End(end), r#"{"end":{"records":1,"blake3":"00"}}"#);
    }
}
