//! Object stores: one bucket prefix behind one handle, whatever the service.

mod url;
mod types;
mod bucket;

pub use bucket::{Bucket, Upload};
pub use types::{Condition, Listing, ObjectInfo, StoreSettings};
pub use url::{BucketUrl, Scheme};
