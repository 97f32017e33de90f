//! The only package that touches the world: object stores, disks, the network, time and chance.

pub mod clock;
pub mod rng;
pub mod task;
pub mod mem;
pub mod net;
pub mod object;
