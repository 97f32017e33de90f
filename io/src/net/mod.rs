//! Ways from one process to another.

mod fd_stream;
mod meeting;
mod notice;

pub use fd_stream::{FdStream, wait_readable};
pub use meeting::{Meeting, meet};
pub use notice::Notice;
