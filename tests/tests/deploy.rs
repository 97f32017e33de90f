//! The files of `deploy/` say what the program understands.

use std::collections::HashMap;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_tests::meta::{free_address, join_secret};
use forebay_tests::process::{output, unmount};
use forebay_tests::{Forebay, Scratch, repository, require_fuse, shell};

/// Longest that a mount may take to say that it serves.
const DEADLINE: Duration = Duration::from_secs(60);

fn read(name: &str) -> String {
    let path = repository().join("deploy").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Runs `forebay WORDS` with everything checked and nothing mounted, the mount point being one that exists.
fn accepted(scratch: &Scratch, words: &[String]) {
    let (last, others) = words.split_last().expect("a command line");
    assert!(last.starts_with("/mnt/"), "the mount point comes last: {words:?}");
    let folder = scratch.folder("mnt").display().to_string();
    let line = others.iter().map(String::as_str).chain([folder.as_str(), "-o", "fake"]);
    Forebay::new(&scratch.folder("home"), line).run().succeeded();
}

#[test]
fn the_unit_runs_a_command_line_that_is_understood() {
    let scratch = Scratch::new();
    let (unit, settings) = (read("systemd/forebay@.service"), read("systemd/datasets.env"));
    let values: HashMap<&str, &str> = settings
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once('='))
        .collect();
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("it starts something");
    let words: Vec<String> = start
        .split(' ')
        .skip(1)
        .flat_map(|word| match word.strip_prefix('$') {
            Some(name) => values[name.trim_matches(['{', '}'])].split(' ').map(str::to_owned).collect(),
            None => vec![word.to_owned()],
        })
        .collect();
    accepted(&scratch, &words);
}

#[test]
fn systemd_finds_no_fault_in_the_unit() {
    if output(Command::new("systemd-analyze").arg("--version")).is_err() {
        return forebay_tests::settings::skip("systemd_finds_no_fault_in_the_unit", "no systemd-analyze");
    }
    let scratch = Scratch::new();
    let program = Forebay::binary().display().to_string();
    let unit = read("systemd/forebay@.service").replace("/usr/bin/forebay", &program);
    std::fs::write(scratch.join("forebay@datasets.service"), unit).expect("the scratch folder is writable");
    let outcome = shell(scratch.path(), "systemd-analyze verify --man=no ./forebay@datasets.service");
    let told = outcome.stderr.lines().filter(|line| line.contains("forebay@")).collect::<Vec<_>>();
    assert!(outcome.code == Some(0) && told.is_empty(), "{outcome}");
}

/// What stands in a manifest behind `args:`.
fn arguments(manifest: &str) -> Vec<String> {
    let lines = manifest.lines().skip_while(|line| line.trim() != "args:").skip(1);
    lines.map_while(|line| line.trim().strip_prefix("- ")).map(str::to_owned).collect()
}

/// They are run as they stand, over a folder.
#[test]
fn the_pods_that_serve_a_tree_run_a_command_line_that_is_understood() {
    let scratch = Scratch::new();
    let (bucket, secret) = (scratch.folder("bucket").display().to_string(), join_secret(scratch.path()));
    let replaced = [
        ("s3://bucket/shared", format!("file://{bucket}")),
        ("/etc/forebay/join/secret", secret),
        ("/var/lib/forebay", scratch.folder("state").display().to_string()),
        ("$(POD_IP)", "127.0.0.1".to_owned()),
    ];
    let replace = |word: String| replaced.iter().fold(word, |word, (from, to)| word.replace(from, to));
    let words: Vec<String> = arguments(&read("kubernetes/meta.yaml")).into_iter().map(replace).collect();
    let listen = format!("--join-listen={}", free_address());
    let words = words.into_iter().chain([listen]);
    let log = scratch.join("log");
    let mut process = Forebay::new(&scratch.folder("home"), words).spawn(&log);
    let started = Instant::now();
    let told = || std::fs::read_to_string(&log).unwrap_or_default();
    while !told().contains("other mounts may join") {
        assert!(process.try_wait().expect("a child").is_none() && started.elapsed() < DEADLINE, "{}", told());
        std::thread::sleep(Duration::from_millis(10));
    }
    shell(scratch.path(), &format!("kill -TERM {}", process.id())).succeeded();
    assert!(process.wait().expect("it ends").success(), "{}", told());
}

#[test]
fn the_pods_run_command_lines_that_are_understood() {
    let scratch = Scratch::new();
    let manifest = read("kubernetes/mount.yaml");
    let words = arguments(&manifest);
    assert!(manifest.contains(words.last().expect("a command line").as_str()));
    accepted(&scratch, &words);
    let probe =
        manifest.lines().find_map(|line| line.trim().strip_prefix("command: [forebay, ")).expect("a probe");
    let folder = scratch.folder("mnt").display().to_string();
    let words = probe.trim_end_matches(']').replace("/mnt/forebay/datasets", &folder);
    let outcome = Forebay::new(&scratch.folder("home"), words.split(", ")).run();
    outcome.failed_with("no forebay mount", "--state-dir");
}

/// `Type=notify`: the unit counts as started when the mount serves.
#[test]
fn a_supervisor_is_told_when_the_mount_serves() {
    if !require_fuse("a_supervisor_is_told_when_the_mount_serves") {
        return;
    }
    let scratch = Scratch::new();
    let socket = UnixDatagram::bind(scratch.join("notify")).expect("a socket");
    socket.set_read_timeout(Some(DEADLINE)).expect("a deadline");
    let (bucket, mnt) = (scratch.folder("bucket"), scratch.folder("mnt"));
    std::fs::write(bucket.join("object"), "bytes").expect("the bucket is writable");
    let (source, folder) = (format!("file://{}", bucket.display()), mnt.display().to_string());
    let variable = ("NOTIFY_SOCKET".to_owned(), scratch.join("notify").display().to_string());
    let command = Forebay::new(&scratch.folder("home"), ["mount", "-f", &source, &folder]).envs(&[variable]);
    let mut process = command.spawn(&scratch.join("log"));
    let mut told = [0; 64];
    let length = socket.recv(&mut told).expect("the mount says that it serves");
    assert_eq!(&told[..length], b"READY=1\n");
    assert_eq!(std::fs::read(mnt.join("object")).expect("it serves"), b"bytes");
    unmount(&scratch.join("mnt"));
    assert!(process.wait().expect("it ends").success());
}
