//! A [`forebay_volume::Volume`] as a mounted file system.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests spawn, sleep and time as they need"))]

pub mod errno;
mod inode;
mod handle;
mod signals;
pub mod fs;
mod dispatch;
mod mountpoint;
mod transport;
mod notify;
mod session;
mod sign;

pub use errno::{Errno, FsResult};
pub use handle::Handle;
pub use mountpoint::{MountPoint, OwnMount, is_dead, own_mounts};
pub use session::{MountOptions, Mounted, mount};
