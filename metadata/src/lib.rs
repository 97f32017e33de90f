//! The directory tree of a volume: names, attributes and layouts over a small transactional key-value engine.

pub mod kv;
pub mod tree;

#[cfg(test)]
mod testing;
