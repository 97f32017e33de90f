//! The `forebay` binary: reads the command line, runs one command, tells how it went.
//!
//! stdout carries data, stderr everything else. Exit code 0 is success, 1 a failure with an `error:` line and, where
//! there is one, a `hint:` line, 2 a command line that makes no sense.

mod report;
mod home;
mod places;
mod settings;
mod log;
mod print;
mod run;
mod mounts;
mod upkeep;
mod arguments;
mod commands;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::arguments::{Arguments, Command};

fn main() -> ExitCode {
    home::ensure();
    let words: Vec<OsString> = std::env::args_os().collect();
    // mount(8) runs `mount.forebay SOURCE DIRECTORY -o OPTIONS` for `forebay` lines of fstab.
    let words = match commands::mount::is_helper(&words) {
        true => commands::mount::helper_arguments(&words),
        false => words,
    };
    let arguments = match Arguments::try_parse_from(&words) {
        Ok(arguments) => arguments,
        // What does not parse says by its words alone how it is to be told.
        Err(failure) => {
            let json = words.iter().take_while(|word| *word != "--").any(|word| word == "--json");
            return report::usage(&failure, json);
        }
    };
    let json = arguments.global.json;
    match dispatch(arguments) {
        Ok(code) => code,
        Err(failure) => {
            report::failure(&failure, json);
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: Arguments) -> forebay_core::Result<ExitCode> {
    let Arguments { global, command } = arguments;
    match command {
        Command::Mount(arguments) => commands::mount::run(&global, &arguments),
        Command::Meta(arguments) => commands::meta::run(&global, &arguments),
        Command::Warmup(arguments) => commands::warmup::run(&global, &arguments),
        Command::Status(arguments) => commands::status::run(&global, &arguments),
        Command::Refresh(arguments) => commands::refresh::run(&global, &arguments),
        Command::Sync(arguments) => commands::sync::run(&global, &arguments),
        Command::Gc(arguments) => commands::gc::run(&global, &arguments),
        Command::Fsck(arguments) => commands::fsck::run(&global, &arguments),
        Command::Volume(command) => commands::volume::run(&global, &command),
        Command::Clone(arguments) => commands::clone::run(&global, &arguments),
        Command::Quota(command) => commands::quota::run(&global, &command),
        Command::Trash(command) => commands::trash::run(&global, &command),
        Command::Doctor(arguments) => commands::doctor::run(&global, &arguments),
        Command::Ckpt(command) => commands::ckpt::run(&global, &command),
        Command::Version => commands::version::run(&global),
    }
}
