//! The cache as its callers see it, over a store that counts, fails and holds back on demand.

mod support;
mod read;
mod warm;
