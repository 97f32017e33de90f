//! Writing through a mount, made durable, against the store's own client.

mod clone;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::common::{GIB, LINK, cpu_a_gib, mib_a_second, over_link};
use crate::context::{Context, PART, names, noise};
use crate::mounted::{Mounted, Mounting};
use crate::raw::ObjectStoreClient;
use crate::report::{Aim, Row};
use crate::sample::{Pairs, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "write";
/// Small files of one run.
const SMALL_FILES: usize = 10_000;
pub(super) const SMALL_BYTES: usize = 4096;
/// How late a far store answers, and how many small files go there.
const FAR: Duration = Duration::from_millis(20);
const FAR_FILES: usize = 2000;
/// Writers of small files, and puts in flight of the baseline.
pub(super) const SMALL_IN_FLIGHT: usize = 8;
/// Random writes into a large file, each of so many bytes, and how many lie between two fsyncs.
const RANDOM_WRITES: u64 = 10_000;
const RANDOM_BYTES: usize = 4096;
const RANDOM_SYNC: u64 = 1000;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(PaceSettings::default())?;
    let client = ObjectStoreClient::new(&store)?;
    let how = Mounting { name: "written", prefix: "written", options: &[], footprint: None };
    let mounted = Mounted::new(context, &store, how)?;
    let mut rows = large(context, &client, &mounted, context.settings.large)?;
    rows.extend(small(context, &client, &mounted, SMALL_FILES, "")?);
    rows.push(random(context, &store, &mounted)?);
    mounted.unmount()?;
    rows.extend(far(context)?);
    rows.extend(linked(context)?);
    rows.extend(clone::run(context)?);
    Ok(rows)
}

/// Small files once more, into a store that answers as late as a real one: what then counts is how often a close waits
/// for it, not what a request costs.
fn far(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(PaceSettings { delay: FAR, ..PaceSettings::default() })?;
    let client = ObjectStoreClient::new(&store)?;
    let how = Mounting { name: "written-far", prefix: "written-far", options: &[], footprint: None };
    let mounted = Mounted::new(context, &store, how)?;
    let rows = small(context, &client, &mounted, FAR_FILES, &format!(", {} ms away", FAR.as_millis()))?;
    mounted.unmount()?;
    Ok(rows)
}

/// The large file once more, over a link that is slower than the processor; and one of four times the size, to tell what a
/// file costs from what a byte costs.
fn linked(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(LINK)?;
    let client = ObjectStoreClient::new(&store)?;
    let how = Mounting { name: "written-linked", prefix: "written-linked", options: &[], footprint: None };
    let mounted = Mounted::new(context, &store, how)?;
    let size = context.settings.large;
    let mut rows = large(context, &client, &mounted, size)?;
    rows.extend(large(context, &client, &mounted, size * 4)?);
    mounted.unmount()?;
    Ok(over_link(rows))
}

/// One large file, front to back, then fsync.
fn large(context: &Context, client: &ObjectStoreClient, mounted: &Mounted, size: u64) -> Result<Vec<Row>> {
    let parts = size.div_ceil(PART) as usize;
    let (data, path, total) = (noise(PART as usize), mounted.path().join("large"), parts as u64 * PART);
    let ours = || {
        let sample = measure(Some(mounted.pid()), || write_large(&path, &data, parts));
        std::fs::remove_file(&path)?;
        sample
    };
    let bare = || {
        let put = client.put_multipart("bare/large", data.clone(), parts);
        let sample = measure(None, || context.wait(put).map(|()| total as f64));
        context.wait(client.delete_below("bare"))?;
        sample
    };
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    let title = format!("sequential write of {:.1} GiB and fsync", total as f64 / GIB);
    let (rate, cpu) = (pairs.figures(mib_a_second), pairs.figures(cpu_a_gib));
    Ok(vec![
        Row::of_pairs(NAME, &title, "MiB/s", &rate, "multipart PUT").aim(Aim::RatioAtLeast(0.95)),
        Row::of_pairs(NAME, &title, "CPU s/GiB, client + daemon", &cpu, "multipart PUT"),
    ])
}

/// Many small files, by several writers at once, then one fsync for all their names.
fn small(
    context: &Context,
    client: &ObjectStoreClient,
    mounted: &Mounted,
    files: usize,
    place: &str,
) -> Result<Vec<Row>> {
    let data = noise(SMALL_BYTES);
    let mut round = 0;
    let ours = || {
        round += 1;
        let folder = mounted.path().join(format!("small-{round}"));
        let sample = measure(Some(mounted.pid()), || {
            write_small(&folder, files, &data)?;
            Ok(files as f64)
        });
        std::fs::remove_dir_all(&folder)?;
        sample
    };
    let keys: Vec<String> = names(files).map(|name| format!("bare/{name}")).collect();
    let bare = || {
        let put = client.put_many(&keys, data.clone(), SMALL_IN_FLIGHT);
        measure(None, || context.wait(put).map(|()| files as f64))
    };
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    let baseline = format!("PUTs, {SMALL_IN_FLIGHT} in flight");
    let kib = SMALL_BYTES >> 10;
    let title = format!("{files} files of {kib} KiB by {SMALL_IN_FLIGHT} writers and one fsync{place}");
    let asked: Vec<f64> = pairs.ours.iter().map(|sample| sample.requests / sample.amount).collect();
    let rate = pairs.figures(|sample| sample.amount / sample.seconds);
    let cpu = pairs.figures(|sample| (sample.client_cpu + sample.daemon_cpu) / sample.amount * 1e6);
    Ok(vec![
        Row::of_pairs(NAME, &title, "files/s", &rate, &baseline).aim(Aim::RatioAtLeast(0.8)),
        Row::of_pairs(NAME, &title, "CPU us a file, client + daemon", &cpu, &baseline),
        Row::of_values(NAME, &title, "reads of the daemon a file, FUSE and sockets", &asked),
    ])
}

/// Random writes into a file that is there, made durable now and then; it stays open, so that nothing is sealed yet.
fn random(context: &Context, store: &StoreProcess, mounted: &Mounted) -> Result<Row> {
    let blocks = context.settings.large / RANDOM_BYTES as u64;
    let path = mounted.path().join("random");
    let file = File::create(&path)?;
    file.set_len(blocks * RANDOM_BYTES as u64)?;
    file.sync_all()?;
    let (data, before) = (noise(RANDOM_BYTES), store.counts()?);
    let mut at = 1_u64;
    for number in 1..=RANDOM_WRITES {
        // Knuth's multiplier for 64 bits; the upper bits are random enough for places.
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        file.write_all_at(&data, (at >> 33) % blocks * RANDOM_BYTES as u64)?;
        if number % RANDOM_SYNC == 0 {
            file.sync_all()?;
        }
    }
    let sent = (store.counts()? - before).bytes_in as f64;
    drop(file);
    std::fs::remove_file(&path)?;
    let title = format!("{RANDOM_WRITES} random writes of 4 KiB, fsync every {RANDOM_SYNC}");
    let ratio = sent / (RANDOM_WRITES * RANDOM_BYTES as u64) as f64;
    Ok(Row::of_values(NAME, &title, "bytes uploaded per byte written", &[ratio]).aim(Aim::AtMost(1.25)))
}

/// Writes a file of so many parts front to back, all alike, and makes it durable; returns its bytes.
pub(super) fn write_large(path: &Path, part: &[u8], parts: usize) -> Result<f64> {
    let mut file = File::create(path)?;
    for _ in 0..parts {
        part.chunks(1 << 20).try_for_each(|piece| file.write_all(piece))?;
    }
    file.sync_all()?;
    Ok((parts * part.len()) as f64)
}

pub(super) fn write_small(folder: &Path, files: usize, data: &[u8]) -> Result<()> {
    let paths: Vec<PathBuf> = names(files).map(|name| folder.join(name)).collect();
    for parent in paths.iter().filter_map(|path| path.parent()).collect::<BTreeSet<_>>() {
        std::fs::create_dir_all(parent)?;
    }
    let next = AtomicUsize::new(0);
    let writer = || -> Result<()> {
        while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
            File::create(path)?.write_all(data).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..SMALL_IN_FLIGHT).map(|_| scope.spawn(writer)).collect();
        writers.into_iter().try_for_each(|writer| match writer.join() {
            Ok(result) => result,
            Err(_) => Err(anyhow::anyhow!("a writer panicked")),
        })
    })?;
    // A directory's fsync makes all names durable; syncfs is not passed on by the kernel.
    Ok(File::open(folder)?.sync_all()?)
}
