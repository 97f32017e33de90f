//! From the FUSE library's callbacks to the file system and back. No semantics.

mod convert;
mod answer;
mod reply;
mod locks;
mod callbacks;

pub(crate) use answer::Answerer;
pub(crate) use callbacks::Dispatch;
