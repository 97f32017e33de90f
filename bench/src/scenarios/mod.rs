//! One file a scenario; each returns its rows.

mod common;
mod object;
mod read;
mod cache;
mod wire;
mod write;
mod juicefs;
mod memory;
mod checkpoint;
mod ranks;
mod hosts;
mod peers;
mod joined;
mod metadata;

use anyhow::Result;

use crate::context::Context;
use crate::machine;
use crate::report::Row;

/// A scenario by name.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// As in `ONLY=name`.
    pub name: &'static str,
    run: fn(&Context) -> Result<Vec<Row>>,
}

/// Every scenario, in the order they run.
pub const SCENARIOS: &[Scenario] = &[
    Scenario { name: "object", run: object::run },
    Scenario { name: "read", run: read::run },
    Scenario { name: "write", run: write::run },
    Scenario { name: "cache", run: cache::run },
    Scenario { name: "checkpoint", run: checkpoint::run },
    Scenario { name: "ranks", run: ranks::run },
    Scenario { name: "hosts", run: hosts::run },
    Scenario { name: "peers", run: peers::run },
    Scenario { name: "joined", run: joined::run },
    Scenario { name: "metadata", run: metadata::run },
    Scenario { name: "juicefs", run: juicefs::run },
    Scenario { name: "memory", run: memory::run },
];

impl Scenario {
    /// Runs it, and adds how busy others kept the machine meanwhile.
    pub fn run(&self, context: &Context) -> Result<Vec<Row>> {
        let (load, start) = (machine::load()?, std::time::Instant::now());
        let others = || -> Result<f64> { Ok(machine::busy()? - machine::cpu_with_children()?) };
        let before = others()?;
        let mut rows = (self.run)(context)?;
        let share = (others()? - before) / (start.elapsed().as_secs_f64() * machine::cores() as f64);
        rows.push(Row::of_values(self.name, "load average when it started", "tasks", &[load]));
        rows.push(Row::of_values(self.name, "CPU that others used", "%", &[share.max(0.0) * 100.0]));
        Ok(rows)
    }
}
