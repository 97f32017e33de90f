//! Measuring one run, and pairs of runs in turn.

use std::time::Instant;

use anyhow::Result;

use crate::machine;

/// What one run took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sample {
    /// Wall time.
    pub seconds: f64,
    /// CPU seconds of this process, which plays the client.
    pub client_cpu: f64,
    /// CPU seconds of the daemon, where there is one.
    pub daemon_cpu: f64,
    /// Read system calls of the daemon: its FUSE requests.
    pub requests: f64,
    /// What the run itself counted, such as bytes or files.
    pub amount: f64,
}

/// Runs `work`, which returns what it counted, beside the daemon `pid`.
pub fn measure(daemon: Option<u32>, work: impl FnOnce() -> Result<f64>) -> Result<Sample> {
    let of_daemon = || -> Result<(f64, f64)> {
        let Some(pid) = daemon else { return Ok((0.0, 0.0)) };
        Ok((machine::cpu_of(pid)?, machine::reads_of(pid)?))
    };
    let (daemon_cpu, requests) = of_daemon()?;
    let (client_cpu, start) = (machine::own_cpu(), Instant::now());
    let amount = work()?;
    let (seconds, client_cpu) = (start.elapsed().as_secs_f64(), machine::own_cpu() - client_cpu);
    let (daemon_cpu_after, requests_after) = of_daemon()?;
    Ok(Sample {
        seconds,
        client_cpu,
        daemon_cpu: daemon_cpu_after - daemon_cpu,
        requests: requests_after - requests,
        amount,
    })
}

/// Runs of ours and of the baseline, one of each in turn.
#[derive(Debug, Clone, Default)]
pub struct Pairs {
    /// Ours, in the order they ran.
    pub ours: Vec<Sample>,
    /// The baseline's.
    pub baseline: Vec<Sample>,
}

impl Pairs {
    /// Runs `count` pairs; which of the two goes first changes from pair to pair.
    pub fn run(
        count: usize,
        mut ours: impl FnMut() -> Result<Sample>,
        mut baseline: impl FnMut() -> Result<Sample>,
    ) -> Result<Self> {
        let mut pairs = Self::default();
        for pair in 0..count {
            if pair % 2 == 0 {
                pairs.ours.push(ours()?);
                pairs.baseline.push(baseline()?);
            } else {
                pairs.baseline.push(baseline()?);
                pairs.ours.push(ours()?);
            }
        }
        Ok(pairs)
    }

    /// One figure of every pair: (ours, the baseline's).
    pub fn figures(&self, figure: impl Fn(&Sample) -> f64) -> Vec<(f64, f64)> {
        self.ours
            .iter()
            .zip(&self.baseline)
            .map(|(ours, baseline)| (figure(ours), figure(baseline)))
            .collect()
    }
}

/// The middle value, or the mean of the two middle ones; 0 of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[count / 2],
        count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn medians_are_of_sorted_values() {
        for (values, wanted) in [(&[][..], 0.0), (&[3.0], 3.0), (&[5.0, 1.0, 3.0], 3.0), (&[4.0, 1.0], 2.5)] {
            assert_eq!(median(values), wanted, "{values:?}");
        }
    }

    #[test]
    fn pairs_take_turns() {
        let order = RefCell::new(String::new());
        let run = |name: char, amount: f64| {
            order.borrow_mut().push(name);
            Ok(Sample { amount, ..Default::default() })
        };
        let pairs = Pairs::run(3, || run('a', 2.0), || run('b', 4.0)).unwrap();
        assert_eq!(order.into_inner(), "abbaab");
        assert_eq!(pairs.figures(|sample| sample.amount), [(2.0, 4.0); 3]);
    }

    #[test]
    fn a_run_is_measured_with_its_daemon() {
        let sample = measure(Some(std::process::id()), || {
            std::fs::read("/proc/self/stat")?;
            Ok(7.0)
        });
        let sample = sample.unwrap();
        assert_eq!(sample.amount, 7.0);
        assert!(sample.requests >= 1.0 && sample.seconds > 0.0, "{sample:?}");
    }
}
