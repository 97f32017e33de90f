//! What hosts hold for each other: where this rank's parts are kept, and what its agent keeps for others.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::Result;
use forebay_io::clock::Clock;
use forebay_io::mem::SharedMemory;

use super::predecessor::Kept;
use super::{Address, Replication, Request, Session};
use crate::arena::Held;

/// What a session knows of it.
#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    /// The port of this session's agent, and what others are to say there, once it told; none where it keeps no copies.
    pub(super) address: Option<Option<(u16, String)>>,
    /// The agent of another host that is to have what is sealed.
    pub(super) to: Option<Address>,
    /// What the agent before this session's kept, until this one has it.
    pub(super) inherited: Vec<(Held, Arc<SharedMemory>)>,
    /// Saves of which another host has no copy, which was to have one.
    pub(super) missed: u64,
}

impl Session {
    /// Has agents of different hosts hold copies for each other; said before one is greeted.
    pub fn set_replication(&mut self, replication: Replication) {
        self.hello.replication = Some(replication);
    }

    /// Where this session's agent takes copies for ranks of other hosts: a port of this host, and what they are to say there.
    /// None where it takes none, or does not say within `patience`.
    pub fn keeps_at(&mut self, patience: Duration) -> Result<Option<(u16, String)>> {
        let clock = Clock::system();
        let deadline = clock.now() + patience;
        self.hear()?;
        while self.elsewhere.address.is_none() && self.is_connected() {
            let left = deadline.since(clock.now());
            if left.is_zero() {
                break;
            }
            self.stream.as_ref().map(|stream| stream.readable(left)).transpose()?;
            self.hear()?;
        }
        Ok(self.elsewhere.address.clone().flatten())
    }

    /// Has the agent of another host, at this address, hold what is sealed from now on.
    pub fn replicate_to(&mut self, address: Address) {
        // A failure here is the agent's death, and the next one is told.
        self.send(&Request::ReplicateTo(address.clone()), None).ok();
        self.elsewhere.to = Some(address);
    }

    /// Saves of which another host has no copy in its memory, which was to have one.
    pub fn replicas_missed(&self) -> u64 {
        self.elsewhere.missed
    }

    /// Takes over what an agent keeps for ranks of other hosts, where this start does the same.
    pub(super) fn inherit(&mut self, kept: Vec<Kept>) {
        if self.hello.replication.is_none() {
            return;
        }
        for Kept { rank, shown } in kept {
            match shown.read() {
                Ok(held) => self.elsewhere.inherited.push((held, shown.memory)),
                Err(error) => {
                    self.warnings.push(format!("a copy of what rank {rank} sealed is not kept on: {error}"))
                }
            }
        }
    }

    /// Tells a new agent where copies go, and hands it those that one before it kept.
    pub(super) fn tell_elsewhere(&mut self) -> Result<()> {
        for index in 0..self.elsewhere.inherited.len() {
            let (held, memory) = &self.elsewhere.inherited[index];
            let (request, memory) = (Request::Inherit(Box::new(held.clone())), memory.clone());
            self.send(&request, Some(memory.as_fd()))?;
        }
        match self.elsewhere.to.clone() {
            Some(address) => self.send(&Request::ReplicateTo(address), None),
            None => Ok(()),
        }
    }
}
