//! What a mount says to the process that serves its tree, on a stream.

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::net::secure::Stream;
use forebay_io::task::Stop;
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, interval_at, sleep, timeout};

use super::messages::Messages;
use super::serve::{BEAT, SILENCE};
use super::wire::{Answer, ToGuest, ToServer, encode, time_for};

pub(super) async fn say(stream: &mut (impl AsyncWriteExt + Unpin), message: &ToServer) -> Result<()> {
    let frame = encode(message)?;
    let saying = async {
        stream.write_all(&frame).await?;
        stream.flush().await
    };
    let said = timeout(SILENCE + time_for(frame.len()), saying).await;
    Ok(said.map_err(|_| Error::new(ErrorKind::Unavailable, "it takes nothing"))??)
}

/// Waits for the answer to a request, and says meanwhile that this side lives: much that is open takes its time.
pub(super) async fn hear_answer(
    hearing: &mut Messages<ReadHalf<Stream>>,
    saying: &mut WriteHalf<Stream>,
    id: u64,
) -> Result<Answer> {
    let mut beat = interval_at(Instant::now() + BEAT, BEAT);
    loop {
        let heard = tokio::select! {
            heard = hearing.next() => heard?,
            _ = beat.tick() => {
                say(saying, &ToServer::Alive).await?;
                continue;
            }
        };
        match heard {
            Some(ToGuest::Answer { id: answered, outcome }) if answered == id => {
                return outcome.map_err(Error::from);
            }
            Some(_) => {}
            None => return Err(Error::new(ErrorKind::Unavailable, "it went away")),
        }
    }
}

/// Says what is to be said, a beat where there is nothing, until nobody has anything to say.
pub(super) async fn speak(mut stream: WriteHalf<Stream>, mut queue: mpsc::Receiver<Bytes>, stop: Stop) {
    let Ok(beat) = encode(&ToServer::Alive) else { return stop.cancel() };
    let speaking = async {
        let mut together = Vec::new();
        loop {
            together.clear();
            tokio::select! {
                frame = queue.recv() => match frame {
                    Some(frame) => together.extend_from_slice(&frame),
                    None => break,
                },
                () = sleep(BEAT) => together.extend_from_slice(&beat),
            }
            // What else is there goes with it.
            while together.len() < 64 << 10
                && let Ok(frame) = queue.try_recv()
            {
                together.extend_from_slice(&frame);
            }
            let saying = async {
                stream.write_all(&together).await?;
                stream.flush().await
            };
            match timeout(SILENCE + time_for(together.len()), saying).await {
                Ok(Ok(())) => {}
                // It takes nothing any more: who hears finds out as well.
                _ => break,
            }
        }
    };
    let mut speaking = pin!(speaking);
    tokio::select! {
        () = &mut speaking => stop.cancel(),
        // What is on its way still leaves.
        () = stop.cancelled() => {
            let _ = timeout(Duration::from_millis(200), speaking).await;
        }
    }
}
