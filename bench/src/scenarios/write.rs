//! Writing through a mount, made durable, against the store's own client.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result};

use super::common::{GIB, cpu_a_gib, mib_a_second};
use crate::context::{Context, IN_FLIGHT, PART, names, noise};
use crate::mounted::{Mounted, Mounting};
use crate::raw::ObjectStoreClient;
use crate::report::{Aim, Row};
use crate::sample::{Pairs, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "write";
/// Small files of one run.
const SMALL_FILES: usize = 2000;
const SMALL_BYTES: usize = 4096;
/// Writers of small files, and puts in flight of the baseline.
const SMALL_IN_FLIGHT: usize = 16;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(PaceSettings::default())?;
    let client = ObjectStoreClient::new(&store)?;
    let how = Mounting { name: "written", prefix: "written", options: &[], footprint: None };
    let mounted = Mounted::new(context, &store, how)?;
    let mut rows = large(context, &client, &mounted)?;
    rows.extend(small(context, &client, &mounted)?);
    mounted.unmount()?;
    Ok(rows)
}

/// One large file, front to back, then fsync.
fn large(context: &Context, client: &ObjectStoreClient, mounted: &Mounted) -> Result<Vec<Row>> {
    let parts = context.settings.large.div_ceil(PART) as usize;
    let (data, path, total) = (noise(PART as usize), mounted.path().join("large"), parts as u64 * PART);
    let ours = || {
        let sample = measure(Some(mounted.pid()), || {
            let mut file = File::create(&path)?;
            for _ in 0..parts {
                data.chunks(1 << 20).try_for_each(|piece| file.write_all(piece))?;
            }
            file.sync_all()?;
            Ok(total as f64)
        });
        std::fs::remove_file(&path)?;
        sample
    };
    let bare = || {
        let put = client.put_multipart("bare/large", data.clone(), parts, IN_FLIGHT);
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

/// Many small files, by several writers at once, then one syncfs for all.
fn small(context: &Context, client: &ObjectStoreClient, mounted: &Mounted) -> Result<Vec<Row>> {
    let data = noise(SMALL_BYTES);
    let mut round = 0;
    let ours = || {
        round += 1;
        let folder = mounted.path().join(format!("small-{round}"));
        let sample = measure(Some(mounted.pid()), || {
            write_small(&folder, &data)?;
            Ok(SMALL_FILES as f64)
        });
        std::fs::remove_dir_all(&folder)?;
        sample
    };
    let keys: Vec<String> = names(SMALL_FILES).map(|name| format!("bare/{name}")).collect();
    let bare = || {
        let put = client.put_many(&keys, data.clone(), SMALL_IN_FLIGHT);
        measure(None, || context.wait(put).map(|()| SMALL_FILES as f64))
    };
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    let title = format!("{SMALL_FILES} files of {} KiB by 16 writers and one syncfs", SMALL_BYTES >> 10);
    let rate = pairs.figures(|sample| sample.amount / sample.seconds);
    let cpu = pairs.figures(|sample| (sample.client_cpu + sample.daemon_cpu) / sample.amount * 1e6);
    Ok(vec![
        Row::of_pairs(NAME, &title, "files/s", &rate, "PUTs, 16 in flight"),
        Row::of_pairs(NAME, &title, "CPU us a file, client + daemon", &cpu, "PUTs, 16 in flight"),
    ])
}

fn write_small(folder: &Path, data: &[u8]) -> Result<()> {
    let paths: Vec<PathBuf> = names(SMALL_FILES).map(|name| folder.join(name)).collect();
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
    rustix::fs::syncfs(File::open(folder)?)?;
    Ok(())
}
