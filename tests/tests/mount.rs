//! The mount command and the kernel's side of a mount: background and end, fstab, a handed-over device, requests that
//! the kernel need not send.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_tests::mount::is_mounted;
use forebay_tests::process::{start, unmount};
use forebay_tests::{Forebay, Mount, Outcome, Scratch, require_fuse, shell};

/// Longest that something may take to show.
const DEADLINE: Duration = Duration::from_secs(60);

fn url(folder: &Path) -> String {
    format!("file://{}", folder.display())
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// `forebay mount` in the background.
fn background(scratch: &Scratch, args: &[&str]) -> Outcome {
    scratch.folder("mnt");
    background_again(scratch, args)
}

/// The same where the mount point cannot be looked at.
fn background_again(scratch: &Scratch, args: &[&str]) -> Outcome {
    let (source, folder) = (url(&scratch.folder("bucket")), text(&scratch.join("mnt")));
    let mut line = vec!["mount", source.as_str(), folder.as_str()];
    line.extend(args);
    Forebay::new(&scratch.folder("home"), line).run()
}

#[track_caller]
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < DEADLINE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What the serving process of a background mount has logged.
fn log(scratch: &Scratch) -> String {
    let folder = scratch.join("home/state/forebay/log");
    let logs = std::fs::read_dir(folder).expect("the log folder is there");
    logs.map(|entry| std::fs::read_to_string(entry.expect("an entry").path()).expect("a log is text"))
        .collect()
}

/// Waits until a background mount has ended and says that everything is written.
#[track_caller]
fn ended_well(scratch: &Scratch) {
    wait_until("the mount has written everything", || log(scratch).contains("everything is written"));
    assert!(!is_mounted(&scratch.join("mnt")), "{}", log(scratch));
}

#[test]
fn a_background_mount_serves_when_the_command_returns_and_ends_with_umount() {
    if !require_fuse("a_background_mount_serves_when_the_command_returns_and_ends_with_umount") {
        return;
    }
    let scratch = Scratch::new();
    let printed = background(&scratch, &["--json"]).succeeded();
    let told: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(told["mount_point"], text(&scratch.join("mnt")));
    let mnt = scratch.join("mnt");
    std::fs::write(mnt.join("file"), "kept").expect("the mount serves at once");
    let table = std::fs::read_to_string("/proc/self/mounts").expect("the mount table");
    let line = format!("{} {} fuse.forebay rw,", url(&scratch.join("bucket")), mnt.display());
    assert!(table.contains(&line), "{line} is not in\n{table}");
    unmount(&scratch.join("mnt"));
    ended_well(&scratch);
    assert_eq!(std::fs::read_to_string(scratch.join("bucket/file")).expect("an object"), "kept");
}

#[test]
fn a_background_mount_that_fails_says_why() {
    if !require_fuse("a_background_mount_that_fails_says_why") {
        return;
    }
    let scratch = Scratch::new();
    let mnt = text(&scratch.folder("mnt"));
    let absent = url(&scratch.join("absent"));
    let outcome = Forebay::new(&scratch.folder("home"), ["mount", absent.as_str(), mnt.as_str()]).run();
    outcome.failed_with("absent", "");
    assert!(!is_mounted(&scratch.join("mnt")));
}

/// Its threads take more descriptors than the process may have.
#[test]
fn a_mount_whose_threads_cannot_be_started_says_so() {
    if !require_fuse("a_mount_whose_threads_cannot_be_started_says_so") {
        return;
    }
    let scratch = Scratch::new();
    let (home, mnt) = (scratch.folder("home"), scratch.folder("mnt"));
    let program = Forebay::binary();
    for more in ["", "--foreground"] {
        let line = format!(
            "HOME={0} XDG_STATE_HOME={0}/state prlimit --nofile=100 {1} mount {2} {3} -o threads=200 {more}",
            home.display(),
            program.display(),
            url(&scratch.folder("bucket")),
            mnt.display(),
        );
        let outcome = shell(scratch.path(), &line);
        outcome.failed_with("ended though nobody unmounted it: Too many open files", "`ulimit -n`");
        assert!(!is_mounted(&mnt));
    }
}

/// What it may have is more than shells allow at first.
#[test]
fn a_mount_takes_as_many_descriptors_as_it_may() {
    if !require_fuse("a_mount_takes_as_many_descriptors_as_it_may") {
        return;
    }
    let scratch = Scratch::new();
    let (home, mnt) = (scratch.folder("home"), scratch.folder("mnt"));
    let line = format!(
        "HOME={0} XDG_STATE_HOME={0}/state prlimit --nofile=100:4096 {1} mount {2} {3} -o threads=200 \
         && echo x >{3}/file && umount {3}",
        home.display(),
        Forebay::binary().display(),
        url(&scratch.folder("bucket")),
        mnt.display(),
    );
    shell(scratch.path(), &line).succeeded();
    assert!(!is_mounted(&mnt));
}

#[test]
fn a_mount_that_the_kernel_ends_writes_what_it_has_and_fails() {
    if !require_fuse("a_mount_that_the_kernel_ends_writes_what_it_has_and_fails") {
        return;
    }
    let scratch = Scratch::new();
    background(&scratch, &[]).succeeded();
    let mnt = scratch.join("mnt");
    std::fs::write(mnt.join("file"), "kept").expect("the mount serves");
    let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(&mnt).expect("the mount serves"));
    scratch.folder("connections");
    // Anonymous devices have the major number 0, and connections are named by the minor one.
    let abort =
        "unshare --mount bash -c 'mount -t fusectl none connections && echo 1 > connections/$1/abort' --";
    shell(scratch.path(), &format!("{abort} {device}")).succeeded();
    wait_until("the mount has ended", || log(&scratch).contains("ended though nobody unmounted it"));
    wait_until("it is out of the way", || !is_mounted(&mnt));
    background(&scratch, &[]).succeeded();
    assert_eq!(std::fs::read_to_string(mnt.join("file")).expect("an object"), "kept");
    unmount(&scratch.join("mnt"));
}

#[test]
fn a_signal_unmounts_and_writes_even_what_is_in_use() {
    if !require_fuse("a_signal_unmounts_and_writes_even_what_is_in_use") {
        return;
    }
    for (signal, in_use) in [("TERM", false), ("INT", false), ("TERM", true)] {
        let scratch = Scratch::new();
        let told = background(&scratch, &["--json"]).succeeded();
        let pid = serde_json::from_str::<serde_json::Value>(&told).expect("JSON")["pid"].to_string();
        let file = std::fs::File::create(scratch.join("mnt/file")).expect("the mount serves");
        std::io::Write::write_all(&mut &file, b"kept").expect("write");
        if !in_use {
            drop(file);
            shell(scratch.path(), &format!("kill -{signal} {pid}")).succeeded();
        } else {
            shell(scratch.path(), &format!("kill -{signal} {pid}")).succeeded();
            wait_until("it is out of sight", || !is_mounted(&scratch.join("mnt")));
            drop(file);
        }
        ended_well(&scratch);
        assert_eq!(std::fs::read_to_string(scratch.join("bucket/file")).expect("an object"), "kept");
    }
}

/// Promise S15: A mount point whose process was killed is mounted again by the same command, and everything that was
/// synced is there. What another file system left behind is not touched.
#[test]
fn a_mount_that_died_is_mounted_again_by_the_same_command() {
    if !require_fuse("a_mount_that_died_is_mounted_again_by_the_same_command") {
        return;
    }
    let scratch = Scratch::new();
    scratch.folder("mnt");
    for round in 0..3 {
        let told = background_again(&scratch, &["--json", "--ttl", "60"]).succeeded();
        let pid = serde_json::from_str::<serde_json::Value>(&told).expect("JSON")["pid"].to_string();
        let file = scratch.join("mnt").join(format!("file-{round}"));
        std::fs::write(&file, "kept").expect("the mount serves");
        std::fs::File::open(&file).and_then(|file| file.sync_all()).expect("fsync");
        // What the kernel knows of the root it tells for a minute, whoever is dead.
        std::fs::metadata(scratch.join("mnt")).expect("the root");
        shell(scratch.path(), &format!("kill -KILL {pid}")).succeeded();
        wait_until("the kernel has noticed", || shell(scratch.path(), "stat -f mnt").code != Some(0));
    }
    background_again(&scratch, &[]).succeeded();
    let table = std::fs::read_to_string("/proc/self/mounts").expect("the mount table");
    assert_eq!(table.matches(&format!(" {} ", text(&scratch.join("mnt")))).count(), 1, "{table}");
    for round in 0..3 {
        let file = scratch.join("mnt").join(format!("file-{round}"));
        assert_eq!(std::fs::read_to_string(file).expect("synced before the kill"), "kept");
    }
    unmount(&scratch.join("mnt"));
    ended_well(&scratch);

    let told = background_again(&scratch, &["--json", "-o", "plain_type"]).succeeded();
    let pid = serde_json::from_str::<serde_json::Value>(&told).expect("JSON")["pid"].to_string();
    shell(scratch.path(), &format!("kill -KILL {pid}")).succeeded();
    wait_until("the kernel has noticed", || std::fs::metadata(scratch.join("mnt")).is_err());
    background_again(&scratch, &[]).failed_with("has died", "umount -l");
    shell(scratch.path(), "umount -l mnt").succeeded();
}

/// What fstab's lines become: mount(8) calls `mount.forebay SOURCE DIRECTORY -o OPTIONS`.
#[test]
fn mount_forebay_is_the_helper_of_mount() {
    if !require_fuse("mount_forebay_is_the_helper_of_mount") {
        return;
    }
    let scratch = Scratch::new();
    let (bucket, home) = (scratch.folder("bucket"), scratch.folder("home"));
    scratch.folder("mnt");
    std::os::unix::fs::symlink(Forebay::binary(), scratch.join("mount.forebay")).expect("a link");
    let run = |options: &str| {
        let (source, state) = (url(&bucket), home.join("state/forebay"));
        let options = format!("{options},_netdev,nofail,state_dir={}", state.display());
        shell(scratch.path(), &format!("./mount.forebay {source} mnt -n -o {options}"))
    };
    run("rw,frobnicate").failed_with("frobnicate", "--help");
    run("rw,plain_type,fsname=/dev/test").succeeded();
    let table = std::fs::read_to_string("/proc/self/mounts").expect("the mount table");
    let line = format!("/dev/test {} fuse rw,", scratch.join("mnt").display());
    assert!(table.contains(&line), "{line} is not in\n{table}");
    unmount(&scratch.join("mnt"));
    ended_well(&scratch);
}

/// An unprivileged pod gets its device from a privileged helper that has mounted it.
#[test]
fn a_device_that_someone_else_mounted_is_served() {
    if !require_fuse("a_device_that_someone_else_mounted_is_served") {
        return;
    }
    let scratch = Scratch::new();
    let script = r#"
import ctypes, os, subprocess, sys
program, bucket, mnt, state = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
device = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(device, True)
options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},default_permissions"
if libc.mount(b"test", mnt.encode(), b"fuse", 0, options.encode()):
    sys.exit("mount: " + os.strerror(ctypes.get_errno()))
command = [program, "mount", "file://" + bucket, f"/dev/fd/{device}", "--state-dir", state]
subprocess.run(command, pass_fds=[device], check=True)
os.close(device)
"#;
    let file = scratch.join("hand-over.py");
    std::fs::write(&file, script).expect("the scratch folder is writable");
    let state = scratch.join("home/state/forebay");
    let (bucket, mnt) = (scratch.folder("bucket"), scratch.folder("mnt"));
    let mut command = Command::new("python3");
    command.arg(&file).arg(Forebay::binary()).arg(&bucket).arg(&mnt).arg(&state);
    assert!(start(&mut command).and_then(|mut python| python.wait()).expect("python runs").success());
    std::fs::write(mnt.join("file"), "kept").expect("it serves");
    unmount(&scratch.join("mnt"));
    ended_well(&scratch);
    assert_eq!(std::fs::read_to_string(bucket.join("file")).expect("an object"), "kept");
    let closed = Forebay::new(&scratch.folder("home"), ["mount", &url(&bucket), "/dev/fd/99"]).run();
    closed.failed_with("descriptor 99 is not open", "/dev/fd");
}

/// Requests by kind in a log of level debug.
fn requests(log: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("operation=\"") {
            let kind = rest.split('"').next().unwrap_or_default();
            *counts.entry(kind.to_owned()).or_default() += 1;
        }
    }
    counts
}

/// A second epoch over a dataset mount is served by the kernel alone.
#[test]
fn a_dataset_mount_asks_once() {
    if !require_fuse("a_dataset_mount_asks_once") {
        return;
    }
    let scratch = Scratch::new();
    let bucket = scratch.folder("bucket");
    for number in 0..50 {
        let class = bucket.join(format!("class{}", number % 3));
        std::fs::create_dir_all(&class).expect("a folder");
        std::fs::write(class.join(format!("{number}.bin")), vec![number; 5000]).expect("a file");
    }
    let options = ["--dataset", "--log", "info,forebay_fuse=debug"];
    let mut mount = Mount::new(&scratch.join("home"), &url(&bucket), &scratch.join("mnt"), &options, &[]);
    let epoch = || shell(mount.path(), "find . -type f | sort | xargs cat | md5sum").succeeded();
    let first = epoch();
    assert_eq!(first, shell(&bucket, "find . -type f | sort | xargs cat | md5sum").succeeded());
    let cold = requests(&mount.log());
    assert_eq!(cold.get("read"), Some(&50), "one read a file: {cold:?}");
    assert_eq!((cold.get("open"), cold.get("flush")), (Some(&1), Some(&1)), "refused once each: {cold:?}");
    assert_eq!(epoch(), first);
    let mut warm = requests(&mount.log());
    // `find` asks for the kind of file system, which the kernel does not keep.
    warm.remove("statfs");
    let cold_rest: BTreeMap<_, _> = cold.into_iter().filter(|(kind, _)| kind != "statfs").collect();
    assert_eq!(warm, cold_rest, "the second epoch sends nothing");
    mount.unmount();
}

/// Reading a file again on a read-write mount opens it again, but reads nothing.
#[test]
fn a_file_that_has_not_changed_is_read_once() {
    if !require_fuse("a_file_that_has_not_changed_is_read_once") {
        return;
    }
    let scratch = Scratch::new();
    let bucket = scratch.folder("bucket");
    std::fs::write(bucket.join("file"), vec![7; 300_000]).expect("a file");
    let options = ["--log", "info,forebay_fuse=debug"];
    let mut mount = Mount::new(&scratch.join("home"), &url(&bucket), &scratch.join("mnt"), &options, &[]);
    let reads = |mount: &Mount| requests(&mount.log()).get("read").copied().unwrap_or_default();
    let content = || std::fs::read(scratch.join("mnt/file")).expect("it can be read");
    assert_eq!(content(), vec![7; 300_000]);
    let once = reads(&mount);
    assert!(once > 0);
    for _ in 0..3 {
        content();
    }
    assert_eq!(reads(&mount), once, "the kernel kept its pages");
    std::fs::write(mount.path().join("file"), "other").expect("it can be written");
    assert_eq!(content(), b"other");
    mount.unmount();
}

/// A new file costs what the kernel cannot do without, and its bytes go in requests as large as it allows.
#[test]
fn writing_a_file_takes_few_requests() {
    if !require_fuse("writing_a_file_takes_few_requests") {
        return;
    }
    let scratch = Scratch::new();
    let options = ["--log", "info,forebay_fuse=debug"];
    let source = url(&scratch.folder("bucket"));
    let mut mount = Mount::new(&scratch.join("home"), &source, &scratch.join("mnt"), &options, &[]);
    // A program of its own: a process that a test beside this one starts would hold our open files
    // until it runs its program, and its closing them is a flush as well.
    let write = |program: &str| {
        shell(&scratch.join("."), &format!("python3 -c 'import os; os.chdir(\"mnt\"); {program}'"))
            .succeeded()
    };
    write("[open(str(number), \"wb\").write(bytes([number]) * 4096) for number in range(20)]");
    let small = requests(&mount.log());
    write("open(\"large\", \"wb\").write(bytes([7]) * (16 << 20))");
    // The kernel sends it behind whoever closes a file.
    while requests(&mount.log()).get("release") != Some(&21) {
        std::thread::sleep(Duration::from_millis(10));
    }
    mount.unmount();
    let mut all = requests(&mount.log());
    for kind in ["lookup", "create", "write", "flush"] {
        assert_eq!(small.get(kind), Some(&20), "one {kind} a file: {small:?}");
    }
    assert_eq!(all.remove("release"), Some(21));
    let writes = all["write"] - small["write"];
    assert!(writes <= 17, "{writes} writes for 16 MiB, in memory that need not begin with a page");
    for kind in ["getxattr", "setattr", "open"] {
        assert_eq!(all.get(kind), None, "{all:?}");
    }
    // The kernel forgets a directory's attributes when a name is made in it, and asks before the next.
    let directory = all.get("getattr").copied().unwrap_or_default();
    assert!(directory <= 22, "{all:?}");
}

/// In the foreground the configuration file's filter counted, in the background the command's.
#[test]
fn what_a_command_is_to_log_counts_before_the_configuration_file() {
    if !require_fuse("what_a_command_is_to_log_counts_before_the_configuration_file") {
        return;
    }
    let scratch = Scratch::new();
    let settings = scratch.join("settings.toml");
    std::fs::write(&settings, "log = 'error'\n").expect("written");
    let settings = settings.display().to_string();
    let bucket = url(&scratch.folder("bucket"));
    for (options, is_told) in
        [(&["--config", &settings][..], false), (&["--config", &settings, "--log", "info"], true)]
    {
        let mut mount = Mount::new(&scratch.join("home"), &bucket, &scratch.join("mnt"), options, &[]);
        assert_eq!(mount.log().contains("INFO"), is_told, "{}", mount.log());
        mount.unmount();
    }
}
