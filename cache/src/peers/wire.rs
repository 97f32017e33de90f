//! What peers say to each other: one asks, the other answers, one after another on a stream (docs/formats.md).
//!
//! A request and an answer begin with a head of 24 bytes, numbers little-endian. What comes from a peer is checked here:
//! lengths before memory is taken for them, kinds before they are believed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use forebay_core::{
    BLOCK_SIZE, Blob, BlockKey, Error, ErrorKind, ObjectKey, Result, Version, VolumeBlob, VolumeId,
};
use forebay_io::net::secure::Stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::relay::Relay;
use crate::{Filled, Residency, Unpinned};

/// Names what is spoken, and its version: hosts that speak another one turn each other away (ALPN).
pub(super) const PROTOCOL: &str = "forebay-blocks/1";
/// Bytes of a head.
const HEAD: usize = 24;
/// Blocks from so many bytes on are told to have arrived, and passed on by who has them: others are sent sooner than said.
pub(super) const LARGE: u64 = 512 << 10;
/// Longest key, version or message, in bytes; stores take keys of 1,024.
const LONGEST: usize = 4096;
/// Who somebody is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Who {
    /// What its share of all blocks follows from, the same for as long as its disk has them.
    pub(super) share: u64,
    /// Chance, drawn when its process began.
    pub(super) process: u64,
}

impl Who {
    /// Who nobody is: hosts of older builds do not say who they are.
    const NOBODY: Self = Self { share: 0, process: 0 };
}

/// From whom a block is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// From who is asked, or whom that names.
    FromAnyone,
    /// From who is asked: the one that it named does not have it.
    FromOwner,
    /// From who is asked, if it is at hand there: no store is asked for it.
    AtHand,
}

/// What a peer may be asked or told. All but the first and the last two are of a block of the volume that both have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    /// Who it is, and who asks, where that is known.
    Hello(Option<Who>),
    /// The bytes, from wherever it has them; it asks the store, and no other peer.
    Get(BlockKey, Wanted),
    /// To bring it to its disk, and to keep it there.
    Fill(BlockKey, bool),
    /// Where it has it, read and checked.
    Stat(BlockKey, bool),
    /// To let it go again.
    Unpin(BlockKey),
    /// To let go of all.
    UnpinAll,
    /// That the block asked for last has arrived, from it or from whom it named, and is kept for others or not. Not answered.
    Got(bool),
}

/// Where the bytes of a block go that is answered, and who passes them on as they come.
#[derive(Debug, Default)]
pub(super) struct Landing<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) relay: Option<&'a Relay>,
}

/// What it answers.
#[derive(Debug)]
pub(super) enum Answer {
    /// Who it is.
    Hello(Who),
    /// The block and its CRC-32C; whether to say that it has arrived.
    Block(u32, Bytes, bool),
    /// A block of so many bytes that is on its way here, and its CRC-32C.
    Passing(Arc<Relay>, u32, u64),
    /// Who has the block and sends it.
    Elsewhere(Who),
    /// Where it had it from.
    Filled(Filled),
    /// Where it has it.
    Residency(Residency),
    /// What was pinned.
    Unpinned(Unpinned),
    /// It cannot.
    Failed(Error),
}

const HELLO: u8 = 1;
const GET: u8 = 2;
const FILL: u8 = 3;
const STAT: u8 = 4;
const UNPIN: u8 = 5;
/// It still works on the answer.
const BUSY: u8 = 6;
const FAILED: u8 = 7;
const UNPIN_ALL: u8 = 8;
const ELSEWHERE: u8 = 9;
const GOT: u8 = 10;

/// By the codes that they have on the network; others are the first.
const WANTED: [Wanted; 3] = [Wanted::FromAnyone, Wanted::FromOwner, Wanted::AtHand];

/// What both heads are made of; what each is for is in docs/formats.md.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Head {
    kind: u8,
    code: u8,
    /// Of a key, in requests.
    short: u16,
    /// Bytes that follow.
    length: u32,
    first: u64,
    second: u64,
}

impl Head {
    fn encode(self) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        (head[0], head[1]) = (self.kind, self.code);
        head[2..4].copy_from_slice(&self.short.to_le_bytes());
        head[4..8].copy_from_slice(&self.length.to_le_bytes());
        head[8..16].copy_from_slice(&self.first.to_le_bytes());
        head[16..].copy_from_slice(&self.second.to_le_bytes());
        head
    }

    fn decode(mut head: &[u8]) -> Self {
        Self {
            kind: head.get_u8(),
            code: head.get_u8(),
            short: head.get_u16_le(),
            length: head.get_u32_le(),
            first: head.get_u64_le(),
            second: head.get_u64_le(),
        }
    }

    /// The bytes that follow, of a text.
    fn text_length(self) -> Result<usize> {
        let length = self.length as usize;
        match length <= 2 * LONGEST && usize::from(self.short) <= length {
            true => Ok(length),
            false => Err(Error::corrupt(format!("a peer says that {length} bytes of text follow"))),
        }
    }
}

impl Request {
    /// As it goes over the network.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, code, key) = match self {
            Self::Hello(own) => {
                let Who { share, process } = own.unwrap_or(Who::NOBODY);
                let head = Head { kind: HELLO, first: share, second: process, ..Head::default() };
                return head.encode().to_vec();
            }
            Self::UnpinAll => return Head { kind: UNPIN_ALL, ..Head::default() }.encode().to_vec(),
            Self::Got(keeps) => {
                return Head { kind: GOT, code: u8::from(*keeps), ..Head::default() }.encode().to_vec();
            }
            Self::Get(key, wanted) => (GET, place(&WANTED, wanted), key),
            Self::Fill(key, pin) => (FILL, u8::from(*pin), key),
            Self::Stat(key, verify) => (STAT, u8::from(*verify), key),
            Self::Unpin(key) => (UNPIN, 0, key),
        };
        let blob = key.blob.blob();
        let (name, version) = (blob.key.as_str().as_bytes(), blob.version.as_str().as_bytes());
        let head = Head {
            kind,
            code,
            short: name.len() as u16,
            length: (name.len() + version.len()) as u32,
            first: key.index,
            second: blob.size,
        };
        [&head.encode(), name, version].concat()
    }

    /// Whether its names are of lengths that can be said.
    pub(super) fn can_be_said(key: &BlockKey) -> bool {
        let blob = key.blob.blob();
        blob.key.as_str().len() <= LONGEST && blob.version.as_str().len() <= LONGEST
    }

    /// The next one on a stream, of a block of `volume`; none where the other side has ended it.
    ///
    /// # Errors
    /// `Corrupt` for what is no request; what the stream says.
    pub(super) async fn hear(stream: &mut Stream, volume: VolumeId) -> Result<Option<Self>> {
        let mut head = [0; HEAD];
        if stream.read(&mut head[..1]).await? == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut head[1..]).await?;
        let head = Head::decode(&head);
        let mut text = vec![0; head.text_length()?];
        stream.read_exact(&mut text).await?;
        let said = String::from_utf8(text).map_err(|_| Error::corrupt("a peer names a block in no text"))?;
        let Some((name, version)) = said.split_at_checked(usize::from(head.short)) else {
            return Err(Error::corrupt("a peer cuts a name within a character"));
        };
        let blob = Blob { key: ObjectKey::new(name), version: Version::new(version), size: head.second };
        let key = VolumeBlob::new(volume, blob).block(head.first);
        let is_set = head.code != 0;
        match head.kind {
            HELLO => {
                let who = Who { share: head.first, process: head.second };
                Ok(Some(Self::Hello((who != Who::NOBODY).then_some(who))))
            }
            UNPIN_ALL => Ok(Some(Self::UnpinAll)),
            GOT => Ok(Some(Self::Got(is_set))),
            _ if key.is_empty() => {
                Err(Error::corrupt(format!("a peer asks for {key}, which lies past its end")))
            }
            GET => {
                let wanted = WANTED.get(usize::from(head.code)).copied().unwrap_or(Wanted::FromAnyone);
                Ok(Some(Self::Get(key, wanted)))
            }
            FILL => Ok(Some(Self::Fill(key, is_set))),
            STAT => Ok(Some(Self::Stat(key, is_set))),
            UNPIN => Ok(Some(Self::Unpin(key))),
            kind => Err(Error::corrupt(format!("a peer asks for kind {kind}"))),
        }
    }
}

impl Answer {
    /// Says that an answer is being worked on.
    pub(super) async fn say_busy(stream: &mut Stream) -> io::Result<()> {
        let head = Head { kind: BUSY, ..Head::default() };
        stream.write_all(&head.encode()).await?;
        stream.flush().await
    }

    /// Says it.
    ///
    /// # Errors
    /// What the stream says, and `Unavailable` where a block that is passed on does not arrive: the stream is of no use any
    /// more then.
    pub(super) async fn say(self, stream: &mut Stream) -> Result<()> {
        let (head, body) = match self {
            Self::Hello(Who { share, process }) => {
                (Head { kind: HELLO, first: share, second: process, ..Head::default() }, Bytes::new())
            }
            Self::Block(crc, bytes, is_told) => {
                let (code, length) = (u8::from(is_told), bytes.len() as u32);
                (Head { kind: GET, code, length, first: crc.into(), ..Head::default() }, bytes)
            }
            Self::Passing(relay, crc, length) => return pass_on(stream, &relay, crc, length).await,
            Self::Elsewhere(Who { share, process }) => {
                (Head { kind: ELSEWHERE, first: share, second: process, ..Head::default() }, Bytes::new())
            }
            Self::Filled(filled) => {
                let (code, first) = match filled {
                    Filled::Memory => (0, 0),
                    Filled::Disk => (1, 0),
                    Filled::Origin { bytes } => (2, bytes),
                    Filled::Peer { bytes } => (2, bytes),
                };
                (Head { kind: FILL, code, first, ..Head::default() }, Bytes::new())
            }
            Self::Residency(residency) => {
                (Head { kind: STAT, code: place(&RESIDENCIES, &residency), ..Head::default() }, Bytes::new())
            }
            Self::Unpinned(Unpinned { blocks, bytes }) => {
                (Head { kind: UNPIN, first: blocks, second: bytes, ..Head::default() }, Bytes::new())
            }
            Self::Failed(error) => {
                let code = place(&ERRORS, &error.kind());
                let mut message = error.to_string();
                message.truncate(message.floor_char_boundary(LONGEST));
                (Head { kind: FAILED, code, length: message.len() as u32, ..Head::default() }, message.into())
            }
        };
        stream.write_all_buf(&mut Buf::chain(&head.encode()[..], body)).await?;
        Ok(stream.flush().await?)
    }

    /// The answer on a stream; a block's bytes go into `block`, whose length they have to have.
    ///
    /// # Errors
    /// `TimedOut` where the other side said nothing for `silence`; `InvalidData` for what is no answer; what the stream
    /// says. The stream is of no use any more then.
    pub(super) async fn hear(
        stream: &mut Stream,
        block: &mut Landing<'_>,
        silence: Duration,
    ) -> io::Result<Heard> {
        let head = loop {
            let mut head = [0; HEAD];
            in_time(silence, stream.read_exact(&mut head)).await?;
            match Head::decode(&head) {
                head if head.kind == BUSY => {}
                head => break head,
            }
        };
        if head.length > 0 && !matches!(head.kind, GET | FAILED) {
            return Err(unheard(format!("kind {} with {} bytes", head.kind, head.length)));
        }
        Ok(match head.kind {
            HELLO => Heard::Hello(Who { share: head.first, process: head.second }),
            GET if head.length as usize == block.bytes.len() && head.length as u64 <= BLOCK_SIZE => {
                let (mut length, whole) = (0, block.bytes.len());
                while length < whole {
                    let count = in_time(silence, stream.read(&mut block.bytes[length..])).await?;
                    if count == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    length += count;
                    if let Some(relay) = block.relay {
                        relay.arrived(head.first as u32, &block.bytes[..length], length == whole);
                    }
                }
                Heard::Block { crc: head.first as u32, is_told: head.code != 0 }
            }
            ELSEWHERE => Heard::Elsewhere(Who { share: head.first, process: head.second }),
            FILL => Heard::Filled(match head.code {
                0 => Filled::Memory,
                1 => Filled::Disk,
                _ => Filled::Origin { bytes: head.first },
            }),
            STAT => {
                let known = RESIDENCIES.get(usize::from(head.code)).copied();
                Heard::Residency(known.ok_or_else(|| unheard("a block lies somewhere".into()))?)
            }
            UNPIN => Heard::Unpinned(Unpinned { blocks: head.first, bytes: head.second }),
            FAILED => {
                let mut message = vec![0; head.text_length().map_err(|error| unheard(error.to_string()))?];
                in_time(silence, stream.read_exact(&mut message)).await?;
                let kind = ERRORS.get(usize::from(head.code)).copied().unwrap_or(ErrorKind::Unavailable);
                Heard::Failed(Error::new(kind, String::from_utf8_lossy(&message)))
            }
            kind => return Err(unheard(format!("kind {kind} with {} bytes", head.length))),
        })
    }
}

/// Says a block as it arrives.
async fn pass_on(stream: &mut Stream, relay: &Relay, crc: u32, length: u64) -> Result<()> {
    let head = Head { kind: GET, length: length as u32, first: crc.into(), ..Head::default() };
    stream.write_all(&head.encode()).await?;
    let mut sent = 0;
    while (sent as u64) < length {
        let Some(piece) = relay.next(sent).await else {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "a block that was to be passed on does not arrive",
            ));
        };
        stream.write_all(&piece).await?;
        stream.flush().await?;
        sent += piece.len();
    }
    Ok(())
}

/// What was answered; a block's bytes lie where the caller wanted them.
#[derive(Debug)]
pub(super) enum Heard {
    Hello(Who),
    Block { crc: u32, is_told: bool },
    Elsewhere(Who),
    Filled(Filled),
    Residency(Residency),
    Unpinned(Unpinned),
    Failed(Error),
}

/// By the codes that they have on the network.
const RESIDENCIES: [Residency; 4] =
    [Residency::Absent, Residency::Memory, Residency::Disk, Residency::Damaged];

/// The same; kinds that are not among them go as the first.
const ERRORS: [ErrorKind; 10] = [
    ErrorKind::Unavailable,
    ErrorKind::NotFound,
    ErrorKind::Stale,
    ErrorKind::Corrupt,
    ErrorKind::NoSpace,
    ErrorKind::Denied,
    ErrorKind::Unsupported,
    ErrorKind::Invalid,
    ErrorKind::Bug,
    ErrorKind::Refused,
];

/// The code that something has on the network.
fn place<T: PartialEq>(all: &[T], one: &T) -> u8 {
    all.iter().position(|known| known == one).unwrap_or_default() as u8
}

fn unheard(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("it gave an answer unheard of: {what}"))
}

/// Waits no longer than for `silence`.
pub(super) async fn in_time<T>(
    silence: Duration,
    step: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    tokio::time::timeout(silence, step).await.unwrap_or_else(|_| {
        let message = format!("it said nothing for {} ms", silence.as_millis());
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    })
}

#[cfg(test)]
mod tests {
    use forebay_io::rng::Rng;

    use super::super::relay::Relays;
    use super::*;
    use crate::block::{Block, BlockId};

    const VOLUME: VolumeId = VolumeId(7);
    const MINUTE: Duration = Duration::from_secs(60);

    fn key(name: &str, version: &str, size: u64, index: u64) -> BlockKey {
        let blob = Blob { key: ObjectKey::new(name), version: Version::new(version), size };
        VolumeBlob::new(VOLUME, blob).block(index)
    }

    fn pair() -> (Stream, Stream) {
        let (here, there) = tokio::io::duplex(1 << 20);
        (Box::new(here), Box::new(there))
    }

    async fn hear(stream: &mut Stream, bytes: &mut [u8]) -> io::Result<Heard> {
        Answer::hear(stream, &mut Landing { bytes, relay: None }, MINUTE).await
    }

    /// What hosts of other builds say has to be understood: docs/formats.md.
    #[tokio::test]
    async fn what_is_said_has_the_bytes_that_it_had() {
        let who = Who { share: 0x0102, process: 0x0304 };
        let mut said = vec![1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0];
        assert_eq!(Request::Hello(Some(who)).encode(), said);
        said[8..].fill(0);
        assert_eq!(Request::Hello(None).encode(), said);
        (said[0], said[1]) = (10, 1);
        assert_eq!(Request::Got(true).encode(), said);
        let request = Request::Get(key("k", "v", 5, 0), Wanted::AtHand);
        assert_eq!(request.encode()[..8], [2, 2, 1, 0, 2, 0, 0, 0]);
        let request = Request::Fill(key("a/é", "\"v\"", 5 * BLOCK_SIZE, 2), true);
        let mut said = vec![3, 1, 4, 0, 7, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40, 1, 0, 0, 0, 0];
        said.extend_from_slice("a/é\"v\"".as_bytes());
        assert_eq!(request.encode(), said);
        let (mut here, mut there) = pair();
        Answer::say_busy(&mut there).await.expect("said");
        Answer::Block(0x0102_0304, Bytes::from_static(b"xyz"), false).say(&mut there).await.expect("said");
        let refusal = Error::new(ErrorKind::Stale, "no");
        Answer::Failed(refusal).say(&mut there).await.expect("said");
        let told = Answer::Block(0, Bytes::new(), true);
        told.say(&mut there).await.expect("said");
        Answer::Elsewhere(who).say(&mut there).await.expect("said");
        drop(there);
        let mut heard = Vec::new();
        here.read_to_end(&mut heard).await.expect("heard");
        let mut expected = [&[6; 1][..], &[0; 23]].concat();
        expected.extend_from_slice(&[2, 0, 0, 0, 3, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(b"xyz");
        expected.extend_from_slice(&[7, 2, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(b"no");
        expected.extend_from_slice(&[2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(&[9, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0]);
        assert_eq!(heard, expected);
    }

    #[tokio::test]
    async fn what_is_asked_is_heard() {
        let block = key("a/b", "v", 3 * BLOCK_SIZE, 2);
        for request in [
            Request::Hello(None),
            Request::Hello(Some(Who { share: 1 << 63, process: 2 })),
            Request::Get(block.clone(), Wanted::FromAnyone),
            Request::Get(block.clone(), Wanted::FromOwner),
            Request::Get(block.clone(), Wanted::AtHand),
            Request::Got(false),
            Request::Got(true),
            Request::Fill(block.clone(), true),
            Request::Fill(block.clone(), false),
            Request::Stat(block.clone(), true),
            Request::Unpin(key("", "", 1, 0)),
            Request::UnpinAll,
        ] {
            let (mut here, mut there) = pair();
            there.write_all(&request.encode()).await.expect("said");
            assert_eq!(Request::hear(&mut here, VOLUME).await.expect("heard"), Some(request));
            drop(there);
            assert_eq!(Request::hear(&mut here, VOLUME).await.expect("an end"), None);
        }
    }

    #[tokio::test]
    async fn what_is_answered_is_heard() {
        let who = Who { share: 1, process: u64::MAX };
        let unpinned = Unpinned { blocks: 3, bytes: 1 << 40 };
        for (answer, expected) in [
            (Answer::Hello(who), format!("{:?}", Heard::Hello(who))),
            (Answer::Elsewhere(who), format!("{:?}", Heard::Elsewhere(who))),
            (
                Answer::Block(7, Bytes::from_static(b"1234"), true),
                format!("{:?}", Heard::Block { crc: 7, is_told: true }),
            ),
            (Answer::Filled(Filled::Disk), format!("{:?}", Heard::Filled(Filled::Disk))),
            (
                Answer::Filled(Filled::Origin { bytes: 9 }),
                format!("{:?}", Heard::Filled(Filled::Origin { bytes: 9 })),
            ),
            (Answer::Residency(Residency::Disk), format!("{:?}", Heard::Residency(Residency::Disk))),
            (Answer::Residency(Residency::Absent), format!("{:?}", Heard::Residency(Residency::Absent))),
            (Answer::Unpinned(unpinned), format!("{:?}", Heard::Unpinned(unpinned))),
        ] {
            let (mut here, mut there) = pair();
            Answer::say_busy(&mut there).await.expect("said");
            answer.say(&mut there).await.expect("said");
            let heard = hear(&mut here, &mut [0; 4]).await.expect("heard");
            assert_eq!(format!("{heard:?}"), expected);
        }
        let (mut here, mut there) = pair();
        let long = Error::new(ErrorKind::NoSpace, "é".repeat(5000));
        Answer::Failed(long).say(&mut there).await.expect("said");
        let Heard::Failed(error) = hear(&mut here, &mut []).await.expect("heard") else {
            panic!("a refusal")
        };
        assert_eq!((error.kind(), error.to_string().len()), (ErrorKind::NoSpace, LONGEST));
    }

    #[tokio::test]
    async fn what_is_passed_on_is_heard_as_a_block_or_ends_its_stream() {
        let (relays, id) = (Arc::<Relays>::default(), BlockId { digest: 1, index: 0 });
        for arrives in [true, false] {
            let (mut here, mut there) = pair();
            let arriving = relays.begin(id);
            let relay = relays.find(&id).expect("it is on its way");
            let block = Block::foreign(vec![7; 200 << 10].into());
            let bytes = &mut vec![0; block.bytes.len()];
            let passed = async {
                let crc = relay.begun().await.expect("it has begun");
                let passed = Answer::Passing(relay.clone(), crc, 200 << 10).say(&mut there).await;
                drop(there);
                passed
            };
            let arrival = async {
                for length in [0, 16 << 10, 100 << 10] {
                    arriving.relay().arrived(block.crc, &block.bytes[..length], false);
                    tokio::task::yield_now().await;
                }
                if arrives {
                    arriving.whole(&block);
                }
                drop(arriving);
            };
            let (heard, passed, ()) = tokio::join!(hear(&mut here, bytes), passed, arrival);
            match arrives {
                true => {
                    passed.expect("passed on");
                    let expected = Heard::Block { crc: block.crc, is_told: false };
                    assert_eq!(format!("{:?}", heard.expect("a block")), format!("{expected:?}"));
                    assert!(*bytes == block.bytes);
                }
                false => {
                    assert_eq!(passed.expect_err("it did not arrive").kind(), ErrorKind::Unavailable);
                    assert_eq!(heard.expect_err("cut off").kind(), io::ErrorKind::UnexpectedEof);
                }
            }
        }
    }

    #[tokio::test]
    async fn chance_is_refused() {
        let seed = Rng::system().u64();
        let random = Rng::seeded(seed);
        for _ in 0..2000 {
            let mut said = vec![0; 24 + random.below(40) as usize];
            random.fill(&mut said);
            said[0] = random.below(11) as u8;
            for side in 0..2 {
                let (mut here, mut there) = pair();
                there.write_all(&said).await.expect("said");
                drop(there);
                match side {
                    0 => drop(Request::hear(&mut here, VOLUME).await),
                    _ => drop(hear(&mut here, &mut [0; 8]).await),
                }
            }
        }
        // Refused by its head, before anything of it came.
        for (side, kind) in [(0, GET), (1, FAILED)] {
            let (mut here, mut there) = pair();
            let endless = Head { kind, length: u32::MAX, ..Head::default() };
            there.write_all(&endless.encode()).await.expect("said");
            match side {
                0 => drop(Request::hear(&mut here, VOLUME).await.expect_err("endless")),
                _ => drop(hear(&mut here, &mut []).await.expect_err("endless")),
            }
        }
        let (mut here, mut there) = pair();
        let past = Request::Get(key("k", "v", 5, 9), Wanted::FromAnyone);
        there.write_all(&past.encode()).await.expect("said");
        let error = Request::hear(&mut here, VOLUME).await.expect_err("past the end");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "seed {seed}");
    }
}
