//! Checkpoints: what a step is made of, how it gets from a trainer's memory into a bucket, and how it comes back.
//!
//! Knows neither torch nor Python nor CUDA: it sees names, shapes and bytes, some of them in a device's memory.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests spawn, sleep and time as they need"))]

#[cfg(test)]
mod testing;

pub mod dtype;
pub mod shard;
pub mod manifest;
pub mod region;
pub mod roster;
pub mod plan;
pub mod group;
mod trees;
pub mod catalog;
pub mod arena;
pub mod local;
pub mod agent;
pub mod session;
pub mod restore;
pub mod verify;
pub mod summary;
pub mod diff;
pub mod convert;

pub use catalog::{StepInfo, list_steps};
pub use verify::{Finding, show, verify};
