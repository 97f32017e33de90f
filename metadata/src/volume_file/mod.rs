//! `.forebay/volume.json`: what a volume is, and who may write to it now.
//!
//! Owns the volume's identity and the lease of its one read-write server. Promises that of all who open a prefix
//! for writing at most one holds it, and that one which lost it can learn so for the price of a comparison. Does
//! not fence writes that are under way: the engine in the bucket does that by its own epoch.
//!
//! In a bucket the lease is a counter that its holder raises by conditional puts. Nobody compares wall clocks: who
//! wants the lease watches the counter stand still for a whole lease of its own monotonic time. A directory
//! (`file://`) has no conditional puts: there a locked file stands for the lease, between processes of one host.

mod record;
mod lease;
mod lock;
mod claim;
#[cfg(test)]
mod tests;

pub use claim::{Access, Claim, VolumeFile};
pub use lease::{LeaseSettings, LeaseState};
pub use record::{EngineKind, LeaseRecord, VolumeRecord};
