//! One random sequence of operations on a tmpfs, on mounts and on the file-system layer without a kernel: the same
//! results, and the same tree in the end. Where they differ, the sequence is played again with parts left out, and the
//! shortest that still differs is shown.
#![allow(clippy::print_stderr, reason = "a failing test tells people what it saw")]

use std::fs::File;
use std::path::PathBuf;

use forebay_tests::cloud::Cloud;
use forebay_tests::s3::Server;
use forebay_tests::settings::skip;
use forebay_tests::{DISK_CACHE, Door, EARLY, EARLY_AND_SOON, Scratch, Seeded, require_fuse, scale};
use rand::RngExt;

#[path = "model/operation.rs"]
mod operation;
#[path = "model/calls.rs"]
mod calls;
#[path = "model/neighbour.rs"]
mod neighbour;
#[path = "model/syscalls.rs"]
mod syscalls;
#[path = "model/layer.rs"]
mod layer;
#[path = "model/subject.rs"]
mod subject;

use calls::{Answer, Program, Tree};
use operation::{Content, Operation, sequence};
use subject::{MOST_REPLAYS, Mounted, Subject, Unmounted, check};
use syscalls::{Folder, Tmpfs};

/// Little enough for a sequence to reach the ceiling now and then.
const WRITEBACK: &[&str] = &["--writeback", "--writeback-size", "12MiB"];

/// Whether `test` can run here.
fn can_run(test: &str) -> bool {
    require_fuse(test) && Tmpfs::new().map(drop).map_err(|why| skip(test, &why)).is_ok()
}

/// How a mount is compared.
#[derive(Clone, Copy, Default)]
struct Case<'a> {
    options: &'a [&'a str],
    variables: &'a [(String, String)],
    /// All directories are packed; segments are compacted whenever the machine changes.
    packed: bool,
    /// Another process serves the tree.
    joined: bool,
    /// The layer without a kernel is compared, too.
    layer: bool,
}

impl Case<'_> {
    /// Compares mounts of prefixes below `url`. Each remount is on another machine.
    fn compare(self, url: &str, rounds: usize) {
        let (mut rng, mut plays) = (Seeded::new(), 0);
        let mut operations = sequence(&mut *rng, rounds);
        if self.joined {
            operations.iter_mut().for_each(Operation::lock_as_a_process);
        }
        let checked = check(&operations, || {
            plays += 1;
            let make = match self {
                Self { packed: true, .. } => Mounted::packed,
                Self { joined: true, .. } => Mounted::joined,
                _ => Mounted::new,
            };
            let mount = make(&format!("{url}/{plays}"), self.options, self.variables);
            let mut subjects: Vec<Box<dyn Subject>> = vec![Box::new(mount)];
            if self.layer {
                subjects.push(Box::new(Unmounted::new(false)));
            }
            subjects
        });
        checked.unwrap_or_else(|failure| panic!("{failure}"));
    }

    fn compare_on_folder(self, test: &str, rounds: usize) {
        if can_run(test) {
            let bucket = Scratch::new();
            self.compare(&format!("file://{}", bucket.path().display()), rounds);
        }
    }

    /// While the store fails, delays and loses answers, which costs time and nothing else.
    fn compare_on_troubled_s3(self, test: &str) {
        if can_run(test) {
            let server = Server::for_volume();
            let door = Door::new(server.address()).expect("loopback has free ports");
            let url = format!("s3://{}/a/prefix", server.create_bucket());
            let variables = server.envs_at(door.endpoint());
            under_trouble(&door, &url, |url| Case { variables: &variables, ..self }.compare(url, scale()));
        }
    }
}

/// One sequence on a tmpfs, on a mount and on the layer without a kernel.
#[test]
fn random_operations_do_what_a_plain_folder_does() {
    let case = Case { options: DISK_CACHE, layer: true, ..Case::default() };
    case.compare_on_folder("random_operations_do_what_a_plain_folder_does", 3 * scale());
}

/// The same where files leave for the store in the middle of what is done to them.
#[test]
fn random_operations_on_what_leaves_early_do_what_a_plain_folder_does() {
    let test = "random_operations_on_what_leaves_early_do_what_a_plain_folder_does";
    Case { options: &["--config", EARLY], ..Case::default() }.compare_on_folder(test, 2 * scale());
    let options = &["--writeback", "--writeback-size", "1MiB", "--config", EARLY_AND_SOON];
    Case { options, ..Case::default() }.compare_on_folder(test, 2 * scale());
}

/// The same where another process has the tree.
#[test]
fn random_operations_on_a_mount_that_joined_do_what_a_plain_folder_does() {
    let test = "random_operations_on_a_mount_that_joined_do_what_a_plain_folder_does";
    for options in [DISK_CACHE, &["--config", EARLY]] {
        Case { options, joined: true, ..Case::default() }.compare_on_folder(test, 2 * scale());
    }
}

/// The same while the store fails for both.
#[test]
fn random_operations_on_a_mount_that_joined_over_a_troubled_store_do_what_a_plain_folder_does() {
    let test = "random_operations_on_a_mount_that_joined_over_a_troubled_store_do_what_a_plain_folder_does";
    Case { options: DISK_CACHE, joined: true, ..Case::default() }.compare_on_troubled_s3(test);
}

/// The same without a mount, which is fast.
#[test]
fn random_operations_on_the_layer_without_a_kernel_do_what_a_plain_folder_does() {
    if !can_run("random_operations_on_the_layer_without_a_kernel_do_what_a_plain_folder_does") {
        return;
    }
    for round in 0..4 * scale() {
        let mut rng = Seeded::new();
        let operations = sequence(&mut *rng, 2);
        // In every second round files leave for the store in the middle of what is done to them.
        let checked = check(&operations, || vec![Box::new(Unmounted::new(round % 2 == 1))]);
        checked.unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn random_operations_with_a_trash_do_what_a_plain_folder_does() {
    let case = Case { options: &["--trash", "1h"], ..Case::default() };
    case.compare_on_folder("random_operations_with_a_trash_do_what_a_plain_folder_does", 2 * scale());
}

#[test]
fn random_operations_in_packed_directories_do_what_a_plain_folder_does() {
    let case = Case { packed: true, ..Case::default() };
    case.compare_on_folder(
        "random_operations_in_packed_directories_do_what_a_plain_folder_does",
        3 * scale(),
    );
}

#[test]
fn random_operations_in_packed_directories_that_are_written_back_do_what_a_plain_folder_does() {
    let test = "random_operations_in_packed_directories_that_are_written_back_do_what_a_plain_folder_does";
    Case { options: WRITEBACK, packed: true, ..Case::default() }.compare_on_folder(test, 2 * scale());
}

#[test]
fn random_operations_in_packed_directories_on_a_troubled_store_do_what_a_plain_folder_does() {
    let test = "random_operations_in_packed_directories_on_a_troubled_store_do_what_a_plain_folder_does";
    Case { packed: true, ..Case::default() }.compare_on_troubled_s3(test);
}

/// The other machine has what was unmounted and nothing else.
#[test]
fn random_operations_that_are_written_back_do_what_a_plain_folder_does() {
    let case = Case { options: WRITEBACK, ..Case::default() };
    case.compare_on_folder(
        "random_operations_that_are_written_back_do_what_a_plain_folder_does",
        2 * scale(),
    );
}

#[test]
fn random_operations_on_s3_do_what_a_plain_folder_does() {
    if can_run("random_operations_on_s3_do_what_a_plain_folder_does") {
        let server = Server::for_volume();
        let variables = server.envs();
        let case = Case { options: DISK_CACHE, variables: &variables, ..Case::default() };
        case.compare(&format!("s3://{}/a/prefix", server.create_bucket()), scale());
    }
}

#[test]
fn random_operations_on_a_troubled_store_do_what_a_plain_folder_does() {
    let case = Case { options: DISK_CACHE, ..Case::default() };
    case.compare_on_troubled_s3("random_operations_on_a_troubled_store_do_what_a_plain_folder_does");
}

#[test]
fn random_operations_written_back_to_a_troubled_store_do_what_a_plain_folder_does() {
    let case = Case { options: WRITEBACK, ..Case::default() };
    case.compare_on_troubled_s3(
        "random_operations_written_back_to_a_troubled_store_do_what_a_plain_folder_does",
    );
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
    if can_run(test) {
        let door = Door::new(cloud.address()).expect("loopback has free ports");
        let url = cloud.create_bucket("a/prefix").to_string();
        let variables = cloud.envs_at(door.endpoint());
        let case = Case { variables: &variables, ..Case::default() };
        under_trouble(&door, &url, |url| case.compare(url, scale()));
    }
}

/// Plays below `url` until the store has failed often enough. How many requests a play makes is chance, too.
fn under_trouble(door: &Door, url: &str, mut play: impl FnMut(&str)) {
    const ENOUGH: usize = 20;
    const MOST_PLAYS: usize = 5;
    let mut rng = Seeded::new();
    door.trouble(rng.random(), 10);
    for number in 0..MOST_PLAYS {
        play(&format!("{url}/{number}"));
        if door.troubles().values().sum::<usize>() >= ENOUGH {
            return;
        }
    }
    panic!("the store failed too seldom: {:?}", door.troubles());
}

/// A folder that loses the last byte of what is appended to a file that was truncated since it was renamed.
struct Faulty {
    tmpfs: Tmpfs,
    program: Program<Folder>,
    renamed: Vec<PathBuf>,
    cut: Vec<PathBuf>,
}

impl Faulty {
    fn new() -> Self {
        let tmpfs = Tmpfs::new().expect("a tmpfs can be mounted");
        let program = Program::new(tmpfs.calls());
        Self { tmpfs, program, renamed: Vec::new(), cut: Vec::new() }
    }
}

impl Subject for Faulty {
    fn name(&self) -> &'static str {
        "a faulty folder"
    }

    fn apply(&mut self, operation: &Operation) -> Answer {
        let done = self.program.run(operation);
        match operation {
            Operation::Rename { to, .. } if done.is_ok() => self.renamed.push(to.clone()),
            Operation::Truncate { path, .. } if done.is_ok() && self.renamed.contains(path) => {
                self.cut.push(path.clone());
            }
            Operation::Append { path, .. } if done.is_ok() && self.cut.contains(path) => {
                let path = self.tmpfs.path().join(path);
                let size = path.metadata().expect("it was appended to").len();
                let file = File::options().write(true).open(path).expect("it was appended to");
                file.set_len(size.saturating_sub(1)).expect("cut");
            }
            _ => {}
        }
        done
    }

    fn tree(&mut self) -> Tree {
        self.program.tree().expect("a tmpfs can be read")
    }

    fn move_on(&mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.program.close_all().expect("files close");
    }
}

/// The model finds a fault that takes three operations on one file, and tells it by few more than those.
#[test]
fn a_failing_sequence_is_made_short() {
    if !can_run("a_failing_sequence_is_made_short") {
        return;
    }
    let mut rng = Seeded::new();
    // No other operation knows these names.
    let (path, first) = (PathBuf::from("y"), PathBuf::from("z"));
    let bytes = Content(vec![7; 100]);
    let fault = [
        Operation::Replace { path: first.clone(), bytes: bytes.clone() },
        Operation::Rename { from: first, to: path.clone(), flags: 0 },
        Operation::Truncate { path: path.clone(), size: 1000 },
        Operation::Append { path, bytes },
    ];
    let mut operations = sequence(&mut *rng, 2);
    for (number, operation) in fault.into_iter().enumerate() {
        operations.insert(number * 40 + rng.random_range(0..40), operation);
    }
    let mut plays = 0;
    let fresh = || -> Vec<Box<dyn Subject>> {
        plays += 1;
        vec![Box::new(Faulty::new())]
    };
    let failure = check(&operations, fresh).expect_err("the fault shows");
    let shown: Vec<_> =
        failure.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    // As the fault was made, or as chance had made it before: always these, and what makes a file and looks at it.
    assert!((4..=6).contains(&shown.len()) && plays <= MOST_REPLAYS + 1, "{plays} plays\n{failure}");
    assert!(["Rename", "Truncate", "Append"].iter().all(|kind| shown.contains(kind)), "{failure}");
}
