//! Bulk bytes from one process to another, of another host: one way, in labelled pieces, over TCP.
//!
//! A message is a head of six numbers (u32, little-endian: kind, four of a label, bytes that follow) and those bytes. Whoever
//! sends says once a second that it is there, so that one who says nothing for [`SILENCE`] is gone, however long what it
//! sends takes to come to it. What either side finds wrong ends the connection: what is behind it is unknown.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use forebay_core::{Error, Result};
use parking_lot::Mutex;

use super::door::{Door, reach};
use super::wait_readable;
use crate::clock::Clock;

/// How long the other side may say nothing, or take nothing.
pub const SILENCE: Duration = Duration::from_secs(10);
/// How often whoever sends says that it is there.
const BEAT: Duration = Duration::from_secs(1);
/// Bytes of a head.
const HEAD: usize = 24;

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

/// The end that sends.
#[derive(Debug)]
pub struct BulkSender {
    /// None once the other side was lost.
    stream: Arc<Mutex<Option<TcpStream>>>,
    /// Ends the beats.
    _beats: SyncSender<()>,
}

/// The end that receives.
#[derive(Debug)]
pub struct BulkReceiver(TcpStream);

impl BulkSender {
    /// Goes to a door, as [`super::come`] does, and says who it is: `from`.
    pub fn connect(
        addresses: &[String],
        port: u16,
        secret: &str,
        from: u32,
        patience: Duration,
    ) -> Option<Self> {
        let mut stream = reach(addresses, port, secret, patience)?;
        stream.set_write_timeout(Some(SILENCE)).ok()?;
        stream.write_all(&from.to_le_bytes()).ok()?;
        let stream = Arc::new(Mutex::new(Some(stream)));
        let (beats, ended) = sync_channel::<()>(0);
        let shared = stream.clone();
        let beat = move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(BEAT) {
                // Where it is in use it is heard of.
                if let Some(mut stream) = shared.try_lock() {
                    say(&mut stream, &head(BEAT_KIND, [0; 4], 0), &[]).ok();
                }
            }
        };
        std::thread::Builder::new().name("forebay-beat".into()).spawn(beat).ok()?;
        Some(Self { stream, _beats: beats })
    }

    /// Sends a piece.
    ///
    /// # Errors
    /// `Unavailable` where the other side is gone or took nothing for [`SILENCE`], this time or before.
    pub fn send(&self, label: Label, bytes: &[u8]) -> Result<()> {
        say(&mut self.stream.lock(), &head(PIECE, label, bytes.len() as u32), bytes)
    }

    /// Says that what the label says does not come.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn give_up(&self, label: Label) -> Result<()> {
        say(&mut self.stream.lock(), &head(GAVE_UP, label, 0), &[])
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

fn say(stream: &mut Option<TcpStream>, head: &[u8], bytes: &[u8]) -> Result<()> {
    let gone = || Error::from(std::io::Error::from(std::io::ErrorKind::NotConnected));
    let open = stream.as_mut().ok_or_else(gone)?;
    let said = open.write_all(head).and_then(|()| open.write_all(bytes));
    if said.is_err() {
        // A part of it may be said.
        open.shutdown(std::net::Shutdown::Both).ok();
        *stream = None;
    }
    Ok(said?)
}

impl BulkReceiver {
    /// Those who come to a door until all `expected` did, or `patience` is over, with who they say they are.
    pub fn welcome(door: &Door, expected: usize, patience: Duration) -> Result<Vec<(u32, Self)>> {
        let clock = Clock::system();
        let deadline = clock.now() + patience;
        let mut came = Vec::with_capacity(expected);
        while came.len() < expected {
            let left = deadline.since(clock.now());
            if left.is_zero() {
                break;
            }
            wait_readable(&[door.as_fd()], left)?;
            let Some(mut stream) = door.visitor()? else { continue };
            stream.set_read_timeout(Some(SILENCE))?;
            let mut from = [0; 4];
            // Who says nothing did not come.
            if stream.read_exact(&mut from).is_ok() {
                came.push((u32::from_le_bytes(from), Self(stream)));
            }
        }
        Ok(came)
    }

    /// Waits for the next message; a piece's bytes are to be taken before the one after.
    ///
    /// # Errors
    /// `Unavailable` where the other side is gone, or said nothing for [`SILENCE`]; `Corrupt` for what is no message. The
    /// connection is of no use any more then.
    pub fn hear(&mut self) -> Result<Message> {
        let mut head = [0; HEAD];
        self.0.read_exact(&mut head)?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (label, length) = ([number(4), number(8), number(12), number(16)], number(20));
        match number(0) {
            PIECE => Ok(Message::Piece(label, length as usize)),
            BEAT_KIND => Ok(Message::Beat),
            GAVE_UP => Ok(Message::GaveUp(label)),
            kind => Err(Error::corrupt(format!("a message of kind {kind}"))),
        }
    }

    /// Takes a piece's bytes.
    ///
    /// # Errors
    /// `Unavailable` as [`Self::hear`].
    pub fn fill(&mut self, piece: &mut [u8]) -> Result<()> {
        Ok(self.0.read_exact(piece)?)
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
            let sender =
                scope.spawn(move || BulkSender::connect(&here, port, "secret", 7, PATIENCE).expect("there"));
            let mut came = BulkReceiver::welcome(&door, 1, PATIENCE).expect("welcome");
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
                sender.send([1, 2, 3, 4], &[5; 1 << 20]).expect("send");
                sender.send([4, 3, 2, 1], b"").expect("send");
                sender.give_up([9; 4]).expect("say");
            });
            assert_eq!(next(&mut receiver), Message::Piece([1, 2, 3, 4], 1 << 20));
            let mut piece = vec![0; 1 << 20];
            receiver.fill(&mut piece).expect("fill");
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
        while sender.send([0; 4], &[0; 1 << 16]).is_ok() {}
        assert!(sender.stream.lock().is_none());
        assert_eq!(sender.send([0; 4], &[]).expect_err("gone").kind(), forebay_core::ErrorKind::Unavailable);
    }

    #[test]
    fn what_is_no_message_is_told() {
        let (sender, mut receiver) = pair();
        sender.stream.lock().as_mut().expect("open").write_all(&[77; HEAD]).expect("write");
        let error = loop {
            if let Err(error) = receiver.hear() {
                break error;
            }
        };
        assert_eq!(error.kind(), forebay_core::ErrorKind::Corrupt);
    }
}
