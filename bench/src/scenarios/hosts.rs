//! What several hosts hold alike is restored by all of them: beside one that is sent it over its link, and beside hosts that each
//! read it for themselves. Two hold copies of what the other one saves. Driven from bench/hosts.py, which makes them.

use std::collections::HashMap;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::common::{GIB, LINK, MIB};
use crate::context::Context;
use crate::helper::{Helper, Values, of};
use crate::report::{Aim, Row};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "hosts";
/// Of the state that the checkpoint scenario saves: each host has as much again.
const SHARE: u64 = 8;
/// Of that again, over links that are slow enough for all of these hosts to share two cores.
const LIMITED_SHARE: u64 = 4;
const LIMITED: &str = "200mbit";
/// What a store sends to hosts that share two cores: their link to it is the limit, as it is where they have cores of their own.
const SHARED: PaceSettings = PaceSettings { rate: Some(250_000_000), ..LINK };
const MANY: usize = 16;
const SOME: usize = 4;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut rows = over_links(context)?;
    rows.extend(out_of_a_store(context)?);
    Ok(rows)
}

/// Links are the limit: the store is a folder in memory, that all hosts have.
fn over_links(context: &Context) -> Result<Vec<Row>> {
    let url = format!("file://{}", context.place("hosts")?.display());
    let bytes = context.settings.state / SHARE / LIMITED_SHARE;
    let mut hosts = Hosts::start(context, bytes, MANY, Some(LIMITED))?;
    hosts.ask(json!({"act": "save", "url": url}))?;
    let folder = context.place("hosts-file")?;
    let (mut by_two, mut by_many, mut read) = (Vec::new(), Vec::new(), Vec::new());
    let (mut of_mounts, mut left, mut copied) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..context.settings.pairs {
        let sent = of(&hosts.ask(json!({"act": "send"}))?, "send_s")? * 1e3;
        copied.push((of(&hosts.ask(json!({"act": "copy"}))?, "copy_s")? * 1e3, sent));
        for (count, pairs) in [(2, &mut by_two), (MANY, &mut by_many)] {
            let told = hosts.ask(json!({"act": "restore", "url": url, "hosts": count, "together": true}))?;
            pairs.push((of(&told, "restore_s")? * 1e3, sent));
            read.push((of(&told, "read_bytes")? / MIB, bytes as f64 / MIB));
        }
        let mount =
            json!({"act": "mount", "forebay": context.settings.forebay, "folder": folder, "hosts": MANY});
        let told = hosts.ask(mount)?;
        of_mounts.push((of(&told, "read_s")? * 1e3, sent));
        left.push((of(&told, "read_bytes")? / MIB, bytes as f64 / MIB));
    }
    let what = format!("{} MiB that all hold, links of 200 Mbit/s", bytes >> 20);
    let row = |count: usize, pairs: &[(f64, f64)]| {
        let name = format!("restore on {count} hosts of {what}");
        Row::of_pairs(NAME, &name, "ms", pairs, "the state, over one link").aim(Aim::RatioAtMost(1.3))
    };
    Ok(vec![
        row(2, &by_two),
        row(MANY, &by_many),
        Row::of_pairs(
            NAME,
            &format!("copies of {} MiB each in two hosts' memory, the same links", bytes >> 20),
            "ms",
            &copied,
            "as much, over one link",
        )
        .aim(Aim::RatioAtMost(1.1)),
        Row::of_pairs(NAME, &format!("bytes read by all hosts of {what}"), "MiB", &read, "of the state")
            .aim(Aim::RatioAtMost(1.02)),
        Row::of_pairs(
            NAME,
            &format!(
                "a file of {} MiB that mounts of {MANY} hosts read at once, the same links",
                bytes >> 20
            ),
            "ms",
            &of_mounts,
            "the file, over one link",
        )
        .aim(Aim::RatioAtMost(1.3)),
        Row::of_pairs(
            NAME,
            &format!("bytes that left the store for {MANY} mounts"),
            "MiB",
            &left,
            "of the file",
        )
        .aim(Aim::RatioAtMost(1.01)),
    ])
}

/// The store is the limit, and what it sends is counted there.
fn out_of_a_store(context: &Context) -> Result<Vec<Row>> {
    let bytes = context.settings.state / SHARE;
    let mut hosts = Hosts::start(context, bytes, SOME, None)?;
    let store = StoreProcess::start_for(SHARED, &hosts.1)?;
    let environment: HashMap<String, String> = store.environment().into_iter().collect();
    let url = format!("s3://{}/hosts", StoreProcess::BUCKET);
    hosts.ask(json!({"act": "save", "url": url, "environment": environment}))?;
    let (mut took, mut read) = (Vec::new(), Vec::new());
    for _ in 0..context.settings.pairs {
        let mut restore = |together: bool| {
            let before = store.counts()?;
            let told =
                hosts.ask(json!({"act": "restore", "url": url, "hosts": SOME, "together": together}))?;
            let sent = (store.counts()? - before).bytes_out;
            Ok::<_, anyhow::Error>((of(&told, "restore_s")? * 1e3, sent as f64 / MIB))
        };
        let (ours, alone) = (restore(true)?, restore(false)?);
        took.push((ours.0, alone.0));
        read.push((ours.1, bytes as f64 / MIB));
    }
    let gib = bytes as f64 / GIB;
    let what = format!("{gib:.2} GiB that all hold, of a store that sends 2 Gbit/s, 20 ms away");
    let restored = format!("restore on {SOME} hosts of {what}");
    Ok(vec![
        Row::of_pairs(NAME, &restored, "ms", &took, "each for itself"),
        Row::of_pairs(
            NAME,
            &format!("bytes that left it for {SOME} hosts, {what}"),
            "MiB",
            &read,
            "of the state",
        )
        .aim(Aim::RatioAtMost(1.02)),
    ])
}

/// The Python program, and the address that all hosts reach.
struct Hosts(Helper, String);

impl Hosts {
    fn start(context: &Context, bytes: u64, count: usize, rate: Option<&str>) -> Result<Self> {
        let mut command = Command::new(&context.settings.python);
        command.arg("bench/hosts.py").arg((bytes >> 20).to_string()).arg(count.to_string()).args(rate);
        let mut helper = Helper::start(command)?;
        let told: HashMap<String, String> = helper.hear("make hosts, as root")?;
        let address = told.get("address").cloned().context("the Python program told no address")?;
        Ok(Self(helper, address))
    }

    fn ask(&mut self, what: Value) -> Result<Values> {
        self.0.ask(&what.to_string())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // It puts away the hosts that it made.
        let _ = self.0.end();
    }
}
