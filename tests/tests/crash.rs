//! A mount that is killed in the middle of a load, again and again: what was synced is there, nothing is half there.

use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_io::object::Bucket;
use forebay_tests::meta::{Meta, join_secret};
use forebay_tests::s3::Server;
use forebay_tests::settings::skip;
use forebay_tests::{
    DISK_CACHE, Door, EARLY, EARLY_AND_SOON, Forebay, Manner, Mount, SOON, Scratch, Seeded, TestBucket,
    require_fuse, scale,
};
use futures::StreamExt;
use rand::RngExt;

#[path = "crash/operation.rs"]
mod operation;
#[path = "crash/power.rs"]
mod power;
#[path = "crash/state.rs"]
mod state;
#[path = "crash/writer.rs"]
mod writer;

use power::PowerDisk;
use writer::Writer;

/// Rounds of one suite: enough for each kind of death to come about in the gate, and ten times as many in a long run.
fn rounds() -> usize {
    (10 * scale()).max(20)
}

/// Rounds of a suite that differs from one of those in how bytes are written: fewer in the gate, as many in a long run.
fn variant_rounds() -> usize {
    if scale() == 1 { 6 } else { rounds() }
}

/// What a mount that was killed leaves, and all that may be wrong with a volume before gc has freed it. What is
/// staged is none of it: fsck through a mount uploads that first.
const LEFT_BY_THE_DEAD: &[&str] = &["leaked-blob", "leaked-uploads"];
/// How many requests of 100 are in trouble, in the rounds of it.
const TROUBLED_PERCENT: u32 = 10;
/// Threads that write at once, each in a directory of its own.
const WRITERS: usize = 3;
/// Longest that the first fsync of a round may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket: killing the mount and losing its
/// disk loses none of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_is_killed_keeps_what_was_synced() {
    if require_fuse("a_load_that_is_killed_keeps_what_was_synced") {
        let scratch = Scratch::new();
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { options: DISK_CACHE, ..Load::of(&scratch, rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// So they are where most files leave for the store while they are written.
///
/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_leaves_early_and_is_killed_keeps_what_was_synced() {
    if require_fuse("a_load_that_leaves_early_and_is_killed_keeps_what_was_synced") {
        let (scratch, home) = (Scratch::new(), Scratch::new());
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { options: &["--config", EARLY], ..Load::of(&home, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// So they are on a mount that joined, which is killed with the process that serves its tree, or some moments after that.
///
/// Promise S77: When fsync returns on a mount that joined, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_a_mount_that_joined_keeps_what_was_synced_when_both_are_killed() {
    if require_fuse("a_load_on_a_mount_that_joined_keeps_what_was_synced_when_both_are_killed") {
        for options in [&[][..], &["--config", EARLY]] {
            let (scratch, home) = (Scratch::new(), Scratch::new());
            let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
            let load = Load { joins: true, options, ..Load::of(&home, variant_rounds()) };
            load_and_kill(&bucket, || {}, load).await;
        }
    }
}

/// So they are in a bucket, whose store fails, delays, refuses and loses answers in every third round.
///
/// Promise S77: When fsync returns on a mount that joined, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_s3_on_a_mount_that_joined_keeps_what_was_synced_when_both_are_killed() {
    if require_fuse("a_load_on_s3_on_a_mount_that_joined_keeps_what_was_synced_when_both_are_killed") {
        let server = Server::for_volume();
        if !server.keeps_objects() {
            let why = "only a server that keeps its objects ends the requests of a killed mount";
            return skip(
                "a_load_on_s3_on_a_mount_that_joined_keeps_what_was_synced_when_both_are_killed",
                why,
            );
        }
        let bucket = server.bucket("a/prefix").await;
        let scratch = Scratch::new();
        let load = Load { joins: true, ..Load::of(&scratch, variant_rounds()) };
        load_and_kill_over_s3(&server, &bucket, load).await;
    }
}

/// So they are where what is deleted and replaced is kept for a time.
///
/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_with_a_trash_that_is_killed_keeps_what_was_synced() {
    if require_fuse("a_load_with_a_trash_that_is_killed_keeps_what_was_synced") {
        let scratch = Scratch::new();
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { options: &["--trash", "1h"], ..Load::of(&scratch, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// So they are where small files share segments, also when one is compacted in the very moment.
///
/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_packed_directories_that_is_killed_keeps_what_was_synced() {
    if require_fuse("a_load_on_packed_directories_that_is_killed_keeps_what_was_synced") {
        let scratch = Scratch::new();
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { is_packed: true, options: DISK_CACHE, ..Load::of(&scratch, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// And where they are staged before that.
///
/// Promise S61: With `--writeback`, when fsync returns, the file's bytes and its name survive the death of the mount
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_packed_directories_that_is_written_back_and_killed_keeps_what_was_synced() {
    if require_fuse("a_load_on_packed_directories_that_is_written_back_and_killed_keeps_what_was_synced") {
        let (scratch, home) = (Scratch::new(), Scratch::new());
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { is_packed: true, options: WRITEBACK, ..Load::of(&home, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// Promise S61: With `--writeback`, when fsync returns, the file's bytes and its name survive the death of the mount
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_is_written_back_and_killed_keeps_what_was_synced() {
    if require_fuse("a_load_that_is_written_back_and_killed_keeps_what_was_synced") {
        let (scratch, home) = (Scratch::new(), Scratch::new());
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { options: WRITEBACK, ..Load::of(&home, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// And where most files leave for the store while they are written, some past the ceiling of what is staged.
///
/// Promise S61: With `--writeback`, when fsync returns, the file's bytes and its name survive the death of the mount
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_leaves_early_and_is_written_back_and_killed_keeps_what_was_synced() {
    if require_fuse("a_load_that_leaves_early_and_is_written_back_and_killed_keeps_what_was_synced") {
        let (scratch, home) = (Scratch::new(), Scratch::new());
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let load = Load { options: EARLY_WRITEBACK, ..Load::of(&home, variant_rounds()) };
        load_and_kill(&bucket, || {}, load).await;
    }
}

/// Promise S61: With `--writeback`, when fsync returns, the file's bytes and its name survive the death of the mount
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_s3_that_is_written_back_and_killed_keeps_what_was_synced() {
    if require_fuse("a_load_on_s3_that_is_written_back_and_killed_keeps_what_was_synced") {
        let (server, home) = (Server::for_volume(), Scratch::new());
        if !server.keeps_objects() {
            let why = "only a server that keeps its objects ends the requests of a killed mount";
            return skip("a_load_on_s3_that_is_written_back_and_killed_keeps_what_was_synced", why);
        }
        let bucket = server.bucket("a/prefix").await;
        let options = [WRITEBACK, DISK_CACHE, &["--take-over"]].concat();
        load_and_kill_over_s3(
            &server,
            &bucket,
            Load { options: &options, ..Load::of(&home, variant_rounds()) },
        )
        .await;
    }
}

/// Promise S61: and a failure of power: the next mount with the same state directory reads and uploads them. Neither leaves
/// a file whose bytes are missing, synced or not: no name is durable before the bytes that it leads to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_staged_on_a_disk_whose_power_fails_keeps_what_was_synced() {
    if require_fuse("a_load_staged_on_a_disk_whose_power_fails_keeps_what_was_synced") {
        let (scratch, home) = (Scratch::new(), Scratch::new());
        let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
        let mut disk = PowerDisk::mount(scratch.folder("disk"));
        let folder = disk.path().join("staging");
        fs::create_dir(&folder).and_then(|()| File::open(disk.path())?.sync_all()).expect("a folder");
        let state = home.folder("home/state/forebay");
        std::os::unix::fs::symlink(&folder, state.join("staging")).expect("a link");
        let load = Load { options: WRITEBACK, ..Load::of(&home, variant_rounds()) };
        load_and_kill(&bucket, || disk.fail(), load).await;
    }
}

/// Little enough for the load to reach the ceiling now and then; uploaded at any time, in the middle of it, too.
const WRITEBACK: &[&str] = &["--writeback", "--writeback-size", "16MiB", "--config", SOON];
/// The same of which most leaves for the store while it is written.
const EARLY_WRITEBACK: &[&str] = &["--writeback", "--writeback-size", "1MiB", "--config", EARLY_AND_SOON];

/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_s3_that_is_killed_keeps_what_was_synced() {
    if require_fuse("a_load_on_s3_that_is_killed_keeps_what_was_synced") {
        let server = Server::for_volume();
        if !server.keeps_objects() {
            let why = "only a server that keeps its objects ends the requests of a killed mount";
            return skip("a_load_on_s3_that_is_killed_keeps_what_was_synced", why);
        }
        let bucket = server.bucket("a/prefix").await;
        let scratch = Scratch::new();
        let options = [DISK_CACHE, &["--take-over"]].concat();
        let load = Load { options: &options, ..Load::of(&scratch, rounds()) };
        load_and_kill_over_s3(&server, &bucket, load).await;
    }
}

/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_a_disk_whose_power_fails_keeps_what_was_synced() {
    if require_fuse("a_load_on_a_disk_whose_power_fails_keeps_what_was_synced") {
        let scratch = Scratch::new();
        let mut disk = PowerDisk::mount(scratch.folder("disk"));
        let folder = disk.path().join("bucket");
        fs::create_dir(&folder).and_then(|()| File::open(disk.path())?.sync_all()).expect("a folder");
        let bucket = TestBucket::folder(&folder).await;
        let home = Scratch::new();
        load_and_kill(&bucket, || disk.fail(), Load::of(&home, rounds())).await;
    }
}

/// LMDB is for a disk of one host: where the file system may be several hosts', that is told, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_on_a_file_system_that_hosts_may_share_is_told_of() {
    if !require_fuse("a_tree_on_a_file_system_that_hosts_may_share_is_told_of") {
        return;
    }
    let scratch = Scratch::new();
    let disk = PowerDisk::mount(scratch.folder("disk"));
    for (folder, times) in [(disk.path().join("bucket"), 1), (scratch.join("bucket"), 0)] {
        fs::create_dir(&folder).expect("a folder");
        let bucket = TestBucket::folder(&folder).await;
        let home = scratch.join(&format!("home-{times}"));
        let mount = Mount::new(&home, &bucket.url().to_string(), &scratch.join("mnt"), &[], &[]);
        let told = mount.log().matches("the tree lies on FUSE, which hosts may share").count();
        assert_eq!(told, times, "{}", mount.log());
    }
}

/// What is mounted and killed.
struct Load<'a> {
    /// Where the mount has its home. Unless it writes back, it loses that in every second round.
    scratch: &'a Scratch,
    /// Small files share segments, and are compacted while they are written.
    is_packed: bool,
    /// Another process holds the volume and dies as well, before the mount or with it.
    joins: bool,
    options: &'a [&'a str],
    variables: &'a [(String, String)],
    /// What all requests go through; in every third round, from its load to the next one's, they are in trouble.
    door: Option<&'a Door>,
    rounds: usize,
}

impl<'a> Load<'a> {
    fn of(scratch: &'a Scratch, rounds: usize) -> Self {
        Self { scratch, is_packed: false, joins: false, options: &[], variables: &[], door: None, rounds }
    }
}

/// The same where the store fails, delays, refuses and loses answers in every third round.
async fn load_and_kill_over_s3(server: &Server, bucket: &Bucket, load: Load<'_>) {
    let door = Door::new(server.address()).expect("loopback has free ports");
    let variables = server.envs_at(door.endpoint());
    let load = Load { variables: &variables, door: Some(&door), ..load };
    // Requests of the killed mount are over before the next one starts, as they are when its lease has run out.
    let after = || {
        door.forget();
        server.restart();
    };
    load_and_kill(bucket, after, load).await;
}

/// Kills the mount under a load, so many rounds; `after` is what happens to its store then.
async fn load_and_kill(bucket: &Bucket, mut after: impl FnMut(), load: Load<'_>) {
    let Load { scratch, is_packed, joins, options, variables, door, rounds } = load;
    let (mut rng, keeps_state) = (Seeded::new(), options.contains(&"--writeback"));
    let (url, folder) = (bucket.url().to_string(), scratch.join("mnt"));
    let mut home = scratch.join("home");
    let secret = join_secret(scratch.path());
    let serve = |round: usize| {
        let home = scratch.join(&format!("home-meta-{}", round / 2));
        joins.then(|| Meta::start(&home, &url, &secret, &["--take-over"], variables))
    };
    let joining = ["--join-only", "--join-secret", &secret];
    let options = [options, if joins { &joining } else { &[] }].concat();
    let mut meta = serve(0);
    let mut mount = Mount::new(&home, &url, &folder, &options, variables);
    if is_packed {
        let words = ["volume", "policy", &folder.display().to_string(), "packed"];
        Forebay::new(&home, words).run().succeeded();
    }
    let mut writers = writers_in(&folder, &mut rng);
    for round in 0..rounds {
        let more = Duration::from_millis(rng.random_range(0..200));
        let lonely = Duration::from_millis(rng.random_range(0..20) * rng.random_range(0..5));
        if let Some(door) = door {
            match round % 3 {
                2 => door.trouble(rng.random(), TROUBLED_PERCENT),
                _ => door.set(Manner::Pass),
            }
        }
        writers.iter_mut().for_each(|writer| writer.home.clone_from(&home));
        // It ends with the mount, if not before.
        let compact = || drop(is_packed.then(|| Forebay::new(&home, ["gc", &url]).envs(variables).run()));
        let synced = kill_under_load(&mut writers, more, compact, || {
            if let Some(meta) = &mut meta {
                meta.kill();
                std::thread::sleep(lonely);
            }
            mount.kill();
        });
        let is_idle = synced.contains(&0);
        assert!(!is_idle, "a writer had no fsync returned in round {round}: {synced:?}\n{}", mount.log());
        after();
        check_objects(bucket, &writers, || mount.log()).await;
        if !keeps_state && round % 2 == 1 {
            fs::remove_dir_all(&home).expect("the state and the cache go");
            home = scratch.join(&format!("home-{round}"));
        }
        meta = serve(round + 1);
        mount.remount(&home);
        check_volume(&home, &url, variables, LEFT_BY_THE_DEAD);
        writers.iter_mut().for_each(|writer| writer.check(round));
    }
    if let Some(door) = door {
        let troubles = door.troubles();
        assert!(troubles.values().sum::<usize>() >= rounds, "the store failed too seldom: {troubles:?}");
        door.set(Manner::Pass);
    }
    check_volume(&home, &url, variables, LEFT_BY_THE_DEAD);
    // Nothing at all is wrong once gc has freed that.
    Forebay::new(&home, ["gc", &url]).envs(variables).run().succeeded();
    check_volume(&home, &url, variables, &[]);
    mount.unmount();
    if let Some(meta) = &mut meta {
        meta.end();
    }
    check_objects(bucket, &writers, || mount.log()).await;
}

/// Writers, each in a directory of its own, which is synced.
fn writers_in(folder: &Path, rng: &mut Seeded) -> Vec<Writer> {
    let writers: Vec<Writer> =
        (0..WRITERS).map(|index| Writer::new(folder.join(format!("w{index}")), rng.random())).collect();
    for writer in &writers {
        fs::create_dir(&writer.folder).expect("a directory");
        writer.make_directories();
        File::open(&writer.folder).and_then(|folder| folder.sync_all()).expect("it is synced");
    }
    writers
}

/// Has the writers work until each had an fsync returned, and a while `more`, and what they work on be killed. Returns how many
/// each had; `beside` runs beside them.
fn kill_under_load(
    writers: &mut [Writer],
    more: Duration,
    beside: impl Fn() + Send,
    kill: impl FnOnce(),
) -> Vec<usize> {
    let killed = AtomicBool::new(false);
    let synced: Vec<_> = writers.iter().map(|_| AtomicUsize::new(0)).collect();
    let idle = || synced.iter().any(|synced| synced.load(Ordering::Relaxed) == 0);
    std::thread::scope(|threads| {
        for (writer, synced) in writers.iter_mut().zip(&synced) {
            threads.spawn(|| writer.work(synced, &killed));
        }
        threads.spawn(beside);
        let started = Instant::now();
        while idle() && started.elapsed() < DEADLINE {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(more);
        killed.store(true, Ordering::SeqCst);
        kill();
    });
    synced.into_iter().map(AtomicUsize::into_inner).collect()
}

/// Nothing is wrong with the volume but findings of the kinds in `left`.
#[track_caller]
fn check_volume(home: &Path, url: &str, variables: &[(String, String)], left: &[&str]) {
    let checked = Forebay::new(home, ["fsck", url, "--json"]).envs(variables).run();
    let report: serde_json::Value =
        serde_json::from_str(&checked.stdout).unwrap_or_else(|error| panic!("{error}: {checked}"));
    let findings = report["findings"].as_array().expect("a list");
    for finding in findings {
        assert!(finding["kind"].as_str().is_some_and(|kind| left.contains(&kind)), "{finding}");
    }
    assert_eq!(report["further"], 0, "{checked}");
    assert_eq!(checked.code == Some(0), findings.is_empty(), "{checked}");
}

/// Every plain object holds what some file held at some time, the whole of it.
async fn check_objects(bucket: &Bucket, writers: &[Writer], log: impl Fn() -> String) {
    let mut listing = std::pin::pin!(bucket.list(""));
    while let Some(info) = listing.next().await {
        let key = info.expect("a listing").key;
        if key.as_str().starts_with(".forebay/") {
            continue;
        }
        let (bytes, _) = bucket.get_whole(&key).await.unwrap_or_else(|error| panic!("{key}: {error}"));
        let hash = blake3::hash(&bytes);
        let known = writers.iter().any(|writer| writer.contents.contains_key(&hash));
        let near: Vec<_> =
            if known { vec![] } else { writers.iter().flat_map(|it| it.near(&bytes)).collect() };
        let (size, near) = (bytes.len(), near.join("\n"));
        assert!(known, "object {key} of {size} bytes is no whole file, but\n{near}\n{}", log());
    }
}
