//! A bound on bytes on their way somewhere, and on how many carry them.
//!
//! Who waits for a place waits in one line, in order of arrival. Those who bring in what nobody waits for yet send one of
//! them at a time into it: a reader comes behind one of them at most, however many a warmup has asked for, and that one
//! comes behind those readers alone who were there before it, so that a warmup gets on however many read.

use std::sync::Arc;

use forebay_core::BLOCK_SIZE;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

use crate::demand::Demand;

/// What one permit of the semaphore stands for, so that 4 TiB fit its counters.
const PERMIT_BYTES: u64 = 1 << 10;

/// Bytes that may be on their way at once. Whoever asks for more than all of it gets all of it, alone.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    semaphore: Arc<Semaphore>,
    /// Held by the one who waits in line for all those whom nobody waits for.
    ahead: Arc<Mutex<()>>,
    permits: u32,
    least: u32,
}

/// A place in a room, given back when dropped.
pub(crate) type Place = OwnedSemaphorePermit;

impl Room {
    /// Room for `bytes`, carried by at most `carriers` (1 or more): everyone takes at least their even share.
    pub(crate) fn new(bytes: u64, carriers: u32) -> Self {
        let permits = (bytes / PERMIT_BYTES).clamp(u64::from(carriers), 1 << 28) as u32;
        let semaphore = Arc::new(Semaphore::new(permits as usize));
        Self { semaphore, ahead: Arc::default(), permits, least: permits / carriers }
    }

    /// Another one as large.
    pub(crate) fn another(&self) -> Self {
        let semaphore = Arc::new(Semaphore::new(self.permits as usize));
        Self { semaphore, ahead: Arc::default(), ..*self }
    }

    /// Waits for a place, in order of arrival. Cancel-safe.
    pub(crate) async fn enter(&self, bytes: u64) -> Place {
        let place = self.semaphore.clone().acquire_many_owned(self.cost(bytes)).await;
        place.expect("this semaphore is never closed")
    }

    /// The same for who brings something in, behind the others like it for as long as nobody waits for what it brings.
    pub(crate) async fn enter_for(&self, demand: &Demand, bytes: u64) -> Place {
        let _ahead = tokio::select! {
            biased;
            () = demand.raised() => None,
            ahead = self.ahead.lock() => Some(ahead),
        };
        self.enter(bytes).await
    }

    /// A place, if one is free.
    pub(crate) fn try_enter(&self, bytes: u64) -> Option<Place> {
        self.semaphore.clone().try_acquire_many_owned(self.cost(bytes)).ok()
    }

    /// Whether all that it holds leaves a place in `other`, for bytes and for who carries them.
    pub(crate) fn is_smaller(&self, other: &Self) -> bool {
        self.permits + other.cost(BLOCK_SIZE) <= other.permits
    }

    /// Whether half of it is free or more.
    pub(crate) fn is_half_free(&self) -> bool {
        self.semaphore.available_permits() >= self.permits as usize / 2
    }

    fn cost(&self, bytes: u64) -> u32 {
        let cost = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX);
        cost.clamp(self.least, self.permits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_and_carriers_are_both_bounded() {
        let room = Room::new(64 << 10, 4);
        let small: Vec<Place> = (0..4).map(|_| room.try_enter(1).expect("four carriers")).collect();
        assert!(room.try_enter(1).is_none(), "a fifth, however small");
        drop(small);
        let large = room.enter(u64::MAX).await;
        assert!(room.try_enter(1).is_none(), "more than all is all");
        drop(large);
        let _half = room.enter(32 << 10).await;
        assert!(room.try_enter(33 << 10).is_none() && room.try_enter(32 << 10).is_some());
    }

    /// Who gets the only place of a room in turn, of those who come in this order: `r`eaders, `w`armups, and one that a
    /// reader `j`oins once all have come.
    async fn order(coming: &str) -> String {
        let (room, got) = (Room::new(1 << 10, 1), Arc::new(parking_lot::Mutex::new(String::new())));
        let held = room.enter(1).await;
        let mut joined = Vec::new();
        let mut waiting: Vec<_> = coming
            .chars()
            .map(|who| {
                let demand = if who == 'r' { Demand::now() } else { Demand::later() };
                joined.extend((who == 'j').then(|| demand.clone()));
                let (room, got) = (room.clone(), got.clone());
                Box::pin(async move {
                    let place = room.enter_for(&demand, 1).await;
                    got.lock().push(who);
                    drop(place);
                })
            })
            .collect();
        for one in &mut waiting {
            assert!(futures::poll!(one).is_pending());
        }
        joined.iter().for_each(Demand::raise);
        for one in &mut waiting {
            assert!(futures::poll!(one).is_pending());
        }
        drop(held);
        futures::future::join_all(waiting).await;
        got.lock().clone()
    }

    #[tokio::test]
    async fn readers_go_before_all_but_one_of_those_who_come_ahead_and_these_get_on() {
        assert_eq!(order("rrr").await, "rrr");
        assert_eq!(order("wwww").await, "wwww");
        assert_eq!(order("wwwwrrr").await, "wrrrwww");
        assert_eq!(order("rrwwrr").await, "rrwrrw");
        assert_eq!(order("wwwjwrr").await, "wrrjwww");
        assert_eq!(order("jwwr").await, "jrww", "who is in line stays there");
    }
}
