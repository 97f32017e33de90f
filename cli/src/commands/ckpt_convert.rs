//! `forebay ckpt convert`: steps from and to Hugging Face directories, and, by the Python package, torch's own files.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Args;
use forebay_ckpt::catalog::{Start, StepName, list_steps};
use forebay_ckpt::convert::{Export, Exported, Imported, import};
use forebay_core::units::{format_bytes, parse_bytes};
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::files::make_directory;
use forebay_io::object::{BucketUrl, StoreSettings};
use forebay_io::rng::Rng;
use forebay_io::task;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::ckpt::{bar, manifest, open, open_to_change, split, url_of};
use crate::report::Failure;
use crate::settings::Settings;
use crate::{mounts, print, report};

/// The arguments of `forebay ckpt convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArguments {
    /// URL@STEP, a URL for its newest step, hf:DIRECTORY, dcp:DIRECTORY, or pt:FILE, one of torch.save's.
    pub(crate) source: String,
    /// The same, but no file, and of another kind. A step that is saved has the number 0 unless given.
    pub(crate) target: String,
    /// The part of the state that is a model: a key, or several with dots between them, '' for all of it.
    #[arg(long, default_value = "model")]
    pub(crate) part: String,
    /// Bytes of tensors in a file of a Hugging Face directory at most, unless one tensor has more [default: 5e9].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "5000000000", hide_default_value = true)]
    pub(crate) max_shard_size: u64,
    /// Let Python unpickle what SOURCE holds, which can run any code (dcp and pt only).
    #[arg(long)]
    pub(crate) allow_pickle: bool,
    /// The Python that has the package `forebay` (dcp and pt only).
    #[arg(long, default_value = "python3")]
    pub(crate) python: PathBuf,
    /// Let the step be the newest of a run that has later ones.
    #[arg(long)]
    pub(crate) force: bool,
    /// The state directory of a mount that both sides lie in.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// What a side is.
enum Side<'a> {
    HuggingFace(&'a str),
    Torch,
    TorchFile,
    Forebay(&'a str, Option<StepName>),
}

impl<'a> Side<'a> {
    fn of(text: &'a str) -> Result<Self> {
        Ok(match text.split_once(':') {
            Some(("hf", place)) => Self::HuggingFace(place),
            Some(("dcp", _)) => Self::Torch,
            Some(("pt", _)) => Self::TorchFile,
            _ => {
                let (url, step) = split(text)?;
                Self::Forebay(url, step)
            }
        })
    }
}

/// Refuses to save into a run that has steps which would not count any more, unless that is meant.
async fn check_target(settings: &Settings, arguments: &ConvertArguments) -> Result<()> {
    let (Side::Forebay(url, step), false) = (Side::of(&arguments.target)?, arguments.force) else {
        return Ok(());
    };
    let steps = match open(url, settings).await {
        Ok(bucket) => list_steps(&bucket).await?,
        // It is made by the conversion, or tells what is wrong with it.
        Err(_) => return Ok(()),
    };
    let Some(newest) = steps.iter().map(|info| info.key.step).max() else { return Ok(()) };
    if step.is_some_and(|name| name.step > newest) {
        return Ok(());
    }
    let fact = format!(
        "{url} holds step {newest}, which would not be the newest any more; a training that saves there would end"
    );
    Err(Error::new(ErrorKind::Conflict, fact).with_hint(format!(
        "convert to a URL of its own; {url}@{} comes after what is there, and --force lets any step be the newest",
        newest.saturating_add(1)
    )))
}

/// Converts.
pub(crate) async fn run(settings: &Settings, arguments: &ConvertArguments, json: bool) -> Result<ExitCode> {
    check_target(settings, arguments).await?;
    match (Side::of(&arguments.source)?, Side::of(&arguments.target)?) {
        (Side::Forebay(url, step), Side::HuggingFace(folder)) => {
            let folder = folder.strip_prefix("file://").unwrap_or(folder);
            if folder.contains("://") {
                let message = format!("`hf:{folder}` is no directory: models are written to a file system");
                return Err(Error::new(ErrorKind::Unsupported, message).with_hint("mount the bucket"));
            }
            show_files(&write(settings, arguments, (url, step), Path::new(folder)).await?, json)?;
        }
        (Side::HuggingFace(folder), Side::Forebay(url, step)) => {
            let step = match step {
                None => 0,
                Some(StepName { step, start: None }) => step,
                Some(name) => {
                    return Err(Error::invalid(format!("{name}: what is saved is given its start")));
                }
            };
            let imported = read(settings, folder, url, step, &arguments.part).await?;
            imported.warnings.iter().for_each(|text| report::warning(text, json));
            show_step(&imported, json)?;
        }
        (_, Side::TorchFile) => {
            return Err(Error::invalid("pt:FILE is a SOURCE only")
                .with_hint("torch.save(forebay.load(URL), FILE) writes one"));
        }
        (Side::Forebay(..), Side::Forebay(..))
        | (Side::HuggingFace(_), Side::HuggingFace(_))
        | (Side::Torch, Side::Torch) => {
            return Err(Error::invalid("SOURCE and TARGET are of one kind").with_hint(
                "forebay ckpt convert s3://bucket/run@500 hf:./model; dcp:DIR and pt:FILE are others",
            ));
        }
        (Side::Torch | Side::TorchFile, _) | (_, Side::Torch) => return hand_over(settings, arguments, json),
    }
    Ok(ExitCode::SUCCESS)
}

/// Forebay to Hugging Face.
async fn write(
    settings: &Settings,
    arguments: &ConvertArguments,
    (url, step): (&str, Option<StepName>),
    folder: &Path,
) -> Result<Exported> {
    let bucket = open(url, settings).await?;
    let manifest = manifest((&bucket, step)).await?;
    let state = mounts::state_directory(arguments.state_dir.as_deref(), settings);
    let shared = shared_root(&url_of(url)?, folder, &state).await;
    let (part, file_bytes, folder) = (arguments.part.clone(), arguments.max_shard_size, folder.to_owned());
    let (runtime, bar) = (Handle::current(), bar("written"));
    let progress = bar.clone();
    let work = move || {
        let plan = Export::plan(&manifest, &part, file_bytes)?;
        make_directory(&folder)?;
        plan.write((&runtime, &bucket), &folder, shared.as_deref(), &|bytes| progress.inc(bytes))
    };
    let written = task::blocking(work).await?;
    bar.finish_and_clear();
    written
}

/// The directory of a step's shards, where it lies in the same mount of this host as the new files will.
async fn shared_root(url: &BucketUrl, folder: &Path, state: &Path) -> Option<PathBuf> {
    let root = PathBuf::from(url.to_string().strip_prefix("file://")?);
    let (from, to) =
        (mounts::holding(&root, state).await.ok()?, mounts::once_holding(folder, state).await.ok()?);
    (from.socket == to.socket).then_some(root)
}

/// Hugging Face to Forebay.
async fn read(settings: &Settings, folder: &str, url: &str, step: u64, part: &str) -> Result<Imported> {
    let from = open(folder, settings).await?;
    if let Some(folder) = url_of(url)?.to_string().strip_prefix("file://") {
        make_directory(Path::new(folder))?;
    }
    let to = open_to_change(url, settings).await?;
    let now = Clock::system().wall();
    let start = Start {
        nonce: Rng::system().name(),
        host: std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned(),
        pid: std::process::id(),
        started_ms: now.seconds.max(0) as u64 * 1000 + u64::from(now.nanos / 1_000_000),
    };
    let bar = bar("read");
    let imported = import(&from, &to, start, step, part, &|bytes| bar.inc(bytes)).await;
    bar.finish_and_clear();
    imported
}

/// What the Python package tells of a conversion: of a step, or of the files of a directory.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<Vec<String>>,
    tensors: u64,
    bytes: u64,
}

/// How the Python package hears of the options that a store is opened with: by their variables, of which each kind of store
/// takes its own.
fn options_as_environment(store: &StoreSettings) -> Vec<(String, String)> {
    const KINDS: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];
    let anonymous = store.anonymous.then(|| ("skip_signature".to_owned(), "true".to_owned()));
    let class = store.storage_class.clone().map(|class| ("storage_class".to_owned(), class));
    let mut variables = Vec::new();
    for (name, value) in store.options.clone().into_iter().chain(anonymous).chain(class) {
        let name = name.to_ascii_uppercase();
        match KINDS.iter().any(|kind| name.starts_with(kind)) {
            true => variables.push((name, value)),
            false => variables.extend(KINDS.map(|kind| (format!("{kind}{name}"), value.clone()))),
        }
    }
    variables
}

/// Has the Python package convert: torch's own files are pickles. It tells warnings and errors as this program does.
fn hand_over(settings: &Settings, arguments: &ConvertArguments, json: bool) -> Result<ExitCode> {
    let python = arguments.python.display();
    let hint = "torch's files need torch and the package forebay in a Python 3; --python says which";
    let refused = |error| Error::from(error).context(&python).with_hint(hint);
    let find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('forebay') is None)";
    if !Command::new(&arguments.python).args(["-c", find]).status().map_err(refused)?.success() {
        return Err(
            Error::new(ErrorKind::NotFound, format!("`{python}` has no package forebay")).with_hint(hint)
        );
    }
    let size = arguments.max_shard_size.to_string();
    let mut words = vec!["-m", "forebay.convert", &arguments.source, &arguments.target, "--json"];
    words.extend(["--part", &arguments.part, "--shard-size", &size]);
    words.extend(arguments.allow_pickle.then_some("--allow-pickle"));
    // What is there was looked at.
    words.push("--force");
    let mut command = Command::new(&arguments.python);
    command.envs(options_as_environment(&settings.volume.store));
    let mut child =
        command.args(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(refused)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let failure = std::thread::spawn(move || stderr.and_then(|stderr| pass_on(stderr, json)));
    let mut text = Vec::new();
    stdout.map_or(Ok(0), |mut stdout| stdout.read_to_end(&mut text)).map_err(refused)?;
    let status = child.wait().map_err(refused)?;
    let failure = failure.join().unwrap_or_default();
    if let Some(failure) = failure.filter(|_| !status.success()) {
        failure.print(json);
        return Ok(ExitCode::FAILURE);
    }
    // What it unpickles may print as well.
    let lines = String::from_utf8_lossy(&text);
    let mut lines: Vec<&str> = lines.lines().filter(|line| !line.is_empty()).collect();
    let told = lines.pop().unwrap_or_default();
    lines.into_iter().for_each(report::foreign);
    match serde_json::from_str::<Told>(told) {
        Ok(told) if status.success() => show_told(&told, json).map(|()| ExitCode::SUCCESS),
        _ => Err(Error::bug(format!(
            "`{python} -m forebay.convert` ended with {status} and did not say why"
        ))
        .with_hint(
            "what it wrote to stderr above may tell; the package and this program have to be of one version",
        )),
    }
}

/// Tells the warnings that come as lines of JSON, and any other line as it is. Returns the error.
fn pass_on(stderr: impl Read, json: bool) -> Option<Failure> {
    let mut failure = None;
    for line in BufReader::new(stderr).split(b'\n').map_while(std::result::Result::ok) {
        let line = String::from_utf8_lossy(&line);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
        if let Some(text) = value["warning"].as_str() {
            report::warning(text, json);
        } else if let Ok(told) = serde_json::from_value(value) {
            failure = Some(told);
        } else {
            report::foreign(&line);
        }
    }
    failure
}

fn show_told(told: &Told, json: bool) -> Result<()> {
    if json {
        return print::json(told);
    }
    let Told { step, files, tensors, bytes } = told;
    let first = step.map(|step| ("step", step.to_string()));
    let first = first.or_else(|| files.as_ref().map(|files| ("files", files.len().to_string())));
    let mut rows: Vec<_> = first.iter().map(|(name, value)| print::row([name, value])).collect();
    rows.push(print::row(["tensors", &tensors.to_string()]));
    rows.push(print::row(["size", &format_bytes(*bytes)]));
    print::table(&rows);
    Ok(())
}

fn show_files(exported: &Exported, json: bool) -> Result<()> {
    if json {
        return print::json(exported);
    }
    let Exported { files, tensors, bytes, shared_bytes, streamed, differing } = exported;
    let mut rows = vec![
        print::row(["files", &files.len().to_string()]),
        print::row(["tensors", &tensors.to_string()]),
        print::row(["size", &format_bytes(*bytes)]),
    ];
    if *shared_bytes > 0 {
        rows.push(print::row(["shared, not read", &format_bytes(*shared_bytes)]));
    }
    rows.extend(streamed.iter().map(|name| print::row(["in too many pieces to share", name])));
    rows.extend(differing.iter().map(|name| print::row(["another on other ranks", name])));
    print::table(&rows);
    Ok(())
}

fn show_step(imported: &Imported, json: bool) -> Result<()> {
    if json {
        return print::json(imported);
    }
    let Imported { step, tensors, bytes, warnings: _ } = imported;
    print::table(&[
        print::row(["step", &step.to_string()]),
        print::row(["tensors", &tensors.to_string()]),
        print::row(["size", &format_bytes(*bytes)]),
    ]);
    Ok(())
}
