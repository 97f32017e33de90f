//! Stores and disks in trouble, seen from a mount and from the command line.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, Condition};
use forebay_tests::process::{start, unmount};
use forebay_tests::s3::Server;
use forebay_tests::{
    Door, Forebay, Manner, Mount, Names, Scratch, assert_same_trees, require_fuse, sample_tree, settings,
    shell,
};

/// Milliseconds until a request that keeps failing is given up, in these tests.
const DEADLINE_MS: u64 = 3000;

/// A bucket of a moto server behind a door, with two objects in it.
struct Store {
    scratch: Scratch,
    door: Door,
    bucket: Bucket,
    variables: Vec<(String, String)>,
    config: String,
}

impl Store {
    async fn new() -> Self {
        let (scratch, server) = (Scratch::new(), Server::shared());
        let bucket = server.bucket("data").await;
        for name in ["a", "b"] {
            let bytes = vec![name.as_bytes()[0]; 100_000].into();
            bucket.put(&ObjectKey::new(name), bytes, Condition::Always).await.expect("put");
        }
        let door = Door::new(server.address()).expect("loopback has free ports");
        let variables = server.envs_at(door.endpoint());
        let config = scratch.join("forebay.toml");
        std::fs::write(
            &config,
            format!(
                "[volume.store]\ndeadline_ms = {DEADLINE_MS}\n[volume.write]\ndeadline_ms = {DEADLINE_MS}\n"
            ),
        )
        .expect("writable");
        let config = config.display().to_string();
        Self { scratch, door, bucket, variables, config }
    }

    fn url(&self) -> String {
        self.bucket.url().to_string()
    }

    #[track_caller]
    fn mount(&self, options: &[&str]) -> Mount {
        let options = [options, &["--config", &self.config]].concat();
        let (home, folder) = (self.scratch.join("home"), self.scratch.join("mnt"));
        Mount::new(&home, &self.url(), &folder, &options, &self.variables)
    }

    /// `forebay mount SOURCE` in the background, which is expected to fail.
    #[track_caller]
    fn mount_fails(&self, source: &str, cause: &str, hint: &str) {
        let folder = self.scratch.folder("mnt").display().to_string();
        let args = ["mount", source, &folder, "--config", &self.config];
        Forebay::new(&self.scratch.folder("home"), args).envs(&self.variables).run().failed_with(cause, hint);
    }
}

/// A program in Python that says how far it came, and waits to be told to go on. A file that a test itself has open is closed, as the
/// kernel tells a mount, by each process that another test starts beside it.
struct Program {
    process: Child,
    said: BufReader<ChildStdout>,
}

impl Program {
    fn start(folder: &Path, text: &str) -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", text]).current_dir(folder).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = start(&mut command).expect("python starts");
        let said = BufReader::new(process.stdout.take().expect("a pipe"));
        Self { process, said }
    }

    /// The next line that it says.
    fn listen(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).expect("it speaks");
        line.trim_end().to_owned()
    }

    fn go_on(&mut self) {
        self.process.stdin.as_mut().expect("a pipe").write_all(b"\n").expect("it listens");
    }

    fn end(mut self) {
        drop(self.process.stdin.take());
        self.process.wait().expect("it ends");
    }
}

/// Changes a page of a file through a mapping that it keeps, and says so.
const MAP: &str = r#"
import mmap, os, sys
file = os.open("mapped", os.O_RDWR | os.O_CREAT)
os.truncate("mapped", 10000)
mapped = mmap.mmap(file, 10000)
mapped[5000:5006] = b"mapped"
print("mapped", flush=True)
sys.stdin.read()
"#;

/// Promise S52: `forebay sync PATH` returns when everything that was written and changed through the mount before is in the
/// bucket, files that are open and pages of mapped files included; else it says what is not, with an exit code.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sync_waits_until_everything_is_in_the_bucket() {
    if !require_fuse("a_sync_waits_until_everything_is_in_the_bucket") {
        return;
    }
    let store = Store::new().await;
    let mut mount = store.mount(&["--take-over"]);
    let (home, folder) = (store.scratch.join("home"), mount.path().to_owned());
    let sync = || Forebay::new(&home, ["sync".as_ref(), folder.join("d").as_os_str()]).run();
    shell(&folder, "mkdir -p d/e && ln -s e d/link && chmod 700 d/e && : > d/e/empty && mv a d/moved")
        .succeeded();
    let mut open = File::create(folder.join("d/open")).expect("created");
    open.write_all(b"not closed").expect("written");
    let mut mapping = Program::start(&folder, MAP);
    assert_eq!(mapping.listen(), "mapped");
    sync().succeeded();
    assert_eq!(store.bucket.get_whole(&ObjectKey::new("d/open")).await.expect("an object").0, "not closed");

    // What cannot be brought there is told, and tried again.
    let mut later = File::create(folder.join("d/later")).expect("created");
    later.write_all(b"written without a store").expect("written");
    store.door.set(Manner::Shut);
    let (refused, failed) = std::thread::scope(|threads| {
        let fsync = threads.spawn(|| later.sync_all().expect_err("the store is shut"));
        (sync(), fsync.join().expect("it ends"))
    });
    assert!(refused.code.is_some_and(|code| code != 0) && refused.stderr.contains("error: "), "{refused}");
    assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{failed}");
    // The log has the cause: what was asked of the store, how often, what came back, and which file that was for.
    let log = mount.log();
    let says = |said: &[&str]| log.lines().any(|line| said.iter().all(|words| line.contains(words)));
    assert!(says(&["gave up on the store", "attempts=", "/data/d/later"]), "{log}");
    assert!(
        says(&["request failed", "inode ", " could not be written", "gave up after", "; the last: "]),
        "{log}"
    );
    store.door.set(Manner::Pass);
    sync().succeeded();
    mount.kill();
    drop((open, later));
    mapping.end();
    mount.remount(&store.scratch.join("other-home"));
    let shown = "cat d/open d/later && stat -c %a d/e && readlink d/link && wc -c < d/moved && stat -c %s d/e/empty mapped \
        && dd if=mapped bs=1 skip=5000 count=6 status=none";
    let expected = "not closedwritten without a store700\ne\n100000\n0\n10000\nmapped";
    assert_eq!(shell(mount.path(), shown).succeeded(), expected);
    mount.unmount();
}

/// Promise S10: While the store cannot be reached, cached bytes are read as ever; other reads fail with EIO once the
/// deadline of the store's settings has passed, and succeed again when the store is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_goes_away_and_comes_back() {
    if !require_fuse("the_store_goes_away_and_comes_back") {
        return;
    }
    let store = Store::new().await;
    for options in [&["--read-only"][..], &[]] {
        let mut mount = store.mount(options);
        let read = |name: &str| std::fs::read(mount.path().join(name)).map(|bytes| bytes.len());
        shell(mount.path(), "ls -l").succeeded();
        assert_eq!(read("a").expect("a"), 100_000);
        store.door.set(Manner::Shut);
        assert_eq!(read("a").expect("a is cached"), 100_000);
        assert_eq!(read("b").expect_err("b is not").raw_os_error(), Some(5), "EIO");
        store.door.set(Manner::Pass);
        assert_eq!(read("b").expect("the store is back"), 100_000);
        mount.unmount();
    }
}

/// A store that takes requests and answers none holds nobody up for longer than one that is away: calls fail, and what
/// was written is kept for when it answers again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_never_answers_is_given_up_at_the_deadline() {
    if !require_fuse("a_store_that_never_answers_is_given_up_at_the_deadline") {
        return;
    }
    let store = Store::new().await;
    let mut mount = store.mount(&["--take-over"]);
    let (home, folder) = (store.scratch.join("home"), mount.path().to_owned());
    let code = |error: std::io::Error| error.raw_os_error();
    shell(&folder, "ls -l && md5sum a").succeeded();
    let mut written = File::create(folder.join("written")).expect("created");
    written.write_all(b"kept").expect("written");
    store.door.set(Manner::Silent);
    mount.within(5 * Duration::from_millis(DEADLINE_MS), || {
        assert_eq!(fs::read(folder.join("a")).expect("a is cached").len(), 100_000);
        assert_eq!(fs::read(folder.join("b")).map_err(code), Err(Some(libc::EIO)));
        assert_eq!(written.sync_all().map_err(code), Err(Some(libc::EIO)));
    });
    store.door.set(Manner::Pass);
    assert_eq!(fs::read(folder.join("b")).expect("the store answers").len(), 100_000);
    Forebay::new(&home, ["sync".as_ref(), folder.as_os_str()]).run().succeeded();
    assert_eq!(store.bucket.get_whole(&ObjectKey::new("written")).await.expect("an object").0, "kept");
    drop(written);
    mount.unmount();
}

/// Appends to a file that it has truncated: what its sync loses, what comes after that through the same descriptor, and more
/// through another one.
const APPEND: &str = r#"
import os, sys
file = os.open("log", os.O_WRONLY | os.O_APPEND)
os.ftruncate(file, 0)
lost = bytes(20 << 20)
while lost:
    lost = lost[os.write(file, lost):]
print("an upload begins", flush=True)
sys.stdin.readline()
try:
    os.fsync(file)
except OSError as error:
    print(error.errno, flush=True)
sys.stdin.readline()
os.write(file, b" and")
again = os.open("log", os.O_WRONLY | os.O_APPEND)
os.write(again, b" more")
os.close(again)
os.close(file)
print("appended", flush=True)
sys.stdin.read()
"#;

/// The kernel knows nothing of what was lost, and puts the next append behind it, as where the file is opened again at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_append_after_a_loss_comes_to_the_end_that_is_left() {
    if !require_fuse("an_append_after_a_loss_comes_to_the_end_that_is_left") {
        return;
    }
    let store = Store::new().await;
    let mut mount = store.mount(&[]);
    let log = mount.path().join("log");
    fs::write(&log, "kept").expect("written");
    let mut program = Program::start(mount.path(), APPEND);
    assert_eq!(program.listen(), "an upload begins");
    store.door.set(Manner::Shut);
    program.go_on();
    assert_eq!(program.listen(), libc::EIO.to_string(), "the store is shut");
    store.door.set(Manner::Pass);
    program.go_on();
    assert_eq!(program.listen(), "appended");
    let left = fs::read(&log).expect("read");
    let shown = String::from_utf8_lossy(&left[..left.len().min(30)]);
    assert!(left == b"kept and more", "{} bytes: {shown:?}", left.len());
    program.end();
    mount.unmount();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_that_cannot_be_used_are_told_at_mount() {
    let store = Store::new().await;
    store.mount_fails("s3://no-such-bucket", "no-such-bucket", "create it");
    store.door.set(Manner::Refuse);
    store.mount_fails(&store.url(), "credentials", "AWS_ACCESS_KEY_ID");
    store.door.set(Manner::Shut);
    store.mount_fails(&store.url(), "", "AWS_ENDPOINT_URL");
}

/// A store that ignores conditional puts takes one writing host, which is told, and loses nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_without_conditions_is_written_from_one_host() {
    if !require_fuse("a_store_without_conditions_is_written_from_one_host") {
        return;
    }
    let store = Store::new().await;
    store.door.set(Manner::IgnoreConditions);
    let mut mount = store.mount(&[]);
    assert!(mount.log().contains("ignores conditional puts"), "{}", mount.log());
    shell(mount.path(), "mkdir d && echo one > d/f && chmod 600 d/f && mv a c").succeeded();
    mount.unmount();
    let (bytes, _) = store.bucket.get_whole(&ObjectKey::new("d/f")).await.expect("a plain object");
    assert_eq!(bytes, "one\n");
    mount.remount(&store.scratch.join("home"));
    assert_eq!(shell(mount.path(), "stat -c %a d/f && ls").succeeded(), "600\nb\nc\nd\n");
    mount.unmount();
    // The store learned of them: a tree that begins anew in the bucket would know nothing of what the first one does.
    store.door.set(Manner::Pass);
    mount.remount(&store.scratch.join("home"));
    assert!(mount.log().contains("stays there"), "{}", mount.log());
    assert_eq!(shell(mount.path(), "stat -c %a d/f && ls").succeeded(), "600\nb\nc\nd\n");
    let dump = store.scratch.join("tree.dump").display().to_string();
    let home = store.scratch.join("home");
    let volume = |words: &[&str]| {
        let line = [&["volume"], words, &["--config", &store.config]].concat();
        Forebay::new(&home, line).envs(&store.variables).run().succeeded()
    };
    volume(&["dump", &store.url(), &dump]);
    mount.unmount();
    let trees = home.join("state/forebay/trees");
    std::fs::rename(&trees, home.join("trees")).expect("moved away");
    volume(&["load", &dump, &store.url()]);
    mount.remount(&home);
    assert!(!mount.log().contains("stays there"), "{}", mount.log());
    assert_eq!(shell(mount.path(), "stat -c %a d/f && ls").succeeded(), "600\nb\nc\nd\n");
    mount.unmount();
}

/// The same in the background: the terminal is told, not only the log, and whatever the log's level is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warnings_of_a_mount_in_the_background_reach_the_terminal() {
    if !require_fuse("warnings_of_a_mount_in_the_background_reach_the_terminal") {
        return;
    }
    let store = Store::new().await;
    let (url, home) = (store.url(), store.scratch.folder("home"));
    let folder = store.scratch.folder("mnt").display().to_string();
    let mount = |url: &str, options: &[&str]| {
        let line = [&["mount", url, folder.as_str(), "--config", &store.config], options].concat();
        let outcome = Forebay::new(&home, line).envs(&store.variables).run();
        let stderr = outcome.stderr.clone();
        outcome.succeeded();
        unmount(Path::new(&folder));
        stderr
    };
    // A mount that fails after it claimed the bucket gives it back: the next one need not wait, nor warn.
    let cache = store.scratch.join("home/mount.log/cache").display().to_string();
    std::fs::write(home.join("mount.log"), "a file").expect("writable");
    let line = ["mount", &url, &folder, "--config", &store.config, "--cache-dir", &cache];
    Forebay::new(&home, line)
        .envs(&store.variables)
        .run()
        .failed_with("cache directory", "choose a directory");
    assert_eq!(mount(&url, &["--state-dir", &store.scratch.join("first").display().to_string()]), "");
    store.door.set(Manner::IgnoreConditions);
    // There is a tree in the bucket, which it may not pass over.
    store.mount_fails(&url, "the volume's tree is in the bucket", "--read-only shows the tree");
    let other = format!("{url}/other");
    let state = store.scratch.join("second").display().to_string();
    let told = mount(&other, &["--log", "error", "--state-dir", &state]);
    let warning = "warning: the store ignores conditional puts";
    assert!(told.starts_with(warning) && told.contains("no second host") && told.contains(&other), "{told}");
    let state = store.scratch.join("third").display().to_string();
    let told: serde_json::Value =
        serde_json::from_str(&mount(&other, &["--json", "--state-dir", &state])).expect("JSON");
    assert!(told["warning"].as_str().is_some_and(|text| text.contains("conditional puts")), "{told}");
}

#[test]
fn a_full_disk_under_the_cache_costs_no_reads() {
    if !require_fuse("a_full_disk_under_the_cache_costs_no_reads") {
        return;
    }
    let scratch = Scratch::new();
    let (source, cache) = (scratch.folder("bucket"), scratch.folder("cache"));
    sample_tree(&source, Names::Keys);
    let Some(_disk) = SmallDisk::mount(&cache, "3m") else {
        return settings::skip("a_full_disk_under_the_cache_costs_no_reads", "mounting a tmpfs needs root");
    };
    let url = format!("file://{}", source.display());
    let cache = cache.join("blocks").display().to_string();
    let options = ["--read-only", "--memory", "64MiB", "--cache-dir", &cache];
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &options, &[]);
    for _ in 0..2 {
        assert_same_trees(&source, mount.path(), false);
    }
    mount.unmount();
}

/// A `file://` bucket, and with it its tree, on a disk that is full for a moment.
#[test]
fn a_full_disk_under_the_bucket_is_told_and_goes_on_once_there_is_room() {
    if !require_fuse("a_full_disk_under_the_bucket_is_told_and_goes_on_once_there_is_room") {
        return;
    }
    let scratch = Scratch::new();
    let folder = scratch.folder("disk");
    let Some(_disk) = SmallDisk::mount(&folder, "16m") else {
        return settings::skip(
            "a_full_disk_under_the_bucket_is_told_and_goes_on_once_there_is_room",
            "mounting a tmpfs needs root",
        );
    };
    let url = format!("file://{}", scratch.folder("disk/bucket").display());
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &[], &[]);
    let synced = |name: &str| {
        let mut file = File::create(mount.path().join(name))?;
        file.write_all(name.as_bytes())?;
        file.sync_all()
    };
    synced("before").expect("there is room");
    let filler = folder.join("filler");
    let full = fs::write(&filler, vec![1; 32 << 20]).expect_err("the disk is full");
    let is_full = |error: std::io::Error| error.raw_os_error() == full.raw_os_error();
    assert!(is_full(synced("beneath").expect_err("there is no room")));
    let folders = || (0..200).map(|index| mount.path().join(format!("folder{index}")));
    folders().for_each(|folder| fs::create_dir(folder).expect("it is not synced"));
    let sync = || File::open(mount.path()).and_then(|folder| folder.sync_all());
    assert!(is_full(sync().expect_err("there is no room for the tree")));
    fs::remove_file(&filler).expect("room is made");
    sync().expect("there is room");
    synced("after").expect("there is room");
    mount.unmount();
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &[], &[]);
    for name in ["before", "after"] {
        assert_eq!(fs::read_to_string(mount.path().join(name)).expect("it is there"), name);
    }
    assert!((0..200).all(|index| mount.path().join(format!("folder{index}")).is_dir()));
    mount.unmount();
}

/// A small disk, in memory.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(folder: &Path, size: &str) -> Option<Self> {
        let mounted = shell(folder, &format!("mount -t tmpfs -o size={size} forebay-test ."));
        (mounted.code == Some(0)).then(|| Self(folder.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        shell(Path::new("/"), &format!("umount -l {}", self.0.display()));
    }
}
