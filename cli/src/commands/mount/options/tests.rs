//! Options as users write them.

use clap::Parser;
use forebay_core::ErrorKind;

use super::*;
use crate::arguments::{Arguments, Command};

fn plan(line: &str) -> Result<Plan> {
    let scratch = tempfile::tempdir().expect("scratch");
    let directory = scratch.path().to_str().expect("UTF-8");
    let words = ["forebay", "mount", "file:///bucket", directory].into_iter().chain(line.split_whitespace());
    let command = Arguments::try_parse_from(words).expect("the command line parses").command;
    let Command::Mount(arguments) = command else { panic!("another command: {command:?}") };
    Plan::new(&arguments, &Settings::default())
}

fn refused(line: &str, message: &str, hint: &str) {
    let failure = plan(line).expect_err(line);
    assert_eq!(failure.kind(), ErrorKind::Invalid, "{line}: {failure}");
    assert!(failure.message().contains(message), "{line}: {failure}");
    assert!(failure.hint().expect("a hint").contains(hint), "{line}: {:?}", failure.hint());
}

#[test]
fn fstab_can_say_what_a_command_line_can() {
    let shown = |line: &str| {
        let plan = plan(line).expect("a plan");
        format!("{:?} {:?}", plan.mount, plan.volume)
    };
    let long = "--allow-other --take-over --relatime --cache-dir /c --cache-size 2GiB --memory 512MiB --state-dir /s --uid 7 \
         --gid 8 --file-mode 0640 --dir-mode 0750 --ttl 2.5 --trash 7d --writeback --writeback-size 3GiB";
    let short = "-o allow_other,take_over,noatime,relatime,cache_dir=/c,cache_size=2GiB,memory=512MiB \
         -o state_dir=/s,uid=7,gid=8,file_mode=0640,dir_mode=0750,ttl=2.5,trash=7d,writeback,writeback_size=3GiB";
    assert_eq!(shown(long), shown(short));
    assert_eq!(shown("--read-only --dataset"), shown("-o ro,dataset"));
}

#[test]
fn options_reach_the_plan() {
    let plan =
        plan("-o ro,plain_type,fsname=/dev/x,threads=3,ttl=0,memory=1GiB,noexec,dev,suid,file_mode=600")
            .expect("a plan");
    assert!(plan.mount.read_only && plan.volume.read_only && !plan.mount.dataset);
    assert!(plan.mount.plain_type && plan.mount.devices && plan.mount.set_id && !plan.mount.executables);
    assert_eq!((plan.mount.source.as_str(), plan.mount.threads), ("/dev/x", Some(3)));
    assert_eq!(plan.mount.ttl, Some(Duration::ZERO));
    assert_eq!((plan.volume.memory_bytes, plan.volume.import.file_mode), (1 << 30, 0o600));
}

#[test]
fn a_long_option_goes_before_a_short_one() {
    assert_eq!(plan("-o uid=1 --uid 2").expect("a plan").volume.import.uid, 2);
}

#[test]
fn options_of_other_programs_are_let_pass() {
    plan("-o rw,_netdev,nofail,noatime,x-systemd.automount,comment=hi,defaults,,").expect("a plan");
}

#[test]
fn nonsense_is_refused_with_a_hint() {
    refused("-o no_such_thing", "unknown mount option `no_such_thing`", "--help");
    refused("-o uid", "`uid` needs a value", "uid=VALUE");
    refused("-o threads=0", "`threads`: 0 is not from 1 to 512", "leave it out");
    refused("-o threads=100000", "`threads`: 100000 is not", "leave it out");
    refused("-o uid=me", "`me` is not a number", "uid=NUMBER");
    refused("--file-mode 99", "no octal mode", "file_mode=0644");
    refused("--memory lots", "`lots` is not a size", "512MiB");
    refused("--ttl=-1", "ttl of -1", "0 to");
    for fixed in ["-o ro", "--read-only", "--dataset"] {
        refused(&format!("--writeback {fixed}"), "nothing to stage", "leave out either");
    }
}
