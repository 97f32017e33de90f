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
use super::crowd::Turn;
use super::settings::BEAT;
use super::wire::{Answer, LARGE, Request, Wanted, Who, in_time};
use crate::block::{Block, BlockId};
use crate::{Filled, Residency, Unpinned};

/// What this host has or is to have, without asking others.
#[async_trait]
pub(crate) trait Local: Send + Sync + 'static {
    /// A whole block.
    async fn block_here(&self, key: &BlockKey) -> Result<Block>;
    /// The same, if it is in memory or on disk.
    async fn block_at_hand(&self, key: &BlockKey) -> Option<Block>;
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
    let mut asker = None;
    let mut turn: Option<Turn> = None;
    while let Some(request) = hear(peers, &mut stream, &mut turn).await? {
        // Whatever else is said, its block has not arrived.
        let turn_before = turn.take();
        match request {
            Request::Got(keeps) => {
                if let Some(turn) = turn_before {
                    turn.arrived(keeps);
                }
                continue;
            }
            Request::Hello(who) => asker = who,
            Request::Get(_, Wanted::FromOwner) => turn_before.into_iter().for_each(Turn::missed),
            _ => drop(turn_before),
        }
        let Some(local) = local.upgrade() else { break };
        // Taken for the bytes of a block until they have left.
        let mut place = None;
        let answer = {
            let working = async {
                if let Request::Get(key, wanted) = &request {
                    turn = peers.turn(key, *wanted, asker);
                    if let Some(who) = turn.as_ref().and_then(Turn::referred_to) {
                        return Answer::Elsewhere(who);
                    }
                    // In this order: what has arrived is in memory before it is on its way no more.
                    if *wanted == Wanted::AtHand
                        && let Some(relay) = peers.relays.find(&BlockId::of(key))
                        && let Some(crc) = relay.begun().await
                    {
                        // Its bytes are those that arrive: it takes no room, for which others would wait in turn.
                        peers.count_served(key.len());
                        return Answer::Passing(relay, crc, key.len());
                    }
                    place = Some(peers.sending.enter(key.len()).await);
                }
                answer_one(peers, &*local, request, turn.is_some()).await
            };
            let mut working = pin!(working);
            loop {
                tokio::select! {
                    answer = &mut working => break answer,
                    () = tokio::time::sleep(BEAT) => in_time(SENDING, Answer::say_busy(&mut stream)).await?,
                }
            }
        };
        if !matches!(answer, Answer::Block(..) | Answer::Elsewhere(_)) {
            turn = None;
        }
        let sent = tokio::time::timeout(SENDING, answer.say(&mut stream)).await;
        sent.map_err(|_| Error::new(ErrorKind::Unavailable, "it takes nothing any more"))??;
        drop(place);
    }
    Ok(())
}

/// The next request; who has had a turn for as long as a block may take has it no more.
async fn hear(peers: &Peers, stream: &mut Stream, turn: &mut Option<Turn>) -> Result<Option<Request>> {
    let mut hearing = pin!(Request::hear(stream, peers.volume));
    if turn.is_some() {
        match tokio::time::timeout(peers.settings.deadline(), &mut hearing).await {
            Ok(heard) => return heard,
            Err(_) => *turn = None,
        }
    }
    hearing.await
}

impl Peers {
    /// A host's turn to be sent a block, where that is one that hosts pass on.
    fn turn(&self, key: &BlockKey, wanted: Wanted, asker: Option<Who>) -> Option<Turn> {
        let asker = asker.filter(|_| wanted != Wanted::AtHand && key.len() >= LARGE)?;
        Some(self.crowds.enter(BlockId::of(key), asker, wanted == Wanted::FromOwner))
    }

    fn count_served(&self, bytes: u64) {
        self.served.fetch_add(1, Relaxed);
        self.served_bytes.fetch_add(bytes, Relaxed);
    }
}

/// `is_told`: a block's arrival is to be told.
async fn answer_one(peers: &Peers, local: &impl Local, request: Request, is_told: bool) -> Answer {
    let served = |block: Block| {
        peers.count_served(block.bytes.len() as u64);
        Answer::Block(block.crc, block.bytes, is_told)
    };
    let answered = match request {
        Request::Hello(_) => Ok(Answer::Hello(peers.own)),
        Request::Got(_) => Err(Error::bug("what is not to be answered is answered")),
        Request::Get(key, Wanted::AtHand) => {
            let gone = || Error::new(ErrorKind::NotFound, "it is at hand no more");
            local.block_at_hand(&key).await.map(served).ok_or_else(gone)
        }
        Request::Get(key, _) => local.block_here(&key).await.map(served),
        Request::Fill(key, pin) => local.fill_here(&key, pin).await.map(Answer::Filled),
        Request::Stat(key, verify) => Ok(Answer::Residency(local.residency_here(key, verify).await)),
        Request::Unpin(key) => local.unpin_here(&key).await.map(Answer::Unpinned),
        Request::UnpinAll => local.unpin_all_here().await.map(Answer::Unpinned),
    };
    answered.unwrap_or_else(Answer::Failed)
}
