//! `forebay volume dump|load`: back a volume's tree up, and bring it back. `adopt` is in `adopt`, `policy|export` are in
//! `packed`.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use forebay_core::{Error, ErrorKind, Result};
use forebay_volume::backup::{LoadOptions, Target};
use forebay_volume::upkeep::{Report, Request};
use forebay_volume::{VolumeSettings, backup};

use super::adopt::{self, AdoptArguments};
use super::packed::{self, ExportArguments, PolicyArguments};
use crate::arguments::Global;
use crate::settings::Settings;
use crate::upkeep::{self, Place};
use crate::{mounts, print, report, run};

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Write names, attributes and layouts to a file. The bytes of files stay in the bucket.
    Dump(DumpArguments),
    /// Replace the tree of a volume that is not mounted by a dump.
    Load(LoadArguments),
    /// Take a bucket for the same volume that was copied or moved object by object (`cp`, `rsync`, `aws s3 sync`, from a
    /// backup). Its objects have other versions than those that the tree names: each is taken for what it was where key and
    /// size agree. That its bytes are the same is yours to know; nothing reads them. What is missing or has another size is
    /// named, cannot be read, and makes the exit code 3. The bucket that it is a copy of must not have been mounted for
    /// writing while it was copied, nor may this one be, before this.
    Adopt(AdoptArguments),
    /// Show how small files made in a directory are stored, or set it: each as an object (`plain`), or many in one
    /// (`packed`). What is there stays as it is; directories made in it later take it over.
    Policy(PolicyArguments),
    /// Turn packed files back into plain objects at their own paths.
    Export(ExportArguments),
}

/// The arguments of `forebay volume dump`.
#[derive(Debug, Args)]
pub(crate) struct DumpArguments {
    /// The URL of the bucket, as it is mounted.
    pub(crate) source: String,
    /// A new file, or `-` for stdout.
    pub(crate) file: PathBuf,
    /// The state directory that it is mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// The arguments of `forebay volume load`.
#[derive(Debug, Args)]
pub(crate) struct LoadArguments {
    /// A dump, or `-` for stdin.
    pub(crate) file: PathBuf,
    /// The URL of the bucket, as it will be mounted.
    pub(crate) source: String,
    /// Replace the tree that the volume has.
    #[arg(long)]
    pub(crate) force: bool,
    /// Load the dump of a volume with another id: right only over the objects that it was taken beside.
    #[arg(long)]
    pub(crate) of_another_volume: bool,
    /// The bucket is a copy of the one that the dump was taken beside: take the objects that are there, as `forebay volume
    /// adopt` does. For copies in another kind of store, and those without `.forebay/tree`.
    #[arg(long)]
    pub(crate) moved: bool,
    /// The state directory that it is mounted with.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Runs one of them.
pub(crate) fn run(global: &Global, command: &VolumeCommand) -> Result<ExitCode> {
    let settings = Settings::load(global)?;
    match command {
        VolumeCommand::Dump(arguments) => dump(global, arguments, &settings),
        VolumeCommand::Load(arguments) => load(global, arguments, &settings),
        VolumeCommand::Adopt(arguments) => adopt::run(global, arguments, &settings),
        VolumeCommand::Policy(arguments) => packed::policy(global, arguments),
        VolumeCommand::Export(arguments) => packed::export(global, arguments),
    }
}

fn is_standard(file: &Path) -> bool {
    file.as_os_str() == "-"
}

fn dump(global: &Global, arguments: &DumpArguments, settings: &Settings) -> Result<ExitCode> {
    let file = &arguments.file;
    if is_standard(file) && (io::stdout().is_terminal() || global.json) {
        return Err(Error::invalid("a dump is not text, and nothing else fits beside it")
            .with_hint("name a file, or send stdout into one, without --json"));
    }
    let state = arguments.state_dir.as_deref();
    let report = run::block_on(async {
        match upkeep::find(&arguments.source, state, settings).await? {
            Place::Mount(_) if is_standard(file) => {
                Err(Error::invalid("a mounted volume is dumped by its mount, into a file")
                    .with_hint("name a file"))
            }
            Place::Mount(socket) => {
                let request = Request::Dump { file: std::path::absolute(file)? };
                let report = match upkeep::ask(&socket, &request).await? {
                    Report::Dump(report) => report,
                    _ => return Err(Error::corrupt("the dump was answered with something else")),
                };
                let state = mounts::state_directory(state, settings);
                if mounts::holding(file, &state).await.is_ok_and(|place| place.socket == socket) {
                    let text = format!(
                        "{} lies in the volume that it is a dump of, and is lost with it: keep a copy elsewhere",
                        file.display()
                    );
                    report::warning(&text, global.json);
                }
                Ok(report)
            }
            Place::Nowhere(volume) => {
                let volume = VolumeSettings { must_exist: true, ..*volume };
                backup::dump(&arguments.source, &volume, target(file)).await
            }
        }
    })?;
    match (is_standard(file), global.json) {
        (true, _) => {}
        (false, true) => print::json(&report)?,
        (false, false) => {
            print::table(&[print::row([&format!("{} records", report.records), &report.blake3])])
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn target(file: &Path) -> Target {
    match is_standard(file) {
        true => Target::Stream(Box::new(io::stdout())),
        false => Target::File(file.to_owned()),
    }
}

fn load(global: &Global, arguments: &LoadArguments, settings: &Settings) -> Result<ExitCode> {
    let (report, adopted) = run::block_on(async {
        match upkeep::find(&arguments.source, arguments.state_dir.as_deref(), settings).await? {
            Place::Mount(_) => Err(Error::invalid("a volume cannot be loaded while it is mounted")
                .with_hint("unmount it, then load again")),
            Place::Nowhere(volume) => {
                let (url, from) = (&arguments.source, source(&arguments.file, &volume)?);
                let LoadArguments { force, of_another_volume, .. } = *arguments;
                let options = LoadOptions { force, of_another_volume };
                let loaded = match arguments.moved {
                    true => backup::load_moved(url, &volume, from, options)
                        .await
                        .map(|(report, adopted)| (report, Some(adopted))),
                    false => backup::load(url, &volume, from, options).await.map(|report| (report, None)),
                };
                loaded.map_err(|error| match error.kind() {
                    ErrorKind::Corrupt => error.context(arguments.file.display()),
                    _ => error,
                })
            }
        }
    })?;
    match global.json {
        true => {
            let mut value = serde_json::to_value(&report).map_err(|error| Error::bug(error.to_string()))?;
            if let Some(adopted) = &adopted {
                value["adopted"] =
                    serde_json::to_value(adopted).map_err(|error| Error::bug(error.to_string()))?;
            }
            print::json(&value)?;
        }
        false => {
            let taken = format!("taken {}", print::utc(report.header.taken));
            let loaded = print::row([&format!("{} records", report.records), &taken]);
            print::table(
                &[&[loaded][..], &adopted.iter().flat_map(adopt::rows).collect::<Vec<_>>()].concat(),
            );
        }
    }
    Ok(adopted.map_or(ExitCode::SUCCESS, |adopted| adopt::tell(&adopted, global.json)))
}

/// The dump as a file that can be read twice; what comes from stdin is kept in the state directory meanwhile.
fn source(file: &Path, volume: &VolumeSettings) -> Result<File> {
    if !is_standard(file) {
        return File::open(file).map_err(|error| {
            let hint = "name a file that `forebay volume dump` wrote, or `-` for stdin";
            Error::from(error).context(file.display()).with_hint(hint)
        });
    }
    std::fs::create_dir_all(&volume.state_directory)?;
    let path = volume.state_directory.join(format!("load-{}", std::process::id()));
    let spooled = File::options().read(true).write(true).create_new(true).open(&path);
    let mut spooled = spooled.map_err(|error| Error::from(error).context(path.display()))?;
    // Without a name it goes with this process.
    std::fs::remove_file(&path)?;
    io::copy(&mut io::stdin(), &mut spooled)?;
    io::Seek::rewind(&mut spooled)?;
    Ok(spooled)
}
