//! `forebay warmup PLACE`: bring files into a cache before they are read, and prove that they are there.
//!
//! A path in a mount is warmed by the mount, in its own cache. A bucket's URL is warmed by this process, into a cache
//! directory that a later mount of the same URL uses.

mod show;

pub(super) use show::Bar;

use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use forebay_core::units::parse_bytes;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::object::BucketUrl;
use forebay_io::task::Stop;
use forebay_volume::control::{self, Reply};
use forebay_volume::warmup::{Outcome, Progress, Request, Unpinned, unpin, warmup};
use forebay_volume::{Volume, VolumeSettings};

use crate::arguments::Global;
use crate::settings::Settings;
use crate::{mounts, places, report, run};

/// The arguments of `forebay warmup`.
#[derive(Debug, Args)]
pub(crate) struct WarmupArguments {
    /// A file or directory in a mount, or the URL of a bucket as it will be mounted.
    pub(crate) place: String,
    /// Warm only the files and directories in FILE, one a line, relative to PLACE; `-` reads stdin.
    #[arg(long, value_name = "FILE")]
    pub(crate) list: Option<PathBuf>,
    /// Keep the data on disk whatever else is read.
    #[arg(long)]
    pub(crate) pin: bool,
    /// Let what `--pin` kept go again when room is needed. Of a whole bucket or mount that is all, also of objects that
    /// were replaced or deleted since.
    #[arg(long, conflicts_with_all = ["pin", "dry_run", "jobs"])]
    pub(crate) unpin: bool,
    /// Only say what would be fetched.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Blocks on their way at once.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) jobs: u16,
    /// Directory for cached data, with a URL.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// How much the cache directory may hold, such as 500GiB.
    #[arg(long, value_name = "SIZE", requires = "cache_dir")]
    pub(crate) cache_size: Option<String>,
    /// The state directory of the mount; with a URL, where the tree of the bucket is kept.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Warms and shows what came of it.
pub(crate) fn run(global: &Global, arguments: &WarmupArguments) -> Result<ExitCode> {
    let settings = Settings::load(global)?;
    let paths = match &arguments.list {
        Some(file) => read_list(file)?,
        None => vec![String::new()],
    };
    if arguments.unpin {
        let unpinned = run::block_on(release(global, arguments, &settings, paths))?;
        return show::unpinned(unpinned, global.json).map(|()| ExitCode::SUCCESS);
    }
    let request = Request {
        paths,
        pin: arguments.pin,
        dry_run: arguments.dry_run,
        concurrency: usize::from(arguments.jobs),
    };
    let bar = show::Bar::new();
    let by_url = arguments.place.contains("://");
    let stop = Stop::new();
    let outcome = run::block_on(async {
        let tell = |progress: &Progress| bar.show(progress);
        match by_url {
            true => warm_bucket(global, arguments, &settings, &request, tell, &stop).await,
            false => {
                run::until_interrupted(warm_mount(arguments, &settings, request, tell, &stop), &stop).await
            }
        }
    });
    bar.end();
    let outcome = outcome?;
    if outcome.progress.files == 0 && !outcome.cancelled {
        report::warning(&format!("{} holds no files: nothing was warmed", arguments.place), global.json);
    }
    // What this process keeps in its memory ends with it.
    let lost = if by_url { outcome.memory_only } else { 0 };
    let failure = failure(&outcome, lost, arguments.dry_run, arguments.pin);
    show::outcome(&outcome, arguments.dry_run, failure.is_none(), global.json)?;
    match failure {
        Some(failure) => Err(failure),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// Lets go what was pinned, in a mount's cache or in a cache directory.
async fn release(
    global: &Global,
    arguments: &WarmupArguments,
    settings: &Settings,
    mut paths: Vec<String>,
) -> Result<Unpinned> {
    if arguments.place.contains("://") {
        let volume = open(global, arguments, settings).await?;
        let unpinned = unpin(&volume, &paths).await;
        volume.close().await?;
        return unpinned;
    }
    let place = find_mount(arguments, settings, &mut paths).await?;
    match control::ask(&place.socket, &control::Request::Unpin { paths }, |_| {}, &Stop::new()).await? {
        Reply::Unpinned(unpinned) => Ok(unpinned),
        other => Err(Error::corrupt(format!("the mount answered an unpinning with {other:?}"))),
    }
}

/// The mount that holds the place; the paths become those in its volume.
async fn find_mount(
    arguments: &WarmupArguments,
    settings: &Settings,
    paths: &mut [String],
) -> Result<mounts::Place> {
    if arguments.cache_dir.is_some() {
        return Err(Error::invalid("--cache-dir goes with a bucket's URL").with_hint(
            "a path is warmed in the cache of its mount, which `forebay mount --cache-dir` names",
        ));
    }
    let state = mounts::state_directory(arguments.state_dir.as_deref(), settings);
    let place = mounts::holding(Path::new(&arguments.place), &state).await?;
    for path in paths {
        *path = [place.path.as_str(), path]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("/");
    }
    Ok(place)
}

/// Asks the mount that holds the path.
async fn warm_mount(
    arguments: &WarmupArguments,
    settings: &Settings,
    mut request: Request,
    tell: impl Fn(&Progress),
    stop: &Stop,
) -> Result<Outcome> {
    let place = find_mount(arguments, settings, &mut request.paths).await?;
    let request = control::Request::Warmup(request);
    match control::ask(&place.socket, &request, |progress| tell(&progress), stop).await? {
        Reply::Warmed(outcome) => Ok(*outcome),
        other => Err(Error::corrupt(format!("the mount answered a warmup with {other:?}"))),
    }
}

/// Opens the bucket here, read-only, and fills the cache directory.
async fn warm_bucket(
    global: &Global,
    arguments: &WarmupArguments,
    settings: &Settings,
    request: &Request,
    tell: impl Fn(&Progress) + Send,
    stop: &Stop,
) -> Result<Outcome> {
    let volume = tokio::select! {
        opened = open(global, arguments, settings) => opened?,
        _ = tokio::signal::ctrl_c() => return Ok(Outcome { cancelled: true, ..Outcome::default() }),
    };
    let outcome = run::until_interrupted(warmup(&volume, request, tell, stop), stop).await;
    volume.close().await?;
    outcome
}

/// Opens the bucket here, read-only, with its cache directory.
async fn open(global: &Global, arguments: &WarmupArguments, settings: &Settings) -> Result<Arc<Volume>> {
    let volume = volume_settings(arguments, settings)?;
    crate::log::start(Some(global.log.as_deref().unwrap_or("warn")), global.json)?;
    let connected = forebay_volume::connect(&arguments.place, volume).await;
    connected.map_err(|error| match error.kind() {
        ErrorKind::Conflict => error.with_hint(
            "a mount or another warmup uses this cache directory or tree: warm the mount by its path, or give \
             --cache-dir and --state-dir of their own",
        ),
        _ => error,
    })
}

fn volume_settings(arguments: &WarmupArguments, settings: &Settings) -> Result<VolumeSettings> {
    let bucket: BucketUrl = arguments.place.parse()?;
    let mut volume = settings.volume.clone();
    volume.read_only = true;
    // It fills this host's directory; a mount shares with others.
    volume.cache.peers = Default::default();
    volume.state_directory = mounts::state_directory(arguments.state_dir.as_deref(), settings);
    if let Some(directory) = &arguments.cache_dir {
        volume.cache.directory = Some(std::path::absolute(directory)?);
    }
    if let Some(size) = &arguments.cache_size {
        volume.cache.disk_bytes = Some(parse_bytes(size)?);
    }
    if volume.cache.directory.is_none() && !arguments.dry_run {
        return Err(Error::invalid("a bucket is warmed into a cache directory, and none is named")
            .with_hint("give --cache-dir, and the same to `forebay mount`; or name a path in a mount"));
    }
    places::keep_out_of_bucket(&volume, &bucket)?;
    Ok(volume)
}

/// The paths in a list, in order, each once.
fn read_list(file: &Path) -> Result<Vec<String>> {
    let mut text = String::new();
    let read = match file == Path::new("-") {
        true => std::io::stdin().read_to_string(&mut text),
        false => std::fs::File::open(file).and_then(|mut file| file.read_to_string(&mut text)),
    };
    read.map_err(|error| Error::from(error).context(format!("list {}", file.display())))?;
    parse_list(&text)
}

fn parse_list(text: &str) -> Result<Vec<String>> {
    let mut seen = std::collections::HashSet::new();
    let mut paths = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let mut names = Vec::new();
        for component in Path::new(line).components() {
            match component {
                Component::Normal(name) => names.push(name.to_string_lossy().into_owned()),
                Component::CurDir => {}
                _ => {
                    return Err(Error::invalid(format!(
                        "line {} of the list, `{line}`, leaves the place",
                        index + 1
                    ))
                    .with_hint("write paths relative to the path or URL that is warmed, without `..`"));
                }
            }
        }
        let path = names.join("/");
        if seen.insert(path.clone()) {
            paths.push(path);
        }
    }
    match paths.is_empty() {
        true => Err(Error::invalid("the list names nothing").with_hint("write one path a line")),
        false => Ok(paths),
    }
}

/// Why the command fails, if it does; `lost` blocks go away with this process. What was to be pinned and is not stays no longer than
/// any other.
fn failure(outcome: &Outcome, lost: u64, dry_run: bool, pin: bool) -> Option<Error> {
    if outcome.cancelled {
        let Progress { done_bytes, bytes, .. } = outcome.progress;
        return Some(
            Error::new(ErrorKind::Unavailable, format!("cancelled after {done_bytes} of {bytes} bytes"))
                .with_hint("run it again: what is in the cache is not fetched again"),
        );
    }
    if dry_run {
        return None;
    }
    if outcome.is_complete() && lost == 0 {
        let unpinned = outcome.failures.len();
        let message = format!("{unpinned} of {} blocks are in the cache, and not pinned", outcome.blocks);
        let hint = "see why above: a cache directory, and more room in it (--cache-size, `pin_bytes` of [volume.cache]), keeps more";
        return (pin && unpinned > 0).then(|| Error::new(ErrorKind::Unavailable, message).with_hint(hint));
    }
    let absent = outcome.missing_blocks + lost;
    let message = format!("{absent} of {} blocks are not in the cache", outcome.blocks);
    let hint = match outcome.failures.is_empty() {
        true => {
            "the cache is smaller than the data, in which each file takes 4 KiB at least (give it more room with --cache-size), or its \
             disk is full or fails"
        }
        false => "see why above, and run it again: what is in the cache is not fetched again",
    };
    Some(Error::new(ErrorKind::Unavailable, message).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_relative_paths_each_once() {
        let paths = parse_list("a/b\n\n./c//d/\na/b\n.\n").expect("a list");
        assert_eq!(paths, ["a/b", "c/d", ""]);
        for (text, message) in [("", "nothing"), ("a\n../b", "line 2"), ("/etc", "line 1")] {
            let failure = parse_list(text).expect_err(text);
            assert!(failure.message().contains(message) && failure.hint().is_some(), "{failure}");
        }
    }

    #[test]
    fn a_warmup_fails_unless_everything_stays() {
        let whole = Outcome { blocks: 3, proved: 3, memory_only: 1, ..Outcome::default() };
        assert!(failure(&whole, 0, false, true).is_none());
        let unpinned = Outcome { failures: vec!["a: no room".into(); 2], ..whole.clone() };
        assert!(failure(&unpinned, 0, false, false).is_none(), "the proof tells");
        let told = failure(&unpinned, 0, false, true).expect("not pinned");
        assert!(
            told.message().starts_with("2 of 3 blocks") && told.message().contains("not pinned"),
            "{told}"
        );
        assert!(failure(&whole, 1, false, false).expect("lost").message().starts_with("1 of 3 blocks"));
        let missing = Outcome { proved: 1, missing_blocks: 2, ..whole.clone() };
        assert!(failure(&missing, 0, false, false).expect("missing").message().starts_with("2 of 3 blocks"));
        assert!(failure(&missing, 0, true, false).is_none());
        let came = Outcome { blocks: 3, proved: 4, ..whole.clone() };
        assert!(failure(&came, 0, false, false).is_none(), "a file was written meanwhile");
        let went = Outcome { missing_blocks: 1, ..whole.clone() };
        assert!(failure(&went, 0, false, false).expect("missing").message().starts_with("1 of 3 blocks"));
        let cancelled = Outcome { cancelled: true, ..whole };
        assert!(failure(&cancelled, 0, false, false).expect("cancelled").message().contains("cancelled"));
    }
}
