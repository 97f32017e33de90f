//! Ways from one process to another.

mod door;
mod fd_stream;
mod inherited;
mod meeting;
mod notice;
mod rdma;
mod bulk;
pub mod secure;

pub use bulk::{BulkReceiver, BulkSender, Label, Message, SILENCE, Sending};
pub use door::{Door, come};
pub use fd_stream::{FdStream, MAX_FRAME, Received, wait_readable};
pub use inherited::{InUse, Inherited, Noted};
pub use meeting::{Meeting, meet, places};
pub use notice::Notice;
pub use rdma::{Lending, Rdma, Wanted};
