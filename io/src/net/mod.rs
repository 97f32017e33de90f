//! Ways from one process to another.

mod fd_stream;
mod meeting;

pub use fd_stream::{FdStream, wait_readable};
pub use meeting::{Meeting, meet};
