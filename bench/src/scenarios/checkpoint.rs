//! Saving and restoring a torch state through the Python package, driven from bench/checkpoint.py.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::common::GIB;
use crate::context::{Context, IN_FLIGHT, PART, noise};
use crate::raw::ObjectStoreClient;
use crate::report::{Aim, Row};
use crate::sample::{Sample, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "checkpoint";

/// One exchange with the trainer, and the store's own client moving the same bytes after it.
struct Round {
    told: HashMap<String, f64>,
    raw: Sample,
}

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(PaceSettings::default())?;
    let client = ObjectStoreClient::new(&store)?;
    let mut trainer = Trainer::start(context, &store)?;
    let parts = (context.settings.large / 2).div_ceil(PART) as usize;
    let part = noise(PART as usize);
    let put = || {
        let put = client.put_multipart("bare/file", part.clone(), parts, IN_FLIGHT);
        measure(None, || context.wait(put).map(|()| (parts as u64 * PART) as f64))
    };
    let get = || {
        let get = client.get_ranges("bare/file", parts as u64 * PART, PART, IN_FLIGHT);
        measure(None, || Ok(context.wait(get)? as f64))
    };
    let first = Round { told: trainer.ask("save")?, raw: put()? };
    let mut saves = Vec::new();
    let mut restores = Vec::new();
    for _ in 0..context.settings.pairs {
        saves.push(Round { told: trainer.ask("save")?, raw: put()? });
    }
    for _ in 0..context.settings.pairs {
        restores.push(Round { told: trainer.ask("restore")?, raw: get()? });
    }
    trainer.ask("end")?;
    rows(&first, &saves, &restores)
}

fn rows(first: &Round, saves: &[Round], restores: &[Round]) -> Result<Vec<Row>> {
    let gib = first.of("bytes")? / GIB;
    let blocking = pairs(saves, |round| Ok((round.ms("blocking_s")?, round.ms("memcpy_s")?)))?;
    let at_first = [(first.ms("blocking_s")?, first.ms("memcpy_s")?)];
    let durable = pairs(saves, |round| Ok((round.ms("durable_s")?, round.raw_ms()?)))?;
    let restored = pairs(restores, |round| Ok((round.ms("restore_s")?, round.raw_ms()?)))?;
    let in_place = pairs(restores, |round| Ok((round.ms("restore_s")?, round.ms("memcpy_s")?)))?;
    let row = |what: &str, pairs: &[(f64, f64)], baseline: &str| {
        Row::of_pairs(NAME, &format!("{what}, {gib:.2} GiB"), "ms", pairs, baseline)
    };
    Ok(vec![
        row("blocking time of the first save", &at_first, "warm memcpy").aim(Aim::RatioAtMost(1.05)),
        row("blocking time of a save", &blocking, "warm memcpy").aim(Aim::RatioAtMost(1.05)),
        row("save until durable", &durable, "multipart PUT").aim(Aim::RatioAtMost(1.1)),
        row("restore from the store, in place", &restored, "ranged GETs"),
        row("restore from the store, in place", &in_place, "warm memcpy"),
    ])
}

fn pairs(rounds: &[Round], figure: impl Fn(&Round) -> Result<(f64, f64)>) -> Result<Vec<(f64, f64)>> {
    rounds.iter().map(figure).collect()
}

impl Round {
    fn of(&self, name: &str) -> Result<f64> {
        self.told.get(name).copied().with_context(|| format!("the trainer told no {name}"))
    }

    fn ms(&self, name: &str) -> Result<f64> {
        Ok(self.of(name)? * 1e3)
    }

    /// The raw client's time for as many bytes as the state has.
    fn raw_ms(&self) -> Result<f64> {
        Ok(self.raw.seconds * 1e3 * self.of("bytes")? / self.raw.amount)
    }
}

/// The Python process; killed on drop.
struct Trainer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Trainer {
    fn start(context: &Context, store: &StoreProcess) -> Result<Self> {
        let mib = (context.settings.large / 2) >> 20;
        let url = format!("s3://{}/checkpoints", StoreProcess::BUCKET);
        let mut command = Command::new(&context.settings.python);
        command.arg("bench/checkpoint.py").arg(url).arg(mib.to_string()).envs(store.environment());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {command:?}"))?;
        let stdin = child.stdin.take().context("the trainer's input")?;
        let stdout = child.stdout.take().context("the trainer's output")?;
        Ok(Self { child, stdin, stdout: BufReader::new(stdout) })
    }

    fn ask(&mut self, what: &str) -> Result<HashMap<String, f64>> {
        writeln!(self.stdin, "{what}")?;
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            bail!(
                "the trainer ended while it was asked to {what}: see above; does python have torch and forebay?"
            );
        }
        serde_json::from_str(&line).with_context(|| format!("the trainer told `{line}`"))
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
