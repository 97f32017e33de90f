//! Hosts that write to one volume, against a mount that has its volume for itself.
//!
//! One mount holds the volume and serves its tree; a fresh one joins it over loopback, walks over a data set, reads it and
//! writes small files. All that differs from the baseline is that it asks the other for each name.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use super::common::{LINK, a_second, over_link};
use super::write::{SMALL_BYTES, SMALL_IN_FLIGHT, write_small};
use crate::context::{Context, names, noise, shuffled};
use crate::epoch::{read_all, walk};
use crate::mounted::{Mounted, Mounting};
use crate::raw::ObjectStoreClient;
use crate::report::Row;
use crate::sample::{Pairs, Sample, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "joined";
/// Files that are read, and those that are written.
const FILES: usize = 2000;
const READERS: usize = 16;
const BASELINE: &str = "a mount alone";

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (name, pace) in [("near", PaceSettings::default()), ("far", LINK)] {
        let store = StoreProcess::start(pace)?;
        let client = ObjectStoreClient::new(&store)?;
        context.put_files(&client, "alone/set", FILES, SMALL_BYTES)?;
        context.put_files(&client, "shared/set", FILES, SMALL_BYTES)?;
        let found = Sides { context, store: &store, name }.measured()?;
        rows.extend(if name == "far" { over_link(found) } else { found });
    }
    Ok(rows)
}

/// Both volumes over one store.
struct Sides<'a> {
    context: &'a Context,
    store: &'a StoreProcess,
    name: &'static str,
}

impl Sides<'_> {
    fn mount(&self, name: &str, prefix: &str, options: &[&str]) -> Result<Mounted> {
        let name = format!("joined-{}-{name}", self.name);
        let how = Mounting { name: &name, prefix, options, footprint: None };
        Mounted::new(self.context, self.store, how)
    }

    /// A mount of the volume that several write to; `host` ends its address.
    fn shared(&self, name: &str, host: u8) -> Result<Mounted> {
        let secret = self.context.place("joined")?.join("secret");
        std::fs::write(&secret, "what all hosts of the benchmark know")?;
        let secret = secret.to_str().context("a path in UTF-8")?;
        let listen = format!("127.93.47.{host}");
        self.mount(name, "shared", &["--join-secret", secret, "--join-listen", &listen])
    }

    fn measured(&self) -> Result<Vec<Row>> {
        let server = self.shared("server", 1)?;
        // Listed by whoever has the tree, as it is for the first one to look.
        ensure!(walk(&server.path().join("set"))? == FILES as f64, "the data set is not there");
        let (mut joined, mut alone) = (0, 0);
        let mut ours = Vec::new();
        let mut theirs = Vec::new();
        for pair in 0..self.context.settings.pairs {
            for is_ours in [pair % 2 == 0, pair % 2 != 0] {
                if is_ours {
                    joined += 1;
                    ours.push(work(self.shared(&format!("guest-{joined}"), 2)?)?);
                } else {
                    alone += 1;
                    theirs.push(work(self.mount(&format!("alone-{alone}"), "alone", &[])?)?);
                }
            }
        }
        server.unmount()?;
        let of = |which: usize| {
            let side = |samples: &[[Sample; 3]]| samples.iter().map(|sample| sample[which]).collect();
            Pairs { ours: side(&ours), baseline: side(&theirs) }.figures(a_second)
        };
        let kib = SMALL_BYTES >> 10;
        let row = |name: &str, which| Row::of_pairs(NAME, name, "files/s", &of(which), BASELINE);
        Ok(vec![
            row(&format!("walk over {FILES} files, by a fresh mount that joined"), 0),
            row(&format!("{FILES} files of {kib} KiB read by {READERS} readers"), 1),
            row(&format!("{FILES} files of {kib} KiB by {SMALL_IN_FLIGHT} writers and one fsync"), 2),
        ])
    }
}

/// Walks over the data set, reads it, and writes files, on a fresh mount.
fn work(mounted: Mounted) -> Result<[Sample; 3]> {
    let set = mounted.path().join("set");
    let paths: Vec<PathBuf> = shuffled(names(FILES).map(|name| set.join(name)).collect());
    let (written, data, daemon) = (mounted.path().join("written"), noise(SMALL_BYTES), Some(mounted.pid()));
    let samples = [
        measure(daemon, || walk(&set))?,
        measure(daemon, || read_all(&paths, READERS).map(|bytes| bytes / SMALL_BYTES as f64))?,
        measure(daemon, || write_small(&written, FILES, &data).map(|()| FILES as f64))?,
    ];
    ensure!(samples.iter().all(|sample| sample.amount == FILES as f64), "some files are missing");
    std::fs::remove_dir_all(&written)?;
    mounted.unmount()?;
    Ok(samples)
}
