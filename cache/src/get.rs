//! THE read path: memory, disk, the block's owner among the peers, origin, in this order.

use std::sync::{Arc, OnceLock};

use forebay_core::{BlockKey, Result};
use forebay_io::clock::Clock;

use crate::Filled;
use crate::block::{Block, BlockId};
use crate::demand::Demand;
use crate::flight::{Flights, Role, Ticket};
use crate::origin::Origin;
use crate::peers::{Asked, Peers};
use crate::room::Place;
use crate::tier::disk::DiskTier;
use crate::tier::memory::MemoryTier;

/// Everything a block may come from, nearest first.
#[derive(Debug)]
pub(crate) struct Sources {
    pub(crate) memory: MemoryTier,
    pub(crate) disk: Option<Arc<DiskTier>>,
    pub(crate) origin: Origin,
    pub(crate) flights: Flights<Brought>,
    /// Set once other hosts share their blocks.
    pub(crate) peers: OnceLock<Arc<Peers>>,
    /// What a flight does where no peer is to be asked, so that these join it as well; unused without peers.
    pub(crate) shared_flights: Flights<Brought>,
}

/// A block, and where it came from.
#[derive(Debug, Clone)]
pub(crate) struct Brought {
    pub(crate) block: Block,
    pub(crate) filled: Filled,
    /// What it takes of the bytes on their way from the origin, still, where the caller writes it to disk.
    pub(crate) place: Option<Arc<Place>>,
}

impl Brought {
    fn new(block: Block, filled: Filled) -> Self {
        Self { block, filled, place: None }
    }
}

/// Who writes what the origin gave to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// A task behind the caller's back, if there is room on the way.
    Behind,
    /// The caller, which waits for it. A task beside it may come late, and write again what was evicted meanwhile.
    Caller,
}

/// A whole block from the nearest source, and whether this call led the way there.
pub(crate) async fn get(
    sources: &Arc<Sources>,
    key: &BlockKey,
    demand: &Demand,
    keep: Keep,
) -> Result<(Brought, Role)> {
    let id = BlockId::of(key);
    if let Some(block) = sources.memory.get(&id) {
        return Ok((Brought::new(block, Filled::Memory), Role::Led));
    }
    let (own, key, wanted) = (sources.clone(), key.clone(), demand.clone());
    let flight = move |ticket: Arc<Ticket<_>>| async move {
        let Some(peers) = own.peers.get() else { return get_here(&own, &key, &wanted, keep, &ticket).await };
        let is_here = own.disk.as_ref().is_some_and(|disk| disk.peek(&key).is_some());
        let asked = match is_here {
            true => Asked::Nobody,
            false => ticket.wait(peers.get(&key, &wanted, own.origin.buffers())).await?,
        };
        if let Asked::Block(block, receipt) = asked {
            own.memory.insert(id, block.clone());
            if let Some(disk) = own.disk.as_ref().filter(|_| keep == Keep::Behind && peers.keeps()) {
                disk.offer(&key, &block);
            }
            receipt.send(own.memory.contains(&id));
            return Ok(Brought::new(block, Filled::Peer { bytes: key.len() }));
        }
        let began = Clock::system().now();
        let (brought, _) = ticket.wait(get_for_all(&own, &key, &wanted, keep)).await??;
        if let Asked::Refused(refusal) = asked {
            refusal.weigh(Clock::system().now().since(began));
        }
        Ok(brought)
    };
    sources.flights.join(id, demand, flight).await
}

/// The same of what this host has or is to have, for its own readers and for peers: none of them is asked, so that nobody
/// waits for somebody who waits in turn.
pub(crate) async fn get_for_all(
    sources: &Arc<Sources>,
    key: &BlockKey,
    demand: &Demand,
    keep: Keep,
) -> Result<(Brought, Role)> {
    let id = BlockId::of(key);
    if let Some(block) = sources.memory.get(&id) {
        return Ok((Brought::new(block, Filled::Memory), Role::Led));
    }
    let (own, key, wanted) = (sources.clone(), key.clone(), demand.clone());
    let flight =
        move |ticket: Arc<Ticket<_>>| async move { get_here(&own, &key, &wanted, keep, &ticket).await };
    sources.shared_flights.join(id, demand, flight).await
}

/// A block that is in memory or on disk, for hosts that others referred here.
pub(crate) async fn get_at_hand(sources: &Sources, key: &BlockKey) -> Option<Block> {
    if let Some(block) = sources.memory.get(&BlockId::of(key)) {
        return Some(block);
    }
    let disk = sources.disk.as_ref().filter(|disk| disk.peek(key).is_some())?;
    let place = disk.admit(key, &Demand::now()).await?;
    disk.read(key, place).await
}

async fn get_here(
    own: &Sources,
    key: &BlockKey,
    demand: &Demand,
    keep: Keep,
    ticket: &Ticket<Brought>,
) -> Result<Brought> {
    let id = BlockId::of(key);
    // An earlier flight may have landed between the miss and this flight's start.
    if let Some(block) = own.memory.get(&id) {
        return Ok(Brought::new(block, Filled::Memory));
    }
    if let Some(disk) = own.disk.as_ref().filter(|disk| disk.peek(key).is_some())
        && let Some(place) = ticket.wait(disk.admit(key, demand)).await?
        && let Some(block) = disk.read(key, place).await
    {
        own.memory.insert(id, block.clone());
        return Ok(Brought::new(block, Filled::Disk));
    }
    let place = ticket.wait(own.origin.admit(key, demand)).await?;
    let block = own.origin.fetch(key, &place).await?;
    own.memory.insert(id, block.clone());
    if let Some(disk) = own.disk.as_ref().filter(|_| keep == Keep::Behind) {
        disk.offer(key, &block);
    }
    let place = (keep == Keep::Caller).then(|| Arc::new(place));
    Ok(Brought { block, filled: Filled::Origin { bytes: key.len() }, place })
}
