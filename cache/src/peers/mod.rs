//! Other hosts that mount the same volume, and share the blocks that they have.
//!
//! Each block has an owner among them, which brings it from the store once for all (`ring`); the others ask that one.
//! Promises: only who holds the secret is asked or answered; a block that arrives damaged, late, or not at all is had from
//! the store; an owner that is lost is replaced by the next one. Nobody waits for who waits for it: an owner has the block
//! itself, or from the store, and whom it names asked before. Where hosts take different ones for the owner, they wait for
//! each other no longer than until the deadline.

mod ring;
mod wire;
mod settings;
mod member;
mod members;
mod crowd;
mod relay;
mod serve;

pub(crate) use serve::{Local, serve};
pub use settings::PeerSettings;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use forebay_core::{BlockKey, Error, ErrorKind, Result, VolumeId, crc32c};
use forebay_io::mem::Pool;
use forebay_io::net::secure::{Host, Identity};
use forebay_io::rng::Rng;
use forebay_io::task::{Stop, TaskGroup};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::block::{Block, BlockId};
use crate::demand::Demand;
use crate::room::Room;
use crate::{Counters, Filled, Residency, Unpinned};
use crowd::Crowds;
use member::{Line, Member};
use members::Members;
use relay::{Arriving, Relay, Relays};
use wire::{Heard, LARGE, Landing, PROTOCOL, Request, Wanted, Who};

/// How often members that are away are looked for, and who is not needed any more is let go.
const LOOK: Duration = Duration::from_secs(1);
/// How often names are looked up.
const LOOKUP_EVERY: Duration = Duration::from_secs(10);
/// How long a cache that opens waits to know who is there.
const FIRST_LOOK: Duration = Duration::from_secs(2);
/// Owners that are tried for one block, each once the one before turned out to be away.
const OWNERS: usize = 3;
/// A store that gives a block in this time is well.
const QUICK: Duration = Duration::from_secs(2);
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
    /// Who is sent blocks that many want.
    crowds: Arc<Crowds>,
    /// Large blocks on their way here.
    relays: Arc<Relays>,
    tasks: TaskGroup,
    hits: AtomicU64,
    bytes: AtomicU64,
    referrals: AtomicU64,
    failures: AtomicU64,
    served: AtomicU64,
    served_bytes: AtomicU64,
}

/// What came of asking for a block.
#[derive(Debug)]
pub(crate) enum Asked {
    /// The block, for which who sent it may wait to be thanked once others can have it from here.
    Block(Block, Receipt),
    /// There was nobody to be asked: this host is to have it from the store.
    Nobody,
    /// Its owner answered, and gave nothing: the store is to be asked.
    Refused(Refusal),
}

/// That a block has arrived, which its owner may wait to hear.
#[derive(Debug)]
pub(crate) struct Receipt {
    line: Option<Line>,
    _arriving: Option<Arriving>,
    tasks: TaskGroup,
}

impl Receipt {
    /// Says that the block is here, and that this host keeps it for others or not, behind the caller's back.
    pub(crate) fn send(self, keeps: bool) {
        if let Some(line) = self.line {
            self.tasks.spawn("thank a peer", async move { line.tell(&Request::Got(keeps)).await });
        }
    }
}

/// What an owner answered in the place of a block.
#[derive(Debug)]
pub(crate) struct Refusal {
    owner: Arc<Member>,
    why: Error,
}

impl Refusal {
    /// Hears how long the store took for the block then. Where it was quick, an owner that was late, or had no store, is to blame,
    /// and else the store.
    pub(crate) fn weigh(&self, store_took: Duration) {
        let is_fault = matches!(self.why.kind(), ErrorKind::Unavailable | ErrorKind::Corrupt);
        if is_fault && store_took < QUICK {
            self.owner.blame(&self.why);
        }
    }
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
        tasks: TaskGroup,
    ) -> Result<Self> {
        let secret = settings.read_secret().await?;
        let identity = Identity::new(&secret, &volume.0.to_le_bytes(), PROTOCOL)?;
        let host = Host::open(settings.transport, settings.listen()?, &identity)?;
        let own = Who { share, process: Rng::system().u64() };
        let members = Members::new(own, settings.silence());
        Ok(Self {
            settings,
            volume,
            host,
            own,
            members,
            sending: room.another(),
            asking: room,
            crowds: Crowds::new(own),
            relays: Arc::default(),
            tasks,
            hits: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            referrals: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            served: AtomicU64::new(0),
            served_bytes: AtomicU64::new(0),
        })
    }

    /// Hosts beside this one, as far as they are known.
    pub(crate) fn others(&self) -> u64 {
        self.members.count().0
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

    /// How many hosts are being sent a block, or wait for that.
    #[cfg(test)]
    pub(crate) fn waiting_for(&self, key: &BlockKey) -> usize {
        self.crowds.turns(BlockId::of(key))
    }

    /// Who is asked for a block; none where that is this host, or nobody.
    fn owner(&self, key: &BlockKey) -> Option<Arc<Member>> {
        // What is staged on a host is in no store, and the keys of most are no longer than this.
        if key.blob.blob().staged_on().is_some() || !Request::can_be_said(key) || key.is_empty() {
            return None;
        }
        self.members.owner(&BlockId::of(key))
    }

    /// Asks a block's owner for it, the next one where one turns out to be away, for no longer than the deadline in all.
    pub(crate) async fn get(&self, key: &BlockKey, demand: &Demand, buffers: &Pool) -> Asked {
        if self.owner(key).is_none() {
            return Asked::Nobody;
        }
        let deadline = Instant::now() + self.settings.deadline();
        let Ok(_place) = timeout_at(deadline, self.asking.enter_for(demand, key.len())).await else {
            self.failures.fetch_add(1, Relaxed);
            return Asked::Nobody;
        };
        let mut buffer = buffers.take(key.len() as usize);
        let mut arriving = (key.len() >= LARGE).then(|| self.relays.begin(BlockId::of(key)));
        for _ in 0..OWNERS {
            let Some(owner) = self.owner(key) else { return Asked::Nobody };
            let mut is_at_it = false;
            let obtaining = self.obtain(&owner, key, &mut buffer, &mut arriving, &mut is_at_it);
            let why = match timeout_at(deadline, obtaining).await {
                Ok(Ok(Ok((crc, line)))) => {
                    owner.praise();
                    self.hits.fetch_add(1, Relaxed);
                    self.bytes.fetch_add(key.len(), Relaxed);
                    let block = Block { bytes: buffer.freeze(), crc };
                    arriving.iter().for_each(|arriving| arriving.whole(&block));
                    let tasks = self.tasks.clone();
                    return Asked::Block(block, Receipt { line, _arriving: arriving, tasks });
                }
                Ok(Ok(Err(why))) => why,
                Ok(Err(_)) => continue,
                // It was not asked yet, as many others are, or one that it named was: nobody is to blame.
                Err(_) if !is_at_it => break,
                Err(_) => Error::new(ErrorKind::Unavailable, "it took too long"),
            };
            self.failures.fetch_add(1, Relaxed);
            tracing::debug!(peer = %owner.address, %key, error = %why, "the store is asked for a peer's block");
            return Asked::Refused(Refusal { owner, why });
        }
        self.failures.fetch_add(1, Relaxed);
        Asked::Nobody
    }

    /// A block from its owner, or from whom that names; its CRC-32C, or why it gave none. Says when the owner is at it.
    ///
    /// # Errors
    /// That the owner could not be asked.
    async fn obtain(
        &self,
        owner: &Arc<Member>,
        key: &BlockKey,
        buffer: &mut [u8],
        arriving: &mut Option<Arriving>,
        is_at_it: &mut bool,
    ) -> Result<Result<(u32, Option<Line>)>> {
        let mut landing =
            Landing { bytes: &mut *buffer, relay: arriving.as_ref().map(|arriving| arriving.relay()) };
        let request = Request::Get(key.clone(), Wanted::FromAnyone);
        let place = owner.place(&request).await?;
        *is_at_it = true;
        let (mut heard, mut line) = owner.call(place, &self.host, self.own, &request, &mut landing).await?;
        if let Heard::Elsewhere(who) = heard {
            *is_at_it = false;
            match self.borrow(who, key, &mut landing).await {
                Some(crc) if crc == crc32c(buffer) => {
                    self.referrals.fetch_add(1, Relaxed);
                    return Ok(Ok((crc, Some(line))));
                }
                Some(_) => arriving.iter_mut().for_each(Arriving::restart),
                None => {}
            }
            *is_at_it = true;
            let mut landing =
                Landing { bytes: &mut *buffer, relay: arriving.as_ref().map(|arriving| arriving.relay()) };
            let request = Request::Get(key.clone(), Wanted::FromOwner);
            heard = line.ask(&self.host, &request, &mut landing).await?;
        }
        // A stream on which something else was said is closed.
        Ok(match heard {
            Heard::Block { crc, is_told } if crc == crc32c(buffer) => {
                Ok((crc, if is_told { Some(line) } else { line.end() }))
            }
            Heard::Block { .. } => {
                arriving.iter_mut().for_each(Arriving::restart);
                Err(Error::corrupt(format!("{key} arrived damaged")))
            }
            Heard::Failed(error) => {
                line.end();
                Err(error)
            }
            other => Err(Error::corrupt(format!("it answered {other:?}"))),
        })
    }

    /// The checksum of a block that came from a host that is said to have it; none where that cannot be asked, does not
    /// send it, or has not begun within half of the deadline.
    async fn borrow(&self, who: Who, key: &BlockKey, landing: &mut Landing<'_>) -> Option<u32> {
        let member = self.members.known_as(who)?;
        let (request, relay) = (Request::Get(key.clone(), Wanted::AtHand), landing.relay);
        let mut asked = pin!(member.ask(&self.host, self.own, &request, landing));
        let answered = match tokio::time::timeout(self.settings.deadline() / 2, &mut asked).await {
            Ok(answered) => answered,
            Err(_) if relay.is_some_and(Relay::has_begun) => asked.await,
            Err(_) => return None,
        };
        match answered {
            Ok(Heard::Block { crc, .. }) => Some(crc),
            other => {
                tracing::debug!(peer = %member.address, %key, ?other, "a peer that was named does not have a block");
                None
            }
        }
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
        let (mut unpinned, mut failed) = (Unpinned::default(), None);
        for member in self.members.others() {
            let mut nowhere = Landing::default();
            let asked = member.ask(&self.host, self.own, &Request::UnpinAll, &mut nowhere);
            let late = |_| Error::new(ErrorKind::Unavailable, "it took too long");
            match tokio::time::timeout(PATIENCE, asked).await.map_err(late).flatten() {
                Ok(Heard::Unpinned(there)) => unpinned += there,
                Ok(Heard::Failed(error)) | Err(error) => {
                    failed.get_or_insert(error.context(format!("pins of peer {}", member.address)));
                }
                Ok(other) => tracing::warn!(peer = %member.address, ?other, "unpinning was answered oddly"),
            }
        }
        failed.map_or(Ok(unpinned), Err)
    }

    /// What a block's owner answers, its refusal an error; none where there is no other one, or none can be asked.
    async fn ask(&self, key: &BlockKey, request: Request) -> Option<Result<Heard>> {
        for _ in 0..OWNERS {
            let owner = self.owner(key)?;
            let mut nowhere = Landing::default();
            let asked = owner.ask(&self.host, self.own, &request, &mut nowhere);
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
    pub(crate) async fn follow(&self, stop: Stop, known: oneshot::Sender<()>) {
        self.members.look_up(&self.settings.members).await;
        let lookups = async {
            loop {
                tokio::time::sleep(LOOKUP_EVERY).await;
                self.members.look_up(&self.settings.members).await;
            }
        };
        let mut known = Some(known);
        let looks = async {
            loop {
                self.members.greet(&self.host).await;
                known.take().map(|known| known.send(()));
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            () = lookups => {}
            () = looks => {}
            () = stop.cancelled() => {}
        }
    }

    /// Waits until everybody was looked for once, or two seconds have passed.
    pub(crate) async fn await_first_look(known: oneshot::Receiver<()>) {
        tokio::time::timeout(FIRST_LOOK, known).await.ok();
    }

    /// Fills in what is known of peers.
    pub(crate) fn report(&self, counters: &mut Counters) {
        (counters.peers, counters.peers_here) = self.members.count();
        counters.peer_hits = self.hits.load(Relaxed);
        counters.peer_bytes = self.bytes.load(Relaxed);
        counters.peer_referrals = self.referrals.load(Relaxed);
        counters.peer_failures = self.failures.load(Relaxed);
        counters.served_blocks = self.served.load(Relaxed);
        counters.served_bytes = self.served_bytes.load(Relaxed);
    }
}
