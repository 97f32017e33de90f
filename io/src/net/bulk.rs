//! Bulk bytes from one process to another, of another host: one way, in labelled pieces, over TCP.
//!
//! A message is a head of six numbers (u32, little-endian: kind, four of a label, bytes of the piece) and those bytes. Whoever
//! sends says once a second that it is there, so that one who says nothing for [`SILENCE`] is gone, however long what it
//! sends takes to come to it. What either side finds wrong ends the connection: what is behind it is unknown.
//!
//! Where both have network cards that read each other's memory (`rdma`), a piece that lies in lent memory is not sent: its head says
//! where it lies (address, u64, and key, u32), and who receives has it read from there, and answers with one byte that it did, or that
//! it is to be sent after all, as all that follow. So a card, or a network, that fails costs speed. That they do reach each
//! other is tried out as they meet.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use forebay_core::{Error, Result};
use parking_lot::Mutex;

use super::door::{Door, reach};
use super::rdma::{ENDPOINT, Offer, Place, Rdma, Way};
use super::wait_readable;
use crate::clock::Clock;
use crate::rng::Rng;

/// How long the other side may say nothing, or take nothing.
pub const SILENCE: Duration = Duration::from_secs(10);
/// How often whoever sends says that it is there.
const BEAT: Duration = Duration::from_secs(1);
/// How long pieces that lie ready may wait to be read: who is to read them may wait for others first.
const LYING: Duration = Duration::from_secs(60);
/// Pieces that lie ready and were not answered for.
const MOST_LYING: usize = 16;
/// Bytes of a head.
const HEAD: usize = 24;
/// Bytes of where a piece lies.
const PLACE: usize = 12;
/// Bytes that are read to try a way out, and how long that may take.
const TRIAL: usize = 64;
const TRYING: Duration = Duration::from_secs(6);

/// What a piece is of; what it means is its users' own.
pub type Label = [u32; 4];

/// What came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// A piece, of so many bytes, which [`BulkReceiver::fill`] takes.
    Piece(Label, usize),
    /// The sender is there.
    Beat,
    /// The sender gave up what the label says.
    GaveUp(Label),
}

const PIECE: u32 = 1;
const BEAT_KIND: u32 = 2;
const GAVE_UP: u32 = 3;
const LIES: u32 = 4;

/// Answers to pieces that lie ready.
const READ: u8 = 1;
const SEND: u8 = 2;

/// The end that sends.
#[derive(Debug)]
pub struct BulkSender {
    /// None once the other side was lost.
    open: Arc<Mutex<Option<Open>>>,
    /// Ends the beats.
    _beats: SyncSender<()>,
}

#[derive(Debug)]
struct Open {
    stream: TcpStream,
    way: Option<Way>,
}

/// Pieces that are sent one after another, and stay as they are until [`Self::end`].
#[derive(Debug)]
pub struct Sending<'s, 'p> {
    sender: &'s BulkSender,
    /// Those that lie ready, in order.
    lying: VecDeque<(Label, &'p [u8])>,
}

/// The end that receives.
#[derive(Debug)]
pub struct BulkReceiver {
    stream: TcpStream,
    way: Option<Way>,
    /// Where the piece lies that was announced last.
    lying: Option<Place>,
    trouble: Option<Error>,
}

impl BulkSender {
    /// Goes to a door, as [`super::come`] does, and says who it is: `from`.
    pub fn connect(
        addresses: &[String],
        port: u16,
        secret: &str,
        from: u32,
        patience: Duration,
        rdma: Option<&Arc<Rdma>>,
    ) -> Option<Self> {
        let mut stream = reach(addresses, port, secret, patience)?;
        stream.set_write_timeout(Some(SILENCE)).ok()?;
        stream.set_read_timeout(Some(SILENCE)).ok()?;
        stream.write_all(&from.to_le_bytes()).ok()?;
        let way = offer_way(&mut stream, rdma).ok()?;
        stream.set_read_timeout(Some(LYING)).ok()?;
        let open = Arc::new(Mutex::new(Some(Open { stream, way })));
        let (beats, ended) = sync_channel::<()>(0);
        let shared = open.clone();
        let beat = move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(BEAT) {
                // Where it is in use it is heard of.
                if let Some(mut open) = shared.try_lock() {
                    say(&mut open, &head(BEAT_KIND, [0; 4], 0), &[]).ok();
                }
            }
        };
        std::thread::Builder::new().name("forebay-beat".into()).spawn(beat).ok()?;
        Some(Self { open, _beats: beats })
    }

    /// Whether the other side reads what lies in lent memory by itself.
    pub fn is_direct(&self) -> bool {
        self.open.lock().as_ref().is_some_and(|open| open.way.is_some())
    }

    /// Sends pieces.
    pub fn sending<'p>(&self) -> Sending<'_, 'p> {
        Sending { sender: self, lying: VecDeque::new() }
    }

    /// Says that what the label says does not come.
    ///
    /// # Errors
    /// As [`Sending::send`].
    pub fn give_up(&self, label: Label) -> Result<()> {
        say(&mut self.open.lock(), &head(GAVE_UP, label, 0), &[])
    }
}

impl<'p> Sending<'_, 'p> {
    /// Sends a piece, or has it read from where it lies, sooner or later.
    ///
    /// # Errors
    /// `Unavailable` where the other side is gone or took nothing for [`SILENCE`], this time or before, or nothing that lies
    /// ready for a minute.
    pub fn send(&mut self, label: Label, piece: &'p [u8]) -> Result<()> {
        while self.lying.len() >= MOST_LYING {
            self.hear()?;
        }
        let mut open = self.sender.open.lock();
        let way = open.as_ref().and_then(|open| open.way.as_ref()).filter(|_| !piece.is_empty());
        match way.and_then(|way| way.place(piece)) {
            Some(place) => {
                say(&mut open, &head(LIES, label, piece.len() as u32), &encode(place))?;
                self.lying.push_back((label, piece));
                Ok(())
            }
            None => say(&mut open, &head(PIECE, label, piece.len() as u32), piece),
        }
    }

    /// Returns once nobody reads any of the pieces any more.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn end(mut self) -> Result<()> {
        while !self.lying.is_empty() {
            self.hear()?;
        }
        Ok(())
    }

    /// Hears what came of the first of those that lie ready.
    fn hear(&mut self) -> Result<()> {
        let mut open = self.sender.open.lock();
        let there = open.as_mut().ok_or_else(gone)?;
        let mut answer = [0];
        there.stream.read_exact(&mut answer)?;
        match (answer, self.lying.front()) {
            ([READ], _) => {}
            ([SEND], Some((label, piece))) => {
                there.way = None;
                say(&mut open, &head(PIECE, *label, piece.len() as u32), piece)?;
            }
            _ => return Err(Error::corrupt("an answer that is none")),
        }
        self.lying.pop_front();
        Ok(())
    }
}

impl Drop for Sending<'_, '_> {
    /// Nobody reads what lies ready once it may be changed.
    fn drop(&mut self) {
        if !self.lying.is_empty() {
            close(&mut self.sender.open.lock());
        }
    }
}

fn head(kind: u32, label: Label, length: u32) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    let numbers = [kind].into_iter().chain(label).chain([length]);
    for (place, number) in head.chunks_exact_mut(4).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    head
}

fn encode(Place { address, key }: Place) -> [u8; PLACE] {
    let mut bytes = [0; PLACE];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..].copy_from_slice(&key.to_le_bytes());
    bytes
}

fn decode(bytes: [u8; PLACE]) -> Place {
    let [a, b, c, d, e, f, g, h, key @ ..] = bytes;
    Place { address: u64::from_le_bytes([a, b, c, d, e, f, g, h]), key: u32::from_le_bytes(key) }
}

fn gone() -> Error {
    Error::from(std::io::Error::from(std::io::ErrorKind::NotConnected))
}

fn say(open: &mut Option<Open>, head: &[u8], bytes: &[u8]) -> Result<()> {
    let stream = &mut open.as_mut().ok_or_else(gone)?.stream;
    let said = stream.write_all(head).and_then(|()| stream.write_all(bytes));
    if said.is_err() {
        // A part of it may be said.
        close(open);
    }
    Ok(said?)
}

fn close(open: &mut Option<Open>) {
    if let Some(Open { stream, .. }) = open.take() {
        stream.shutdown(std::net::Shutdown::Both).ok();
    }
}

/// Makes a way by which the other side reads this one's memory, if both have cards that reach each other.
fn offer_way(stream: &mut TcpStream, rdma: Option<&Arc<Rdma>>) -> Result<Option<Way>> {
    let offer = rdma.and_then(|rdma| Some((rdma, note(Offer::new(rdma))?)));
    stream.write_all(&offer.as_ref().map_or([0; ENDPOINT], |(_, offer)| offer.endpoint()))?;
    let mut other = [0; ENDPOINT];
    stream.read_exact(&mut other)?;
    let Some((rdma, offer)) = offer.filter(|_| other != [0; ENDPOINT]) else { return Ok(None) };
    let way = note(offer.connect(&other)).flatten();
    let mut trial = [0; TRIAL];
    trial.chunks_exact_mut(8).for_each(|bytes| bytes.copy_from_slice(&Rng::system().u64().to_le_bytes()));
    let lent = [&mut trial[..]];
    let lending = note(rdma.lend(&lent));
    let place = lending.as_ref().and_then(|_| way.as_ref()?.place(lent[0]));
    stream.write_all(&encode(place.unwrap_or(Place { address: 0, key: 0 })))?;
    stream.write_all(lent[0])?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    Ok(way.filter(|_| answer == [READ]))
}

/// The other side of [`offer_way`].
fn take_way(stream: &mut TcpStream, rdma: Option<&Arc<Rdma>>) -> Result<Option<Way>> {
    let mut other = [0; ENDPOINT];
    stream.read_exact(&mut other)?;
    let offer = rdma.filter(|_| other != [0; ENDPOINT]);
    let offer = offer.and_then(|rdma| Some((rdma, note(Offer::new(rdma))?)));
    stream.write_all(&offer.as_ref().map_or([0; ENDPOINT], |(_, offer)| offer.endpoint()))?;
    let Some((rdma, offer)) = offer else { return Ok(None) };
    let way = note(offer.connect(&other)).flatten();
    let (mut place, mut expected) = ([0; PLACE], [0; TRIAL]);
    stream.read_exact(&mut place)?;
    stream.read_exact(&mut expected)?;
    let mut trial = [0; TRIAL];
    let mut lent = [&mut trial[..]];
    let lending = note(rdma.lend(&lent));
    let way = way.filter(|_| lending.is_some() && place != [0; PLACE]);
    let way =
        way.and_then(|way| note(way.read(decode(place), lent[0], TRYING))).filter(|_| *lent[0] == expected);
    stream.write_all(&[if way.is_some() { READ } else { SEND }])?;
    Ok(way)
}

/// What is done without where it fails.
fn note<T>(outcome: Result<T>) -> Option<T> {
    outcome.inspect_err(|error| tracing::debug!(%error, "bytes go over TCP")).ok()
}

impl BulkReceiver {
    /// Those who come to a door until all `expected` did, or `patience` is over, with who they say they are.
    pub fn welcome(
        door: &Door,
        expected: usize,
        patience: Duration,
        rdma: Option<&Arc<Rdma>>,
    ) -> Result<Vec<(u32, Self)>> {
        let clock = Clock::system();
        let deadline = clock.now() + patience;
        std::thread::scope(|scope| {
            let mut coming = Vec::with_capacity(expected);
            while coming.len() < expected {
                let left = deadline.since(clock.now());
                if left.is_zero() {
                    break;
                }
                wait_readable(&[door.as_fd()], left)?;
                if let Some(stream) = door.visitor()? {
                    coming.push(scope.spawn(|| Self::greet(stream, rdma)));
                }
            }
            // Who says nothing did not come.
            Ok(coming.into_iter().filter_map(|coming| coming.join().ok()?.ok()).collect())
        })
    }

    fn greet(mut stream: TcpStream, rdma: Option<&Arc<Rdma>>) -> Result<(u32, Self)> {
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let mut from = [0; 4];
        stream.read_exact(&mut from)?;
        let way = take_way(&mut stream, rdma)?;
        Ok((u32::from_le_bytes(from), Self { stream, way, lying: None, trouble: None }))
    }

    /// Whether pieces that lie in lent memory are read from there.
    pub fn is_direct(&self) -> bool {
        self.way.is_some()
    }

    /// Why pieces are read from there no more.
    pub fn trouble(&self) -> Option<&Error> {
        self.trouble.as_ref()
    }

    /// Waits for the next message; a piece's bytes are to be taken before the one after.
    ///
    /// # Errors
    /// `Unavailable` where the other side is gone, or said nothing for [`SILENCE`]; `Corrupt` for what is no message. The
    /// connection is of no use any more then.
    pub fn hear(&mut self) -> Result<Message> {
        let mut head = [0; HEAD];
        self.stream.read_exact(&mut head)?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (label, length) = ([number(4), number(8), number(12), number(16)], number(20));
        match number(0) {
            PIECE => Ok(Message::Piece(label, length as usize)),
            LIES => {
                let mut place = [0; PLACE];
                self.stream.read_exact(&mut place)?;
                self.lying = Some(decode(place));
                Ok(Message::Piece(label, length as usize))
            }
            BEAT_KIND => Ok(Message::Beat),
            GAVE_UP => Ok(Message::GaveUp(label)),
            kind => Err(Error::corrupt(format!("a message of kind {kind}"))),
        }
    }

    /// Takes a piece's bytes. False where it comes again, later, as it could not be read from where it lies: what is in `piece` is
    /// not to be used then.
    ///
    /// # Errors
    /// `Unavailable` as [`Self::hear`].
    pub fn fill(&mut self, piece: &mut [u8]) -> Result<bool> {
        let Some(place) = self.lying.take() else {
            self.stream.read_exact(piece)?;
            return Ok(true);
        };
        match self.way.take().map(|way| way.read(place, piece, SILENCE)) {
            Some(Ok(way)) => self.way = Some(way),
            Some(Err(error)) => self.trouble = Some(error),
            None => {}
        }
        let is_read = self.way.is_some();
        self.stream.write_all(&[if is_read { READ } else { SEND }])?;
        Ok(is_read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn pair() -> (BulkSender, BulkReceiver) {
        let door = Door::open("secret".into()).expect("a port");
        let port = door.port().expect("port");
        let here = ["127.0.0.1".to_owned()];
        std::thread::scope(|scope| {
            let sender = scope
                .spawn(move || BulkSender::connect(&here, port, "secret", 7, PATIENCE, None).expect("there"));
            let mut came = BulkReceiver::welcome(&door, 1, PATIENCE, None).expect("welcome");
            let (from, receiver) = came.pop().expect("one came");
            assert_eq!(from, 7);
            (sender.join().expect("join"), receiver)
        })
    }

    fn next(receiver: &mut BulkReceiver) -> Message {
        loop {
            match receiver.hear().expect("a message") {
                Message::Beat => {}
                message => return message,
            }
        }
    }

    #[test]
    fn pieces_come_as_they_were_sent_and_an_end_is_told() {
        let (sender, mut receiver) = pair();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut sending = sender.sending();
                sending.send([1, 2, 3, 4], &[5; 1 << 20]).expect("send");
                sending.send([4, 3, 2, 1], b"").expect("send");
                sending.end().expect("sent");
                sender.give_up([9; 4]).expect("say");
            });
            assert_eq!(next(&mut receiver), Message::Piece([1, 2, 3, 4], 1 << 20));
            let mut piece = vec![0; 1 << 20];
            assert!(receiver.fill(&mut piece).expect("fill"));
            assert!(piece.iter().all(|byte| *byte == 5));
            assert_eq!(next(&mut receiver), Message::Piece([4, 3, 2, 1], 0));
            assert_eq!(next(&mut receiver), Message::GaveUp([9; 4]));
        });
        // It says that it is there, though nothing is sent.
        assert_eq!(receiver.hear().expect("a beat"), Message::Beat);
        drop(sender);
        while receiver.hear().is_ok() {}
    }

    #[test]
    fn one_who_is_gone_is_found_gone_for_good() {
        let (sender, receiver) = pair();
        drop(receiver);
        while sender.sending().send([0; 4], &[0; 1 << 16]).is_ok() {}
        assert!(sender.open.lock().is_none());
        assert_eq!(
            sender.sending().send([0; 4], &[]).expect_err("gone").kind(),
            forebay_core::ErrorKind::Unavailable
        );
    }

    #[test]
    fn what_is_no_message_is_told() {
        let (sender, mut receiver) = pair();
        sender.open.lock().as_mut().expect("open").stream.write_all(&[77; HEAD]).expect("write");
        let error = loop {
            if let Err(error) = receiver.hear() {
                break error;
            }
        };
        assert_eq!(error.kind(), forebay_core::ErrorKind::Corrupt);
    }
}
