//! Beside JuiceFS: the same work on a mount of each, with the defaults of both, over the same store.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use super::common::{GIB, LINK, a_second, cpu_a_gib, mib_a_second, over_link};
use super::write::{SMALL_BYTES, SMALL_IN_FLIGHT, write_large, write_small};
use crate::context::{Context, PART, names, noise, shuffled};
use crate::epoch::{read_all, read_one, walk};
use crate::juicefs::JuiceFs;
use crate::mounted::{Mounted, Mounting};
use crate::report::{Aim, Row};
use crate::sample::{Pairs, Sample, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "juicefs";
/// Small files that are written in one run, and files of a data set with their bytes and its readers.
const WRITTEN_FILES: usize = 2000;
const SET_FILES: usize = 2000;
const SET_BYTES: usize = 100 << 10;
const READERS: usize = 16;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let program = context.settings.juicefs.as_ref().context("where is it? (--juicefs)")?;
    let mut rows = Vec::new();
    for (name, pace) in [("near", PaceSettings::default()), ("far", LINK)] {
        let store = StoreProcess::start(pace)?;
        let volume = JuiceFs::new(context, program, &store, &format!("juicefs-{name}"))?;
        let sides = Sides { context, store: &store, volume: &volume, name };
        let mut found = sides.written()?;
        found.extend(sides.read()?);
        rows.extend(if name == "far" { over_link(found) } else { found });
    }
    Ok(rows)
}

/// Ours and theirs over one store.
struct Sides<'a> {
    context: &'a Context,
    store: &'a StoreProcess,
    volume: &'a JuiceFs,
    name: &'static str,
}

/// What a fresh mount's walk over a data set took, reading that for the first time, then once more, and a large file.
type Readings = [Sample; 4];

impl Sides<'_> {
    /// Ours, with its cache on disk as theirs has it.
    fn ours(&self, name: &str) -> Result<Mounted> {
        let name = format!("ours-{}-{name}", self.name);
        let cache = self.context.place(&format!("{name}.cache"))?;
        let options = ["--cache-dir", cache.to_str().context("a path in UTF-8")?];
        let how = Mounting { name: &name, prefix: "ours", options: &options, footprint: None };
        Mounted::new(self.context, self.store, how)
    }

    /// Theirs, which is dropped: how it ends, with what it wrote on the store by then, is not what is measured.
    fn theirs(&self, name: &str) -> Result<Mounted> {
        self.volume.mount(self.context, &format!("theirs-{}-{name}", self.name))
    }

    fn written(&self) -> Result<Vec<Row>> {
        let (ours, theirs) = (self.ours("written")?, self.theirs("written")?);
        let (part, parts) = (noise(PART as usize), self.context.settings.large.div_ceil(PART) as usize);
        let large = |mounted: &Mounted| {
            let path = mounted.path().join("large");
            let sample = measure(Some(mounted.serving()?), || write_large(&path, &part, parts))?;
            std::fs::remove_file(&path)?;
            Ok(sample)
        };
        let pairs = Pairs::run(self.context.settings.pairs, || large(&ours), || large(&theirs))?;
        let title = format!("sequential write of {:.1} GiB and fsync", parts as f64 * PART as f64 / GIB);
        let mut rows = vec![self.row(&title, "MiB/s", &pairs.figures(mib_a_second))];
        rows.push(self.cost(&title, &pairs.figures(cpu_a_gib)));
        let data = noise(SMALL_BYTES);
        let small = |mounted: &Mounted| {
            let folder = mounted.path().join("small");
            let sample = measure(Some(mounted.serving()?), || {
                write_small(&folder, WRITTEN_FILES, &data)?;
                Ok(WRITTEN_FILES as f64)
            })?;
            std::fs::remove_dir_all(&folder)?;
            Ok(sample)
        };
        let pairs = Pairs::run(self.context.settings.pairs, || small(&ours), || small(&theirs))?;
        let kib = SMALL_BYTES >> 10;
        let title = format!("{WRITTEN_FILES} files of {kib} KiB by {SMALL_IN_FLIGHT} writers and one fsync");
        rows.push(self.row(&title, "files/s", &pairs.figures(a_second)));
        ours.unmount()?;
        Ok(rows)
    }

    fn read(&self) -> Result<Vec<Row>> {
        let fill = |mounted: &Mounted| {
            write_small(&mounted.path().join("set"), SET_FILES, &noise(SET_BYTES))?;
            let parts = self.context.settings.large.div_ceil(PART) as usize;
            write_large(&mounted.path().join("large"), &noise(PART as usize), parts)
        };
        let ours = self.ours("filled")?;
        fill(&ours)?;
        ours.unmount()?;
        fill(&self.theirs("filled")?)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for pair in 0..self.context.settings.pairs {
            let name = format!("read-{pair}");
            for is_ours in [pair % 2 == 0, pair % 2 != 0] {
                if is_ours {
                    let mounted = self.ours(&name)?;
                    ours.push(readings(&mounted)?);
                    mounted.unmount()?;
                } else {
                    theirs.push(readings(&self.theirs(&name)?)?);
                }
            }
        }
        let of = |which: usize, figure: fn(&Sample) -> f64| -> Vec<(f64, f64)> {
            ours.iter()
                .zip(&theirs)
                .map(|(ours, theirs)| (figure(&ours[which]), figure(&theirs[which])))
                .collect()
        };
        let files = |sample: &Sample| sample.amount / SET_BYTES as f64 / sample.seconds;
        let set = format!("{SET_FILES} files of {} KiB, {READERS} readers", SET_BYTES >> 10);
        let large = format!("sequential read of {:.1} GiB", self.context.settings.large as f64 / GIB);
        Ok(vec![
            self.row(&format!("walk over {SET_FILES} files"), "files/s", &of(0, a_second)),
            self.row(&format!("first epoch, {set}"), "files/s", &of(1, files)),
            self.row(&format!("second epoch, {set}"), "files/s", &of(2, files)),
            self.row(&large, "MiB/s", &of(3, mib_a_second)),
            self.cost(&large, &of(3, cpu_a_gib)),
        ])
    }

    /// Of what should be more than theirs.
    fn row(&self, title: &str, unit: &str, pairs: &[(f64, f64)]) -> Row {
        Row::of_pairs(NAME, title, unit, pairs, self.volume.label()).aim(Aim::RatioAtLeast(1.0))
    }

    fn cost(&self, title: &str, pairs: &[(f64, f64)]) -> Row {
        let row = Row::of_pairs(NAME, title, "CPU s/GiB, client + daemon", pairs, self.volume.label());
        row.aim(Aim::RatioAtMost(1.0))
    }
}

/// Reads all of a fresh mount.
fn readings(mounted: &Mounted) -> Result<Readings> {
    let paths: Vec<PathBuf> = names(SET_FILES).map(|name| mounted.path().join("set").join(name)).collect();
    let (paths, daemon) = (shuffled(paths), Some(mounted.serving()?));
    let walked = measure(daemon, || walk(&mounted.path().join("set")))?;
    ensure!(walked.amount == SET_FILES as f64, "{} files were found", walked.amount);
    let first = measure(daemon, || read_all(&paths, READERS))?;
    let second = measure(daemon, || read_all(&paths, READERS))?;
    let large = measure(daemon, || read_one(&mounted.path().join("large")))?;
    let all = (SET_FILES * SET_BYTES) as f64;
    ensure!(first.amount == all && second.amount == all, "{} bytes were read", first.amount);
    Ok([walked, first, second, large])
}
