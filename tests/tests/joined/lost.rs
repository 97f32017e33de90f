//! What becomes of mounts when the process that serves their tree is lost.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_tests::process::start;
use forebay_tests::{Cable, Door, Forebay, Manner, Meta, Seeded, noise, require_fuse, scale, shell};

use super::{Hosts, check_same, free_address, make, wait_for};

/// Promise S74: When the process that serves the tree is lost, what is asked of the tree waits up to `deadline_ms` of `[volume.join]` for the next one
#[test]
fn mounts_go_on_when_the_one_that_serves_is_killed() {
    if !require_fuse("mounts_go_on_when_the_one_that_serves_is_killed") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mut first = hosts.mount("first", &[]);
    let second = hosts.mount("second", &["--join-only"]);
    fs::write(second.path().join("before"), "before").expect("written");
    let mut open = fs::File::create(second.path().join("open")).expect("created");
    open.write_all(&vec![7; 20 << 20]).expect("written");
    open.sync_all().expect("synced");
    open.write_all(b"and more").expect("written");
    first.kill();
    let listed = std::thread::scope(|threads| {
        let waiting = threads.spawn(|| fs::read_to_string(second.path().join("before")));
        std::thread::sleep(Duration::from_millis(500));
        assert!(!waiting.is_finished(), "nobody serves the tree");
        first.remount(&hosts.home("first"));
        waiting.join().expect("joined")
    });
    assert_eq!(listed.expect("read"), "before");
    open.sync_all().expect("what was being written goes on");
    let mut whole = vec![7; 20 << 20];
    whole.extend_from_slice(b"and more");
    wait_for("the file", || fs::read(first.path().join("open")).expect("read") == whole);
    fs::write(second.path().join("after"), "after").expect("written");
    check_same(&first, &second);
    assert!(hosts.status("second")["sharing"]["reconnects"].as_u64() >= Some(1));
}

/// A program without privileges writes to a file that was there before: each write takes set-id bits and a capability away from it, for
/// which the tree was asked, and waited for.
const AS_OTHERS: &str = r#"
import os, sys
os.setgroups([])
os.setgid(4321)
os.setuid(1234)
file = os.open("older", os.O_WRONLY | os.O_APPEND)
def step(word):
    print(word, flush=True)
    sys.stdin.readline()
step("open")
for number in range(300):
    os.write(file, b"%03d\n" % number)
step("written")
os.fsync(file)
os.close(file)
print("done", flush=True)
"#;

/// Promise S74: Files that are open stay open, and what is being written to them goes on.
#[test]
fn who_has_no_privileges_writes_on_while_nobody_serves_the_tree() {
    if !require_fuse("who_has_no_privileges_writes_on_while_nobody_serves_the_tree") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mut first = hosts.mount("first", &[]);
    let second = hosts.mount("second", &["--join-only", "-o", "allow_other"]);
    let older = first.path().join("older");
    let requests = || hosts.status("second")["sharing"]["requests"].as_u64().expect("a count");
    for is_killed in [false, true] {
        fs::write(&older, "older\n").expect("written");
        shell(first.path(), "chmod 666 older && sync older .").succeeded();
        wait_for("the file", || fs::read(second.path().join("older")).is_ok_and(|text| text == b"older\n"));
        let mut command = Command::new("python3");
        command.args(["-c", AS_OTHERS]).current_dir(second.path());
        let mut writer = start(command.stdin(Stdio::piped()).stdout(Stdio::piped())).expect("python3 starts");
        let mut steps = BufReader::new(writer.stdout.take().expect("piped")).lines();
        let mut next = || steps.next().expect("one more").expect("text");
        let mut go_on = writer.stdin.take().expect("piped");
        assert_eq!(next(), "open");
        if is_killed {
            first.kill();
        }
        let (before, began) = (requests(), Instant::now());
        writeln!(go_on, "go").expect("told");
        assert_eq!(next(), "written");
        let took = began.elapsed();
        let asked = requests() - before;
        // What is synced every two seconds, and what the kernel asks again.
        assert!(asked < 20 + 10 * took.as_secs(), "{asked} requests in {took:?} for 300 writes");
        if is_killed {
            first.remount(&hosts.home("first"));
        }
        writeln!(go_on, "go").expect("told");
        assert_eq!(next(), "done");
        assert!(writer.wait().expect("ended").success());
        let lines: String = (0..300).map(|number| format!("{number:03}\n")).collect();
        wait_for("what was written", || {
            fs::read_to_string(&older).is_ok_and(|text| text == format!("older\n{lines}"))
        });
    }
}

/// Each of the others stands by.
///
/// Promise S78: A mount that joined takes the tree over when the process that serves it is lost
#[test]
fn a_mount_that_joined_takes_the_tree_over() {
    if !require_fuse("a_mount_that_joined_takes_the_tree_over") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mut first = hosts.mount("first", &[]);
    let [mut second, mut third] = ["second", "third"].map(|name| hosts.mount(name, &[]));
    let mut open = fs::File::create(second.path().join("open")).expect("created");
    open.write_all(b"before").expect("written");
    open.sync_all().expect("synced");
    first.kill();
    open.write_all(b" and after").expect("written");
    open.sync_all().expect("synced by the next one");
    drop(open);
    fs::write(third.path().join("third"), "third").expect("written");
    check_same(&second, &third);
    let served = |name: &str| hosts.status(name)["sharing"]["mounts"].as_array().map(Vec::len);
    let serving: Vec<_> = ["second", "third"].into_iter().filter(|name| served(name).is_some()).collect();
    assert_eq!(serving.len(), 1, "one of them serves the tree");
    assert_eq!(served(serving[0]), Some(2), "itself among those that joined");
    // The one that was killed is one of them when it comes again.
    first.remount(&hosts.home("first"));
    check_same(&first, &second);
    // And so it goes on when a mount ends well.
    let [last, other] =
        if serving[0] == "second" { [&mut second, &mut third] } else { [&mut third, &mut second] };
    last.unmount();
    fs::write(other.path().join("last"), "last").expect("written");
    check_same(&first, other);
    assert_eq!(fs::read_to_string(first.path().join("open")).expect("read"), "before and after");
    other.unmount();
    first.unmount();
    let shown = Forebay::new(&hosts.home("upkeep"), ["fsck", &hosts.url]).run();
    shown.succeeded();
}

/// A process without a mount, another one that stands by, and mounts that never hold the volume.
///
/// Promise S74: When the process that serves the tree is lost, what is asked of the tree waits up to `deadline_ms` of `[volume.join]` for the next one
#[test]
fn a_process_without_a_mount_serves_the_tree_and_another_takes_over() {
    if !require_fuse("a_process_without_a_mount_serves_the_tree_and_another_takes_over") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mut active = hosts.serve("meta", &[]);
    let mounts = [hosts.mount("one", &["--join-only"]), hosts.mount("other", &["--join-only"])];
    let mut standby = hosts.serve("standby", &["--standby"]);
    make(&mounts[0], "of-one");
    make(&mounts[1], "of-other");
    check_same(&mounts[0], &mounts[1]);
    let shown = hosts.status("meta");
    assert_eq!(shown["sharing"]["mounts"].as_array().expect("mounts").len(), 2, "{shown}");
    active.kill();
    fs::write(mounts[0].path().join("after"), "by the next one").expect("written");
    assert_eq!(fs::read_to_string(mounts[1].path().join("after")).expect("read"), "by the next one");
    check_same(&mounts[0], &mounts[1]);
    // It ends when it is told to; what mounts ask waits, and fails when nobody comes.
    standby.end();
    let mut next = hosts.serve("next", &[]);
    assert_eq!(fs::read_to_string(mounts[0].path().join("after")).expect("read"), "by the next one");
    drop(mounts);
    next.end();
}

/// As on a host that slept, or was cut off from the store alone, while another one took the volume over.
///
/// Promise S74: When the process that serves the tree is lost, what is asked of the tree waits up to `deadline_ms` of `[volume.join]` for the next one
#[test]
fn a_process_whose_lease_ran_out_serves_nobody() {
    if !require_fuse("a_process_whose_lease_ran_out_serves_nobody") {
        return;
    }
    for sleeps in [false, true] {
        let hosts = Hosts::of_s3();
        let server = hosts.server.as_ref().expect("over S3");
        let door = Door::new(server.address()).expect("loopback has free ports");
        let envs = server.envs_at(door.endpoint());
        let mut lost = Meta::start(&hosts.home("lost"), &hosts.url, &hosts.secret(), &[], &envs);
        let mounts = ["one", "other"].map(|name| hosts.mount(name, &["--join-only"]));
        let mut standby = hosts.serve("standby", &["--standby"]);
        fs::write(mounts[0].path().join("before"), "before").expect("written");
        fs::File::open(mounts[0].path()).expect("opened").sync_all().expect("synced");
        match sleeps {
            true => lost.signal("STOP"),
            false => door.set(Manner::Shut),
        }
        // Synced where the process that serves cannot reach the store: by the next one, or not at all, and told.
        let synced = |name: &str| {
            let mut file = fs::File::create(mounts[0].path().join(name))?;
            file.write_all(name.as_bytes())?;
            file.sync_all()
        };
        let made: Vec<String> = (0..2).map(|number| format!("made-{number}")).collect();
        let kept: Vec<&String> = made.iter().filter(|name| synced(name).is_ok()).collect();
        match sleeps {
            true => lost.signal("CONT"),
            false => door.set(Manner::Pass),
        }
        assert!(!lost.wait().success(), "it has no volume any more");
        assert!(lost.log().contains("another process took this volume over"), "{}", lost.log());
        for name in kept {
            let found = fs::read_to_string(mounts[1].path().join(name)).expect("what was synced is there");
            assert_eq!(&found, name);
        }
        wait_for("the next one", || synced("after").is_ok());
        assert_eq!(fs::read_to_string(mounts[1].path().join("before")).expect("found"), "before");
        check_same(&mounts[0], &mounts[1]);
        drop(mounts);
        standby.end();
        Forebay::new(&hosts.home("upkeep"), ["fsck", &hosts.url]).envs(&hosts.envs).run().succeeded();
    }
}

/// Promise S74: When the process that serves the tree is lost, what is asked of the tree waits up to `deadline_ms` of `[volume.join]` for the next one
#[test]
fn what_is_asked_while_the_process_that_serves_says_nothing_is_done_once() {
    if !require_fuse("what_is_asked_while_the_process_that_serves_says_nothing_is_done_once") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mut meta = hosts.serve("meta", &[]);
    let mount = hosts.mount("one", &["--join-only"]);
    let mut open = fs::File::create(mount.path().join("open")).expect("created");
    meta.signal("STOP");
    std::thread::scope(|threads| {
        let making = threads.spawn(|| fs::create_dir(mount.path().join("directory")));
        // Longer than its silence is taken for life.
        std::thread::sleep(Duration::from_secs(10));
        assert!(!making.is_finished(), "nobody answers");
        meta.signal("CONT");
        making.join().expect("joined").expect("it is made, and not there already");
    });
    assert!(hosts.status("one")["sharing"]["reconnects"].as_u64() >= Some(1));
    open.write_all(b"goes on").expect("written");
    open.sync_all().expect("synced");
    drop((open, mount));
    meta.end();
}

/// Promise S78: A mount that joined takes the tree over when the process that serves it is lost
#[test]
fn a_mount_whose_port_is_taken_leaves_the_tree_to_another() {
    if !require_fuse("a_mount_whose_port_is_taken_leaves_the_tree_to_another") {
        return;
    }
    let (hosts, listen) = (Hosts::of_folder(), free_address());
    let mut first = hosts.mount("first", &[]);
    let mount = hosts.mount_at("one", &listen, &[]);
    fs::write(mount.path().join("before"), "before").expect("written");
    let _taken = TcpListener::bind(&listen).expect("it listens where it serves, and that is elsewhere");
    first.kill();
    wait_for("its try", || mount.log().contains(&listen));
    let mut next = hosts.serve("next", &["--standby"]);
    fs::write(mount.path().join("after"), "after").expect("written where the next one serves");
    assert_eq!(fs::read_to_string(mount.path().join("before")).expect("found"), "before");
    drop(mount);
    next.end();
}

/// Promise S77: When fsync returns on a mount that joined, the file's bytes and its name are in the bucket
#[test]
fn what_is_synced_while_one_process_after_another_is_lost_is_there() {
    if !require_fuse("what_is_synced_while_one_process_after_another_is_lost_is_there") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mut serving = hosts.serve("meta", &[]);
    let mounts = ["one", "other"].map(|name| hosts.mount(name, &["--join-only"]));
    let (is_over, syncs) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (kept, records) = std::thread::scope(|threads| {
        let files: Vec<_> = (0..3)
            .map(|writer| {
                let (folder, is_over, syncs) = (mounts[0].path(), &is_over, &syncs);
                threads.spawn(move || write_files(folder, writer, is_over, syncs))
            })
            .collect();
        let appended = threads.spawn(|| append(&mounts[0].path().join("log"), &is_over, &syncs));
        for round in 0..(2 * scale()).min(10) {
            let mut next = hosts.serve(&format!("meta-{round}"), &["--standby"]);
            let before = syncs.load(Ordering::SeqCst);
            wait_for("syncs", || syncs.load(Ordering::SeqCst) > before + 20);
            serving.kill();
            std::mem::swap(&mut serving, &mut next);
        }
        let before = syncs.load(Ordering::SeqCst);
        wait_for("syncs with the last one", || syncs.load(Ordering::SeqCst) > before + 20);
        is_over.store(true, Ordering::SeqCst);
        let kept: Vec<String> =
            files.into_iter().flat_map(|writing| writing.join().expect("no panic")).collect();
        (kept, appended.join().expect("no panic"))
    });
    for mount in &mounts {
        for name in &kept {
            let found = fs::read_to_string(mount.path().join(name));
            assert_eq!(&found.unwrap_or_else(|error| panic!("{name}: {error}")), name);
        }
        let log = fs::read_to_string(mount.path().join("log")).expect("the log");
        let mut lines = log.lines();
        for record in &records {
            assert!(lines.any(|line| line == record), "{record} was synced and is not in its place");
        }
    }
    check_same(&mounts[0], &mounts[1]);
    drop(mounts);
    serving.end();
    // Content of files that were lost before they had any is gc's.
    for upkeep in ["gc", "fsck"] {
        Forebay::new(&hosts.home("upkeep"), [upkeep, &hosts.url]).run().succeeded();
    }
}

/// Makes files, one after another, each with its name as content. Returns those of which all was told to have been done.
fn write_files(folder: &Path, writer: usize, is_over: &AtomicBool, syncs: &AtomicUsize) -> Vec<String> {
    let mut kept = Vec::new();
    for number in 0.. {
        if is_over.load(Ordering::SeqCst) {
            break;
        }
        let name = format!("f-{writer}-{number}");
        let write = || {
            let mut file = fs::File::create(folder.join(&name))?;
            file.write_all(name.as_bytes())?;
            file.sync_all()
        };
        // What was asked of a process that is lost may fail, and be told so.
        if write().is_ok() {
            syncs.fetch_add(1, Ordering::SeqCst);
            kept.push(name);
        }
    }
    kept
}

/// Appends lines to a file that stays open. Returns those that were synced.
fn append(path: &Path, is_over: &AtomicBool, syncs: &AtomicUsize) -> Vec<String> {
    let mut file = fs::File::options().create(true).append(true).open(path).expect("opened");
    let mut kept = Vec::new();
    for number in 0.. {
        if is_over.load(Ordering::SeqCst) {
            break;
        }
        let line = format!("line {number}");
        if file.write_all(format!("{line}\n").as_bytes()).and_then(|()| file.sync_all()).is_ok() {
            syncs.fetch_add(1, Ordering::SeqCst);
            kept.push(line);
        }
    }
    kept
}

/// Promise S74: When the process that serves the tree is lost, what is asked of the tree waits up to `deadline_ms` of `[volume.join]` for the next one
#[test]
fn what_is_asked_while_nobody_serves_the_tree_fails_in_time_and_is_asked_again() {
    if !require_fuse("what_is_asked_while_nobody_serves_the_tree_fails_in_time_and_is_asked_again") {
        return;
    }
    let hosts = Hosts::of_folder();
    let short = hosts.scratch.join("short.toml");
    fs::write(&short, "[volume.join]\ndeadline_ms = 5000\n").expect("written");
    let mut meta = hosts.serve("meta", &[]);
    wait_for("who serves the tree", || meta.log().contains("other mounts may join"));
    let mount = hosts.mount("one", &["--join-only", "--config", &short.display().to_string()]);
    fs::write(mount.path().join("before"), "before").expect("written");
    let mut open = fs::File::create(mount.path().join("open")).expect("created");
    open.write_all(b"synced").and_then(|()| open.sync_all()).expect("synced");
    meta.kill();
    let failed = |what: &str, outcome: std::io::Result<()>| {
        let error = outcome.expect_err(what);
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{what}: {error}");
    };
    std::thread::scope(|threads| {
        threads.spawn(|| failed("a look", fs::metadata(mount.path().join("before")).map(drop)));
        threads.spawn(|| failed("a new name", fs::create_dir(mount.path().join("directory"))));
        threads.spawn(|| failed("a sync", open.write_all(b" and kept").and_then(|()| open.sync_all())));
    });
    let why = "no process that serves the tree of this volume answered for 5 s";
    assert!(mount.log().contains(why), "{}", mount.log());
    let mut next = hosts.serve("next", &[]);
    wait_for("the next one", || fs::metadata(mount.path().join("before")).is_ok());
    assert!(!mount.path().join("directory").exists(), "what was told to have failed was not done later");
    open.write_all(b" and more").and_then(|()| open.sync_all()).expect("synced by the next one");
    let found = fs::read_to_string(mount.path().join("open")).expect("read");
    assert_eq!(found, "synced and kept and more");
    drop((open, mount));
    next.end();
}

/// Promise S74: Files that are open stay open, and what is being written to them goes on.
#[test]
fn a_mount_that_was_cut_off_for_long_is_told_what_it_lost() {
    if !require_fuse("a_mount_that_was_cut_off_for_long_is_told_what_it_lost") {
        return;
    }
    let (hosts, listen) = (Hosts::of_folder(), free_address());
    let cable = Cable::new(listen.parse().expect("an address")).expect("loopback has free ports");
    let reached = cable.address().to_string();
    let options = ["--join-address", &reached];
    let mut meta =
        Meta::start_at(&listen, &hosts.home("meta"), &hosts.url, &hosts.secret(), &options, &hosts.envs);
    let mount = hosts.mount("one", &["--join-only"]);
    let create = |name: &str| fs::File::create(mount.path().join(name)).expect("created");
    let (mut open, mut quiet) = (create("open"), create("quiet"));
    for file in [&mut open, &mut quiet] {
        file.write_all(b"synced").and_then(|()| file.sync_all()).expect("synced");
    }
    open.write_all(b" and in memory").expect("taken");
    let mut large = create("large");
    let data = noise(&mut Seeded::new(), 40 << 20);
    large.write_all(&data).expect("taken");
    let bucket = || shell(hosts.scratch.path(), "du -sb bucket | cut -f1").succeeded();
    wait_for("a part of it", || bucket().trim().parse::<usize>().expect("a size") > 8 << 20);
    cable.cut();
    let guests = || hosts.status("meta")["sharing"]["mounts"].as_array().map(Vec::len);
    wait_for("the end of its session", || guests() == Some(0));
    cable.mend();
    wait_for("its new session", || guests() == Some(1));
    let error = large.sync_all().expect_err("what was uploaded is lost with the session");
    assert!([libc::EIO, libc::ESTALE].map(Some).contains(&error.raw_os_error()), "{error}");
    open.sync_all().expect("it has lost nothing");
    quiet.write_all(b" and more").and_then(|()| quiet.sync_all()).expect("nor has this one");
    drop((open, quiet, large));
    let read = |name: &str| fs::read_to_string(mount.path().join(name)).expect("read");
    assert_eq!((read("open").as_str(), read("quiet").as_str()), ("synced and in memory", "synced and more"));
    fs::write(mount.path().join("large"), &data).expect("written once more");
    assert!(fs::read(mount.path().join("large")).expect("read") == data);
    assert!(mount.log().contains("cut off for too long"), "{}", mount.log());
    let other = hosts.mount("other", &["--join-only"]);
    check_same(&mount, &other);
    drop((mount, other));
    meta.end();
}
