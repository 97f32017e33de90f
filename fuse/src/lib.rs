//! A [`forebay_volume::Volume`] as a mounted file system.

pub mod errno;
mod inode;
mod handle;
pub mod fs;
mod dispatch;
mod mountpoint;
mod transport;
mod session;

pub use errno::{Errno, FsResult};
pub use handle::Handle;
pub use mountpoint::MountPoint;
pub use session::{MountOptions, Mounted, mount};
