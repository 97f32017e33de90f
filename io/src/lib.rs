//! The only package that touches the world: object stores, disks, the network, time and chance.

pub mod mem;
pub mod net;
pub mod object;
