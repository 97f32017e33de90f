//! Mounts that stage what is written and upload it behind.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_core::ObjectKey;
use forebay_io::object::Bucket;
use forebay_tests::door::{Door, Manner};
use forebay_tests::mount::is_mounted;
use forebay_tests::process::unmount;
use forebay_tests::s3::Server;
use forebay_tests::{Forebay, Mount, Outcome, Scratch, require_fuse, shell};
use serde_json::Value;

/// Longest that something may take to come.
const DEADLINE: Duration = Duration::from_secs(120);

/// A folder as a bucket, of which a part can be made to take nothing.
struct Walk {
    mount: Mount,
    scratch: Scratch,
}

impl Walk {
    /// `hidden/` of the bucket takes nothing: another disk is mounted there.
    fn blocked() -> Self {
        let scratch = Scratch::new();
        let hidden = scratch.folder("bucket/hidden");
        fs::write(hidden.join("old"), "old").expect("written");
        let mount = mount(&scratch);
        assert_eq!(fs::read_to_string(mount.path().join("hidden/old")).expect("it is listed"), "old");
        let walk = Self { mount, scratch };
        walk.sh(&format!("mount -t tmpfs -o size=1m none {}", hidden.display()));
        walk
    }

    fn unblock(&self) {
        unmount(&self.scratch.join("bucket/hidden"));
    }

    #[track_caller]
    fn sh(&self, script: &str) {
        shell(Path::new("/"), script).succeeded();
    }

    fn forebay(&self, args: &[&str]) -> Outcome {
        Forebay::new(&self.scratch.join("home"), args).run()
    }

    /// What `forebay status` shows of the only mount.
    #[track_caller]
    fn status(&self) -> Value {
        let shown = self.forebay(&["status", "--json"]).succeeded();
        let shown: Value = serde_json::from_str(&shown).expect("JSON");
        shown["mounts"][0].clone()
    }

    /// Returns the status once `ready` says so.
    #[track_caller]
    fn wait(&self, ready: impl Fn(&Value) -> bool) -> Value {
        let started = Instant::now();
        loop {
            let status = self.status();
            if ready(&status) {
                return status;
            }
            assert!(started.elapsed() < DEADLINE, "{status}\n{}", self.mount.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn staged(&self) -> Vec<PathBuf> {
        staged(&self.scratch.join("home"))
    }
}

fn mount(scratch: &Scratch) -> Mount {
    let url = format!("file://{}", scratch.join("bucket").display());
    Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &["--writeback"], &[])
}

/// The files of staged blobs below `home`.
fn staged(home: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(home.join("state/forebay/staging")).into_iter().flatten();
    let files = folders.flat_map(|folder| fs::read_dir(folder.expect("entry").path()).expect("a folder"));
    let paths = files.map(|file| file.expect("entry").path());
    paths.filter(|path| !path.ends_with("lock") && !path.ends_with("bucket")).collect()
}

/// Promise S65: Unmounting a volume with staged bytes ends at once for programs; its process goes on until they are in the
/// bucket and logs how much is left.
/// Promise S66: `forebay status` shows how many files and bytes are staged, for how long, and why uploads fail.
#[test]
fn unmounting_ends_when_all_is_uploaded() {
    if !require_fuse("unmounting_ends_when_all_is_uploaded") {
        return;
    }
    let mut walk = Walk::blocked();
    let (folder, home) = (walk.mount.path().to_owned(), walk.scratch.join("home"));
    for number in 0..5_u8 {
        fs::write(folder.join(format!("hidden/f{number}")), [number; 1000]).expect("written");
    }
    let status = walk.wait(|status| status["staged"]["last_error"].is_string());
    let pending = (status["staged"]["files"].as_u64(), status["staged"]["bytes"].as_u64());
    assert_eq!(pending, (Some(5), Some(5000)), "{status}");
    assert!(status["staged"]["oldest_seconds"].is_u64(), "{status}");
    let table = walk.forebay(&["status"]);
    assert!(table.stderr.contains("staged bytes are not uploaded"), "{table}");
    assert!(table.succeeded().contains("in 5 files"));

    // The mount point goes at once, the process stays, and says so to whoever wants to mount.
    unmount(&folder);
    walk.wait(|status| status["is_ending"] == Value::Bool(true));
    assert!(!is_mounted(&folder));
    let url = format!("file://{}", walk.scratch.join("bucket").display());
    let again = walk.forebay(&["mount", &url, &folder.display().to_string(), "--writeback"]);
    again.failed_with("still uploads 5 files", "forebay status");
    again.failed_with(&walk.mount.pid().to_string(), "forebay status");
    assert!(walk.forebay(&["status"]).succeeded().contains("uploading"));
    assert!(walk.mount.log().contains("uploading what is staged"), "{}", walk.mount.log());

    walk.unblock();
    assert!(walk.mount.wait().success(), "{}", walk.mount.log());
    assert_eq!(staged(&home), Vec::<PathBuf>::new());
    for number in 0..5_u8 {
        let object = fs::read(walk.scratch.join(&format!("bucket/hidden/f{number}"))).expect("an object");
        assert_eq!(object, [number; 1000]);
    }
}

/// Promise S65: A signal ends it with an exit code that says that some is left; the next mount goes on.
#[test]
fn a_second_signal_ends_the_upload_and_the_next_mount_goes_on() {
    if !require_fuse("a_second_signal_ends_the_upload_and_the_next_mount_goes_on") {
        return;
    }
    let mut walk = Walk::blocked();
    let file = walk.mount.path().join("hidden/f");
    fs::write(&file, "staged").expect("written");
    let end = format!("kill -TERM {}", walk.mount.pid());
    walk.sh(&end);
    walk.wait(|status| status["is_ending"] == Value::Bool(true));
    walk.sh(&end);
    let status = walk.mount.wait();
    assert!(!status.success(), "{}", walk.mount.log());
    assert!(
        walk.mount.log().contains("1 files, 6 B of them staged, are not in the bucket"),
        "{}",
        walk.mount.log()
    );
    assert_eq!(walk.staged().len(), 1);

    walk.unblock();
    let home = walk.scratch.join("home");
    walk.mount.remount(&home);
    assert_eq!(fs::read_to_string(&file).expect("read"), "staged");
    walk.forebay(&["sync", &walk.mount.path().display().to_string()]).succeeded();
    assert_eq!(fs::read_to_string(walk.scratch.join("bucket/hidden/f")).expect("an object"), "staged");
    walk.mount.unmount();
    assert_eq!(walk.staged(), Vec::<PathBuf>::new());
}

/// Promise S66: `forebay sync` returns when what was staged before is in the bucket.
/// Promise S62: With `--writeback`, files are written, closed and read as ever while the store is away, and become plain
/// objects when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_written_while_the_store_is_away_become_objects() {
    if !require_fuse("files_written_while_the_store_is_away_become_objects") {
        return;
    }
    let server = Server::for_volume();
    let door = Door::new(server.address()).expect("loopback has free ports");
    let bucket = server.bucket("a/prefix").await;
    let (scratch, url) = (Scratch::new(), bucket.url().to_string());
    let (home, folder) = (scratch.join("home"), scratch.join("mnt"));
    let variables = server.envs_at(door.endpoint());
    let mut mount = Mount::new(&home, &url, &folder, &["--writeback"], &variables);
    fs::create_dir(folder.join("d")).expect("a directory");
    fs::read_dir(folder.join("d")).expect("it is listed");
    door.set(Manner::Shut);
    for number in 0..20_u8 {
        fs::write(folder.join(format!("d/f{number}")), vec![number; 20_000]).expect("written");
    }
    // More than is kept in memory of one file.
    fs::write(folder.join("d/large"), vec![7; 20 << 20]).expect("written");
    assert_eq!(fs::read(folder.join("d/f7")).expect("read"), [7; 20_000]);
    // Nobody knows any more whether another host has the volume.
    wait_for(&mount, "the volume's lease ran out");
    for number in 20..40_u8 {
        fs::write(folder.join(format!("d/f{number}")), vec![number; 20_000]).expect("written");
    }
    fs::rename(folder.join("d/f30"), folder.join("d/renamed")).expect("renamed");
    fs::create_dir(folder.join("d/new")).expect("made");
    fs::write(folder.join("d/new/f"), "new").expect("written");
    let file = fs::File::open(folder.join("d/f31")).expect("opened");
    assert_eq!(file.sync_all().expect_err("nothing is durable now").raw_os_error(), Some(libc::EIO));
    drop(file);
    door.set(Manner::Pass);
    wait_for(&mount, "the volume's lease is held again");
    let sync = Forebay::new(&home, ["sync", &folder.display().to_string()]).envs(&variables).run();
    sync.succeeded();
    assert_eq!(staged(&home).len(), 0);
    assert!(object(&bucket, "d/renamed").await == vec![30; 20_000]);
    assert!(object(&bucket, "d/new/f").await == b"new");
    for number in (0..40_u8).filter(|number| *number != 30) {
        assert!(object(&bucket, &format!("d/f{number}")).await == vec![number; 20_000], "f{number}");
    }
    assert!(object(&bucket, "d/large").await == vec![7; 20 << 20]);
    mount.unmount();
}

/// Returns once the mount has logged `words`.
fn wait_for(mount: &Mount, words: &str) {
    let started = Instant::now();
    while !mount.log().contains(words) {
        assert!(started.elapsed() < DEADLINE, "not logged: {words}\n{}", mount.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

async fn object(bucket: &Bucket, key: &str) -> Vec<u8> {
    let found = bucket.get_whole(&ObjectKey::new(key)).await;
    found.unwrap_or_else(|error| panic!("object {key}: {error}")).0.to_vec()
}

/// Promise S64: Once that host has uploaded them they are read: it does so when the volume is mounted there again, or a
/// mount of it is refused there because another host has it.
/// Promise S66: It shows, as `left`, what mounts that ended left staged and nobody uploads, with the bucket.
#[test]
fn a_refused_mount_uploads_what_it_staged_for_the_host_that_has_the_volume() {
    if !require_fuse("a_refused_mount_uploads_what_it_staged_for_the_host_that_has_the_volume") {
        return;
    }
    let scratch = Scratch::new();
    let url = format!("file://{}", scratch.folder("bucket").display());
    let (folder, home, other) = (scratch.join("mnt"), scratch.join("home"), scratch.join("other"));
    let mut mount = Mount::new(&home, &url, &folder, &["--writeback"], &[]);
    let file = fs::File::create(folder.join("f")).expect("made");
    file.write_all_at(b"staged", 0).expect("written");
    file.sync_all().expect("synced");
    drop(file);
    mount.kill();
    assert_eq!(staged(&home).len(), 1);
    // Once the dead mount's socket is gone its bytes are still told of.
    for _ in 0..2 {
        let shown = Forebay::new(&home, ["status", "--json"]).run().succeeded();
        let shown: Value = serde_json::from_str(&shown).expect("JSON");
        let left: Vec<_> = shown["mounts"]
            .as_array()
            .expect("a list")
            .iter()
            .filter(|mount| mount["state"] == "left")
            .collect();
        let [left] = left.as_slice() else { panic!("{shown}") };
        assert_eq!((left["blobs"].as_u64(), left["bytes"].as_u64()), (Some(1), Some(6)), "{shown}");
        assert_eq!(left["source"].as_str(), Some(url.as_str()), "{shown}");
    }
    let table = Forebay::new(&home, ["status"]).run();
    assert!(table.stderr.contains("nobody uploads them"), "{table}");
    assert!(table.succeeded().contains("left"));

    mount.remount(&other);
    let error = fs::read(folder.join("f")).expect_err("the bytes are elsewhere");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert!(mount.log().contains("staged with --writeback on host"), "{}", mount.log());
    let found = Forebay::new(&other, ["fsck", &url]).run();
    assert!(found.code == Some(1) && found.stdout.contains("not-uploaded"), "{found}");
    Forebay::new(&other, ["gc", &url]).run().succeeded();

    let refused =
        Forebay::new(&home, ["mount", "-f", &url, &scratch.folder("mnt2").display().to_string()]).run();
    assert_ne!(refused.code, Some(0), "{refused}");
    assert!(refused.stderr.contains("the volume is another host's"), "{refused}");
    assert_eq!(staged(&home).len(), 0);
    assert_eq!(fs::read_to_string(folder.join("f")).expect("it is there now"), "staged");
    assert!(Forebay::new(&other, ["fsck", &url]).run().succeeded().starts_with("clean"));
    mount.unmount();
}

/// A mount that lost its volume to another host uploads what it has staged, under its own keys, for that one to read.
#[test]
fn a_mount_that_was_taken_over_uploads_what_it_staged() {
    if !require_fuse("a_mount_that_was_taken_over_uploads_what_it_staged") {
        return;
    }
    let server = Server::for_volume();
    let (scratch, url) = (Scratch::new(), format!("s3://{}/a/prefix", server.create_bucket()));
    let (home, folder) = (scratch.join("home"), scratch.join("mnt"));
    let settings = "[volume.writeback]\ndelay_ms = 3600000\nopen_ms = 3600000\n";
    fs::write(scratch.folder("home/config/forebay").join("forebay.toml"), settings).expect("settings");
    let mut first = Mount::new(&home, &url, &folder, &["--writeback"], &server.envs());
    let file = fs::File::create(folder.join("f")).expect("made");
    file.write_all_at(b"staged", 0).expect("written");
    file.sync_all().expect("synced");
    drop(file);
    let options = ["--take-over"];
    let second = Mount::new(&scratch.join("other"), &url, &scratch.join("mnt2"), &options, &server.envs());
    let error = fs::read(second.path().join("f")).expect_err("the bytes are elsewhere");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    unmount(&folder);
    // It cannot say that all is well, for it has no volume any more.
    first.wait();
    assert!(first.log().contains("the volume is another's"), "{}", first.log());
    assert_eq!(staged(&home).len(), 0);
    assert_eq!(fs::read_to_string(second.path().join("f")).expect("it is there now"), "staged");
}

/// Promise S63: Past `--writeback-size`, and on a full local disk, writes go to the store as without `--writeback`; none
/// fails for it.
#[test]
fn a_full_local_disk_fails_no_write() {
    if !require_fuse("a_full_local_disk_fails_no_write") {
        return;
    }
    let scratch = Scratch::new();
    let (home, disk) = (scratch.folder("home"), scratch.folder("home/state/forebay/staging"));
    shell(Path::new("/"), &format!("mount -t tmpfs -o size=3m none {}", disk.display())).succeeded();
    let url = format!("file://{}", scratch.folder("bucket").display());
    let mut mount = Mount::new(&home, &url, &scratch.join("mnt"), &["--writeback"], &[]);
    for number in 0..10_u8 {
        fs::write(mount.path().join(format!("f{number}")), vec![number; 600_000]).expect("written");
    }
    fs::write(mount.path().join("large"), vec![7; 30 << 20]).expect("written");
    for number in 0..10_u8 {
        assert!(fs::read(mount.path().join(format!("f{number}"))).expect("read") == vec![number; 600_000]);
    }
    assert!(mount.log().contains("the local disk does not take them"), "{}", mount.log());
    mount.unmount();
    for number in 0..10_u8 {
        let object = fs::read(scratch.join(&format!("bucket/f{number}"))).expect("an object");
        assert!(object == vec![number; 600_000], "f{number}");
    }
    assert!(fs::read(scratch.join("bucket/large")).expect("an object") == vec![7; 30 << 20]);
    assert_eq!(staged(&home).len(), 0);
    unmount(&disk);
}

/// What a file has can be read past the mount's modes and lists by whoever may read copies of it on the host's disk.
#[test]
fn copies_on_a_hosts_disk_are_its_users_alone() {
    if !require_fuse("copies_on_a_hosts_disk_are_its_users_alone") {
        return;
    }
    let scratch = Scratch::new();
    let (home, folder) = (scratch.join("home"), scratch.folder("mnt"));
    fs::write(scratch.folder("bucket").join("listed"), "secret of another tool").expect("written");
    let (url, cache) =
        (format!("file://{}", scratch.join("bucket").display()), scratch.join("cache").display().to_string());
    let settings = scratch.join("settings.toml");
    fs::write(&settings, "[volume.writeback]\ndelay_ms = 3600000\n").expect("written");
    let settings = settings.display().to_string();
    let mount =
        Mount::new(&home, &url, &folder, &["--config", &settings, "--writeback", "--cache-dir", &cache], &[]);
    fs::write(mount.path().join("staged"), "secret of a program").expect("written");
    Forebay::new(&home, ["warmup", &mount.path().join("listed").display().to_string()]).run().succeeded();
    let place = scratch.path().display();
    let found = shell(Path::new("/"), &format!("grep -rl secret {place}/home {cache} | sort")).succeeded();
    assert_eq!(found.lines().count(), 2, "one is cached, one is staged: {found}");
    // Whoever may not enter one of the directories above a file cannot read it.
    for file in found.lines() {
        let is_private =
            |above: &&Path| above.metadata().is_ok_and(|found| found.permissions().mode() & 0o077 == 0);
        let above = Path::new(file).ancestors().skip(1).take_while(|above| *above != scratch.path());
        assert!(above.into_iter().any(|above| is_private(&above)), "{file}");
    }
}
