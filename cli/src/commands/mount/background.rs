//! A mount that outlives the command that made it.
//!
//! The command starts the same program again with `--in-background`; that process leaves the terminal's session,
//! serves the mount, and says on its stdout, in one line of JSON, when it serves or why it cannot, and what it warned
//! of meanwhile. Its stderr is a log file.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use forebay_core::{Error, ErrorKind, Result};
use forebay_fuse::MountPoint;
use serde::{Deserialize, Serialize};

use super::options::Plan;
use super::{MountArguments, serve};
use crate::arguments::Global;
use crate::places;
use crate::report::{self, Failure};
use crate::settings::Settings;

/// What the serving process says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    /// The mount can be used; these are the warnings of its start.
    Serving { warnings: Vec<String> },
    /// It cannot.
    Failed(Failure),
}

/// Starts the serving process and waits for its outcome.
#[allow(clippy::print_stdout, reason = "the result is data")]
pub(super) fn start(plan: &Plan, json: bool) -> Result<ExitCode> {
    if plan.fake {
        return Ok(ExitCode::SUCCESS);
    }
    let log_path = log_path(plan);
    let log = open_log(&log_path)?;
    let program = std::env::current_exe().map_err(|error| Error::from(error).context("own program file"))?;
    let mut child = Command::new(program)
        .args(serving_arguments(std::env::args_os()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(|error| Error::from(error).context("cannot start the serving process"))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    match serde_json::from_str(&line) {
        Ok(Outcome::Serving { warnings }) => {
            warnings.iter().for_each(|warning| report::warning(warning, json));
            if json {
                let result = serde_json::json!({
                    "source": plan.source, "mount_point": shown(&plan.target), "pid": child.id(), "log": log_path,
                });
                println!("{result}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Ok(Outcome::Failed(failure)) => {
            failure.print(json);
            Ok(ExitCode::FAILURE)
        }
        Err(_) => {
            let status = child.wait()?;
            Err(Error::new(ErrorKind::Bug, format!("the serving process ended before it served ({status})"))
                .with_hint(format!("see {}", log_path.display())))
        }
    }
}

/// The same command line, marked for the process that serves.
fn serving_arguments(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let words: Vec<OsString> = words.collect();
    let mut words = match super::is_helper(&words) {
        true => super::helper_arguments(&words),
        false => words,
    };
    words.remove(0);
    words.push("--in-background".into());
    words
}

/// Runs in the process that serves.
pub(super) fn serve(global: &Global, arguments: &MountArguments) -> Result<ExitCode> {
    // Fails only in a process that leads a session already, which is what is wanted.
    let _ = rustix::process::setsid();
    let prepared = Settings::load(global).and_then(|settings| {
        let plan = Plan::new(arguments, &settings)?;
        let filter = global.log.as_deref().or(plan.log.as_deref());
        let warnings = crate::log::start_keeping_warnings(filter)?;
        // A working directory would be kept from being unmounted.
        std::env::set_current_dir("/")?;
        Ok((plan, warnings))
    });
    let mut told = false;
    let result = prepared.and_then(|(plan, warnings)| {
        serve::serve(plan, |_| {
            told = true;
            tell(&Outcome::Serving { warnings: warnings.take() })
        })
    });
    match result {
        Err(failure) if !told => {
            tell(&Outcome::Failed(Failure::from(&failure)))?;
            Ok(ExitCode::FAILURE)
        }
        result => result,
    }
}

fn tell(outcome: &Outcome) -> Result<()> {
    let mut line = serde_json::to_vec(outcome).map_err(|error| Error::bug(error.to_string()))?;
    line.push(b'\n');
    // Whoever started this process may be gone; the mount serves all the same.
    let _ = std::io::stdout().write_all(&line);
    let _ = std::io::stdout().flush();
    Ok(())
}

fn shown(target: &MountPoint) -> PathBuf {
    match target {
        MountPoint::Directory(directory) => directory.clone(),
        MountPoint::Device(number) => format!("/dev/fd/{number}").into(),
    }
}

fn log_path(plan: &Plan) -> PathBuf {
    places::mount_log(&plan.volume.state_directory, &shown(&plan.target))
}

fn open_log(path: &Path) -> Result<File> {
    let made = path.parent().map_or(Ok(()), fs::create_dir_all);
    made.and_then(|()| OpenOptions::new().create(true).append(true).open(path)).map_err(|error| {
        Error::from(error)
            .context(format!("cannot write the log {}", path.display()))
            .with_hint("choose a directory that you can write to with --state-dir, or mount with -f")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_serving_process_gets_the_same_command_line() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        for (given, expected) in [
            ("forebay --log debug mount a b -o ro", "--log debug mount a b -o ro --in-background"),
            ("/sbin/mount.forebay a b -n -o ro", "mount a b -o ro --in-background"),
        ] {
            assert_eq!(serving_arguments(words(given).into_iter()), words(expected));
        }
    }
}
