//! The cache as its callers see it, over a store that counts, fails and holds back on demand.

pub(crate) mod support;
mod read;
mod turns;
mod warm;
mod disk;
mod hanging;
mod others;
mod peers;
