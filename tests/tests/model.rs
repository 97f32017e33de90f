//! A mount against a plain folder: the same random operations give the same results and leave the same tree.
#![allow(clippy::print_stderr, reason = "a failing test tells people what it saw")]

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use forebay_tests::cloud::Cloud;
use forebay_tests::s3::Server;
use forebay_tests::{Door, Mount, Scratch, Seeded, assert_same_trees, require_fuse, scale, shell};
use rand::{Rng, RngExt};

/// One operation, on paths relative to either root.
#[derive(Debug, Clone)]
enum Operation {
    Write { path: PathBuf, offset: u64, bytes: Vec<u8>, sync: bool },
    Append { path: PathBuf, bytes: Vec<u8> },
    Truncate { path: PathBuf, size: u64 },
    Replace { path: PathBuf, bytes: Vec<u8> },
    Read { path: PathBuf, offset: u64, length: usize },
    MakeFolder { path: PathBuf },
    Remove { path: PathBuf },
    RemoveFolder { path: PathBuf },
    Rename { from: PathBuf, to: PathBuf },
    Link { from: PathBuf, to: PathBuf },
    Symlink { path: PathBuf, target: PathBuf },
    Mode { path: PathBuf, mode: u32 },
    List { path: PathBuf },
}

/// Few names, so that operations meet.
fn path(rng: &mut impl Rng) -> PathBuf {
    let depth = rng.random_range(1..4);
    (0..depth).map(|_| ["a", "b", "c", "d e", "ü"][rng.random_range(0..5)]).collect()
}

fn bytes(rng: &mut impl Rng) -> Vec<u8> {
    let length = match rng.random_range(0..10) {
        0 => 0,
        1..7 => rng.random_range(1..5000),
        7..9 => rng.random_range(5000..300_000),
        _ => rng.random_range(4 << 20..9 << 20),
    };
    let mut bytes = vec![0; length];
    rng.fill_bytes(&mut bytes);
    bytes
}

fn operation(rng: &mut impl Rng) -> Operation {
    let offset = |rng: &mut dyn Rng| u64::from(rng.next_u32()) % 600_000;
    match rng.random_range(0..100) {
        0..18 => Operation::Write {
            path: path(rng),
            offset: offset(rng),
            bytes: bytes(rng),
            sync: rng.random_bool(0.3),
        },
        18..30 => Operation::Append { path: path(rng), bytes: bytes(rng) },
        30..37 => Operation::Truncate { path: path(rng), size: offset(rng) },
        37..50 => Operation::Replace { path: path(rng), bytes: bytes(rng) },
        50..60 => Operation::Read { path: path(rng), offset: offset(rng), length: 200_000 },
        60..70 => Operation::MakeFolder { path: path(rng) },
        70..76 => Operation::Remove { path: path(rng) },
        76..79 => Operation::RemoveFolder { path: path(rng) },
        79..88 => Operation::Rename { from: path(rng), to: path(rng) },
        88..92 => Operation::Link { from: path(rng), to: path(rng) },
        92..94 => Operation::Symlink { path: path(rng), target: path(rng) },
        94..97 => Operation::Mode { path: path(rng), mode: 0o600 | rng.random_range(0..0o100) },
        _ => Operation::List { path: path(rng) },
    }
}

/// Does `operation` below `root`; the answer is what a program can see of it.
fn apply(root: &Path, operation: &Operation) -> Result<Vec<u8>, Option<i32>> {
    let done = match operation {
        Operation::Write { path, offset, bytes, sync } => write(&root.join(path), *offset, bytes, *sync),
        Operation::Append { path, bytes } => {
            let file = OpenOptions::new().append(true).create(true).open(root.join(path));
            file.and_then(|mut file| io::Write::write_all(&mut file, bytes)).map(|()| Vec::new())
        }
        Operation::Truncate { path, size } => {
            let file = OpenOptions::new().write(true).open(root.join(path));
            file.and_then(|file| file.set_len(*size)).map(|()| Vec::new())
        }
        Operation::Replace { path, bytes } => fs::write(root.join(path), bytes).map(|()| Vec::new()),
        Operation::Read { path, offset, length } => read(&root.join(path), *offset, *length),
        Operation::MakeFolder { path } => fs::create_dir(root.join(path)).map(|()| Vec::new()),
        Operation::Remove { path } => fs::remove_file(root.join(path)).map(|()| Vec::new()),
        Operation::RemoveFolder { path } => fs::remove_dir(root.join(path)).map(|()| Vec::new()),
        Operation::Rename { from, to } => fs::rename(root.join(from), root.join(to)).map(|()| Vec::new()),
        Operation::Link { from, to } => fs::hard_link(root.join(from), root.join(to)).map(|()| Vec::new()),
        Operation::Symlink { path, target } => symlink(target, root.join(path)).map(|()| Vec::new()),
        Operation::Mode { path, mode } => {
            fs::set_permissions(root.join(path), fs::Permissions::from_mode(*mode)).map(|()| Vec::new())
        }
        Operation::List { path } => list(&root.join(path)),
    };
    done.map_err(|error| error.raw_os_error())
}

fn write(path: &Path, offset: u64, bytes: &[u8], sync: bool) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    file.write_all_at(bytes, offset)?;
    if sync {
        file.sync_all()?;
    }
    Ok(Vec::new())
}

fn read(path: &Path, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let file = File::open(path)?;
    let mut filled = 0;
    while filled < length {
        match file.read_at(&mut bytes[filled..], offset + filled as u64)? {
            0 => break,
            more => filled += more,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn list(path: &Path) -> io::Result<Vec<u8>> {
    let entries = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name()));
    let mut names: Vec<_> = entries.collect::<io::Result<_>>()?;
    names.sort();
    Ok(format!("{names:?}").into_bytes())
}

#[test]
fn random_operations_do_what_a_plain_folder_does() {
    if require_fuse("random_operations_do_what_a_plain_folder_does") {
        let bucket = Scratch::new();
        compare_with_plain(&format!("file://{}", bucket.path().display()), &[], 3 * scale());
    }
}

#[test]
fn random_operations_on_s3_do_what_a_plain_folder_does() {
    if require_fuse("random_operations_on_s3_do_what_a_plain_folder_does") {
        let server = Server::for_volume();
        compare_with_plain(&format!("s3://{}/a/prefix", server.create_bucket()), &server.envs(), scale());
    }
}

/// Requests that fail, come late, break off or lose their answers cost time and nothing else.
#[test]
fn random_operations_on_a_troubled_store_do_what_a_plain_folder_does() {
    if !require_fuse("random_operations_on_a_troubled_store_do_what_a_plain_folder_does") {
        return;
    }
    let server = Server::for_volume();
    let door = Door::new(server.address()).expect("loopback has free ports");
    let url = format!("s3://{}/a/prefix", server.create_bucket());
    let mut rng = Seeded::new();
    door.trouble(rng.random(), 10);
    compare_with_plain(&url, &server.envs_at(door.endpoint()), scale());
    assert!(door.troubles().values().sum::<usize>() >= 20, "{:?}", door.troubles());
}

/// The same troubles on the way to Azure's protocol.
#[test]
fn random_operations_on_a_troubled_azure_do_what_a_plain_folder_does() {
    if let Some(cloud) = Cloud::azure() {
        compare_a_troubled_cloud(cloud, "random_operations_on_a_troubled_azure_do_what_a_plain_folder_does");
    }
}

/// And to Google's.
#[test]
fn random_operations_on_a_troubled_google_do_what_a_plain_folder_does() {
    let cloud = Cloud::google_in_dialect();
    compare_a_troubled_cloud(cloud, "random_operations_on_a_troubled_google_do_what_a_plain_folder_does");
}

fn compare_a_troubled_cloud(cloud: &Cloud, test: &str) {
    if !require_fuse(test) {
        return;
    }
    let door = Door::new(cloud.address()).expect("loopback has free ports");
    let url = cloud.create_bucket("a/prefix").to_string();
    let mut rng = Seeded::new();
    door.trouble(rng.random(), 10);
    compare_with_plain(&url, &cloud.envs_at(door.endpoint()), scale());
    assert!(door.troubles().values().sum::<usize>() >= 20, "{:?}", door.troubles());
}

/// Applies the same operations to a mount of `url` and to a plain folder, and mounts again after each round.
fn compare_with_plain(url: &str, variables: &[(String, String)], rounds: usize) {
    let mut rng = Seeded::new();
    let scratch = Scratch::new();
    let plain = scratch.folder("plain");
    let mut mount = Mount::new(&scratch.join("home"), url, &scratch.join("mnt"), &[], variables);
    for round in 0..rounds {
        for step in 0..150 {
            let operation = operation(&mut *rng);
            let expected = apply(&plain, &operation);
            let got = within_deadline(&mount, || apply(mount.path(), &operation));
            assert!(expected == got, "round {round} step {step}: {}", story(&operation, &expected, &got));
        }
        within_deadline(&mount, || assert_same_trees(&plain, mount.path(), true));
        mount.unmount();
        mount.remount(&scratch.join(&format!("home-{round}")));
        within_deadline(&mount, || assert_same_trees(&plain, mount.path(), true));
    }
    mount.unmount();
}

/// Longest that any call may take: a few deadlines of the store, of 30 s each, one after another.
const DEADLINE: Duration = Duration::from_secs(150);

/// Does `work` on a mount, which is killed when that takes too long, so that a call that hangs fails.
fn within_deadline<T>(mount: &Mount, work: impl FnOnce() -> T) -> T {
    let (done, watched) = mpsc::channel::<()>();
    std::thread::scope(|threads| {
        threads.spawn(move || {
            if watched.recv_timeout(DEADLINE) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("a call took longer than {DEADLINE:?}: the mount is killed");
                shell(Path::new("/"), &format!("kill -KILL {}", mount.pid()));
            }
        });
        // Dropped with the closure's end, also by a panic in `work`.
        let _done = done;
        work()
    })
}

/// A difference in words, long byte strings shortened.
fn story(operation: &Operation, expected: &impl std::fmt::Debug, got: &impl std::fmt::Debug) -> String {
    let short = |value: String| value.chars().take(300).collect::<String>();
    let parts = [format!("{operation:?}"), format!("{expected:?}"), format!("{got:?}")].map(short);
    format!("{}\n expected {}\n got {}", parts[0], parts[1], parts[2])
}
