//! Hosts that share what they have cached, against each reading the store for itself.
//!
//! Hosts are mounts of this machine with addresses of their own. Of the pairs, one mount has everything in memory, and a
//! fresh one reads it: what that one owns from there, its own share from the store, and all of it where it knows no other.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};

use super::common::{GIB, LINK, cpu_a_gib, mib_a_second, over_link};
use super::wire;
use crate::context::{Context, names, shuffled};
use crate::epoch::{read_all, read_one};
use crate::mounted::{Mounted, Mounting};
use crate::raw::ObjectStoreClient;
use crate::report::{Aim, Row};
use crate::sample::{Pairs, Sample, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "peers";
const SET_FILES: usize = 2000;
const SET_BYTES: usize = 100 << 10;
const READERS: usize = 16;
/// Hosts that read one data set at once.
const HOSTS: u8 = 3;
const BASELINE: &str = "the store, alone";

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (name, pace) in [("near", PaceSettings::default()), ("far", LINK)] {
        let store = StoreProcess::start(pace)?;
        let client = ObjectStoreClient::new(&store)?;
        context.put_files(&client, "data/set", SET_FILES, SET_BYTES)?;
        context.put_large(&client, "data/large", context.settings.large)?;
        let hosts = Hosts { context, store: &store, name };
        let mut found = hosts.read()?;
        found.push(hosts.share()?);
        rows.extend(if name == "far" { over_link(found) } else { found });
    }
    rows.extend(wire::run(context, NAME)?);
    Ok(rows)
}

/// Mounts over one store.
struct Hosts<'a> {
    context: &'a Context,
    store: &'a StoreProcess,
    name: &'static str,
}

impl Hosts<'_> {
    /// A fresh mount of a host, which knows `members`.
    fn mount(&self, name: &str, host: u8, members: &[u8]) -> Result<Mounted> {
        let address = |host: u8| Ipv4Addr::new(127, 93, 46, host).to_string();
        let secret = self.context.place("peers")?.join("secret");
        std::fs::write(&secret, "what all hosts of the benchmark know")?;
        let secret = secret.to_str().context("a path in UTF-8")?.to_owned();
        let members = members.iter().map(|member| address(*member)).collect::<Vec<_>>().join(",");
        let listen = address(host);
        let mut options = vec!["--read-only", "--memory", "4GiB"];
        if !members.is_empty() {
            options.extend(["--peers", &members, "--peer-listen", &listen, "--peer-secret", &secret]);
        }
        let name = format!("peers-{}-{name}", self.name);
        let how = Mounting { name: &name, prefix: "data", options: &options, footprint: None };
        Mounted::new(self.context, self.store, how)
    }

    fn set(&self, mounted: &Mounted) -> Vec<PathBuf> {
        shuffled(names(SET_FILES).map(|name| mounted.path().join("set").join(name)).collect())
    }

    /// What one host has, read by another.
    fn read(&self) -> Result<Vec<Row>> {
        let owner = self.mount("owner", 1, &[1])?;
        read_all(&self.set(&owner), READERS)?;
        read_one(&owner.path().join("large"))?;
        let (mut from_peer, mut number) = (Vec::new(), 0);
        let mut small = |members: &[u8]| -> Result<[Sample; 2]> {
            number += 1;
            let mounted = self.mount(&format!("reader-{number}"), 2, members)?;
            let before = self.store.counts()?;
            let set = measure(Some(mounted.pid()), || read_all(&self.set(&mounted), READERS))?;
            let large = measure(Some(mounted.pid()), || read_one(&mounted.path().join("large")))?;
            if !members.is_empty() {
                from_peer.push((self.store.counts()? - before).gets as f64);
            }
            mounted.unmount()?;
            Ok([set, large])
        };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for pair in 0..self.context.settings.pairs {
            for is_ours in [pair % 2 == 0, pair % 2 != 0] {
                match is_ours {
                    true => ours.push(small(&[1])?),
                    false => theirs.push(small(&[])?),
                }
            }
        }
        owner.unmount()?;
        let of = |which: usize, figure: fn(&Sample) -> f64| {
            let side = |samples: &[[Sample; 2]]| samples.iter().map(|sample| sample[which]).collect();
            Pairs { ours: side(&ours), baseline: side(&theirs) }.figures(figure)
        };
        let files = |sample: &Sample| sample.amount / SET_BYTES as f64 / sample.seconds;
        let set =
            format!("first epoch, half of it another host's, {SET_FILES} files of {} KiB", SET_BYTES >> 10);
        let large = format!(
            "{:.1} GiB in order, half of it another host's",
            self.context.settings.large as f64 / GIB
        );
        Ok(vec![
            Row::of_pairs(NAME, &set, "files/s", &of(0, files), BASELINE),
            Row::of_pairs(NAME, &large, "MiB/s", &of(1, mib_a_second), BASELINE),
            Row::of_pairs(NAME, &large, "CPU s a GiB, reader", &of(1, cpu_a_gib), BASELINE),
            Row::of_values(NAME, "GETs of these, the reader's own share", "GETs", &from_peer),
        ])
    }

    /// What leaves the store when all hosts read all of it at once.
    fn share(&self) -> Result<Row> {
        let members: Vec<u8> = (1..=HOSTS).collect();
        let size = (SET_FILES * SET_BYTES) as f64 + self.context.settings.large as f64;
        let mut left = Vec::new();
        for run in 0..self.context.settings.pairs {
            let mount = |host: &u8| self.mount(&format!("share-{run}-{host}"), *host, &members);
            let mounts = members.iter().map(mount).collect::<Result<Vec<_>>>()?;
            // Those that came first look for the others once a second.
            std::thread::sleep(std::time::Duration::from_secs(3));
            let before = self.store.counts()?;
            std::thread::scope(|scope| {
                let readers: Vec<_> = mounts
                    .iter()
                    .map(|mounted| {
                        scope.spawn(|| -> Result<f64> {
                            let small = read_all(&self.set(mounted), READERS)?;
                            Ok(small + read_one(&mounted.path().join("large"))?)
                        })
                    })
                    .collect();
                for reader in readers {
                    let Ok(read) = reader.join() else { bail!("a reader ended") };
                    ensure!(read? == size, "not all was read");
                }
                Ok(())
            })?;
            left.push((self.store.counts()? - before).bytes_out as f64 / size);
            mounts.into_iter().try_for_each(Mounted::unmount)?;
        }
        let title = format!("what leaves the store for {HOSTS} hosts that read the same, listings among it");
        Ok(Row::of_values(NAME, &title, "x the data", &left).aim(Aim::AtMost(1.01)))
    }
}
