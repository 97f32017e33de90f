//! Bounds the wait for one attempt: for its reply, and for each next piece of its body.
//!
//! The clients' own timeouts are off, because they count a large part on a slow link as a failure. Here the wait
//! for a reply grows with what is sent, or is copied inside the store, at a rate below which a link counts as broken, up to
//! ten minutes, and with the parts that the store puts together: S3 says that it may take minutes over 10,000. It begins
//! anew with each piece of the request's body that the connection takes, or that a folder's disk does: many that share a
//! slow link move slowly, and none is late.

use std::pin::pin;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::StreamExt;
use object_store::Result;

use super::body::map_body;
use crate::object::error::Fault;
use crate::object::progress::Progress;
use crate::object::request::{Reply, Request, Service, Shared};

/// Bytes a second that any working link moves; slower ones time out.
const SLOWEST_BYTES_A_MS: u64 = 256;
/// The most that bytes are given without a sign of life, in milliseconds: a store that is asked to copy 5 GiB, the most that
/// S3 copies at once, needs some ten seconds, and two minutes on a disk that does other things as well.
const MOST_MOVED_MS: u64 = 600_000;
/// What a store may need for each part of an object that it completes.
const SLOWEST_PART_MS: u64 = 50;

#[derive(Debug)]
pub(in crate::object) struct Patience {
    pub(in crate::object) next: Shared,
    pub(in crate::object) attempt_ms: u64,
}

#[async_trait]
impl Service for Patience {
    async fn call(&self, request: Request) -> Result<Reply> {
        let moved_ms = (request.moved_bytes() / SLOWEST_BYTES_A_MS).min(MOST_MOVED_MS);
        let waited_ms = self.attempt_ms + moved_ms + request.joined_parts() as u64 * SLOWEST_PART_MS;
        let progress = Progress::default();
        let mut call = pin!(progress.watch(self.next.call(request)));
        let reply = loop {
            tokio::select! {
                biased;
                reply = &mut call => break reply?,
                () = progress.made() => {}
                () = tokio::time::sleep(Duration::from_millis(waited_ms)) => {
                    return Err(Fault::Stalled { waited_ms }.into());
                }
            }
        };
        let waited_ms = self.attempt_ms;
        Ok(map_body(reply, |body| {
            let timed = futures::stream::unfold(Some(body), move |body| async move {
                let mut body = body?;
                match tokio::time::timeout(Duration::from_millis(waited_ms), body.next()).await {
                    Ok(chunk) => Some((chunk?, Some(body))),
                    Err(_) => Some((Err(Fault::Stalled { waited_ms }.into()), None)),
                }
            });
            timed.boxed()
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use object_store::path::Path;
    use object_store::{PutOptions, PutPayload, PutResult};

    use super::*;

    /// Takes a body piece by piece, one in 40 s; some at last none more.
    #[derive(Debug)]
    struct Slow {
        pieces: usize,
        answers: bool,
        taken: AtomicUsize,
    }

    #[async_trait]
    impl Service for Slow {
        async fn call(&self, _: Request) -> Result<Reply> {
            for _ in 0..self.pieces {
                tokio::time::sleep(Duration::from_secs(40)).await;
                Progress::of_call().expect("watched").tell();
                self.taken.fetch_add(1, Ordering::Relaxed);
            }
            if !self.answers {
                std::future::pending::<()>().await;
            }
            let (e_tag, version) = (Some("\"a\"".to_owned()), None);
            Ok(Reply::Put(PutResult { e_tag, version, extensions: Default::default() }))
        }
    }

    /// Sends 8 MiB, which are given 43 s between two pieces.
    async fn send(answers: bool) -> (Result<Reply>, usize, Duration) {
        let store = Arc::new(Slow { pieces: 1000, answers, taken: AtomicUsize::default() });
        let patience = Patience { next: store.clone(), attempt_ms: 10_000 };
        let (key, payload) = (Path::from("a"), PutPayload::from(vec![0; 8 << 20]));
        let put = Request::Put { key, payload, options: PutOptions::default(), token: String::new() };
        let begun = tokio::time::Instant::now();
        let reply = patience.call(put).await;
        (reply, store.taken.load(Ordering::Relaxed), begun.elapsed())
    }

    /// A store that answered no copy of 5 GiB was waited for all day.
    #[tokio::test(start_paused = true)]
    async fn a_copy_of_any_size_stands_still_for_minutes_at_most() {
        for (bytes, waited_ms) in [(1 << 20, 14_096), (5 << 30, 610_000), (u64::MAX, 610_000)] {
            let store = Arc::new(Slow { pieces: 0, answers: false, taken: AtomicUsize::default() });
            let patience = Patience { next: store, attempt_ms: 10_000 };
            let [from, to] = ["a", "b"].map(Path::from);
            let begun = tokio::time::Instant::now();
            let copied = patience.call(Request::Copy { from, to, bytes, options: Default::default() }).await;
            copied.expect_err("no answer");
            assert_eq!(begun.elapsed(), Duration::from_millis(waited_ms), "{bytes} bytes");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_moves_is_never_late() {
        let (reply, taken, _) = send(true).await;
        reply.expect("it was taken after all").put().expect("a put's");
        assert_eq!(taken, 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stands_is_given_up_as_long_after_its_last_piece() {
        let (reply, taken, waited) = send(false).await;
        assert!(reply.is_err_and(|error| error.to_string().contains("42768")), "ms without a piece");
        assert_eq!((taken, waited), (1000, Duration::from_millis(40_000 * 1000 + 42_768)));
    }
}
