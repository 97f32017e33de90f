//! Memory: one ceiling for all bytes in flight.

mod budget;

pub use budget::{Budget, Class, Permit};
