//! The commands that look and tell: status, refresh, doctor, ckpt, version.

#[path = "commands/ckpt.rs"]
mod ckpt;

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use forebay_tests::mount::is_mounted;
use forebay_tests::process::{start, unmount};
use forebay_tests::s3::Server;
use forebay_tests::{Forebay, Mount, Outcome, Scratch, require_fuse, shell};
use serde_json::{Value, json};

fn forebay(scratch: &Scratch, args: &[&str]) -> Outcome {
    Forebay::new(&scratch.folder("home"), args).run()
}

fn url(folder: &Path) -> String {
    format!("file://{}", folder.display())
}

#[track_caller]
fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn status_shows_mounts_and_clears_away_what_dead_ones_left() {
    if !require_fuse("status_shows_mounts_and_clears_away_what_dead_ones_left") {
        return;
    }
    let scratch = Scratch::new();
    let status = |args: &[&str]| forebay(&scratch, &[&["status"], args].concat());
    // Mounts of other tests may be dead at this moment; they are of the host.
    let shown = |args: &[&str]| {
        let mut shown = parse(&status(args).succeeded());
        let mounts = shown["mounts"].as_array_mut().expect("a list");
        mounts.retain(|mount| mount["state"] != json!("dead"));
        shown
    };
    assert_eq!(shown(&["--json"]), json!({ "mounts": [] }));
    let (source, folder) = (url(&scratch.folder("bucket")), scratch.join("mnt"));
    let state = scratch.join("elsewhere").display().to_string();
    let mut mount =
        Mount::new(&scratch.folder("home"), &source, &folder, &["--state-dir", &state, "--read-only"], &[]);
    let told = shown(&["--state-dir", &state, "--json"]);
    let only = &told["mounts"][0];
    assert_eq!((&only["state"], &only["source"]), (&json!("serving"), &json!(source)), "{told}");
    assert_eq!((&only["pid"], &only["read_only"]), (&json!(mount.pid()), &json!(true)), "{told}");
    let table = status(&["--state-dir", &state, &folder.display().to_string()]).succeeded();
    assert!(table.lines().count() == 2 && table.contains("read-only"), "{table}");
    status(&[&folder.display().to_string()]).failed_with("no Forebay mount", "--state-dir");
    status(&["/no/such/path"]).failed_with("/no/such/path", "a path in a mount");

    // One that is detached is no mount any more.
    mount.kill();
    assert_eq!(fs::read_dir(Path::new(&state).join("mounts")).expect("sockets").count(), 1);
    assert_eq!(shown(&["--state-dir", &state, "--json"]), json!({ "mounts": [] }));
    assert_eq!(fs::read_dir(Path::new(&state).join("mounts")).expect("sockets").count(), 0);
}

/// A mount as a container of its own has it, where it is the process 1, until it is unmounted.
fn mount_as_process_1(scratch: &Scratch, name: &str) -> (PathBuf, Child) {
    let (bucket, folder) = (scratch.folder(&format!("bucket {name}")), scratch.folder(name));
    fs::write(bucket.join(name), name).expect("the bucket is writable");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork"]).arg(Forebay::binary()).args(["mount", "-f", "--state-dir"]);
    command.arg(scratch.join("state")).args([url(&bucket).as_str(), &folder.display().to_string()]);
    let log = fs::File::create(scratch.join(&format!("log {name}"))).expect("a log can be made");
    command.env("HOME", scratch.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let process = start(&mut command).expect("unshare starts");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_mounted(&folder) {
        assert!(
            Instant::now() < deadline,
            "{}",
            fs::read_to_string(scratch.join(&format!("log {name}"))).expect("a log")
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    (folder, process)
}

/// Each took the other's control socket away, and the second one's end that of whoever was left.
#[test]
fn mounts_of_two_containers_that_share_a_state_directory_are_both_reached() {
    let test = "mounts_of_two_containers_that_share_a_state_directory_are_both_reached";
    let scratch = Scratch::new();
    if !require_fuse(test) {
        return;
    }
    if shell(scratch.path(), "unshare --pid --fork true").code != Some(0) {
        return forebay_tests::settings::skip(test, "no PID namespaces");
    }
    let state = scratch.join("state").display().to_string();
    let reach = |folder: &Path| {
        let folder = folder.display().to_string();
        let told = forebay(&scratch, &["status", &folder, "--state-dir", &state, "--json"]).succeeded();
        let told = parse(&told);
        assert_eq!(
            (&told["mounts"][0]["mount_point"], &told["mounts"][0]["pid"]),
            (&json!(folder), &json!(1)),
            "{told}"
        );
        forebay(&scratch, &["sync", &folder, "--state-dir", &state]).succeeded();
    };
    let (one, mut first) = mount_as_process_1(&scratch, "one");
    let (other, mut second) = mount_as_process_1(&scratch, "other");
    reach(&one);
    reach(&other);
    unmount(&other);
    assert!(second.wait().expect("it ends").success());
    reach(&one);

    // What a container leaves that was killed is cleared away by the next one, and by no number of a process.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a number");
    let boot = boot.split('-').next().expect("its beginning");
    // Another host that shares the directory, where this one finds nobody who listens.
    let [left, elsewhere] = [format!("{boot}-0.sock"), "00000000-0.sock".to_owned()]
        .map(|name| Path::new(&state).join("mounts").join(name));
    drop([&left, &elsewhere].map(|socket| UnixListener::bind(socket).expect("a socket")));
    let (other, mut second) = mount_as_process_1(&scratch, "other");
    assert!(!left.exists() && elsewhere.exists());
    forebay(&scratch, &["status", "--state-dir", &state]).succeeded();
    assert!(elsewhere.exists());
    fs::remove_file(elsewhere).expect("removed");
    reach(&one);
    reach(&other);
    for (folder, process) in [(one, &mut first), (other, &mut second)] {
        unmount(&folder);
        assert!(process.wait().expect("it ends").success());
    }
    assert_eq!(fs::read_dir(Path::new(&state).join("mounts")).expect("sockets").count(), 0);
}

/// It was told once, by the number of its process; what it had been mounted on went on to fail.
#[test]
fn a_mount_that_died_is_told_until_it_is_mounted_again_or_detached() {
    if !require_fuse("a_mount_that_died_is_told_until_it_is_mounted_again_or_detached") {
        return;
    }
    let scratch = Scratch::new();
    let (source, folder) = (url(&scratch.folder("bucket")), scratch.folder("a mount"));
    let at = folder.display().to_string();
    let mount = || {
        let told = parse(&forebay(&scratch, &["mount", &source, &at, "--ttl", "60", "--json"]).succeeded());
        told["pid"].as_i64().expect("a process")
    };
    let dead = || {
        let shown = parse(&forebay(&scratch, &["status", "--json"]).succeeded());
        let all = shown["mounts"].as_array().expect("a list").clone();
        // Others' tests may leave dead mounts on this host, too.
        let ours = all.into_iter().filter(|mount| mount["mount_point"] == json!(at));
        ours.filter(|mount| mount["state"] == json!("dead")).collect::<Vec<_>>()
    };
    let kill = |pid: i64| {
        shell(scratch.path(), &format!("kill -KILL {pid}")).succeeded();
        let gone =
            "for i in $(seq 1000); do stat -f 'a mount' > /dev/null 2>&1 || exit 0; sleep 0.01; done; exit 1";
        shell(scratch.path(), gone).succeeded();
    };
    let pid = mount();
    fs::metadata(&folder).expect("the kernel knows it for a minute");
    assert!(dead().is_empty());
    kill(pid);
    for _ in 0..2 {
        assert_eq!(dead(), [json!({ "state": "dead", "mount_point": at, "source": source })]);
    }
    let table = forebay(&scratch, &["status"]);
    assert!(table.stderr.contains(&format!("warning: {at}: its process died")), "{table}");
    assert!(table.stderr.contains("the same `forebay mount` again"), "{table}");
    let line = table.stdout.lines().find(|line| line.starts_with(&at)).expect("a line");
    assert!(line.contains(&source) && line.contains("dead"), "{table}");
    let below = folder.join("none").display().to_string();
    for line in [
        &["status", &at][..],
        &["sync", &at],
        &["sync", &below],
        &["trash", "restore", &below],
        &["quota", "get", &at],
    ] {
        forebay(&scratch, line).failed_with("the process of the mount", "the same `forebay mount` again");
    }
    let pid = mount();
    assert!(dead().is_empty());
    kill(pid);
    assert_eq!(dead().len(), 1);
    shell(scratch.path(), "umount -l 'a mount'").succeeded();
    assert!(dead().is_empty());
}

/// Who asks for the mounts of a state directory looks for dead ones of the whole host. To look one up keeps it busy, and
/// `umount` by another failed.
#[test]
fn status_touches_no_mount_that_is_served() {
    if !require_fuse("status_touches_no_mount_that_is_served") {
        return;
    }
    let scratch = Scratch::new();
    let (source, folder) = (url(&scratch.folder("bucket")), scratch.join("mnt"));
    let options = ["--log", "info,forebay_fuse=debug"];
    let mut mount = Mount::new(&scratch.folder("other home"), &source, &folder, &options, &[]);
    fs::write(folder.join("file"), "x").expect("written");
    let statfs = |mount: &Mount| mount.log().matches("operation=\"statfs\"").count();
    // A status beside this test may have found it before it was seen to be served.
    let before = statfs(&mount);
    for _ in 0..3 {
        forebay(&scratch, &["status", "--json"]).succeeded();
    }
    assert_eq!(statfs(&mount), before, "{}", mount.log());
    shell(&folder, "stat -f .").succeeded();
    assert_eq!(statfs(&mount), before + 1, "{}", mount.log());
    mount.unmount();
}

#[test]
fn a_refreshed_directory_shows_what_is_new_in_the_bucket() {
    if !require_fuse("a_refreshed_directory_shows_what_is_new_in_the_bucket") {
        return;
    }
    let scratch = Scratch::new();
    let (bucket, folder) = (scratch.folder("bucket"), scratch.join("mnt"));
    fs::create_dir(bucket.join("dir")).expect("folder");
    fs::write(bucket.join("dir/old"), "old").expect("file");
    let _mount = Mount::new(&scratch.folder("home"), &url(&bucket), &folder, &[], &[]);
    assert!(folder.join("dir/old").exists());
    for name in ["one", "two"] {
        fs::write(bucket.join("dir").join(name), name).expect("file");
    }
    assert!(!folder.join("dir/one").exists(), "the listing at hand is good for a minute");
    forebay(&scratch, &["refresh", &folder.join("dir").display().to_string()]).succeeded();
    assert_eq!(fs::read_to_string(folder.join("dir/two")).expect("a new file"), "two");
    forebay(&scratch, &["refresh", &folder.join("dir/two").display().to_string()])
        .failed_with("mnt/dir/two: it is no directory", "the directory that it is in");
}

/// The checks that `doctor --json` made, by name.
#[track_caller]
fn checks(outcome: Outcome, sound: bool) -> Vec<(String, String, Value)> {
    assert_eq!(outcome.code, Some(if sound { 0 } else { 1 }), "{outcome}");
    let report = parse(&outcome.stdout);
    assert_eq!(report["ok"], json!(sound), "{report}");
    let text = |check: &Value, field: &str| check[field].as_str().expect("text").to_owned();
    let checks = report["checks"].as_array().expect("checks").iter();
    checks.map(|check| (text(check, "name"), text(check, "verdict"), check.clone())).collect()
}

#[track_caller]
fn find<'a>(checks: &'a [(String, String, Value)], name: &str) -> (&'a str, &'a Value) {
    let found =
        checks.iter().find(|check| check.0 == name).unwrap_or_else(|| panic!("no {name}: {checks:?}"));
    (&found.1, &found.2)
}

#[test]
fn doctor_says_what_a_store_honours_and_where_the_tree_goes() {
    if !require_fuse("doctor_says_what_a_store_honours_and_where_the_tree_goes") {
        return;
    }
    let (scratch, server) = (Scratch::new(), Server::shared());
    let source = format!("s3://{}/p", server.create_bucket());
    let args = ["doctor", source.as_str(), "--json"];
    let found = checks(Forebay::new(&scratch.folder("home"), args).envs(&server.envs()).run(), true);
    for name in ["/dev/fuse", "kernel", "state directory", "bucket", "round trip", "writing", "range reads"] {
        assert_eq!(find(&found, name).0, "ok", "{found:?}");
    }
    for name in ["conditional create", "conditional update", "conditional reads", "versions", "names"] {
        assert_eq!(find(&found, name).0, "ok", "{found:?}");
    }
    // A container may forbid it.
    let (verdict, check) = find(&found, "io_uring");
    assert_eq!(verdict == "ok", check["fact"] == json!("can be used"), "{check}");
    assert_eq!(verdict == "warn", check["hint"].is_string(), "{check}");
    // moto completes an upload whatever version it names.
    let (verdict, check) = find(&found, "conditional uploads");
    assert_eq!((verdict, check["hint"].is_string()), ("warn", true), "{check}");
    assert_eq!(find(&found, "tree").1["fact"], json!("in the bucket, under .forebay/tree/"));

    let folder = scratch.folder("bucket");
    let source = url(&folder);
    let found = checks(forebay(&scratch, &["doctor", &source, "--json", "--read-only"]), true);
    assert_eq!(find(&found, "tree").1["fact"], json!("on this host, for a read-only mount"));
    assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 0, "nothing is written");
}

#[test]
fn doctor_fails_on_what_does_not_work() {
    let scratch = Scratch::new();
    let server = Server::start();
    let variables = server.envs();
    server.kill();
    let run = |args: &[&str]| Forebay::new(&scratch.folder("home"), args).envs(&variables).run();
    let found = checks(run(&["doctor", "s3://b", "--json"]), false);
    let (verdict, check) = find(&found, "bucket");
    assert_eq!(verdict, "fail");
    assert!(check["hint"].as_str().expect("a hint").contains("endpoint"), "{check}");
    let table = run(&["doctor", "file:///no/such/folder"]);
    assert_eq!(table.code, Some(1), "{table}");
    assert!(table.stdout.contains("FAIL") && table.stdout.contains("hint:"), "{table}");
    let file = scratch.join("file");
    fs::write(&file, "").expect("file");
    let found =
        checks(run(&["doctor", "--json", "--state-dir", &file.join("x").display().to_string()]), false);
    assert_eq!(find(&found, "state directory").0, "fail");
}

fn prints_the_version_to(stdout: impl Into<Stdio>) -> Output {
    let mut command = Command::new(Forebay::binary());
    command.arg("version").stdout(stdout).stderr(Stdio::piped());
    start(&mut command).and_then(Child::wait_with_output).expect("it runs")
}

/// As behind `| head`: it was a panic.
#[test]
fn a_reader_that_has_enough_is_no_fault() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = prints_the_version_to(writer);
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[test]
fn an_output_that_cannot_be_written_is_told() {
    let full = fs::File::options().write(true).open("/dev/full").expect("every Linux has it");
    let output = prints_the_version_to(full);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(told.contains("the output cannot be written: No space left"), "{told}");
}

#[test]
fn the_version_names_the_formats() {
    let scratch = Scratch::new();
    let version = parse(&forebay(&scratch, &["version", "--json"]).succeeded());
    assert_eq!(version["version"], json!(env!("CARGO_PKG_VERSION")));
    assert_eq!((&version["volume_format"], &version["checkpoint_format"]), (&json!(1), &json!("2")));
    assert!(forebay(&scratch, &["version"]).succeeded().starts_with("forebay "));
    forebay(&scratch, &["warmup"]).failed_with("required arguments", "--help");
}

#[test]
fn command_lines_that_make_no_sense_are_told_with_one_hint_and_as_json() {
    let scratch = Scratch::new();
    let plain = forebay(&scratch, &["mount", "--no-such-option"]);
    plain.failed_with("unexpected argument '--no-such-option'", "forebay COMMAND --help");
    assert!(plain.stderr.contains("Usage: ") && !plain.stderr.contains("For more"), "{plain}");
    for (line, error, hint) in [
        (&["--json", "mount"][..], "required arguments were not provided: <SOURCE> <DIRECTORY>", "--help"),
        (&["mount", "--read-onyl", "--json"], "unexpected argument '--read-onyl'", "'--read-only'"),
        (&["ckpt", "show", "--json", "run", "last"], "`last` names no step", "--help"),
        (&["--json"], "requires a subcommand", "--help"),
        (&["ckpt", "--json"], "requires a subcommand", "--help"),
    ] {
        let outcome = forebay(&scratch, line);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome}");
        let told = parse(&outcome.stderr);
        assert_eq!(told["kind"], json!("invalid"), "{told}");
        assert!(told["error"].as_str().expect("text").contains(error), "{told}");
        assert!(told["hint"].as_str().expect("text").contains(hint), "{told}");
    }
    // Behind `--` it is a name.
    let outcome = forebay(&scratch, &["sync", "a", "--", "--json"]);
    assert!(outcome.code == Some(2) && outcome.stderr.starts_with("error: "), "{outcome}");
    assert!(forebay(&scratch, &["--help", "--json"]).succeeded().starts_with("Holds checkpoints"));
}
