//! Warmup through the command: what it fetches, what it proves, what it says when something is not there.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, Condition};
use forebay_tests::process::start;
use forebay_tests::s3::Server;
use forebay_tests::{Door, Forebay, Manner, Mount, Outcome, Scratch, require_fuse, shell};
use serde_json::Value;

/// Longest that something may take to show.
const DEADLINE: Duration = Duration::from_secs(60);

/// One machine: its home, its cache directory and its mount point.
struct Machine {
    scratch: Scratch,
    variables: Vec<(String, String)>,
}

impl Machine {
    fn new(variables: Vec<(String, String)>) -> Self {
        Self { scratch: Scratch::new(), variables }
    }

    fn home(&self) -> PathBuf {
        self.scratch.folder("home")
    }

    fn cache(&self) -> String {
        self.scratch.join("cache").display().to_string()
    }

    fn mount(&self, source: &str, options: &[&str]) -> Mount {
        let cache = self.cache();
        let options = [options, &["--cache-dir", &cache]].concat();
        Mount::new(&self.home(), source, &self.scratch.join("mnt"), &options, &self.variables)
    }

    fn forebay(&self, args: &[&str]) -> Outcome {
        Forebay::new(&self.home(), args).envs(&self.variables).run()
    }

    /// Warms `place` and gives what it printed; `complete` is whether it must succeed.
    #[track_caller]
    fn warm(&self, place: &str, options: &[&str], complete: bool) -> Value {
        let outcome = self.forebay(&[&["warmup", place, "--json"], options].concat());
        assert_eq!(outcome.code, Some(if complete { 0 } else { 1 }), "{outcome}");
        json(&outcome.stdout)
    }

    /// The one mount's status.
    #[track_caller]
    fn status(&self) -> Value {
        let mut status = json(&self.forebay(&["status", "--json"]).succeeded());
        let mounts = status["mounts"].as_array_mut().expect("a list");
        // Mounts of other tests on this host may be dead at this moment.
        mounts.retain(|mount| mount["state"] != "dead");
        assert_eq!(mounts.len(), 1, "{mounts:?}");
        mounts.remove(0)
    }

    fn fetched(&self) -> u64 {
        self.status()["cache"]["origin_requests"].as_u64().expect("a count")
    }
}

#[track_caller]
fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[track_caller]
fn count(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("no {name} in {value}"))
}

fn url(folder: &Path) -> String {
    format!("file://{}", folder.display())
}

fn content(index: usize, size: usize) -> Vec<u8> {
    (0..size).map(|at| (at.wrapping_mul(31) ^ index.wrapping_mul(17)) as u8).collect()
}

/// Files of several sizes, 7 blocks in all.
const FILES: [(&str, usize); 5] =
    [("a/empty", 0), ("a/small", 100), ("a/b/page", 4096), ("large", 9 << 20), ("more/large", (5 << 20) - 1)];
const BLOCKS: u64 = 7;

fn fill_folder(folder: &Path) {
    for (index, (name, size)) in FILES.iter().enumerate() {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folder");
        fs::write(path, content(index, *size)).expect("file");
    }
}

async fn put(bucket: &Bucket, name: &str, data: Vec<u8>) {
    bucket.put(&ObjectKey::new(name), Bytes::from(data), Condition::Always).await.expect("put");
}

#[track_caller]
fn assert_reads_back(mount: &Mount) {
    for (index, (name, size)) in FILES.iter().enumerate() {
        let got = fs::read(mount.path().join(name)).expect("a file can be read");
        assert!(got == content(index, *size), "{name} differs");
    }
}

/// The walk of a person: plan, warm, warm again, read.
fn walk(machine: &Machine, source: &str, options: &[&str]) {
    let mount = machine.mount(source, options);
    let place = mount.path().display().to_string();
    let plan = machine.warm(&place, &["--dry-run"], true);
    assert_eq!((count(&plan, "blocks"), count(&plan, "missing_blocks")), (BLOCKS, BLOCKS), "{plan}");
    assert_eq!(machine.fetched(), 0, "a dry run fetches nothing");

    let part = machine.warm(&mount.path().join("a").display().to_string(), &[], true);
    assert_eq!((count(&part, "fetched"), count(&part, "proved")), (2, 2), "{part}");
    let first = machine.warm(&place, &[], true);
    let counts = ["blocks", "fetched", "already", "proved"].map(|name| count(&first, name));
    assert_eq!(counts, [BLOCKS, BLOCKS - 2, 2, BLOCKS], "{first}");
    assert_eq!((&first["complete"], count(&first["progress"], "files")), (&Value::Bool(true), 5));
    assert_eq!(machine.fetched(), BLOCKS);

    let second = machine.warm(&place, &[], true);
    assert_eq!((count(&second, "fetched"), count(&second, "already")), (0, BLOCKS), "{second}");
    assert_reads_back(&mount);
    assert_eq!(machine.fetched(), BLOCKS, "what is warm is fetched once");
}

#[test]
fn what_is_warm_is_not_fetched_again() {
    if !require_fuse("what_is_warm_is_not_fetched_again") {
        return;
    }
    let machine = Machine::new(Vec::new());
    let bucket = machine.scratch.folder("bucket");
    fill_folder(&bucket);
    walk(&machine, &url(&bucket), &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_warm_of_an_s3_bucket_is_not_fetched_again() {
    if !require_fuse("what_is_warm_of_an_s3_bucket_is_not_fetched_again") {
        return;
    }
    let server = Server::shared();
    let bucket = server.bucket("data").await;
    for (index, (name, size)) in FILES.iter().enumerate() {
        put(&bucket, name, content(index, *size)).await;
    }
    walk(&Machine::new(server.envs()), &bucket.url().to_string(), &[]);
}

#[test]
fn a_cache_warmed_by_url_is_that_of_a_later_mount() {
    if !require_fuse("a_cache_warmed_by_url_is_that_of_a_later_mount") {
        return;
    }
    let machine = Machine::new(Vec::new());
    let bucket = machine.scratch.folder("bucket");
    fill_folder(&bucket);
    let (source, cache) = (url(&bucket), machine.cache());
    let first = machine.warm(&source, &["--cache-dir", &cache], true);
    assert_eq!((count(&first, "fetched"), count(&first, "memory_only")), (BLOCKS, 0), "{first}");
    assert!(!bucket.join(".forebay").exists(), "a warmup writes nothing to the bucket");
    // Nobody had mounted it before: the mount makes the volume, under the name that the cache knows it by.
    let mut mount = machine.mount(&source, &[]);
    assert_reads_back(&mount);
    assert_eq!(machine.fetched(), 0);
    mount.unmount();
    let again = machine.warm(&source, &["--cache-dir", &cache], true);
    assert_eq!((count(&again, "fetched"), count(&again, "already")), (0, BLOCKS), "{again}");
    machine.warm(&source, &["--cache-dir", &cache, "--pin"], true);
    let unpinned = machine.warm(&source, &["--cache-dir", &cache, "--unpin"], true);
    assert_eq!(count(&unpinned, "unpinned_blocks"), BLOCKS, "{unpinned}");
    let refused = machine.forebay(&["warmup", &source]);
    refused.failed_with("none is named", "--cache-dir");
}

#[test]
fn a_list_is_warmed_and_pinned() {
    if !require_fuse("a_list_is_warmed_and_pinned") {
        return;
    }
    let machine = Machine::new(Vec::new());
    let bucket = machine.scratch.folder("bucket");
    fill_folder(&bucket);
    let mount = machine.mount(&url(&bucket), &[]);
    let list = machine.scratch.join("list");
    fs::write(&list, "small\nb\n\nsmall\n").expect("list");
    let (place, list) = (mount.path().join("a").display().to_string(), list.display().to_string());
    let outcome = machine.warm(&place, &["--list", &list, "--pin"], true);
    assert_eq!((count(&outcome, "blocks"), count(&outcome, "proved")), (2, 2), "{outcome}");
    let status = machine.status();
    assert_eq!(count(&status["cache"], "pinned_bytes"), count(&status["cache"], "disk_bytes"), "{status}");
    let pinned = count(&status["cache"], "pinned_bytes");
    assert!(pinned > 0);

    // Some of it, and then all: also of an object that was replaced since.
    let some = machine.warm(&mount.path().join("a/small").display().to_string(), &["--unpin"], true);
    assert_eq!(count(&some, "unpinned_blocks"), 1, "{some}");
    fs::remove_file(bucket.join("a/b/page")).expect("replace");
    fs::write(bucket.join("a/b/page"), "other").expect("replace");
    machine.forebay(&["refresh", &mount.path().join("a/b").display().to_string()]).succeeded();
    let below = machine.warm(&mount.path().join("a").display().to_string(), &["--unpin"], true);
    assert_eq!(count(&below, "unpinned_blocks"), 0, "{below}");
    let all = machine.warm(&mount.path().display().to_string(), &["--unpin"], true);
    assert_eq!(count(&all, "unpinned_blocks"), 1, "{all}");
    assert_eq!(count(&some, "unpinned_bytes") + count(&all, "unpinned_bytes"), pinned);
    assert_eq!(count(&machine.status()["cache"], "pinned_bytes"), 0);

    fs::write(machine.scratch.join("list"), "small\nnone\n").expect("list");
    let refused = machine.forebay(&["warmup", &place, "--list", &list]);
    refused.failed_with("there is no `none`", "spelling");
    let refused = machine.forebay(&["warmup", &machine.scratch.path().display().to_string()]);
    refused.failed_with("no Forebay mount", "--state-dir");
}

#[test]
fn what_the_store_lost_is_named() {
    if !require_fuse("what_the_store_lost_is_named") {
        return;
    }
    let machine = Machine::new(Vec::new());
    let bucket = machine.scratch.folder("bucket");
    fill_folder(&bucket);
    let mount = machine.mount(&url(&bucket), &[]);
    let place = mount.path().display().to_string();
    machine.warm(&place, &["--dry-run"], true);
    // The listing just taken is still good; the object is gone.
    fs::remove_file(bucket.join("a/small")).expect("remove");
    let outcome = machine.forebay(&["warmup", &place]);
    outcome.failed_with("1 of 7 blocks", "run it again");
    assert_eq!(outcome.code, Some(1), "{outcome}");
    assert!(outcome.stderr.contains("missing: a/small bytes 0-100"), "{outcome}");
    let outcome = machine.warm(&place, &[], false);
    assert_eq!(outcome["missing"], serde_json::json!(["a/small bytes 0-100"]));
    assert_eq!((count(&outcome, "missing_blocks"), count(&outcome, "proved")), (1, BLOCKS - 1));
    assert_eq!(outcome["complete"], Value::Bool(false));
}

/// What lies in Glacier looked like a matter of permissions, in the middle of an epoch.
#[test]
fn what_is_archived_is_named_with_its_storage_class() {
    let server = Server::shared();
    let machine = Machine::new(server.envs());
    let name = server.create_bucket();
    server.put_archived(&format!("{name}/cold"), "cold bytes");
    let (source, cache) = (format!("s3://{name}"), machine.cache());
    let outcome = machine.forebay(&["warmup", &source, "--cache-dir", &cache]);
    outcome.failed_with("1 of 1 blocks", "run it again");
    let cause = format!("cold in {source} is archived (storage class GLACIER)");
    assert!(outcome.stderr.contains(&cause) && outcome.stderr.contains("missing: cold"), "{outcome}");
    if !require_fuse("what_is_archived_is_named_with_its_storage_class") {
        return;
    }
    let mount = machine.mount(&source, &["--read-only"]);
    let path = mount.path().join("cold");
    assert_eq!(fs::metadata(&path).expect("it is listed").len(), 10);
    let error = fs::read(&path).expect_err("it is archived");
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
}

#[test]
fn a_cache_that_is_too_small_is_told() {
    let machine = Machine::new(Vec::new());
    let bucket = machine.scratch.folder("bucket");
    fs::write(bucket.join("huge"), content(0, 40 << 20)).expect("file");
    let cache = machine.cache();
    let options = ["--cache-dir", cache.as_str(), "--cache-size", "16MiB"];
    let outcome = machine.forebay(&[&["warmup", &url(&bucket)], options.as_slice()].concat());
    outcome.failed_with(
        "are to be warmed, with 4 KiB a block at least, and the cache holds 16.0 MiB",
        "--cache-size",
    );
    let blocks = shell(machine.scratch.path(), &format!("find {cache}/v1 -type f | wc -l")).succeeded();
    assert_eq!(blocks.trim(), "0", "nothing was fetched");
}

/// As a power cut leaves a copy that was being written.
#[test]
fn a_copy_on_disk_that_was_cut_short_is_fetched_again() {
    let machine = Machine::new(Vec::new());
    let bucket = machine.scratch.folder("bucket");
    fill_folder(&bucket);
    let cache = machine.cache();
    let options = ["--cache-dir", cache.as_str()];
    let first = machine.warm(&url(&bucket), &options, true);
    assert_eq!(count(&first, "fetched"), BLOCKS, "{first}");

    let find = format!("find {cache} -type f -size +3M | head -n 1");
    let copy = forebay_tests::shell(machine.scratch.path(), &find).succeeded();
    fs::OpenOptions::new()
        .write(true)
        .open(copy.trim())
        .and_then(|file| file.set_len(10_000))
        .expect("a copy");
    let again = machine.warm(&url(&bucket), &options, true);
    assert_eq!((count(&again, "fetched"), count(&again, "already")), (1, BLOCKS - 1), "{again}");
    assert_eq!(count(&again, "proved"), BLOCKS, "{again}");
}

/// Objects of one block each, enough for a warmup to be in the middle of.
const OBJECTS: usize = 200;

/// A bucket of [`OBJECTS`] behind a door.
async fn behind_a_door() -> (Machine, Door, String) {
    let server = Server::shared();
    let bucket = server.bucket("data").await;
    for index in 0..OBJECTS {
        put(&bucket, &format!("part-{index:03}"), content(index, 1000)).await;
    }
    let door = Door::new(server.address()).expect("a door");
    (Machine::new(server.envs_at(door.endpoint())), door, bucket.url().to_string())
}

/// Waits until so many objects have been asked for.
fn wait_for(door: &Door, wanted: usize) {
    let (started, mut seen) = (Instant::now(), 0);
    while seen < wanted {
        assert!(started.elapsed() < DEADLINE, "only {seen} objects were asked for");
        let requests = door.take_requests();
        seen += requests.iter().filter(|line| line.starts_with("GET") && line.contains("part-")).count();
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warmup_that_was_killed_goes_on_where_it_was() {
    if !require_fuse("a_warmup_that_was_killed_goes_on_where_it_was") {
        return;
    }
    let (machine, door, source) = behind_a_door().await;
    let mut mount = machine.mount(&source, &["--read-only"]);
    let place = mount.path().display().to_string();
    // From here on every request is for an object.
    machine.warm(&place, &["--dry-run"], true);
    door.set(Manner::Few(OBJECTS / 4));
    let line = ["warmup", place.as_str(), "--jobs", "4"];
    let mut warmup =
        Forebay::new(&machine.home(), line).envs(&machine.variables).spawn(&machine.scratch.join("log"));
    wait_for(&door, OBJECTS / 4);
    mount.kill();
    let status = warmup.wait().expect("a child can be waited for");
    assert_eq!(status.code(), Some(1), "a warmup whose mount died has failed");

    door.set(Manner::Pass);
    mount.remount(&machine.home());
    let rest = machine.warm(&place, &["--jobs", "4"], true);
    let (fetched, already) = (count(&rest, "fetched"), count(&rest, "already"));
    assert_eq!((fetched + already, count(&rest, "proved")), (OBJECTS as u64, OBJECTS as u64), "{rest}");
    // Each of the four blocks on their way may have been fetched and not yet written.
    assert!(already + 4 >= OBJECTS as u64 / 4 && fetched > 0, "{rest}");
    assert_eq!(fetched, {
        let status = json(&machine.forebay(&["status", &place, "--json"]).succeeded());
        count(&status["mounts"][0]["cache"], "origin_requests")
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warmup_that_is_interrupted_says_what_it_did() {
    if !require_fuse("a_warmup_that_is_interrupted_says_what_it_did") {
        return;
    }
    let (machine, door, source) = behind_a_door().await;
    let mount = machine.mount(&source, &["--read-only"]);
    let place = mount.path().display().to_string();
    machine.warm(&place, &["--dry-run"], true);
    door.set(Manner::Few(OBJECTS / 4));
    let (line, log) = (["warmup", place.as_str(), "--jobs", "2", "--json"], machine.scratch.join("log"));
    let mut warmup = Forebay::new(&machine.home(), line).envs(&machine.variables).spawn(&log);
    wait_for(&door, OBJECTS / 4);
    forebay_tests::shell(machine.scratch.path(), &format!("kill -INT {}", warmup.id())).succeeded();
    // The store answers nothing until the mount has heard of it; what is on its way then ends well.
    let started = Instant::now();
    while !mount.log().contains("warmup cancelled") {
        assert!(started.elapsed() < DEADLINE, "the mount did not hear of it\n{}", mount.log());
        std::thread::sleep(Duration::from_millis(2));
    }
    door.set(Manner::Pass);
    let status = warmup.wait().expect("a child can be waited for");
    let printed = fs::read_to_string(&log).expect("a log");
    assert_eq!(status.code(), Some(1), "{printed}");
    let mut lines = printed.lines();
    let outcome = json(lines.next().expect("an outcome"));
    assert_eq!(outcome["cancelled"], Value::Bool(true), "{outcome}");
    let done = count(&outcome, "blocks");
    assert!(done > 0 && done < OBJECTS as u64, "{outcome}");
    assert!(lines.next().expect("an error").contains("cancelled"), "{printed}");
    let rest = machine.warm(&place, &[], true);
    assert_eq!((count(&rest, "already"), count(&rest, "proved")), (done, OBJECTS as u64), "{rest}");
}

/// What the bar showed last: bytes done, bytes in all, and the message behind them.
fn last_frame(terminal: &str) -> Option<(String, String, String)> {
    let line = terminal.split(['\r', '\n']).rfind(|line| line.contains(" files"))?;
    let bytes = line.split_once(" KiB  ")?.0.rsplit_once('/')?;
    let done = bytes.0.rsplit(' ').take(2).collect::<Vec<_>>();
    let message = line.split(" left ").nth(1)?.trim().split('\u{1b}').next()?;
    Some((format!("{} {}", done[1], done[0]), format!("{} KiB", bytes.1), message.to_owned()))
}

/// The bar of a warmup whose store stops answering after a quarter of the objects stands at that quarter.
#[tokio::test(flavor = "multi_thread")]
async fn the_bar_shows_what_was_done() {
    if !require_fuse("the_bar_shows_what_was_done") {
        return;
    }
    let (machine, door, source) = behind_a_door().await;
    let mut mount = machine.mount(&source, &["--read-only"]);
    let place = mount.path().display().to_string();
    // From here on every request is for an object.
    machine.warm(&place, &["--dry-run"], true);
    door.set(Manner::Few(OBJECTS / 4));
    let printed = machine.scratch.join("printed");
    let line = format!("{} warmup {place} --jobs 4 > {}", Forebay::binary().display(), printed.display());
    let (home, terminal) = (machine.home(), machine.scratch.join("terminal"));
    let mut command = std::process::Command::new("script");
    command.args(["--quiet", "--return", "--flush", "--command", &line]).arg(&terminal);
    command.env("HOME", &home).env("XDG_STATE_HOME", home.join("state")).env("TERM", "xterm");
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
    let mut warmup = start(&mut command).expect("script runs");
    let shown = || {
        let bytes = fs::read(&terminal).unwrap_or_default();
        last_frame(&String::from_utf8_lossy(&bytes))
    };
    let quarter = ("48.83 KiB".to_owned(), "195.31 KiB".to_owned(), format!("{OBJECTS} files"));
    let started = Instant::now();
    while shown().as_ref() != Some(&quarter) {
        assert!(started.elapsed() < DEADLINE, "{:?} is not {quarter:?}", shown());
        std::thread::sleep(Duration::from_millis(5));
    }
    door.set(Manner::Pass);
    assert!(warmup.wait().expect("a child can be waited for").success());
    let printed = fs::read_to_string(printed).expect("a table");
    let proved = printed.lines().find(|line| line.starts_with("proved in the cache"));
    assert_eq!(proved.and_then(|line| line.split_whitespace().last()), Some("200"), "{printed}");
    mount.unmount();
}
