//! What a slot holds once it is sealed, and whose it is.

use serde::{Deserialize, Serialize};

use crate::manifest::{Extra, Tensor};

/// A snapshot that is whole in its slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// The trainer's number for it, ascending.
    pub save: u64,
    /// Which arena, as announced.
    pub arena: u64,
    /// Which slot of it.
    pub slot: usize,
    /// Bytes of the shard.
    pub size: u64,
    /// Bytes of it before the first tensor.
    pub header: u64,
    /// The step.
    pub step: u64,
    /// Milliseconds since 1970 by the trainer's clock.
    pub created_ms: u64,
    /// The tensors, all in shard 0.
    pub tensors: Vec<Tensor>,
    /// Everything else.
    pub extras: Vec<Extra>,
}

/// Names a sealed step: a step of one start of the run.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeldStep {
    /// The start's nonce.
    pub start: String,
    /// The step.
    pub step: u64,
}

/// A sealed snapshot and whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The nonce of the start that saved it.
    pub start: String,
    /// Which rank's part of the step it is.
    pub rank: u32,
    /// Ranks that saved together.
    pub world_size: u32,
    /// The snapshot.
    pub seal: Seal,
}

impl Held {
    /// What it is called.
    pub fn name(&self) -> HeldStep {
        HeldStep { start: self.start.clone(), step: self.seal.step }
    }
}
