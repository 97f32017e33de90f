//! Volumes over a bucket in memory: contents against a plain array, costs, faults, ceilings, warmup.

pub(crate) mod support;
mod model;
mod reading;
mod writing;
mod costs;
mod packing;
mod warming;
mod writeback;
