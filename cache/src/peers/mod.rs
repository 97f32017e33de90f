//! Other hosts that mount the same volume, and share the blocks that they have.
//!
//! Each block has an owner among them, which brings it from the store once for all (`ring`); the others ask that one.
//! Promises: only who holds the secret is asked or answered; a block that arrives damaged, late, or not at all is had from
//! the store; an owner that is lost is replaced by the next one. Who asks never waits for who asks in turn: an owner has
//! the block itself, or from the store.

mod ring;
mod wire;
mod settings;
mod member;
mod members;
mod serve;

pub(crate) use serve::{Local, serve};
pub use settings::PeerSettings;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use forebay_core::{BlockKey, Error, ErrorKind, Result, VolumeId, crc32c};
use forebay_io::mem::Pool;
use forebay_io::net::secure::{Host, Identity};
use forebay_io::rng::Rng;
use forebay_io::task::Stop;
use tokio::time::{Instant, timeout_at};

use crate::block::{Block, BlockId};
use crate::room::Room;
use crate::{Counters, Filled, Residency, Unpinned};
use member::Member;
use members::Members;
use wire::{Heard, PROTOCOL, Request, Who};

/// How often members that are away are looked for, and who is not needed any more is let go.
const LOOK: Duration = Duration::from_secs(1);
/// Looks after which names are looked up again.
const LOOKUP_EVERY: u32 = 10;
/// How long a cache that opens waits to know who is there.
const FIRST_LOOK: Duration = Duration::from_secs(2);
/// Owners that are tried for one block, each once the one before turned out to be away.
const OWNERS: usize = 3;
/// How long a peer may work on what is no read, saying each second that it does: writing a block to its disk.
const PATIENCE: Duration = Duration::from_secs(120);

/// This host among the others.
#[derive(Debug)]
pub(crate) struct Peers {
    settings: PeerSettings,
    volume: VolumeId,
    host: Host,
    own: Who,
    members: Members,
    /// Blocks on their way here.
    asking: Room,
    /// Blocks on their way from here.
    sending: Room,
    hits: AtomicU64,
    bytes: AtomicU64,
    failures: AtomicU64,
    served: AtomicU64,
    served_bytes: AtomicU64,
}

impl Peers {
    /// Opens this host's port. Blocks on their way here have `room`, those on their way from here as much; others know those
    /// that are this host's by `share`. To be called in an async runtime.
    ///
    /// # Errors
    /// `Invalid` for a secret that is none, what the file system says of its file, what the kernel says of the port.
    pub(crate) async fn open(
        settings: PeerSettings,
        room: Room,
        share: u64,
        volume: VolumeId,
    ) -> Result<Self> {
        let secret = settings.read_secret().await?;
        let identity = Identity::new(&secret, &volume.0.to_le_bytes(), PROTOCOL)?;
        let host = Host::open(settings.transport, settings.listen()?, &identity)?;
        Ok(Self {
            settings,
            volume,
            host,
            own: Who { share, process: Rng::system().u64() },
            members: Members::default(),
            sending: room.another(),
            asking: room,
            hits: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            served: AtomicU64::new(0),
            served_bytes: AtomicU64::new(0),
        })
    }

    /// Whether what comes from others is kept on this host's disk.
    pub(crate) fn keeps(&self) -> bool {
        self.settings.keep
    }

    /// Where this host listens.
    #[cfg(test)]
    pub(crate) fn address(&self) -> std::net::SocketAddr {
        self.host.address().expect("a port")
    }

    /// Who is asked for a block; none where that is this host, or nobody.
    fn owner(&self, key: &BlockKey) -> Option<Arc<Member>> {
        // What is staged on a host is in no store, and the keys of most are no longer than this.
        if key.blob.blob().staged_on().is_some() || !Request::can_be_said(key) {
            return None;
        }
        self.members.owner(&BlockId::of(key))
    }

    /// A block from its owner; none where this host is to have it from the store.
    pub(crate) async fn get(&self, key: &BlockKey, buffers: &Pool) -> Option<Block> {
        self.owner(key)?;
        let _place = self.asking.enter(key.len()).await;
        match self.get_from_owners(key, buffers).await {
            Ok(None) => None,
            Ok(Some(block)) => {
                self.hits.fetch_add(1, Relaxed);
                self.bytes.fetch_add(key.len(), Relaxed);
                Some(block)
            }
            Err(error) => {
                self.failures.fetch_add(1, Relaxed);
                tracing::debug!(%key, %error, "the store is asked for a peer's block");
                None
            }
        }
    }

    /// The same, from the next owner where one turns out to be away. One that is late, or cannot reach the store, is left alone for
    /// a while, lest every read wait for it.
    async fn get_from_owners(&self, key: &BlockKey, buffers: &Pool) -> Result<Option<Block>> {
        let (request, mut buffer) = (Request::Get(key.clone()), buffers.take(key.len() as usize));
        let deadline = Instant::now() + Duration::from_millis(self.settings.deadline_ms);
        for _ in 0..OWNERS {
            let Some(owner) = self.owner(key) else { return Ok(None) };
            let heard = match timeout_at(deadline, owner.ask(&self.host, &request, &mut buffer)).await {
                Ok(Ok(heard)) => heard,
                Ok(Err(_)) => continue,
                Err(_) => Heard::Failed(Error::new(ErrorKind::Unavailable, "it took too long")),
            };
            return match heard {
                Heard::Block { crc } if crc == crc32c(&buffer) => {
                    Ok(Some(Block { bytes: buffer.freeze(), crc }))
                }
                Heard::Block { .. } => {
                    tracing::warn!(peer = %owner.address, %key, "a block arrived damaged; the store is asked for it");
                    Err(Error::corrupt("it arrived damaged"))
                }
                Heard::Failed(error) => {
                    if error.kind() == ErrorKind::Unavailable {
                        owner.rest(&error);
                    }
                    Err(error.context(format!("peer {}", owner.address)))
                }
                other => Err(Error::corrupt(format!("peer {} answered {other:?}", owner.address))),
            };
        }
        Err(Error::new(ErrorKind::Unavailable, format!("{OWNERS} peers in turn are away")))
    }

    /// Has a block's owner bring it to its disk; none where this host is to do so.
    ///
    /// # Errors
    /// What the owner says.
    pub(crate) async fn fill(&self, key: &BlockKey, pin: bool) -> Option<Result<Filled>> {
        match self.ask(key, Request::Fill(key.clone(), pin)).await? {
            Ok(Heard::Filled(filled)) => Some(Ok(filled)),
            Err(error) => Some(Err(error)),
            _ => None,
        }
    }

    /// Where a block's owner has it; none where there is no other one, or it cannot be asked.
    pub(crate) async fn stat(&self, key: &BlockKey, verify: bool) -> Option<Residency> {
        match self.ask(key, Request::Stat(key.clone(), verify)).await? {
            Ok(Heard::Residency(residency)) => Some(residency),
            _ => None,
        }
    }

    /// Has a block's owner let it go; none where there is no other one, or it cannot be asked.
    ///
    /// # Errors
    /// What the owner says.
    pub(crate) async fn unpin(&self, key: &BlockKey) -> Option<Result<Unpinned>> {
        match self.ask(key, Request::Unpin(key.clone())).await? {
            Ok(Heard::Unpinned(unpinned)) => Some(Ok(unpinned)),
            Err(error) => Some(Err(error)),
            _ => None,
        }
    }

    /// Has all others let go of all that is pinned.
    ///
    /// # Errors
    /// `Unavailable` where one is away: what it has stays pinned; what one of them says otherwise.
    pub(crate) async fn unpin_all(&self) -> Result<Unpinned> {
        let mut unpinned = Unpinned::default();
        for member in self.members.others() {
            let asked = member.ask(&self.host, &Request::UnpinAll, &mut []);
            let late = |_| Error::new(ErrorKind::Unavailable, "it took too long");
            let told = match tokio::time::timeout(PATIENCE, asked).await.map_err(late).flatten() {
                Ok(Heard::Unpinned(there)) => Ok(there),
                Ok(Heard::Failed(error)) | Err(error) => Err(error),
                Ok(other) => Err(Error::corrupt(format!("it answered {other:?}"))),
            };
            unpinned += told.map_err(|error| error.context(format!("pins of peer {}", member.address)))?;
        }
        Ok(unpinned)
    }

    /// What a block's owner answers, its refusal an error; none where there is no other one, or none can be asked.
    async fn ask(&self, key: &BlockKey, request: Request) -> Option<Result<Heard>> {
        for _ in 0..OWNERS {
            let owner = self.owner(key)?;
            let asked = owner.ask(&self.host, &request, &mut []);
            match tokio::time::timeout(PATIENCE, asked).await.ok()? {
                Ok(Heard::Failed(error)) => {
                    return Some(Err(error.context(format!("peer {}", owner.address))));
                }
                Ok(heard) => return Some(Ok(heard)),
                Err(_) => {}
            }
        }
        None
    }

    /// Finds out who is there and who is not, until told to stop; `known` hears once everybody was looked for.
    pub(crate) async fn follow(&self, stop: Stop, known: tokio::sync::oneshot::Sender<()>) {
        let mut known = Some(known);
        for look in 0_u32.. {
            let looking = async {
                if look % LOOKUP_EVERY == 0 {
                    self.members.look_up(&self.settings.members).await;
                }
                self.members.greet(&self.host, self.own).await;
                known.take().map(|known| known.send(()));
                tokio::time::sleep(LOOK).await;
            };
            tokio::select! {
                () = looking => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Waits until everybody was looked for once, or two seconds have passed.
    pub(crate) async fn await_first_look(known: tokio::sync::oneshot::Receiver<()>) {
        tokio::time::timeout(FIRST_LOOK, known).await.ok();
    }

    /// Fills in what is known of peers.
    pub(crate) fn report(&self, counters: &mut Counters) {
        (counters.peers, counters.peers_here) = self.members.count();
        counters.peer_hits = self.hits.load(Relaxed);
        counters.peer_bytes = self.bytes.load(Relaxed);
        counters.peer_failures = self.failures.load(Relaxed);
        counters.served_blocks = self.served.load(Relaxed);
        counters.served_bytes = self.served_bytes.load(Relaxed);
    }
}
