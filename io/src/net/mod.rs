//! Ways from one process to another.

mod fd_stream;

pub use fd_stream::FdStream;
