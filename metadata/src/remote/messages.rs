//! Messages as they come on a stream.

use std::pin::Pin;
use std::time::Duration;

use bytes::BytesMut;
use forebay_core::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{Instant, Sleep, sleep};

use super::wire::{HEAD, Message, announced, decode};

/// Bytes that are taken from a stream at once.
const AT_ONCE: usize = 64 << 10;

/// The messages that come on a stream, one after another. Waiting for them may be given up at any moment: none is lost.
#[derive(Debug)]
pub(super) struct Messages<S> {
    stream: S,
    /// What has come and was not taken yet.
    come: BytesMut,
    silence: Duration,
    /// Whether `late` is that of the message that has begun.
    is_begun: bool,
    late: Pin<Box<Sleep>>,
}

impl<S: AsyncRead + Unpin> Messages<S> {
    /// Those of a stream whose other side says something at least every so often: what is long may take its time.
    pub(super) fn new(stream: S, silence: Duration) -> Self {
        let late = Box::pin(sleep(silence));
        Self { stream, come: BytesMut::new(), silence, is_begun: false, late }
    }

    /// The stream, to say something on it.
    pub(super) fn stream(&mut self) -> &mut S {
        &mut self.stream
    }

    /// The next message, if it has come.
    ///
    /// # Errors
    /// `Corrupt` for what is no message.
    pub(super) fn next_now<M: Message>(&mut self) -> Result<Option<M>> {
        let Some(length) = announced(&self.come)? else { return Ok(None) };
        if self.come.len() < HEAD + length {
            return Ok(None);
        }
        let frame = self.come.split_to(HEAD + length);
        self.is_begun = false;
        if self.come.is_empty() && self.come.capacity() > 2 * AT_ONCE {
            // It was a long one, and its memory is not kept for others.
            self.come = BytesMut::new();
        }
        decode(&frame[HEAD..]).map(Some)
    }

    /// The next message; none where the other side has ended the stream.
    ///
    /// # Errors
    /// As [`Self::next_now`] and [`Self::hear`].
    pub(super) async fn next<M: Message>(&mut self) -> Result<Option<M>> {
        loop {
            if let Some(message) = self.next_now()? {
                return Ok(Some(message));
            }
            if !self.hear().await? {
                return Ok(None);
            }
        }
    }

    /// Waits for more to come, which may or may not make a message whole. False where the other side has ended the stream.
    ///
    /// # Errors
    /// `Unavailable` where it says nothing for as long as it may, or less than a mebibyte a second; what the stream says.
    pub(super) async fn hear(&mut self) -> Result<bool> {
        // Taken as it comes: whoever announces much and sends little takes little.
        self.come.reserve(AT_ONCE);
        tokio::select! {
            biased;
            count = self.stream.read_buf(&mut self.come) => match count {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(false),
                Err(error) => return Err(error.into()),
            },
            () = &mut self.late => return Err(Error::new(ErrorKind::Unavailable, "it says nothing")),
        }
        self.wait_longer()
    }

    /// Sets until when the next bytes, or those of a message that has begun, are waited for.
    fn wait_longer(&mut self) -> Result<bool> {
        let patience = match announced(&self.come)? {
            Some(length) if self.come.len() < HEAD + length => {
                if self.is_begun {
                    return Ok(true);
                }
                self.is_begun = true;
                self.silence + super::wire::time_for(length)
            }
            _ => self.silence,
        };
        self.late.as_mut().reset(Instant::now() + patience);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures::FutureExt;
    use tokio::io::{AsyncWriteExt, duplex};
    use tokio::task::unconstrained;
    use tokio::time::advance;

    use super::super::wire::{Request, ToServer, encode};
    use super::*;
    use crate::testing::{Chance, rounds};

    const SILENCE: Duration = Duration::from_secs(7);

    /// With so many bytes of its own.
    fn message(id: u64, length: usize) -> ToServer {
        ToServer::Ask { id, oldest: 0, request: Request::Command(Bytes::from(vec![id as u8; length])) }
    }

    #[tokio::test(start_paused = true)]
    async fn messages_come_whole_and_in_order_however_often_waiting_for_them_is_given_up() {
        for _ in 0..rounds(20) {
            let mut chance = Chance::fresh();
            let mut said = Vec::new();
            for id in 0..50 {
                let most = [10, 1000, 200_000][chance.below(3) as usize];
                said.push(encode(&message(id, chance.below(most) as usize)).expect("short enough"));
            }
            let (mut saying, hearing) = duplex(64 << 10);
            let mut left = said.concat();
            let mut messages = Messages::new(hearing, SILENCE);
            let mut heard = Vec::new();
            while heard.len() < said.len() {
                let piece = left.len().min(chance.below(60_000) as usize);
                saying.write_all(&left[..piece]).await.expect("there is room");
                left.drain(..piece);
                // It is begun each time, and dropped while it waits for the rest.
                while let Some(next) = unconstrained(messages.next::<ToServer>()).now_or_never() {
                    heard.push(encode(&next.expect("whole").expect("one")).expect("as it was"));
                }
            }
            assert!(heard == said, "{chance:?}");
            drop(saying);
            assert!(messages.next::<ToServer>().await.expect("no failure").is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_is_lost_and_who_says_much_has_its_time() {
        let (mut saying, hearing) = duplex(8 << 20);
        let mut messages = Messages::new(hearing, SILENCE);
        let beat = encode(&ToServer::Alive).expect("short");
        for _ in 0..5 {
            advance(SILENCE - Duration::from_millis(1)).await;
            saying.write_all(&beat).await.expect("room");
            assert!(messages.next::<ToServer>().await.expect("in time").is_some());
        }
        // A long one may take a second a mebibyte on top of that.
        let long = encode(&message(1, 4 << 20)).expect("short enough");
        let mut pieces = long.chunks(1 << 20);
        for piece in pieces.by_ref().take(4) {
            saying.write_all(piece).await.expect("room");
            advance(Duration::from_millis(2500)).await;
            assert!(unconstrained(messages.next::<ToServer>()).now_or_never().is_none());
        }
        saying.write_all(pieces.next().expect("the end")).await.expect("room");
        assert!(messages.next::<ToServer>().await.expect("in time").is_some());
        saying.write_all(&long[..2 << 20]).await.expect("room");
        for _ in 0..2 {
            assert!(unconstrained(messages.next::<ToServer>()).now_or_never().is_none());
            advance(Duration::from_secs(5)).await;
        }
        advance(Duration::from_secs(2)).await;
        let late = messages.next::<ToServer>().await.expect_err("a part of it never came");
        assert_eq!(late.kind(), ErrorKind::Unavailable);
        let mut silent = Messages::new(duplex(8).0, SILENCE);
        assert!(silent.next::<ToServer>().await.is_ok_and(|end| end.is_none()), "the other side is gone");
        let (_saying, hearing) = duplex(8);
        let mut silent = Messages::new(hearing, SILENCE);
        assert_eq!(silent.next::<ToServer>().await.expect_err("nothing").kind(), ErrorKind::Unavailable);
    }
}
