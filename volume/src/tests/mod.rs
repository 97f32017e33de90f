//! Volumes over a bucket in memory: contents against a plain array, faults, ceilings, warmup.

mod support;
mod model;
mod writing;
mod warming;
