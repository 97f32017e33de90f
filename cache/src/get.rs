//! THE read path: memory, disk, the block's owner among the peers, origin, in this order.

use std::sync::{Arc, OnceLock};

use forebay_core::{BlockKey, Result};
use forebay_io::clock::Clock;

use crate::Filled;
use crate::block::{Block, BlockId};
use crate::flight::{Flights, Role, Ticket};
use crate::origin::Origin;
use crate::peers::{Asked, Peers};
use crate::tier::disk::DiskTier;
use crate::tier::memory::MemoryTier;

/// Everything a block may come from, nearest first.
#[derive(Debug)]
pub(crate) struct Sources {
    pub(crate) memory: MemoryTier,
    pub(crate) disk: Option<Arc<DiskTier>>,
    pub(crate) origin: Origin,
    pub(crate) flights: Flights<(Block, Filled)>,
    /// Set once other hosts share their blocks.
    pub(crate) peers: OnceLock<Arc<Peers>>,
    /// What a flight does where no peer is to be asked, so that these join it as well; unused without peers.
    pub(crate) shared_flights: Flights<(Block, Filled)>,
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
pub(crate) async fn get(sources: &Arc<Sources>, key: &BlockKey, keep: Keep) -> Result<(Block, Filled, Role)> {
    let id = BlockId::of(key);
    if let Some(block) = sources.memory.get(&id) {
        return Ok((block, Filled::Memory, Role::Led));
    }
    let (own, key) = (sources.clone(), key.clone());
    let flight = move |ticket: Arc<Ticket<_>>| async move {
        let Some(peers) = own.peers.get() else { return get_here(&own, &key, keep, &ticket).await };
        let is_here = own.disk.as_ref().is_some_and(|disk| disk.peek(&key).is_some());
        let asked = match is_here {
            true => Asked::Nobody,
            false => ticket.wait(peers.get(&key, own.origin.buffers())).await?,
        };
        if let Asked::Block(block, receipt) = asked {
            own.memory.insert(id, block.clone());
            if let Some(disk) = own.disk.as_ref().filter(|_| keep == Keep::Behind && peers.keeps()) {
                disk.offer(&key, &block);
            }
            receipt.send(own.memory.contains(&id));
            return Ok((block, Filled::Peer { bytes: key.len() }));
        }
        let began = Clock::system().now();
        let (block, filled, _) = ticket.wait(get_for_all(&own, &key, keep)).await??;
        if let Asked::Refused(refusal) = asked {
            refusal.weigh(Clock::system().now().since(began));
        }
        Ok((block, filled))
    };
    let ((block, filled), role) = sources.flights.join(id, flight).await?;
    Ok((block, filled, role))
}

/// The same of what this host has or is to have, for its own readers and for peers: none of them is asked, so that nobody
/// waits for somebody who waits in turn.
pub(crate) async fn get_for_all(
    sources: &Arc<Sources>,
    key: &BlockKey,
    keep: Keep,
) -> Result<(Block, Filled, Role)> {
    let id = BlockId::of(key);
    if let Some(block) = sources.memory.get(&id) {
        return Ok((block, Filled::Memory, Role::Led));
    }
    let (own, key) = (sources.clone(), key.clone());
    let flight = move |ticket: Arc<Ticket<_>>| async move { get_here(&own, &key, keep, &ticket).await };
    let ((block, filled), role) = sources.shared_flights.join(id, flight).await?;
    Ok((block, filled, role))
}

/// A block that is in memory or on disk, for hosts that others referred here.
pub(crate) async fn get_at_hand(sources: &Sources, key: &BlockKey) -> Option<Block> {
    if let Some(block) = sources.memory.get(&BlockId::of(key)) {
        return Some(block);
    }
    let disk = sources.disk.as_ref().filter(|disk| disk.peek(key).is_some())?;
    let place = disk.admit(key).await?;
    disk.read(key, place).await
}

async fn get_here(
    own: &Sources,
    key: &BlockKey,
    keep: Keep,
    ticket: &Ticket<(Block, Filled)>,
) -> Result<(Block, Filled)> {
    let id = BlockId::of(key);
    // An earlier flight may have landed between the miss and this flight's start.
    if let Some(block) = own.memory.get(&id) {
        return Ok((block, Filled::Memory));
    }
    if let Some(disk) = own.disk.as_ref().filter(|disk| disk.peek(key).is_some())
        && let Some(place) = ticket.wait(disk.admit(key)).await?
        && let Some(block) = disk.read(key, place).await
    {
        own.memory.insert(id, block.clone());
        return Ok((block, Filled::Disk));
    }
    let permit = ticket.wait(own.origin.admit(key)).await?;
    let block = own.origin.fetch(key, permit).await?;
    own.memory.insert(id, block.clone());
    if let Some(disk) = own.disk.as_ref().filter(|_| keep == Keep::Behind) {
        disk.offer(key, &block);
    }
    Ok((block, Filled::Origin { bytes: key.len() }))
}
