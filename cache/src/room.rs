//! A bound on bytes on their way somewhere, and on how many carry them.

use std::sync::Arc;

use forebay_core::BLOCK_SIZE;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What one permit of the semaphore stands for, so that 4 TiB fit its counters.
const PERMIT_BYTES: u64 = 1 << 10;

/// Bytes that may be on their way at once. Whoever asks for more than all of it gets all of it, alone.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    semaphore: Arc<Semaphore>,
    permits: u32,
    least: u32,
}

/// A place in a room, given back when dropped.
pub(crate) type Place = OwnedSemaphorePermit;

impl Room {
    /// Room for `bytes`, carried by at most `carriers` (1 or more): everyone takes at least their even share.
    pub(crate) fn new(bytes: u64, carriers: u32) -> Self {
        let permits = (bytes / PERMIT_BYTES).clamp(u64::from(carriers), 1 << 28) as u32;
        Self { semaphore: Arc::new(Semaphore::new(permits as usize)), permits, least: permits / carriers }
    }

    /// Another one as large.
    pub(crate) fn another(&self) -> Self {
        let semaphore = Arc::new(Semaphore::new(self.permits as usize));
        Self { semaphore, ..*self }
    }

    /// Waits for a place, in order of arrival. Cancel-safe.
    pub(crate) async fn enter(&self, bytes: u64) -> Place {
        let place = self.semaphore.clone().acquire_many_owned(self.cost(bytes)).await;
        place.expect("this semaphore is never closed")
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
}
