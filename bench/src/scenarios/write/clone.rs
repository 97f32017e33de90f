//! `git clone` onto a mount, with and without `--writeback`, against the disk.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use super::{FAR, NAME};
use crate::context::Context;
use crate::mounted::{Mounted, Mounting};
use crate::report::Row;
use crate::sample::{Pairs, measure};
use crate::store::{PaceSettings, StoreProcess};

/// Files of the repository, of so many bytes each.
const FILES: usize = 400;
const BYTES: usize = 4096;

/// From a store that answers at once, and from one that is far away, where each close that waits for it shows.
pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let origin = context.place("origin")?;
    context.write_files(&origin, FILES, BYTES)?;
    git(&origin, &["init", "-q", "-b", "main", "."])?;
    git(&origin, &["add", "-A"])?;
    git(&origin, &["-c", "user.name=Bench", "-c", "user.email=bench@example.org", "commit", "-qm", "one"])?;
    let far = format!(", {} ms away", FAR.as_millis());
    let mut rows = Vec::new();
    for (delay, place) in [(std::time::Duration::ZERO, ""), (FAR, far.as_str())] {
        let store = StoreProcess::start(PaceSettings { delay, ..PaceSettings::default() })?;
        for (name, options) in [("through", &[][..]), ("writeback", &["--writeback"][..])] {
            rows.push(clones(context, &store, &origin, (name, options), place)?);
        }
    }
    Ok(rows)
}

fn clones(
    context: &Context,
    store: &StoreProcess,
    origin: &Path,
    (name, options): (&str, &[&str]),
    place: &str,
) -> Result<Row> {
    let mounted = Mounted::new(context, store, Mounting { name, prefix: name, options, footprint: None })?;
    let beside = context.place("cloned")?;
    let mut round = 0;
    let ours = || clone(origin, mounted.path(), &mut round, Some(mounted.pid()));
    let mut rounds_beside = 0;
    let bare = || clone(origin, &beside, &mut rounds_beside, None);
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    mounted.unmount()?;
    std::fs::remove_dir_all(&beside)?;
    let how = options.iter().map(|option| format!(", {option}")).collect::<String>();
    let title = format!("git clone of {FILES} files of {} KiB{how}{place}", BYTES >> 10);
    Ok(Row::of_pairs(NAME, &title, "s", &pairs.figures(|sample| sample.seconds), "the same on the disk"))
}

/// Clones into a folder of its own, so that every run makes all files anew.
fn clone(
    origin: &Path,
    folder: &Path,
    round: &mut usize,
    daemon: Option<u32>,
) -> Result<crate::sample::Sample> {
    *round += 1;
    let target = folder.join(format!("clone-{round}"));
    let target = target.to_string_lossy();
    measure(daemon, || {
        // Copied, as from another machine: links to objects of the origin would cost nothing.
        git(folder, &["clone", "-q", "--no-local", &origin.to_string_lossy(), &target])?;
        Ok(FILES as f64)
    })
}

/// Runs git in `folder`, with no configuration but ours.
fn git(folder: &Path, args: &[&str]) -> Result<()> {
    let mut command = Command::new("git");
    command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null");
    let output = command.current_dir(folder).args(args).output()?;
    if !output.status.success() {
        bail!("git {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
