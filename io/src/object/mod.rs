//! Object stores: one bucket prefix behind one handle, whatever the service.

mod url;
mod types;
mod counters;
mod error;
mod key;
mod progress;
mod request;
mod unanswered;
mod layer;
mod backend;
mod stack;
mod front;
mod aside;
mod bucket;
mod read;
mod in_place;
mod upload;
mod probe;

pub use bucket::Bucket;
pub use counters::{Count, Counters, OperationKind};
pub use error::{is_unrepeated, is_withheld};
pub use in_place::InPlace;
pub use layer::{Delay, FaultMode, Faults, Gate, Rate};
pub use probe::Capabilities;
pub use types::{Authorship, Condition, Leftover, Listing, ObjectInfo, Skipped, StoreSettings, Unfinished};
pub use upload::{
    COPY_PART_BYTES, MAX_PARTS, MIN_PART_BYTES, Upload, UploadNotes, UploadOptions, even_part_size, part_size,
};
pub use url::{BucketUrl, Scheme};

#[cfg(test)]
mod tests;
