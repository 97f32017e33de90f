//! Figures that several scenarios report.

use std::time::Duration;

use crate::report::Row;
use crate::sample::Sample;
use crate::store::PaceSettings;

pub(super) const GIB: f64 = (1_u64 << 30) as f64;
pub(super) const MIB: f64 = (1_u64 << 20) as f64;

/// Where `amount` is bytes.
pub(super) fn mib_a_second(sample: &Sample) -> f64 {
    sample.amount / MIB / sample.seconds
}

/// What was counted, a second.
pub(super) fn a_second(sample: &Sample) -> f64 {
    sample.amount / sample.seconds
}

/// Of client and daemon together, where `amount` is bytes.
pub(super) fn cpu_a_gib(sample: &Sample) -> f64 {
    (sample.client_cpu + sample.daemon_cpu) / (sample.amount / GIB)
}

/// A store behind a link of 10 Gbit/s, as late as a real one, which gives each request what S3 does ("Performance design
/// patterns for Amazon S3": 85 to 90 MB/s): what then counts is whether the link is kept busy, not what a byte costs.
pub(super) const LINK: PaceSettings = PaceSettings {
    delay: Duration::from_millis(20),
    rate: Some(1_250_000_000),
    request_rate: Some(90_000_000),
};

/// Names the link in rows that were measured over it.
pub(super) fn over_link(mut rows: Vec<Row>) -> Vec<Row> {
    for row in &mut rows {
        row.name += ", over 10 Gbit/s, 20 ms away, 90 MB/s a request";
    }
    rows
}
