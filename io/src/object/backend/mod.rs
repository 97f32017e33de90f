//! The stores themselves: any object_store store, a directory, and S3 with what object_store lacks.

mod switch;
mod storage_class;
mod client;
mod send;
mod plain;
mod file;
mod profile_file;
mod credentials;
mod s3;
mod azure;
mod google;
mod profile;
mod endpoint;
mod connect;

pub(super) use connect::{Connected, connect};
pub(super) use file::{open_object, sweep as sweep_directory};
pub(super) use google::STAGED;
pub(super) use plain::Plain;
