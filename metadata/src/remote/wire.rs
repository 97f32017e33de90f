//! What a mount and the process that serves its tree say to each other (docs/formats.md).
//!
//! Messages are frames: their length as four little-endian bytes, and their postcard encoding. What comes from the other side is
//! checked here: lengths before memory is taken for them, layouts before they are believed.

use std::time::Duration;

use bytes::Bytes;
use forebay_core::{
    Attributes, Error, ErrorKind, FileLayout, InodeId, ObjectKey, Result, Timestamp, VolumeId,
};
use postcard::ser_flavors::Flavor;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::locks::Asking;
use crate::tree::{
    Created, DirectoryPage, Existing, Lock, LockAnswer, LockRange, Lookup, NewInode, OutsideChange,
    Placement, Removed, RenameMode, SetAttributes, Statistics, XattrMode,
};

/// Names what is spoken, and its version: who speaks another one is turned away (ALPN).
pub const PROTOCOL: &str = "forebay-tree/3";
/// The longest message, in bytes: a layout of half a million extents.
const LONGEST: usize = 64 << 20;
/// Bytes before the body of a message: its length.
pub(super) const HEAD: usize = 4;

/// What a mount says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToServer {
    /// First of all: who it is.
    Hello(Hello),
    /// Asks for something. Answers come in any order.
    Ask {
        /// Raised with each request of a session.
        id: u64,
        /// The lowest number whose answer it waits for: those below are not asked for again.
        oldest: u64,
        /// What.
        request: Request,
    },
    /// It lives.
    Alive,
}

/// Who a mount is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The volume whose tree it wants.
    pub(super) volume: VolumeId,
    /// What it is known by.
    pub(super) session: u64,
    /// Whether it never was here, nor at another process that served this tree.
    pub(super) is_new: bool,
    /// For messages: its host and process.
    pub(super) name: String,
}

/// What the process that serves the tree says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToGuest {
    /// The mount is let in.
    Welcome(Welcome),
    /// It is not.
    Refused(Failure),
    /// The answer to a request.
    Answer {
        /// The request's number.
        id: u64,
        /// What came of it.
        outcome: Result<Answer, Failure>,
    },
    /// What others changed.
    Changed(Vec<OutsideChange>),
    /// Some of that was lost, or came while nobody listened: anything may have changed.
    Missed,
    /// Whether there are quotas, so that files ask for room before they grow.
    Quotas(bool),
    /// It lives.
    Alive,
    /// It ends, and answers nothing any more: another one may serve the tree soon. Whether all that it answered is durable.
    Ending(bool),
    /// A lock is free that the mount waits for under this number.
    Offered(u64),
}

/// How a mount is let in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Welcome {
    /// A number of the process, and no other.
    pub(super) server: u64,
    /// How its session stands.
    pub(super) standing: Standing,
    /// Whether there are quotas.
    pub(super) has_quotas: bool,
}

/// How a session stands with the process that serves the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Standing {
    /// It was here all the time: what was asked and not answered may be asked again.
    Kept,
    /// It goes on here; the process before is gone, and may have taken with it what was not synced.
    TakenOver,
    /// It begins here.
    New,
    /// It was ended meanwhile. The mount begins another one.
    Ended,
}

/// A failure as it crosses the network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    kind: u8,
    message: String,
    hint: Option<String>,
}

/// By the codes that they have on the network: new ones are added at the end.
const KINDS: [ErrorKind; 20] = [
    ErrorKind::NotFound,
    ErrorKind::Exists,
    ErrorKind::Invalid,
    ErrorKind::Conflict,
    ErrorKind::Unavailable,
    ErrorKind::Stale,
    ErrorKind::Corrupt,
    ErrorKind::NoSpace,
    ErrorKind::OverQuota,
    ErrorKind::Denied,
    ErrorKind::Unsupported,
    ErrorKind::Bug,
    ErrorKind::NotDirectory,
    ErrorKind::IsDirectory,
    ErrorKind::NotEmpty,
    ErrorKind::ReadOnly,
    ErrorKind::NameTooLong,
    ErrorKind::NoAttribute,
    ErrorKind::TooLarge,
    ErrorKind::Refused,
];

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let kind = KINDS.iter().position(|kind| *kind == error.kind()).unwrap_or(KINDS.len()) as u8;
        let mut message = error.message().to_owned();
        let mut below = std::error::Error::source(&error);
        while let Some(cause) = below {
            message = format!("{message}: {cause}");
            below = cause.source();
        }
        Self { kind, message, hint: error.hint().map(str::to_owned) }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let kind = KINDS.get(usize::from(failure.kind)).copied().unwrap_or(ErrorKind::Bug);
        let error = Self::new(kind, failure.message);
        match failure.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}

/// What a mount asks for: a call of [`crate::tree::Tree`] each, but for some of the last.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Request {
    Lookup(InodeId, Bytes),
    Attributes(InodeId),
    ReadDirectory(InodeId, Option<Bytes>, u32),
    Parent(InodeId),
    Layout(InodeId),
    FilesAfter(InodeId, u32),
    ReadLink(InodeId),
    Create(InodeId, Bytes, NewInode, Existing),
    CreateOpened(InodeId, Bytes, NewInode, Existing),
    Link(InodeId, InodeId, Bytes),
    Unlink(InodeId, Bytes),
    RemoveDirectory(InodeId, Bytes),
    Rename((InodeId, Bytes), (InodeId, Bytes), RenameMode),
    SetAttributes(InodeId, SetAttributes),
    Accessed(InodeId, Timestamp),
    Xattr(InodeId, Bytes),
    Xattrs(InodeId),
    SetXattr(InodeId, Bytes, Bytes, XattrMode),
    RemoveXattr(InodeId, Bytes),
    Opened(InodeId),
    Closed(InodeId),
    Reserve(InodeId, u64),
    Place(InodeId, bool),
    Settle(InodeId),
    Doubt(InodeId),
    IsInDoubt(InodeId),
    HasObject(InodeId),
    IsReferred(ObjectKey),
    UploadStarted(ObjectKey, String),
    UploadEnded(String),
    CommitLayout(InodeId, u64, FileLayout, Timestamp),
    CommitShared(InodeId, u64, FileLayout, Timestamp, InodeId),
    Relocate(InodeId, u64, FileLayout),
    Sync,
    Statistics,
    Refresh(InodeId),
    /// What the session has open, as often as it has, at whose own paths it is, and what it has locked, after another process took
    /// the tree over. Answered with what is open, and locked, no more.
    Reopen(Vec<InodeId>, Vec<InodeId>, Vec<(InodeId, Lock)>),
    /// A command of people, as whoever serves the tree understands it; answered in kind.
    Command(Bytes),
    /// It ends.
    Bye,
    /// An advisory lock.
    Lock(InodeId, Lock, Asking),
    /// Takes those of an owner away.
    Unlock(InodeId, u64, LockRange),
    /// It does not wait any more for the lock that it waited for under this number.
    Leave(InodeId, u64),
}

/// What a request does to the tree if it is made twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Twice {
    /// Nothing: it only looks.
    Looks,
    /// No more than once, whoever serves the tree: the same comes of it, as what is open is told to who takes that over.
    Same,
    /// Something else.
    Differs,
}

impl Request {
    /// What comes of it if it is made twice.
    pub(super) fn twice(&self) -> Twice {
        match self {
            Self::Lookup(..)
            | Self::Attributes(_)
            | Self::ReadDirectory(..)
            | Self::Parent(_)
            | Self::Layout(_)
            | Self::FilesAfter(..)
            | Self::ReadLink(_)
            | Self::Xattr(..)
            | Self::Xattrs(_)
            | Self::IsInDoubt(_)
            | Self::HasObject(_)
            | Self::IsReferred(_)
            | Self::Statistics => Twice::Looks,
            Self::SetAttributes(..)
            | Self::Accessed(..)
            | Self::SetXattr(_, _, _, XattrMode::Set)
            | Self::Reserve(..)
            | Self::Place(..)
            | Self::Settle(_)
            | Self::Doubt(_)
            | Self::UploadStarted(..)
            | Self::UploadEnded(_)
            // Of a generation: the second one is told that the first was made.
            | Self::CommitLayout(..)
            | Self::CommitShared(..)
            | Self::Relocate(..)
            | Self::Opened(_)
            | Self::Closed(_)
            | Self::Sync
            | Self::Refresh(_)
            | Self::Create(_, _, _, Existing::Accept)
            | Self::CreateOpened(_, _, _, Existing::Accept)
            | Self::Bye
            // An owner's locks are in nobody's way but others', and each file's are asked for one after another.
            | Self::Lock(..)
            | Self::Unlock(..)
            | Self::Leave(..) => Twice::Same,
            Self::Create(_, _, _, Existing::Refuse)
            | Self::CreateOpened(_, _, _, Existing::Refuse)
            | Self::Link(..)
            | Self::Unlink(..)
            | Self::RemoveDirectory(..)
            | Self::Rename(..)
            | Self::SetXattr(..)
            | Self::RemoveXattr(..)
            | Self::Command(_)
            | Self::Reopen(..) => Twice::Differs,
        }
    }

    /// Whether it changes what `Sync` makes durable.
    pub(super) fn changes(&self) -> bool {
        match self {
            Self::Sync
            | Self::Refresh(_)
            | Self::Bye
            | Self::Opened(_)
            | Self::Reserve(..)
            | Self::Lock(..)
            | Self::Unlock(..)
            | Self::Leave(..)
            | Self::Reopen(..) => false,
            other => other.twice() != Twice::Looks,
        }
    }

    /// Whether it opens a file.
    pub(super) fn opens(&self) -> bool {
        matches!(self, Self::Opened(_) | Self::CreateOpened(..))
    }

    /// Checks what serde did not.
    fn check(self) -> Result<Self> {
        Ok(match self {
            Self::CommitLayout(ino, generation, layout, mtime) => {
                Self::CommitLayout(ino, generation, checked(layout)?, mtime)
            }
            Self::CommitShared(ino, generation, layout, mtime, lender) => {
                Self::CommitShared(ino, generation, checked(layout)?, mtime, lender)
            }
            Self::Relocate(ino, generation, layout) => Self::Relocate(ino, generation, checked(layout)?),
            Self::Lock(_, Lock { range, .. }, _) | Self::Unlock(_, _, range) if range.first > range.last => {
                return Err(Error::corrupt("a lock ends before it begins"));
            }
            Self::Reopen(_, _, ref locks)
                if locks.iter().any(|(_, lock)| lock.range.first > lock.range.last) =>
            {
                return Err(Error::corrupt("a lock ends before it begins"));
            }
            other => other,
        })
    }
}

/// What is answered.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    Lookup(Lookup),
    Attributes(Attributes),
    Page(DirectoryPage),
    Inode(InodeId),
    Layout(FileLayout, u64),
    Files(Vec<(InodeId, FileLayout)>),
    Bytes(Bytes),
    Names(Vec<Bytes>),
    Made(Attributes, bool),
    Created(Created),
    Placement(Placement),
    Flag(bool),
    Statistics(Statistics),
    /// What of that which was said to be open, and of the owners of what was said to be locked, is so no more.
    Reopened(Vec<InodeId>, Vec<(InodeId, u64)>),
    Removed(Option<Removed>),
    /// Of an open file: its layout, its generation, and whether a write takes neither set-id bits nor a capability from it.
    Opened(FileLayout, u64, bool),
    Lock(LockAnswer),
}

impl Answer {
    fn check(self) -> Result<Self> {
        Ok(match self {
            Self::Layout(layout, generation) => Self::Layout(checked(layout)?, generation),
            Self::Opened(layout, generation, is_bare) => Self::Opened(checked(layout)?, generation, is_bare),
            Self::Created(made) => Self::Created(Created { layout: checked(made.layout)?, ..made }),
            Self::Files(files) => {
                let check = |(ino, layout)| Ok((ino, checked(layout)?));
                Self::Files(files.into_iter().map(check).collect::<Result<_>>()?)
            }
            other => other,
        })
    }
}

/// A layout whose extents are as they should be.
fn checked(layout: FileLayout) -> Result<FileLayout> {
    layout.check().map(|()| layout)
}

/// What is said in one direction.
pub(super) trait Message: Serialize + DeserializeOwned {
    /// Checks what the encoding does not.
    fn check(self) -> Result<Self>;
}

impl Message for ToServer {
    fn check(self) -> Result<Self> {
        Ok(match self {
            Self::Ask { id, oldest, request } => Self::Ask { id, oldest, request: request.check()? },
            other => other,
        })
    }
}

impl Message for ToGuest {
    fn check(self) -> Result<Self> {
        Ok(match self {
            Self::Answer { id, outcome: Ok(answer) } => Self::Answer { id, outcome: Ok(answer.check()?) },
            other => other,
        })
    }
}

/// A message as it goes over the network.
///
/// # Errors
/// `TooLarge` for one of more than 64 MiB.
pub(super) fn encode(message: &impl Message) -> Result<Bytes> {
    let mut frame = Vec::new();
    append(message, &mut frame)?;
    Ok(frame.into())
}

/// The same, behind what else leaves with it.
///
/// # Errors
/// As [`encode`]; nothing is appended then.
pub(super) fn append(message: &impl Message, leaving: &mut Vec<u8>) -> Result<()> {
    let start = leaving.len();
    let result = append_whole(message, leaving);
    if result.is_err() {
        leaving.truncate(start);
    }
    result
}

fn append_whole(message: &impl Message, leaving: &mut Vec<u8>) -> Result<()> {
    let start = leaving.len();
    leaving.extend([0; HEAD]);
    let written = postcard::serialize_with_flavor(message, Behind(leaving));
    written.map_err(|error| Error::bug("a message").with_source(error))?;
    let length = leaving.len() - start - HEAD;
    if length > LONGEST {
        let fact = format!("{length} bytes of records are more than goes over the network at once");
        return Err(Error::new(ErrorKind::TooLarge, fact));
    }
    leaving[start..][..HEAD].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(())
}

/// Where postcard writes to: behind what is there.
struct Behind<'a>(&'a mut Vec<u8>);

impl Flavor for Behind<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// How many bytes the body of the message that begins here has, once so much of it has come.
///
/// # Errors
/// `Corrupt` where it is longer than any is.
pub(super) fn announced(come: &[u8]) -> Result<Option<usize>> {
    let Some(head) = come.first_chunk::<HEAD>() else { return Ok(None) };
    let length = u32::from_le_bytes(*head) as usize;
    match length <= LONGEST {
        true => Ok(Some(length)),
        false => Err(Error::corrupt(format!("a message of {length} bytes is announced"))),
    }
}

/// A message of its body.
///
/// # Errors
/// `Corrupt` for what is none.
pub(super) fn decode<M: Message>(body: &[u8]) -> Result<M> {
    let message: M =
        postcard::from_bytes(body).map_err(|error| Error::corrupt("a message").with_source(error))?;
    message.check()
}

/// How long bytes may take on a slow link.
pub(super) fn time_for(bytes: usize) -> Duration {
    Duration::from_millis(bytes as u64 >> 10)
}

#[cfg(test)]
mod tests {
    use forebay_core::{Blob, Extent, FileKind, Source, Version};

    use super::super::messages::Messages;
    use super::*;
    use crate::tree::{Blocker, LockKind};

    const SECOND: Duration = Duration::from_secs(1);

    async fn back<M: Message>(message: &M) -> Result<Option<M>> {
        Messages::new(&encode(message).expect("short enough")[..], SECOND).next().await
    }

    fn layout(length: u64) -> FileLayout {
        FileLayout::of_blob(Blob { key: ObjectKey::new("a"), version: Version::new("v"), size: length })
    }

    #[tokio::test]
    async fn messages_come_back_as_they_were() {
        let request = Request::CommitLayout(InodeId(7), 3, layout(5), Timestamp { seconds: -1, nanos: 9 });
        let said = ToServer::Ask { id: 9, oldest: 4, request };
        let heard = back(&said).await.expect("whole").expect("one");
        assert_eq!(format!("{said:?}"), format!("{heard:?}"));
        for kind in KINDS {
            let error = Error::new(kind, "so").with_hint("do").with_source(Error::invalid("below"));
            let said = ToGuest::Answer { id: 1, outcome: Err(error.into()) };
            let Some(ToGuest::Answer { outcome: Err(failure), .. }) = back(&said).await.expect("whole")
            else {
                panic!("a failure");
            };
            let error = Error::from(failure);
            assert_eq!((error.kind(), error.hint()), (kind, Some("do")));
            assert!(error.message().starts_with("so: ") && error.message().contains("below"), "{error}");
        }
    }

    fn hex(message: &dyn Fn() -> Result<Bytes>) -> String {
        let bytes = message().expect("encodes");
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Those of other builds of this protocol say and hear the same.
    #[test]
    fn what_is_said_has_the_bytes_that_it_had() {
        let ask =
            |request: Request| move || encode(&ToServer::Ask { id: 9, oldest: 4, request: request.clone() });
        let hello = Hello { volume: VolumeId(7), session: 300, is_new: true, name: "h-1".to_owned() };
        let name = Bytes::from_static(b"n");
        let time = Timestamp { seconds: -1, nanos: 9 };
        let failure = Failure::from(Error::new(ErrorKind::Stale, "so").with_hint("do"));
        let welcome = Welcome { server: 5, standing: Standing::TakenOver, has_quotas: true };
        let range = LockRange { first: 1, last: 300 };
        let lock = Lock { owner: 300, pid: 5, range, kind: LockKind::Write };
        let changed = vec![
            OutsideChange::Name { directory: InodeId(1), name: name.clone() },
            OutsideChange::Inode { ino: InodeId(2), has_content: true },
            OutsideChange::Anything,
        ];
        let said: [(&str, String); 16] = [
            ("HELLO", hex(&|| encode(&ToServer::Hello(hello.clone())))),
            ("LOOKUP", hex(&ask(Request::Lookup(InodeId(1), name.clone())))),
            (
                "RENAME",
                hex(&ask(Request::Rename(
                    (InodeId(1), name.clone()),
                    (InodeId(2), name.clone()),
                    RenameMode::Exchange,
                ))),
            ),
            ("COMMIT", hex(&ask(Request::CommitLayout(InodeId(7), 3, layout(5), time)))),
            ("BYE", hex(&ask(Request::Bye))),
            ("ALIVE", hex(&|| encode(&ToServer::Alive))),
            ("WELCOME", hex(&|| encode(&ToGuest::Welcome(welcome.clone())))),
            ("FAILED", hex(&|| encode(&ToGuest::Answer { id: 9, outcome: Err(failure.clone()) }))),
            ("DONE", hex(&|| encode(&ToGuest::Answer { id: 9, outcome: Ok(Answer::Done) }))),
            (
                "REOPENED",
                hex(&|| {
                    let reopened = Answer::Reopened(vec![InodeId(7)], vec![(InodeId(8), 300)]);
                    encode(&ToGuest::Answer { id: 9, outcome: Ok(reopened) })
                }),
            ),
            ("CHANGED", hex(&|| encode(&ToGuest::Changed(changed.clone())))),
            ("ENDING", hex(&|| encode(&ToGuest::Ending(true)))),
            ("LOCK", hex(&ask(Request::Lock(InodeId(7), lock, Asking::Wait(8))))),
            ("UNLOCK", hex(&ask(Request::Unlock(InodeId(7), 300, lock.range)))),
            ("REOPEN", hex(&ask(Request::Reopen(vec![InodeId(7)], Vec::new(), vec![(InodeId(7), lock)])))),
            ("OFFERED", hex(&|| encode(&ToGuest::Offered(8)))),
        ];
        let pinned: [(&str, &str); 16] = [
            ("HELLO", "090000000007ac020103682d31"),
            ("LOOKUP", "070000000109040001016e"),
            ("RENAME", "0b0000000109040c01016e02016e02"),
            ("COMMIT", "130000000109041e070305010005000161017605000109"),
            ("BYE", "0400000001090426"),
            ("ALIVE", "0100000002"),
            ("WELCOME", "0400000000050101"),
            ("FAILED", "0b0000000209010502736f0102646f"),
            ("DONE", "0400000002090000"),
            ("REOPENED", "0a0000000209000e01070108ac02"),
            ("CHANGED", "0a00000003030001016e01020102"),
            ("ENDING", "020000000701"),
            ("LOCK", "0e0000000109042707ac020501ac02010208"),
            ("UNLOCK", "0a0000000109042807ac0201ac02"),
            ("REOPEN", "10000000010904240107000107ac020501ac0201"),
            ("OFFERED", "020000000808"),
        ];
        for ((name, said), (_, pinned)) in said.iter().zip(pinned) {
            assert_eq!(said, pinned, "{name}");
        }
    }

    #[test]
    fn what_is_answered_has_the_bytes_that_it_had() {
        let answer =
            |answer: Answer| hex(&|| encode(&ToGuest::Answer { id: 9, outcome: Ok(answer.clone()) }));
        let time = Timestamp { seconds: -1, nanos: 9 };
        let removed = Removed {
            attributes: Attributes {
                ino: InodeId(7),
                kind: FileKind::Directory,
                mode: 0o755,
                uid: 1,
                gid: 2,
                nlink: 0,
                size: 0,
                allocated: 0,
                rdev: 0,
                atime: time,
                mtime: time,
                ctime: time,
                generation: 0,
            },
            access_list: Some(Bytes::from_static(b"n")),
        };
        let removed = answer(Answer::Removed(Some(removed)));
        assert_eq!(removed, "190000000209000f010701ed030102000000000109010901090001016e");
        let range = LockRange { first: 1, last: 300 };
        let held = LockAnswer::Held(Blocker { range, kind: LockKind::Write, pid: 5 });
        assert_eq!(answer(Answer::Lock(held)), "0a000000020900110201ac020105");
        let opened = answer(Answer::Opened(layout(5), 3, true));
        assert_eq!(opened, "110000000209001005010005000161017605000301");
    }

    #[tokio::test]
    async fn what_is_no_message_is_refused() {
        let said = encode(&ToServer::Ask { id: 9, oldest: 4, request: Request::Sync }).expect("short");
        for cut in 1..said.len() {
            let heard: Option<ToServer> =
                Messages::new(&said[..cut], SECOND).next().await.expect("cut off is an end");
            assert!(heard.is_none(), "{cut}");
        }
        let long = u32::try_from(LONGEST + 1).expect("fits").to_le_bytes();
        let refused = |frame: Vec<u8>| async move {
            Messages::new(&frame[..], SECOND).next::<ToServer>().await.expect_err("refused").kind()
        };
        assert_eq!(refused(long.to_vec()).await, ErrorKind::Corrupt);
        assert_eq!(refused([&[1, 0, 0, 0][..], &[200]].concat()).await, ErrorKind::Corrupt);
        // Locks of less than nothing.
        let range = LockRange { first: 2, last: 1 };
        let lock = Lock { owner: 1, pid: 1, range, kind: LockKind::Read };
        for request in [
            Request::Lock(InodeId(7), lock, Asking::Try),
            Request::Unlock(InodeId(7), 1, range),
            Request::Reopen(Vec::new(), Vec::new(), vec![(InodeId(7), lock)]),
        ] {
            let frame = encode(&ToServer::Ask { id: 1, oldest: 1, request }).expect("short");
            assert_eq!(refused(frame.to_vec()).await, ErrorKind::Corrupt);
        }
        // Extents that overlap, as no tree of ours makes them.
        let extent = Extent { offset: 0, length: 1, source: Source::Inline(Bytes::from_static(b"x")) };
        let body =
            postcard::to_stdvec(&ToServer::Ask { id: 1, oldest: 1, request: Request::Sync }).expect("one");
        assert!(!body.is_empty());
        let bad = Bad { size: 1, extents: vec![extent.clone(), extent] };
        let bytes = postcard::to_stdvec(&bad).expect("encodes");
        let decoded: FileLayout = postcard::from_bytes(&bytes).expect("serde believes it");
        assert_eq!(checked(decoded).expect_err("overlap").kind(), ErrorKind::Corrupt);
    }

    #[derive(Serialize)]
    struct Bad {
        size: u64,
        extents: Vec<Extent>,
    }
}
