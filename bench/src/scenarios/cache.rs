//! The first epoch after a restart, from the blocks that an earlier mount left on the local disk, against ext4 with
//! nothing in memory.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};

use super::common::mib_a_second;
use crate::context::{Context, names, shuffled};
use crate::epoch::read_all;
use crate::machine;
use crate::mounted::{Mounted, Mounting};
use crate::raw::ObjectStoreClient;
use crate::report::{Aim, Row};
use crate::sample::{Pairs, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "cache";
const FILE_BYTES: usize = 100 << 10;
/// A fourth of the files of the read scenario: each pair reads all of them from the disk twice.
const SHARE: usize = 4;
const READERS: usize = 16;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    if !machine::drop_caches() {
        bail!("the kernel's caches cannot be dropped: run as root");
    }
    let count = (context.settings.files / SHARE).max(1);
    let store = StoreProcess::start(PaceSettings::default())?;
    let client = ObjectStoreClient::new(&store)?;
    let folder = context.place("set")?;
    context.put_files(&client, "set", count, FILE_BYTES)?;
    context.write_files(&folder, count, FILE_BYTES)?;
    let names = shuffled(names(count).map(PathBuf::from).collect());
    let theirs: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
    let mut gets = Vec::new();
    let total = (count * FILE_BYTES) as f64;
    let cache = context.place("cache")?;
    let options = ["--dataset", "--cache-dir", cache.to_str().context("a scratch folder has a plain name")?];
    let mut epoch = |counted: bool| {
        let how = Mounting { name: "cached", prefix: "set", options: &options, footprint: None };
        let mounted = Mounted::new(context, &store, how)?;
        let paths: Vec<PathBuf> = names.iter().map(|name| mounted.path().join(name)).collect();
        machine::drop_caches();
        let before = store.counts()?;
        let sample = measure(Some(mounted.pid()), || read_all(&paths, READERS))?;
        ensure!(sample.amount == total, "{} bytes were read", sample.amount);
        if counted {
            gets.push((store.counts()? - before).gets as f64);
        }
        mounted.unmount()?;
        Ok(sample)
    };
    epoch(false)?;
    let cold = || {
        machine::drop_caches();
        measure(None, || read_all(&theirs, READERS))
    };
    let pairs = Pairs::run(context.settings.pairs, || epoch(true), cold)?;
    let title = format!("first epoch after a restart, {count} files of {} KiB", FILE_BYTES >> 10);
    let rate = pairs.figures(mib_a_second);
    let cpu = pairs.figures(|sample| (sample.client_cpu + sample.daemon_cpu) / count as f64 * 1e6);
    Ok(vec![
        Row::of_pairs(NAME, &title, "MiB/s", &rate, "ext4, cold").aim(Aim::RatioAtLeast(0.95)),
        Row::of_pairs(NAME, &title, "CPU us a file, client + daemon", &cpu, "ext4, cold"),
        Row::of_values(NAME, &title, "GETs", &gets).aim(Aim::AtMost(0.0)),
    ])
}
