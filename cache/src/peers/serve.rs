//! Answering other hosts.

use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use forebay_core::{BlockKey, Error, ErrorKind, Result};
use forebay_io::net::secure::Stream;
use forebay_io::task::TaskGroup;

use super::Peers;
use super::settings::BEAT;
use super::wire::{Answer, Request, in_time};
use crate::block::Block;
use crate::{Filled, Residency, Unpinned};

/// What this host has or is to have, without asking others.
#[async_trait]
pub(crate) trait Local: Send + Sync + 'static {
    /// A whole block.
    async fn block_here(&self, key: &BlockKey) -> Result<Block>;
    /// Brings it to the disk, as [`crate::Blocks::fill`].
    async fn fill_here(&self, key: &BlockKey, pin: bool) -> Result<Filled>;
    /// Where it is.
    async fn residency_here(&self, key: BlockKey, verify: bool) -> Residency;
    /// Lets it be evicted again.
    async fn unpin_here(&self, key: &BlockKey) -> Result<Unpinned>;
    /// Lets all be evicted again.
    async fn unpin_all_here(&self) -> Result<Unpinned>;
}

/// How long an answer may be on its way to who asked: what takes nothing any more holds no room for long.
const SENDING: Duration = Duration::from_secs(30);

/// Answers others with what `local` has, while that lives and until `tasks` are to end.
pub(crate) async fn serve(peers: Arc<Peers>, local: Weak<impl Local>, tasks: TaskGroup) {
    let own = peers.clone();
    let answer = move |stream: Stream| {
        let (peers, local) = (own.clone(), local.clone());
        async move {
            if let Err(error) = answer_all(&peers, &local, stream).await {
                tracing::debug!(%error, "a peer's stream ended");
            }
        }
    };
    peers.host.serve(&tasks, answer).await;
}

async fn answer_all(peers: &Peers, local: &Weak<impl Local>, mut stream: Stream) -> Result<()> {
    while let Some(request) = Request::hear(&mut stream, peers.volume).await? {
        let Some(local) = local.upgrade() else { break };
        // Taken for the bytes of a block until they have left.
        let mut place = None;
        let answer = {
            let working = async {
                if let Request::Get(key) = &request {
                    place = Some(peers.sending.enter(key.len()).await);
                }
                answer_one(peers, &*local, request).await
            };
            let mut working = pin!(working);
            loop {
                tokio::select! {
                    answer = &mut working => break answer,
                    () = tokio::time::sleep(BEAT) => in_time(SENDING, Answer::say_busy(&mut stream)).await?,
                }
            }
        };
        let sent = tokio::time::timeout(SENDING, answer.say(&mut stream)).await;
        sent.map_err(|_| Error::new(ErrorKind::Unavailable, "it takes nothing any more"))??;
        drop(place);
    }
    Ok(())
}

async fn answer_one(peers: &Peers, local: &impl Local, request: Request) -> Answer {
    let answered = match request {
        Request::Hello => Ok(Answer::Hello(peers.own)),
        Request::Get(key) => local.block_here(&key).await.map(|block| {
            peers.served.fetch_add(1, Relaxed);
            peers.served_bytes.fetch_add(key.len(), Relaxed);
            Answer::Block(block.crc, block.bytes)
        }),
        Request::Fill(key, pin) => local.fill_here(&key, pin).await.map(Answer::Filled),
        Request::Stat(key, verify) => Ok(Answer::Residency(local.residency_here(key, verify).await)),
        Request::Unpin(key) => local.unpin_here(&key).await.map(Answer::Unpinned),
        Request::UnpinAll => local.unpin_all_here().await.map(Answer::Unpinned),
    };
    answered.unwrap_or_else(Answer::Failed)
}
