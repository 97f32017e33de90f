//! A mount against a plain folder: the same random operations give the same results and leave the same tree. Where they
//! do not, the sequence is played again with parts left out, and the shortest that still fails is shown.
#![allow(clippy::print_stderr, reason = "a failing test tells people what it saw")]

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use forebay_tests::cloud::Cloud;
use forebay_tests::s3::Server;
use forebay_tests::{Door, Forebay, Mount, Scratch, Seeded, differences, require_fuse, scale, shell, shrink};
use rand::{Rng, RngExt};

/// Bytes to be written, which are not shown.
#[derive(Clone)]
struct Content(Vec<u8>);

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} random bytes", self.0.len())
    }
}

/// One operation, on paths relative to either root.
#[derive(Debug, Clone)]
enum Operation {
    Write {
        path: PathBuf,
        offset: u64,
        bytes: Content,
        sync: bool,
    },
    Append {
        path: PathBuf,
        bytes: Content,
    },
    Truncate {
        path: PathBuf,
        size: u64,
    },
    Replace {
        path: PathBuf,
        bytes: Content,
    },
    Read {
        path: PathBuf,
        offset: u64,
        length: usize,
    },
    MakeFolder {
        path: PathBuf,
    },
    Remove {
        path: PathBuf,
    },
    RemoveFolder {
        path: PathBuf,
    },
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
    Link {
        from: PathBuf,
        to: PathBuf,
    },
    Symlink {
        path: PathBuf,
        target: PathBuf,
    },
    Mode {
        path: PathBuf,
        mode: u32,
    },
    List {
        path: PathBuf,
    },
    /// Both trees are compared, before and after the volume is mounted on another machine.
    Remount,
}

/// Few names, so that operations meet.
fn path(rng: &mut impl Rng) -> PathBuf {
    let depth = rng.random_range(1..4);
    (0..depth).map(|_| ["a", "b", "c", "d e", "ü"][rng.random_range(0..5)]).collect()
}

fn bytes(rng: &mut impl Rng) -> Content {
    let length = match rng.random_range(0..10) {
        0 => 0,
        1..7 => rng.random_range(1..5000),
        7..9 => rng.random_range(5000..300_000),
        _ => rng.random_range(4 << 20..9 << 20),
    };
    let mut bytes = vec![0; length];
    rng.fill_bytes(&mut bytes);
    Content(bytes)
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

/// What a program can see of an operation.
type Answer = Result<Vec<u8>, Option<i32>>;

/// Does `operation` below `root`.
fn apply(root: &Path, operation: &Operation) -> Answer {
    let done = match operation {
        Operation::Write { path, offset, bytes, sync } => write(&root.join(path), *offset, &bytes.0, *sync),
        Operation::Append { path, bytes } => {
            let file = OpenOptions::new().append(true).create(true).open(root.join(path));
            file.and_then(|mut file| io::Write::write_all(&mut file, &bytes.0)).map(|()| Vec::new())
        }
        Operation::Truncate { path, size } => {
            let file = OpenOptions::new().write(true).open(root.join(path));
            file.and_then(|file| file.set_len(*size)).map(|()| Vec::new())
        }
        Operation::Replace { path, bytes } => fs::write(root.join(path), &bytes.0).map(|()| Vec::new()),
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
        Operation::Remount => Ok(Vec::new()),
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

/// Little enough for a sequence to reach the ceiling now and then.
const WRITEBACK: &[&str] = &["--writeback", "--writeback-size", "12MiB"];

#[test]
fn random_operations_do_what_a_plain_folder_does() {
    if require_fuse("random_operations_do_what_a_plain_folder_does") {
        let bucket = Scratch::new();
        compare_with_plain(&format!("file://{}", bucket.path().display()), &[], 3 * scale());
    }
}

/// The same where small files share segments, which are compacted whenever the machine changes.
#[test]
fn random_operations_in_packed_directories_do_what_a_plain_folder_does() {
    if require_fuse("random_operations_in_packed_directories_do_what_a_plain_folder_does") {
        let bucket = Scratch::new();
        compare_packed_with_plain(&format!("file://{}", bucket.path().display()), &[], &[], 3 * scale());
    }
}

/// And where they are staged before that.
#[test]
fn random_operations_in_packed_directories_that_are_written_back_do_what_a_plain_folder_does() {
    let test = "random_operations_in_packed_directories_that_are_written_back_do_what_a_plain_folder_does";
    if require_fuse(test) {
        let bucket = Scratch::new();
        let url = format!("file://{}", bucket.path().display());
        compare_packed_with_plain(&url, WRITEBACK, &[], 2 * scale());
    }
}

/// And while the store fails, delays and loses answers.
#[test]
fn random_operations_in_packed_directories_on_a_troubled_store_do_what_a_plain_folder_does() {
    let test = "random_operations_in_packed_directories_on_a_troubled_store_do_what_a_plain_folder_does";
    if !require_fuse(test) {
        return;
    }
    let server = Server::for_volume();
    let door = Door::new(server.address()).expect("loopback has free ports");
    let url = format!("s3://{}/a/prefix", server.create_bucket());
    let variables = server.envs_at(door.endpoint());
    under_trouble(&door, &url, |url| compare_packed_with_plain(url, &[], &variables, scale()));
}

/// As [`compare_with_plain_on`], with all directories packed.
fn compare_packed_with_plain(url: &str, options: &[&str], variables: &[(String, String)], rounds: usize) {
    let (mut rng, mut plays) = (Seeded::new(), 0);
    let operations = sequence(&mut *rng, rounds);
    let checked = check(&operations, || {
        plays += 1;
        Mounted::packed(&format!("{url}/{plays}"), options, variables)
    });
    checked.unwrap_or_else(|failure| panic!("{failure}"));
}

/// Each remount is on another machine, which has what was unmounted and nothing else.
#[test]
fn random_operations_that_are_written_back_do_what_a_plain_folder_does() {
    if require_fuse("random_operations_that_are_written_back_do_what_a_plain_folder_does") {
        let bucket = Scratch::new();
        let url = format!("file://{}", bucket.path().display());
        compare_with_plain_on(&url, WRITEBACK, &[], 2 * scale());
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
    let variables = server.envs_at(door.endpoint());
    under_trouble(&door, &url, |url| compare_with_plain(url, &variables, scale()));
}

/// The same troubles where what is written is staged first.
#[test]
fn random_operations_written_back_to_a_troubled_store_do_what_a_plain_folder_does() {
    if !require_fuse("random_operations_written_back_to_a_troubled_store_do_what_a_plain_folder_does") {
        return;
    }
    let server = Server::for_volume();
    let door = Door::new(server.address()).expect("loopback has free ports");
    let url = format!("s3://{}/a/prefix", server.create_bucket());
    let variables = server.envs_at(door.endpoint());
    under_trouble(&door, &url, |url| compare_with_plain_on(url, WRITEBACK, &variables, scale()));
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
    let variables = cloud.envs_at(door.endpoint());
    under_trouble(&door, &url, |url| compare_with_plain(url, &variables, scale()));
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

/// Runs that a failure may be played again to be made shorter.
const MOST_REPLAYS: usize = 200;
/// Operations between two mounts.
const ROUND: usize = 150;

/// What is compared with a plain folder.
trait Subject {
    fn apply(&mut self, operation: &Operation) -> Answer;
    /// What tells its tree from `plain`.
    fn differences(&mut self, plain: &Path) -> Option<String>;
    /// Goes on elsewhere with what it stored.
    fn move_on(&mut self);
    fn end(&mut self);
}

/// A mount, of a bucket or prefix that was empty.
struct Mounted {
    mount: Mount,
    scratch: Scratch,
    moves: usize,
    /// Of one whose directories are packed: its URL, and the environment that reaches it.
    packed: Option<(String, Vec<(String, String)>)>,
}

impl Mounted {
    /// One whose directories are packed.
    fn packed(url: &str, options: &[&str], variables: &[(String, String)]) -> Self {
        let packed = Some((url.to_owned(), variables.to_vec()));
        let mounted = Self { packed, ..Self::new(url, options, variables) };
        let folder = mounted.mount.path().display().to_string();
        let words = ["volume", "policy", &folder, "packed"];
        Forebay::new(&mounted.scratch.join("home"), words).run().succeeded();
        mounted
    }

    /// Compacts and checks a volume that is not mounted.
    fn check_packed(&self) {
        if let Some((url, variables)) = &self.packed {
            let home = self.scratch.join("upkeep");
            for words in [["gc", url], ["fsck", url]] {
                Forebay::new(&home, words).envs(variables).run().succeeded();
            }
        }
    }

    fn new(url: &str, options: &[&str], variables: &[(String, String)]) -> Self {
        let scratch = Scratch::new();
        if let Some(folder) = url.strip_prefix("file://") {
            fs::create_dir_all(folder).expect("a folder can be made");
        }
        let mount = Mount::new(&scratch.join("home"), url, &scratch.join("mnt"), options, variables);
        Self { mount, scratch, moves: 0, packed: None }
    }
}

impl Subject for Mounted {
    fn apply(&mut self, operation: &Operation) -> Answer {
        within_deadline(&self.mount, || apply(self.mount.path(), operation))
    }

    fn differences(&mut self, plain: &Path) -> Option<String> {
        within_deadline(&self.mount, || differences(plain, self.mount.path(), true))
    }

    fn move_on(&mut self) {
        self.moves += 1;
        self.mount.unmount();
        self.check_packed();
        self.mount.remount(&self.scratch.join(&format!("home-{}", self.moves)));
    }

    fn end(&mut self) {
        self.mount.unmount();
        self.check_packed();
    }
}

/// Does the same to a plain folder and to `subject`. `step` is how many operations were begun when the first difference,
/// which comes in words, was seen.
fn play(subject: &mut dyn Subject, operations: &[Operation], step: &mut usize) -> Result<(), String> {
    let plain = Scratch::new();
    let differ = |when: &str, found: Option<String>| {
        found.map_or(Ok(()), |found| Err(format!("{when} mounting again: {found}")))
    };
    for operation in operations {
        *step += 1;
        let (expected, got) = (apply(plain.path(), operation), subject.apply(operation));
        if expected != got {
            return Err(story(operation, &expected, &got));
        }
        if matches!(operation, Operation::Remount) {
            differ("before", subject.differences(plain.path()))?;
            subject.move_on();
            differ("after", subject.differences(plain.path()))?;
        }
    }
    subject.end();
    Ok(())
}

/// Plays `operations` over subjects that `fresh` makes. Where they fail, finds a short part of them that fails, too,
/// and says what it is and how it fails.
fn check<S: Subject>(operations: &[Operation], mut fresh: impl FnMut() -> S) -> Result<(), String> {
    let mut outcome = |operations: &[Operation], step: &mut usize| {
        let played = catch_unwind(AssertUnwindSafe(|| play(&mut fresh(), operations, step)));
        played.unwrap_or_else(|panic| Err(format!("it panicked: {:?}", panic.downcast_ref::<String>())))
    };
    let mut steps = 0;
    let Err(failure) = outcome(operations, &mut steps) else { return Ok(()) };
    eprintln!("step {steps}: {failure}\nis played again to be made shorter");
    let mut last = None;
    let short = shrink(&operations[..steps], MOST_REPLAYS, |part| {
        let failed = outcome(part, &mut 0).err();
        let fails = failed.is_some();
        last = failed.or(last.take());
        fails
    });
    let lines: Vec<_> = short.iter().map(|operation| format!("  {operation:?}")).collect();
    let (count, of) = (short.len(), operations.len());
    let how = last.unwrap_or_else(|| "never when it is played again".to_owned());
    Err(format!(
        "step {steps}: {failure}\n{count} of {of} operations fail, too:\n{}\n{how}",
        lines.join("\n")
    ))
}

/// `rounds` times random operations, and a remount after each.
fn sequence(rng: &mut impl Rng, rounds: usize) -> Vec<Operation> {
    let round = |_| (0..ROUND).map(|_| operation(rng)).chain([Operation::Remount]).collect::<Vec<_>>();
    (0..rounds).flat_map(round).collect()
}

/// Compares mounts of prefixes below `url` with plain folders.
fn compare_with_plain(url: &str, variables: &[(String, String)], rounds: usize) {
    compare_with_plain_on(url, &[], variables, rounds);
}

/// The same for mounts with options.
fn compare_with_plain_on(url: &str, options: &[&str], variables: &[(String, String)], rounds: usize) {
    let mut rng = Seeded::new();
    let operations = sequence(&mut *rng, rounds);
    let mut plays = 0;
    let checked = check(&operations, || {
        plays += 1;
        Mounted::new(&format!("{url}/{plays}"), options, variables)
    });
    checked.unwrap_or_else(|failure| panic!("{failure}"));
}

/// A folder that loses the last byte of what is appended to a file that was truncated since it was renamed.
struct Faulty {
    folder: Scratch,
    renamed: Vec<PathBuf>,
    cut: Vec<PathBuf>,
}

impl Subject for Faulty {
    fn apply(&mut self, operation: &Operation) -> Answer {
        let done = apply(self.folder.path(), operation);
        match operation {
            Operation::Rename { to, .. } if done.is_ok() => self.renamed.push(to.clone()),
            Operation::Truncate { path, .. } if done.is_ok() && self.renamed.contains(path) => {
                self.cut.push(path.clone());
            }
            Operation::Append { path, .. } if done.is_ok() && self.cut.contains(path) => {
                let file = OpenOptions::new().write(true).open(self.folder.path().join(path));
                let file = file.expect("it was appended to");
                let size = file.metadata().expect("metadata").len();
                file.set_len(size.saturating_sub(1)).expect("cut");
            }
            _ => {}
        }
        done
    }

    fn differences(&mut self, plain: &Path) -> Option<String> {
        differences(plain, self.folder.path(), true)
    }

    fn move_on(&mut self) {}

    fn end(&mut self) {}
}

/// The model finds a fault that takes three operations on one file, and tells it by few more than those.
#[test]
fn a_failing_sequence_is_made_short() {
    let mut rng = Seeded::new();
    // No other operation knows these names.
    let (path, first) = (PathBuf::from("y"), PathBuf::from("x"));
    let bytes = Content(vec![7; 100]);
    let fault = [
        Operation::Replace { path: first.clone(), bytes: bytes.clone() },
        Operation::Rename { from: first, to: path.clone() },
        Operation::Truncate { path: path.clone(), size: 1000 },
        Operation::Append { path, bytes },
    ];
    let mut operations = sequence(&mut *rng, 2);
    for (number, operation) in fault.into_iter().enumerate() {
        operations.insert(number * 40 + rng.random_range(0..40), operation);
    }
    let mut plays = 0;
    let fresh = || {
        plays += 1;
        Faulty { folder: Scratch::new(), renamed: Vec::new(), cut: Vec::new() }
    };
    let failure = check(&operations, fresh).expect_err("the fault shows");
    let shown: Vec<_> =
        failure.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    // As the fault was made, or as chance had made it before: always these, and what makes a file and looks at it.
    assert!((4..=6).contains(&shown.len()) && plays <= MOST_REPLAYS + 1, "{plays} plays\n{failure}");
    assert!(["Rename", "Truncate", "Append"].iter().all(|kind| shown.contains(kind)), "{failure}");
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
