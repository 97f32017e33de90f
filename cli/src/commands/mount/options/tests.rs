//! Options as users write them.

use clap::Parser;
use forebay_core::ErrorKind;

use super::*;
use crate::arguments::{Arguments, Command};

fn plan(line: &str) -> Result<Plan> {
    plan_with(line, &Settings::default())
}

fn plan_with(line: &str, settings: &Settings) -> Result<Plan> {
    let scratch = tempfile::tempdir().expect("scratch");
    let directory = scratch.path().to_str().expect("UTF-8");
    let words = ["forebay", "mount", "file:///bucket", directory].into_iter().chain(line.split_whitespace());
    let command = Arguments::try_parse_from(words).expect("the command line parses").command;
    let Command::Mount(arguments) = command else { panic!("another command: {command:?}") };
    Plan::new(&arguments, settings)
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
         --gid 8 --file-mode 0640 --dir-mode 0750 --ttl 2.5 --trash 7d --writeback --writeback-size 3GiB --storage-class STANDARD_IA \
         --peers a,b:7 --peer-secret /k --peer-listen :9 --peer-keep --peer-transport quic \
         --join-secret /j --join-listen :8 --join-address h:8 --join-only";
    let short = "-o allow_other,take_over,noatime,relatime,cache_dir=/c,cache_size=2GiB,memory=512MiB \
         -o state_dir=/s,uid=7,gid=8,file_mode=0640,dir_mode=0750,ttl=2.5,trash=7d,writeback,writeback_size=3GiB,storage_class=STANDARD_IA \
         -o peers=a;b:7,peer_secret=/k,peer_listen=:9,peer_keep,peer_transport=quic \
         -o join_secret=/j,join_listen=:8,join_address=h:8,join_only";
    assert_eq!(shown(long), shown(short));
    assert_eq!(shown("--read-only --dataset"), shown("-o ro,dataset"));
}

#[test]
fn options_reach_the_plan() {
    let plan = plan(
        "-o ro,anonymous,plain_type,fsname=/dev/x,threads=3,ttl=0,memory=1GiB,noexec,dev,suid,file_mode=600",
    )
    .expect("a plan");
    assert!(plan.mount.read_only && plan.volume.read_only && !plan.mount.dataset);
    assert!(plan.volume.store.anonymous);
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
        refused(&format!("--trash 1d {fixed}"), "nothing to keep", "leave out either");
        refused(&format!("--storage-class COLD {fixed}"), "writes nothing", "leave out either");
    }
}

/// They were taken, and did nothing.
#[test]
fn options_that_mean_nothing_without_others_or_beside_them_are_refused() {
    for cache in ["--cache-size 1GiB", "-o cache_size=1GiB"] {
        refused(cache, "`cache_size` without `cache_dir`", "--cache-dir");
    }
    for staged in ["--writeback-size 1GiB", "-o writeback_size=1GiB"] {
        refused(staged, "`writeback_size` without `writeback`", "--writeback");
    }
    for peer in ["peer-secret /k", "peer-listen :9", "peer-keep", "peer-transport quic"] {
        refused(&format!("--{peer}"), "without `peers`", "--peers");
    }
    refused("--peers a --peer-transport pigeon", "`pigeon`", "quic");
    for join in ["join-listen :9", "join-address h", "join-only"] {
        refused(&format!("--{join}"), "without `join_secret`", "--join-secret");
    }
    refused("--join-secret /k --dataset", "needs nobody's leave", "leave out either");
    for both in ["-o ro,rw", "-o rw -o ro", "-o rw --read-only"] {
        refused(both, "`rw` and `ro`", "leave out either");
    }
    // mount(8) gives `rw` wherever fstab has no `ro`.
    for fine in ["-o rw,dataset", "-o rw,read_only", "--trash 0 -o ro", "--cache-size 1GiB -o cache_dir=/c"] {
        plan(fine).expect(fine);
    }
    // The other half may stand in the file, whose own halves are for other mounts.
    let parse = |text: &str| Settings::parse(text, Path::new("/x.toml")).expect(text);
    let cache = parse("[volume.cache]\ndirectory = \"/c\"");
    plan_with("--cache-size 1GiB", &cache).expect("a plan");
    plan_with("", &parse("[volume.cache]\ndisk_bytes = 1073741824")).expect("a plan");
    plan_with("--writeback-size 1GiB", &parse("[volume.writeback]\nenabled = true")).expect("a plan");
    plan_with("-o ro", &parse("[volume]\ntrash_ms = 1000")).expect("a plan");
    plan_with("-o rw", &parse("[volume]\nread_only = true")).expect("a plan");
    let fixed =
        plan_with("--trash 1d", &parse("[volume]\nread_only = true")).expect_err("nothing is deleted");
    assert!(fixed.message().contains("nothing to keep"), "{fixed}");
}
