//! The first epoch after a restart, from the blocks that an earlier mount left on the local disk, against ext4 with
//! nothing in memory.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use super::common::{GIB, cpu_a_gib, mib_a_second};
use crate::context::{Context, names, shuffled};
use crate::epoch::{read_all, read_one};
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
    let store = StoreProcess::start(PaceSettings::default())?;
    let client = ObjectStoreClient::new(&store)?;
    let mut rows = small(context, &store, &client)?;
    rows.extend(large(context, &store, &client)?);
    Ok(rows)
}

/// Files of one block each, in no order, by many readers.
fn small(context: &Context, store: &StoreProcess, client: &ObjectStoreClient) -> Result<Vec<Row>> {
    let count = (context.settings.files / SHARE).max(1);
    let folder = context.place("set")?;
    context.put_files(client, "set", count, FILE_BYTES)?;
    context.write_files(&folder, count, FILE_BYTES)?;
    let names = shuffled(names(count).map(PathBuf::from).collect());
    let paths = |root: &Path| names.iter().map(|name| root.join(name)).collect::<Vec<_>>();
    let read = |root: &Path| read_all(&paths(root), READERS);
    let total = (count * FILE_BYTES) as f64;
    let (pairs, gets) = after_restarts(context, store, "set", total, &folder, read)?;
    let title = format!("first epoch after a restart, {count} files of {} KiB", FILE_BYTES >> 10);
    let cpu = pairs.figures(|sample| (sample.client_cpu + sample.daemon_cpu) / count as f64 * 1e6);
    let cpu = Row::of_pairs(NAME, &title, "CPU us a file, client + daemon", &cpu, "ext4, cold");
    Ok(rows_of(&title, &pairs, cpu, &gets))
}

/// A large file front to back.
fn large(context: &Context, store: &StoreProcess, client: &ObjectStoreClient) -> Result<Vec<Row>> {
    let size = context.settings.large;
    context.put_large(client, "large/file", size)?;
    let folder = context.place("large")?;
    let size = context.write_large(&folder.join("file"), size)?;
    let read = |root: &Path| read_one(&root.join("file"));
    let (pairs, gets) = after_restarts(context, store, "large", size as f64, &folder, read)?;
    let title = format!("sequential read of {:.1} GiB after a restart", size as f64 / GIB);
    let cpu = pairs.figures(cpu_a_gib);
    let cpu = Row::of_pairs(NAME, &title, "CPU s/GiB, client + daemon", &cpu, "ext4, cold");
    Ok(rows_of(&title, &pairs, cpu, &gets))
}

/// Reads `total` bytes of mounts that find them in their cache directory, and of a folder that holds the same; and the GETs of each
/// mount.
fn after_restarts(
    context: &Context,
    store: &StoreProcess,
    prefix: &str,
    total: f64,
    folder: &Path,
    read: impl Fn(&Path) -> Result<f64>,
) -> Result<(Pairs, Vec<f64>)> {
    let mut gets = Vec::new();
    let cache = context.place(&format!("{prefix}.cache"))?;
    let options = ["--dataset", "--cache-dir", cache.to_str().context("a scratch folder has a plain name")?];
    let mut epoch = |counted: bool| {
        let how = Mounting { name: &format!("{prefix}-cached"), prefix, options: &options, footprint: None };
        let mounted = Mounted::new(context, store, how)?;
        machine::drop_caches();
        let before = store.counts()?;
        let sample = measure(Some(mounted.pid()), || read(mounted.path()))?;
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
        measure(None, || read(folder))
    };
    let pairs = Pairs::run(context.settings.pairs, || epoch(true), cold)?;
    Ok((pairs, gets))
}

fn rows_of(title: &str, pairs: &Pairs, cpu: Row, gets: &[f64]) -> Vec<Row> {
    let rate = pairs.figures(mib_a_second);
    vec![
        Row::of_pairs(NAME, title, "MiB/s", &rate, "ext4, cold").aim(Aim::RatioAtLeast(0.95)),
        cpu,
        Row::of_values(NAME, title, "GETs", gets).aim(Aim::AtMost(0.0)),
    ]
}
