//! Checkpoints: what a step is made of, how it gets from a trainer's memory into a bucket, and how it comes back.
//!
//! Knows neither torch nor Python nor CUDA: it sees names, shapes and bytes.

pub mod dtype;
pub mod shard;
pub mod manifest;
