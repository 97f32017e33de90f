//! Saving and restoring a torch state through the Python package, driven from bench/checkpoint.py.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::common::{GIB, LINK, over_link};
use crate::context::{Context, PART, noise};
use crate::helper::{Helper, Values, of};
use crate::raw::ObjectStoreClient;
use crate::report::{Aim, Row};
use crate::sample::{Sample, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "checkpoint";
/// What the raw client sends again and again: more than caches hold.
const RAW_BYTES: usize = 32 * PART as usize;
/// Rounds until a store of this host has all the memory that it will use: it takes its first pages from clients on its cores.
const WARM_UP: usize = 3;
/// The first rows of `in_store`, in which no store has a part.
const BLOCKING_ROWS: usize = 2;

/// One exchange with the trainer, and the store's own client moving the same bytes after it.
struct Round {
    told: Values,
    raw: Sample,
}

/// One part of the scenario: its name, and what runs it.
type Part = (&'static str, fn(&Context) -> Result<Vec<Row>>);

const PARTS: [Part; 5] = [
    ("store", beside_store),
    ("link", over_a_link),
    ("disk", on_disk),
    ("near", near),
    ("training", beside_training),
];

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let chosen = &context.settings.parts;
    let mut rows = Vec::new();
    for (_, part) in
        PARTS.iter().filter(|(name, _)| chosen.is_empty() || chosen.iter().any(|one| one == name))
    {
        rows.extend(part(context)?);
    }
    Ok(rows)
}

fn beside_store(context: &Context) -> Result<Vec<Row>> {
    in_store(context, PaceSettings::default())
}

fn over_a_link(context: &Context) -> Result<Vec<Row>> {
    Ok(over_link(in_store(context, LINK)?.split_off(BLOCKING_ROWS)))
}

/// Against a store of which the limit is a client of its own.
fn in_store(context: &Context, pace: PaceSettings) -> Result<Vec<Row>> {
    let store = StoreProcess::start(pace)?;
    let client = ObjectStoreClient::new(&store)?;
    let url = format!("s3://{}/checkpoints", StoreProcess::BUCKET);
    let mut trainer = Trainer::start(context, &url, &store.environment())?;
    let parts = context.settings.state.div_ceil(PART) as usize;
    // A state is read from memory, not from the processor's caches.
    let data = noise(RAW_BYTES);
    let put = || {
        let put = client.put_multipart("bare/file", data.clone(), parts);
        measure(None, || context.wait(put).map(|()| (parts as u64 * PART) as f64))
    };
    let get = || {
        let get = client.get_ranges("bare/file", parts as u64 * PART, PART);
        measure(None, || Ok(context.wait(get)? as f64))
    };
    let first = Round { told: trainer.ask("save")?, raw: put()? };
    let mut saves = Vec::new();
    let mut restores = Vec::new();
    for _ in 0..WARM_UP {
        trainer.ask("save")?;
        put()?;
    }
    for _ in 0..context.settings.pairs {
        saves.push(Round { told: trainer.ask("save")?, raw: put()? });
    }
    for _ in 0..context.settings.pairs {
        restores.push(Round { told: trainer.ask("restore")?, raw: get()? });
    }
    trainer.ask("end")?;
    let gib = first.of("bytes")? / GIB;
    let row = |what: &str, pairs: &[(f64, f64)], baseline: &str| {
        Row::of_pairs(NAME, &format!("{what}, {gib:.2} GiB"), "ms", pairs, baseline)
    };
    let blocking = pairs(&saves, |round| Ok((round.ms("blocking_s")?, round.ms("memcpy_s")?)))?;
    let at_first = [(first.ms("blocking_s")?, first.ms("memcpy_s")?)];
    let durable = pairs(&saves, |round| Ok((round.ms("durable_s")?, round.raw_ms()?)))?;
    let restored = pairs(&restores, |round| Ok((round.ms("restore_s")?, round.raw_ms()?)))?;
    let read = restores.iter().map(|round| read_of(&round.told)).collect::<Result<Vec<_>>>()?;
    Ok(vec![
        row("blocking time of the first save", &at_first, "warm memcpy").aim(Aim::RatioAtMost(1.05)),
        row("blocking time of a save", &blocking, "warm memcpy").aim(Aim::RatioAtMost(1.05)),
        row("save to a store until durable", &durable, "multipart PUT").aim(Aim::RatioAtMost(1.1)),
        row("restore from a store, in place", &restored, "ranged GETs").aim(Aim::RatioAtMost(1.1)),
        row_of_reads("a restore from a store", gib, &read),
    ])
}

/// On the disk that the scratch folder is on, beside what else saves there.
fn on_disk(context: &Context) -> Result<Vec<Row>> {
    let place = context.place("checkpoints")?;
    let mut trainer = Trainer::start(context, &format!("file://{}", place.display()), &[])?;
    trainer.ask("save")?;
    let (mut saves, mut others) = (Vec::new(), Vec::new());
    for _ in 0..context.settings.pairs {
        saves.push((trainer.ask("save")?, trainer.ask("disk")?));
        others.push(trainer.ask("others")?);
    }
    let (mut restores, mut cached) = (Vec::new(), Vec::new());
    for _ in 0..context.settings.pairs {
        trainer.ask("forget")?;
        restores.push((trainer.ask("restore")?, trainer.ask("read")?));
        cached.push((trainer.ask("restore")?, trainer.ask("read")?));
    }
    trainer.ask("end")?;
    let told = |round: &Values, name: &str| of(round, name).map(|seconds| seconds * 1e3);
    let both = |rounds: &[(Values, Values)], ours: &str, theirs: &str| {
        let pair = |(one, other): &_| Ok((told(one, ours)?, told(other, theirs)?));
        rounds.iter().map(pair).collect::<Result<Vec<_>>>()
    };
    let gib = of(&saves[0].0, "bytes")? / GIB;
    let row = |what: &str, pairs: &[(f64, f64)], baseline: &str| {
        Row::of_pairs(NAME, &format!("{what}, {gib:.2} GiB"), "ms", pairs, baseline)
    };
    let durable = both(&saves, "durable_s", "write_s")?;
    let read = restores.iter().map(|(restore, _)| read_of(restore)).collect::<Result<Vec<_>>>()?;
    let restored = both(&restores, "restore_s", "read_s")?;
    let cached = both(&cached, "restore_s", "read_s")?;
    let mut rows = vec![
        row("save to a disk until durable", &durable, "write, fsync").aim(Aim::RatioAtMost(1.1)),
        row("restore from a disk, in place", &restored, "read into place").aim(Aim::RatioAtMost(1.1)),
        row_of_reads("a restore from a disk", gib, &read),
        row("restore from the page cache, in place", &cached, "read into place").aim(Aim::RatioAtMost(1.1)),
    ];
    for (what, name) in [
        ("torch.save, not synced", "torch_save_s"),
        ("safetensors, not synced", "safetensors_s"),
        ("DCP save, not synced", "dcp_save_s"),
        ("DCP async_save until it returns", "dcp_async_s"),
        ("DCP async_save, tuned, until it returns", "dcp_tuned_s"),
    ] {
        let pair = |(other, (save, _)): (&_, &(_, _))| Ok((told(other, name)?, told(save, "blocking_s")?));
        let pairs = others.iter().zip(&saves).map(pair).collect::<Result<Vec<_>>>()?;
        rows.push(row(what, &pairs, "our blocking time"));
    }
    Ok(rows)
}

/// What is nearer than the store: the host's disk, and memory, the trainer's own and what a killed one leaves to the next.
fn near(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(PaceSettings::default())?;
    let (url, local) = (format!("s3://{}/near", StoreProcess::BUCKET), context.place("local")?);
    let start = || Trainer::start_with(context, &url, &store.environment(), Some(&local));
    let mut trainer = start()?;
    trainer.ask("save")?;
    let (mut saves, mut restarts, mut returns) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..context.settings.pairs {
        let save = trainer.ask("save")?;
        let raw = trainer.ask("disk")?;
        saves.push((of(&save, "local_s")? * 1e3, of(&raw, "write_s")? * 1e3));
    }
    let state = of(&trainer.ask("disk")?, "bytes")?;
    let extra = of(&trainer.ask("memory")?, "extra_bytes")?;
    for _ in 0..context.settings.pairs {
        trainer.kill()?;
        trainer = start()?;
        let restart = trainer.ask("restart")?;
        restarts.push((of(&restart, "restart_s")? * 1e3, of(&restart, "memcpy_s")? * 1e3));
        trainer.ask("save")?;
        let back = trainer.ask("back")?;
        returns.push((of(&back, "back_s")? * 1e3, of(&back, "memcpy_s")? * 1e3));
    }
    trainer.ask("end")?;
    let (gib, mib) = (state / GIB, GIB / 1024.0);
    let row = |what: &str, pairs: &[(f64, f64)], baseline: &str| {
        Row::of_pairs(NAME, &format!("{what}, {gib:.2} GiB"), "ms", pairs, baseline)
            .aim(Aim::RatioAtMost(1.1))
    };
    let more = format!("memory of trainer and agent beyond state and arena, {gib:.2} GiB");
    Ok(vec![
        row("save until it is on the local disk", &saves, "write, fsync"),
        row("restart of a killed trainer, in place", &restarts, "warm memcpy"),
        row("back to the newest step in the process that saved it", &returns, "warm memcpy"),
        Row::of_values(NAME, &more, "MiB", &[extra / mib]).aim(Aim::AtMost(0.02 * state / mib + 64.0)),
    ])
}

/// Beside a loop that computes on all cores, with a store that leaves it these.
fn beside_training(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start_at(PaceSettings::default(), 19)?;
    let url = format!("s3://{}/beside", StoreProcess::BUCKET);
    let mut trainer = Trainer::start(context, &url, &store.environment())?;
    let bytes = of(&trainer.ask("save")?, "bytes")?;
    let mut rounds = Vec::new();
    for _ in 0..context.settings.pairs {
        rounds.push(trainer.ask("train")?);
    }
    trainer.ask("end")?;
    let told = |name: &str| rounds.iter().map(|round| of(round, name)).collect::<Result<Vec<_>>>();
    let loops: Vec<_> = told("saving_s")?.into_iter().zip(told("alone_s")?).collect();
    let gib = bytes / GIB;
    let slowed = format!("training loop on all cores, each save of {gib:.2} GiB after the one before");
    let agent = format!("the agent's processor time beside it, saves of {gib:.2} GiB");
    Ok(vec![
        Row::of_pairs(NAME, &slowed, "s", &loops, "without saves").aim(Aim::RatioAtMost(1.05)),
        Row::of_values(NAME, &agent, "s", &told("flush_cpu_s")?),
    ])
}

fn pairs(rounds: &[Round], figure: impl Fn(&Round) -> Result<(f64, f64)>) -> Result<Vec<(f64, f64)>> {
    rounds.iter().map(figure).collect()
}

/// MiB that a restore read, headers and all, and those of the state.
fn read_of(told: &Values) -> Result<(f64, f64)> {
    let mib = GIB / 1024.0;
    Ok((of(told, "read_bytes")? / mib, of(told, "bytes")? / mib))
}

fn row_of_reads(what: &str, gib: f64, read: &[(f64, f64)]) -> Row {
    let name = format!("bytes read by {what}, {gib:.2} GiB");
    Row::of_pairs(NAME, &name, "MiB", read, "bytes needed").aim(Aim::RatioAtMost(1.02))
}

impl Round {
    fn of(&self, name: &str) -> Result<f64> {
        of(&self.told, name)
    }

    fn ms(&self, name: &str) -> Result<f64> {
        Ok(self.of(name)? * 1e3)
    }

    /// The raw client's time for as many bytes as the state has.
    fn raw_ms(&self) -> Result<f64> {
        Ok(self.raw.seconds * 1e3 * self.of("bytes")? / self.raw.amount)
    }
}

/// The Python process.
struct Trainer(Helper);

impl Trainer {
    fn start(context: &Context, url: &str, environment: &[(String, String)]) -> Result<Self> {
        Self::start_with(context, url, environment, None)
    }

    /// As `start`, with copies in the directory `local`.
    fn start_with(
        context: &Context,
        url: &str,
        environment: &[(String, String)],
        local: Option<&Path>,
    ) -> Result<Self> {
        let mib = context.settings.state >> 20;
        let mut command = Command::new(&context.settings.python);
        command.arg("bench/checkpoint.py").arg(url).arg(mib.to_string()).arg(context.place("scratch")?);
        command.args(local);
        command.envs(environment.iter().cloned());
        Helper::start(command).map(Self)
    }

    fn kill(&mut self) -> Result<()> {
        self.0.kill()
    }

    fn ask(&mut self, what: &str) -> Result<Values> {
        self.0.ask(what)
    }
}
