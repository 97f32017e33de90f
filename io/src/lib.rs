//! The only package that touches the world: object stores, disks, the network, time and chance.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests spawn, sleep and time as they need"))]

pub mod clock;
pub mod rng;
pub mod lock_file;
pub mod disk;
pub mod files;
pub mod task;
pub mod host;
pub mod open_files;
pub mod priority;
pub mod mem;
pub mod device;
pub mod codec;
pub mod net;
pub mod object;
