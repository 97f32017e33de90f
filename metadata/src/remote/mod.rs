//! A tree that another process serves.
//!
//! One process holds a volume and has its tree (`crate::tree::LocalTree`). It serves that to mounts of other hosts (`serve`,
//! `conversation`, `session`, `interest`), which speak to it as to a tree of their own (`tree`, over a `link` that finds the process again when it, or its
//! host, was lost; `state` is what a mount knows of both, `privileges` of what its writes take away, `locks` of what it has locked). Bytes never pass this way: each mount reads and writes objects by itself.

mod wire;
mod messages;
mod interest;
mod session;
mod conversation;
mod serve;
mod saying;
mod link;
mod privileges;
mod locks;
mod state;
mod tree;

pub use link::{Finder, Reached};
pub use serve::{Guest, Server};
pub use session::Command;
pub use tree::{RemoteParts, RemoteTree};
pub use wire::PROTOCOL;
