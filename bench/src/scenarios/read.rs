//! Reading a data set through a dataset mount: warm against ext4, cold against the store's own clients.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::common::{GIB, LINK, cpu_a_gib, mib_a_second, over_link};
use crate::context::{Context, PART, names, shuffled};
use crate::epoch::{read_all, read_one};
use crate::mounted::{Mounted, Mounting};
use crate::raw::ObjectStoreClient;
use crate::report::{Aim, Row};
use crate::sample::{Pairs, Sample, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "read";
/// Readers of a warm epoch: as many as the machine that FACTS were measured on has cores.
const WARM_READERS: usize = 2;
/// Readers of a cold epoch, and requests in flight of its baseline.
const COLD_READERS: usize = 16;
/// A cold epoch reads a fourth of the files: each pair starts with an empty mount.
const COLD_SHARE: usize = 4;
/// How late a far store answers, and how large a data set is there.
const FAR: Duration = Duration::from_millis(20);
const FAR_FILES: usize = 4000;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(PaceSettings::default())?;
    let client = ObjectStoreClient::new(&store)?;
    let mut rows = Vec::new();
    for (size, aim) in [(4 << 10, 1.15), (100 << 10, 1.05)] {
        let set = Set::new(context, &client, size)?;
        rows.extend(warm(context, &store, &set, aim)?);
        rows.extend(first(context, &store, &client, &set)?);
        std::fs::remove_dir_all(&set.folder)?;
        context.wait(client.delete_below(&set.prefix))?;
    }
    rows.extend(sequential(context, &store, &client)?);
    rows.extend(far(context)?);
    let store = StoreProcess::start(LINK)?;
    let client = ObjectStoreClient::new(&store)?;
    rows.extend(over_link(sequential(context, &store, &client)?));
    Ok(rows)
}

/// The first epoch once more, from a store that answers as late as a real one: what then counts is how many requests
/// are in flight, not what one costs.
fn far(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(PaceSettings { delay: FAR, ..PaceSettings::default() })?;
    let client = ObjectStoreClient::new(&store)?;
    let few = context.with_files(FAR_FILES)?;
    let set = Set::new(&few, &client, 100 << 10)?;
    let mut rows = first(&few, &store, &client, &set)?;
    // As `cp -a` and `tar` read: what the next files are can be told.
    let ordered = Set { names: names(few.settings.files).map(PathBuf::from).collect(), ..set };
    let mut walk = epoch_of(&few, &store, &client, &ordered, 1)?;
    for row in &mut walk {
        row.name = format!("{}, in order by one reader", row.name);
    }
    rows.extend(walk);
    for row in &mut rows {
        row.name = format!("{}, {} ms away", row.name, FAR.as_millis());
    }
    Ok(rows)
}

/// A data set, in the store and on the local disk.
struct Set {
    size: usize,
    prefix: String,
    folder: PathBuf,
    names: Vec<PathBuf>,
}

impl Set {
    fn new(context: &Context, client: &ObjectStoreClient, size: usize) -> Result<Self> {
        let (count, prefix) = (context.settings.files, format!("set{size}"));
        let folder = context.place(&prefix)?;
        context.put_files(client, &prefix, count, size)?;
        context.write_files(&folder, count, size)?;
        Ok(Self { size, prefix, folder, names: shuffled(names(count).map(PathBuf::from).collect()) })
    }

    fn below(&self, root: &Path, count: usize) -> Vec<PathBuf> {
        self.names.iter().take(count).map(|name| root.join(name)).collect()
    }

    fn title(&self, what: &str) -> String {
        format!("{what}, {} files of {} KiB", self.names.len(), self.size >> 10)
    }

    /// One epoch over the files below `root`, all bytes counted.
    fn epoch(&self, paths: &[PathBuf], readers: usize, daemon: Option<u32>) -> Result<Sample> {
        let sample = measure(daemon, || read_all(paths, readers))?;
        ensure!(sample.amount == (paths.len() * self.size) as f64, "{} bytes were read", sample.amount);
        Ok(sample)
    }
}

/// The second epoch, the kernel's page cache warm on both sides.
fn warm(context: &Context, store: &StoreProcess, set: &Set, aim: f64) -> Result<Vec<Row>> {
    let how = Mounting { name: "warm", prefix: &set.prefix, options: &["--dataset"], footprint: None };
    let mounted = Mounted::new(context, store, how)?;
    let (ours, theirs) =
        (set.below(mounted.path(), set.names.len()), set.below(&set.folder, set.names.len()));
    set.epoch(&ours, WARM_READERS, None)?;
    set.epoch(&theirs, WARM_READERS, None)?;
    let before = store.counts()?;
    let pairs = Pairs::run(
        context.settings.pairs,
        || set.epoch(&ours, WARM_READERS, Some(mounted.pid())),
        || set.epoch(&theirs, WARM_READERS, None),
    )?;
    let gets = (store.counts()? - before).gets;
    mounted.unmount()?;
    let count = set.names.len() as f64;
    let client = pairs.figures(|sample| sample.client_cpu / count * 1e6);
    let of_ours = |figure: fn(&Sample) -> f64| -> Vec<f64> {
        pairs.ours.iter().map(|sample| figure(sample) / count).collect()
    };
    let title = set.title("warm epoch");
    let requests = of_ours(|sample| sample.requests);
    let daemon = of_ours(|sample| sample.daemon_cpu * 1e6);
    Ok(vec![
        Row::of_pairs(NAME, &title, "client CPU us a file", &client, "ext4").aim(Aim::RatioAtMost(aim)),
        Row::of_values(NAME, &title, "daemon CPU us a file", &daemon),
        Row::of_values(NAME, &title, "FUSE requests a file", &requests).aim(Aim::AtMost(0.0)),
        Row::of_values(NAME, &title, "GETs in all epochs", &[gets as f64]).aim(Aim::AtMost(0.0)),
    ])
}

/// The first epoch of a mount that knows and holds nothing, straight from the store.
fn first(context: &Context, store: &StoreProcess, client: &ObjectStoreClient, set: &Set) -> Result<Vec<Row>> {
    epoch_of(context, store, client, set, COLD_READERS)
}

/// Beside the same objects fetched with [`COLD_READERS`] requests in flight.
fn epoch_of(
    context: &Context,
    store: &StoreProcess,
    client: &ObjectStoreClient,
    set: &Set,
    readers: usize,
) -> Result<Vec<Row>> {
    let count = (set.names.len() / COLD_SHARE).max(1);
    let keys: Vec<String> =
        set.names.iter().take(count).map(|name| format!("{}/{}", set.prefix, name.display())).collect();
    let mut round = 0;
    let ours = || {
        round += 1;
        let name = format!("first-{}-{readers}-{round}", set.size);
        let how = Mounting { name: &name, prefix: &set.prefix, options: &["--dataset"], footprint: None };
        let mounted = Mounted::new(context, store, how)?;
        let paths = set.below(mounted.path(), count);
        let sample = set.epoch(&paths, readers, Some(mounted.pid()))?;
        mounted.unmount()?;
        Ok(sample)
    };
    let bare = || measure(None, || Ok(context.wait(client.get_many(&keys, COLD_READERS))? as f64));
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    let title = format!("first epoch from the store, {count} files of {} KiB", set.size >> 10);
    let each = pairs.figures(|sample| count as f64 / sample.seconds);
    let cpu = pairs.figures(|sample| (sample.client_cpu + sample.daemon_cpu) / count as f64 * 1e6);
    Ok(vec![
        Row::of_pairs(NAME, &title, "files/s", &each, "object_store").aim(Aim::RatioAtLeast(0.95)),
        Row::of_pairs(NAME, &title, "CPU us a file, client + daemon", &cpu, "object_store"),
    ])
}

/// A large file front to back, from the store.
fn sequential(context: &Context, store: &StoreProcess, client: &ObjectStoreClient) -> Result<Vec<Row>> {
    let size = context.settings.large;
    context.put_large(client, "large/file", size)?;
    let mut round = 0;
    let ours = || {
        round += 1;
        let name = format!("large-{round}");
        let how = Mounting { name: &name, prefix: "large", options: &["--dataset"], footprint: None };
        let mounted = Mounted::new(context, store, how)?;
        let path = mounted.path().join("file");
        let sample = measure(Some(mounted.pid()), || read_one(&path))?;
        mounted.unmount()?;
        std::fs::remove_dir_all(context.place(&format!("{name}.home"))?)?;
        Ok(sample)
    };
    let bare = || {
        let get = client.get_ranges("large/file", size, PART);
        measure(None, || Ok(context.wait(get)? as f64))
    };
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    let title = format!("sequential read of {:.1} GiB from the store", size as f64 / GIB);
    let daemon: Vec<f64> =
        pairs.ours.iter().map(|sample| sample.daemon_cpu / (sample.amount / GIB)).collect();
    let rate = pairs.figures(mib_a_second);
    Ok(vec![
        Row::of_pairs(NAME, &title, "MiB/s", &rate, "object_store").aim(Aim::RatioAtLeast(0.95)),
        Row::of_pairs(NAME, &title, "CPU s/GiB, client + daemon", &pairs.figures(cpu_a_gib), "object_store"),
        Row::of_values(NAME, &title, "daemon CPU s/GiB", &daemon).aim(Aim::AtMost(0.7)),
    ])
}
