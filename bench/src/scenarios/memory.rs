//! Whether `--memory` holds: the peak of a daemon's memory while far more is read and written.

use std::fs::File;
use std::io::Write;

use anyhow::Result;

use super::common::{GIB, MIB};
use crate::context::{Context, PART, noise};
use crate::epoch::read_one;
use crate::footprint::Footprint;
use crate::mounted::{Mounted, Mounting};
use crate::raw::ObjectStoreClient;
use crate::report::{Aim, Row};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "memory";
/// What the mount is told, in MiB.
const BUDGET: f64 = 512.0;
/// Above the budget, in MiB: 2 % of it and 64 MiB for code, tree and connections.
const MORE: f64 = BUDGET * 0.02 + 64.0;
/// Bytes of one file; many share their memory in the store.
const FILE: u64 = 1 << 30;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let files = context.settings.volume.div_ceil(FILE);
    let store = StoreProcess::start(PaceSettings::default())?;
    let client = ObjectStoreClient::new(&store)?;
    context.put_large(&client, "data/0", FILE)?;
    for index in 1..files {
        context.wait(client.copy("data/0", &format!("data/{index}")))?;
    }
    let footprint = Footprint::new()?;
    let options = ["--memory", "512MiB"];
    let how = Mounting { name: "small", prefix: "data", options: &options, footprint: Some(&footprint) };
    let mounted = Mounted::new(context, &store, how)?;
    let idle = footprint.now()?;
    let (reading, read) = footprint.peak_while(|| read_through(&mounted, files));
    read?;
    let (writing, written) = footprint.peak_while(|| write_through(&mounted, files));
    written?;
    mounted.unmount()?;
    let size = files as f64 * FILE as f64 / GIB;
    let row =
        |what: &str, bytes: u64| Row::of_values(NAME, what, "MiB, anonymous + shared", &[bytes as f64 / MIB]);
    Ok(vec![
        row("idle, --memory 512MiB", idle),
        row(&format!("peak while {size:.0} GiB are read"), reading).aim(Aim::AtMost(BUDGET + MORE)),
        row(&format!("peak while {size:.0} GiB are written"), writing).aim(Aim::AtMost(BUDGET + MORE)),
    ])
}

/// Four readers at once: read windows and cache fills press on the same budget.
fn read_through(mounted: &Mounted, files: u64) -> Result<()> {
    let names: Vec<u64> = (0..files).collect();
    for batch in names.chunks(4) {
        std::thread::scope(|scope| {
            let read = |index: &u64| read_one(&mounted.path().join(index.to_string())).map(drop);
            let readers: Vec<_> = batch.iter().map(|index| scope.spawn(move || read(index))).collect();
            readers.into_iter().try_for_each(|reader| match reader.join() {
                Ok(result) => result,
                Err(_) => Err(anyhow::anyhow!("a reader panicked")),
            })
        })?;
    }
    Ok(())
}

/// Each file is removed once it is durable, so that the store need not hold them all.
fn write_through(mounted: &Mounted, files: u64) -> Result<()> {
    let data = noise(PART as usize);
    for index in 0..files {
        let path = mounted.path().join(format!("written-{index}"));
        let mut file = File::create(&path)?;
        for _ in 0..FILE / PART {
            data.chunks(1 << 20).try_for_each(|piece| file.write_all(piece))?;
        }
        file.sync_all()?;
        drop(file);
        std::fs::remove_file(&path)?;
    }
    Ok(())
}
