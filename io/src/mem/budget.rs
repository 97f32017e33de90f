//! The one ceiling on bytes in flight.
//!
//! Every buffer that holds data on its way is charged to a class here before it is filled. The sum over all classes
//! never exceeds the ceiling; at the ceiling work waits, it does not fail.
//!
//! **No class starves another.** A sixteenth of the ceiling is reserved for each class; the rest is shared. A request
//! that fits what is left of its class's reserve is granted at once (behind earlier requests of its own class), so
//! every class always makes progress while its own holders do. What does not fit the reserve takes from the shared
//! part, and requests for it are served strictly in order of arrival over all classes, so that a large request is not
//! overtaken for ever by small ones.
//!
//! A request larger than a class can ever get (its reserve plus the whole shared part) is clamped to that and so
//! runs alone; [`Permit::bytes`] says what was granted. To stay free of deadlock, a task must not wait for more of a
//! class while it holds that class, and classes are acquired in their declared order.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// What bytes in flight are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Blocks on their way to a reader.
    Read,
    /// Dirty bytes of files being written.
    Write,
    /// Blocks being fetched for the cache.
    Fill,
    /// Checkpoint shards being flushed or restored.
    Ckpt,
    /// Listings, tree pages and images.
    Metadata,
}

impl Class {
    /// Every class, in the order in which a task may acquire several.
    pub const ALL: [Self; 5] = [Self::Read, Self::Write, Self::Fill, Self::Ckpt, Self::Metadata];
}

/// The ceiling and who holds how much of it; clones are the same budget.
#[derive(Debug, Clone)]
pub struct Budget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    ceiling: u64,
    reserve: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    used: [u64; Class::ALL.len()],
    peak: u64,
    /// Those who wait, oldest first: one entry per waiting future, so its bound is the number of tasks.
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Waiter {
    class: Class,
    bytes: u64,
    grant: oneshot::Sender<Permit>,
}

/// Bytes granted to a holder, given back when dropped.
#[derive(Debug)]
pub struct Permit {
    inner: Arc<Inner>,
    class: Class,
    bytes: u64,
}

impl Budget {
    /// A budget of `ceiling` bytes over all classes.
    pub fn new(ceiling: u64) -> Self {
        let reserve = ceiling / 16;
        Self { inner: Arc::new(Inner { ceiling, reserve, state: Mutex::default() }) }
    }

    /// The ceiling in bytes.
    pub fn ceiling(&self) -> u64 {
        self.inner.ceiling
    }

    /// The most that one request can be granted: a class's reserve and the whole shared part.
    pub fn largest(&self) -> u64 {
        self.inner.reserve + self.inner.shared()
    }

    /// Bytes held now by `class`.
    pub fn used(&self, class: Class) -> u64 {
        self.inner.state.lock().used[class as usize]
    }

    /// Bytes held now by all classes.
    pub fn total(&self) -> u64 {
        self.inner.state.lock().used.iter().sum()
    }

    /// The most bytes that were ever held at once.
    pub fn peak(&self) -> u64 {
        self.inner.state.lock().peak
    }

    /// Waits for `bytes` of `class`; more than [`Budget::largest`] is clamped to it. Cancel-safe.
    pub async fn acquire(&self, class: Class, bytes: u64) -> Permit {
        let bytes = bytes.min(self.largest());
        let granted = {
            let mut state = self.inner.state.lock();
            if self.inner.may_grant(&state, class, bytes) {
                Ok(self.inner.grant(&mut state, class, bytes))
            } else {
                let (grant, granted) = oneshot::channel();
                state.waiting.push_back(Waiter { class, bytes, grant });
                Err(granted)
            }
        };
        match granted {
            Ok(permit) => permit,
            Err(granted) => {
                let mut waiting = Waiting { inner: self.inner.clone(), granted };
                (&mut waiting.granted).await.expect("a waiter is dropped only after its grant")
            }
        }
    }

    /// Takes `bytes` of `class` if that needs no waiting. Never clamps.
    pub fn try_acquire(&self, class: Class, bytes: u64) -> Option<Permit> {
        let mut state = self.inner.state.lock();
        self.inner.may_grant(&state, class, bytes).then(|| self.inner.grant(&mut state, class, bytes))
    }
}

/// A future that waits: when it is dropped, those behind it must be looked at again.
struct Waiting {
    inner: Arc<Inner>,
    granted: oneshot::Receiver<Permit>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.granted.close();
        Inner::serve(&self.inner);
    }
}

impl Inner {
    fn shared(&self) -> u64 {
        self.ceiling - self.reserve * Class::ALL.len() as u64
    }

    /// Bytes that `used` takes from the shared part.
    fn beyond(&self, used: u64) -> u64 {
        used.saturating_sub(self.reserve)
    }

    fn fits_reserve(&self, state: &State, class: Class, bytes: u64) -> bool {
        state.used[class as usize] + bytes <= self.reserve
    }

    fn fits_shared(&self, state: &State, class: Class, bytes: u64) -> bool {
        let others: u64 = Class::ALL.iter().map(|c| self.beyond(state.used[*c as usize])).sum();
        let own = self.beyond(state.used[class as usize]);
        others - own + self.beyond(state.used[class as usize] + bytes) <= self.shared()
    }

    /// Whether a new request may pass those who wait already.
    fn may_grant(&self, state: &State, class: Class, bytes: u64) -> bool {
        if state.waiting.iter().any(|waiter| waiter.class == class) {
            return false;
        }
        self.fits_reserve(state, class, bytes)
            || (state.waiting.is_empty() && self.fits_shared(state, class, bytes))
    }

    fn grant(self: &Arc<Self>, state: &mut State, class: Class, bytes: u64) -> Permit {
        state.used[class as usize] += bytes;
        let total: u64 = state.used.iter().sum();
        assert!(total <= self.ceiling, "{total} bytes granted of {}", self.ceiling);
        state.peak = state.peak.max(total);
        Permit { inner: self.clone(), class, bytes }
    }

    /// Grants what the waiting may have now, oldest first, and wakes them after the lock is gone.
    fn serve(self: &Arc<Self>) {
        let mut ready = Vec::new();
        {
            let mut state = self.state.lock();
            let mut blocked = Vec::new();
            let mut shared_is_blocked = false;
            let mut index = 0;
            while let Some(waiter) = state.waiting.get(index) {
                let (class, bytes) = (waiter.class, waiter.bytes);
                if waiter.grant.is_closed() {
                    state.waiting.remove(index);
                    continue;
                }
                let fits = !blocked.contains(&class)
                    && (self.fits_reserve(&state, class, bytes)
                        || (!shared_is_blocked && self.fits_shared(&state, class, bytes)));
                if fits {
                    let waiter = state.waiting.remove(index).expect("the index was just read");
                    ready.push((waiter.grant, self.grant(&mut state, class, bytes)));
                    continue;
                }
                shared_is_blocked = true;
                blocked.push(class);
                index += 1;
            }
        }
        for (grant, permit) in ready {
            // A waiter that left meanwhile gives its permit straight back.
            drop(grant.send(permit));
        }
    }
}

impl Permit {
    /// Bytes granted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What they are for.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Gives back all but `bytes`; does nothing when fewer are held.
    pub fn shrink(&mut self, bytes: u64) {
        drop(self.split(self.bytes.saturating_sub(bytes)));
    }

    /// Holds from here on what `other`, of the same budget and class, holds.
    pub fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.inner, &other.inner) && self.class == other.class);
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Takes `bytes` (at most all) out of this permit into one of their own.
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { inner: self.inner.clone(), class: self.class, bytes }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.inner.state.lock().used[self.class as usize] -= self.bytes;
            Inner::serve(&self.inner);
        }
    }
}

#[cfg(test)]
mod tests;
