//! Figures that several scenarios report.

use crate::sample::Sample;

pub(super) const GIB: f64 = (1_u64 << 30) as f64;
pub(super) const MIB: f64 = (1_u64 << 20) as f64;

/// Where `amount` is bytes.
pub(super) fn mib_a_second(sample: &Sample) -> f64 {
    sample.amount / MIB / sample.seconds
}

/// Of client and daemon together, where `amount` is bytes.
pub(super) fn cpu_a_gib(sample: &Sample) -> f64 {
    (sample.client_cpu + sample.daemon_cpu) / (sample.amount / GIB)
}
