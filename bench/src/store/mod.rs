//! An S3 server that keeps everything in memory, fast enough to show a client's own limits.
//!
//! Speaks what the whole product asks of a store: conditional and ranged requests, multipart uploads with part
//! copies, listings, bulk deletes. Checks no signature and keeps nothing over a restart.

mod fault;
mod date;
mod object;
mod multipart;
mod listing;
mod objects;
mod xml;
mod request;
mod pace;
mod answer;
mod server;
mod process;

#[cfg(test)]
mod tests;

pub use pace::PaceSettings;
pub use process::{Counts, StoreProcess};
pub use server::{ServerSettings, serve};
