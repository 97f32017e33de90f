//! Measures Forebay against the limits it aims at: `make bench`.
//!
//! Each scenario runs the real `forebay` binary and a baseline in turn and reports medians of the pairs. Nothing here
//! runs in the tests but the arithmetic and the store.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a benchmark tells people what it does and found"
)]

pub mod store;
pub mod machine;
pub mod sample;
pub mod report;
pub mod raw;
pub mod context;
pub mod epoch;
pub mod helper;
pub mod footprint;
pub mod mounted;
pub mod juicefs;
pub mod scenarios;
