//! Whether a tree and its bucket agree with themselves and with one another, and mending what does not.
//!
//! Owns the list of what can be wrong (`damage`), gathering what is there (`facts`, over one snapshot of the records),
//! the judgement (`judge`, pure), the comparison with the bucket (`objects`), the files
//! whose bytes are missing there (`lost`), what has to be seen before these are given up (`evidence`), and the mending (`mend`; `refuge` is `/lost+found`). Promises that a check
//! changes nothing, that mending destroys no bytes and makes no file look whole that is not, and that what it reports of a
//! tree in use was true at one moment. Holds some hundred bytes of memory for each inode and each object that the tree knows.

mod damage;
mod facts;
mod evidence;
mod judge;
mod objects;
mod refuge;
mod lost;
mod mend;
mod check;

pub(crate) use check::{check, no_bucket};
pub use damage::{Finding, FsckReport};
pub use evidence::Repair;
