//! Several mounts that write to one volume: one holds it and serves its tree, the others join.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_tests::meta::{free_address, join_secret};
use forebay_tests::s3::Server;
use forebay_tests::{Forebay, Meta, Mount, Scratch, assert_same_trees, require_fuse, shell};
use serde_json::Value;

/// Hosts that write to one bucket.
struct Hosts {
    scratch: Scratch,
    url: String,
    envs: Vec<(String, String)>,
}

impl Hosts {
    fn of_folder() -> Self {
        let scratch = Scratch::new();
        let url = format!("file://{}", scratch.folder("bucket").display());
        Self::of(scratch, url, Vec::new())
    }

    fn of(scratch: Scratch, url: String, envs: Vec<(String, String)>) -> Self {
        Self { scratch, url, envs }
    }

    fn home(&self, name: &str) -> PathBuf {
        self.scratch.join(&format!("home-{name}"))
    }

    /// Mounts on a host of its own, at a port that is free now.
    fn mount(&self, name: &str, options: &[&str]) -> Mount {
        let (secret, listen) = (self.secret(), free_address());
        let ours = ["--join-secret", &secret, "--join-listen", &listen];
        let options: Vec<&str> = ours.iter().chain(options).copied().collect();
        Mount::new(&self.home(name), &self.url, &self.scratch.join(name), &options, &self.envs)
    }

    fn secret(&self) -> String {
        join_secret(self.scratch.path())
    }

    /// What `forebay status` tells of a host's mount.
    #[track_caller]
    fn status(&self, name: &str) -> Value {
        let text = Forebay::new(&self.home(name), ["status", "--json"]).run().succeeded();
        let shown: Value = serde_json::from_str(&text).expect("it is JSON");
        shown["mounts"][0].clone()
    }
}

/// Waits for what others are told of in moments, and see after a second in any case.
#[track_caller]
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(60), "it never came: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What one made, wherever that is shown.
const MAKE: &str = r#"
mkdir -p $1/deep && echo one > $1/deep/a && ln -s a $1/deep/link && ln $1/deep/a $1/hard && chmod 600 $1/deep/a
mkfifo $1/pipe && python3 -c "import os; os.setxattr('$1/hard', 'user.k', b'v')"
head -c 9000000 /dev/urandom > $1/pieces && printf x | dd of=$1/pieces bs=1 seek=5000000 conv=notrunc status=none
head -c 3000000 /dev/urandom > $1/old && mv $1/old $1/new && for i in $(seq 40); do echo $i > $1/n$i; done && rm $1/n7
"#;

fn make(mount: &Mount, name: &str) {
    shell(mount.path(), &MAKE.replace("$1", name)).succeeded();
}

/// Both mounts show the same, each after what the other one's kernel may still keep.
#[track_caller]
fn check_same(one: &Mount, other: &Mount) {
    let facts = "find . -printf '%p %y %m %U %G %n %s %T@ %i\\n' | sort";
    let shown = |mount: &Mount| shell(mount.path(), facts).succeeded();
    wait_for("the same names", || shown(one) == shown(other));
    assert_same_trees(one.path(), other.path(), true);
}

fn write_and_compare(hosts: &Hosts) {
    let mut one = hosts.mount("one", &[]);
    let mut other = hosts.mount("other", &[]);
    make(&one, "of-one");
    make(&other, "of-other");
    check_same(&one, &other);
    // Each in what the other made.
    shell(other.path(), "mv of-one/deep of-other/deeper && rm of-one/n1 && echo more >> of-one/hard")
        .succeeded();
    shell(one.path(), "ln of-other/hard again && rm -r of-other/deep && truncate -s 5 of-other/new")
        .succeeded();
    check_same(&one, &other);
    // A name is found by who was told of it, at once.
    for round in 0..50 {
        let (writer, reader) = if round % 2 == 0 { (&one, &other) } else { (&other, &one) };
        let name = format!("round-{round}");
        assert!(!reader.path().join(&name).exists());
        fs::write(writer.path().join(&name), &name).expect("written");
        assert_eq!(fs::read_to_string(reader.path().join(&name)).expect("read"), name);
        fs::remove_file(reader.path().join(&name)).expect("removed");
    }
    check_same(&one, &other);
    assert_eq!(hosts.status("one")["sharing"]["mounts"].as_array().expect("mounts").len(), 1);
    assert!(hosts.status("other")["sharing"]["server"].is_string());
    other.unmount();
    assert_eq!(hosts.status("one")["sharing"]["mounts"], Value::Array(Vec::new()));
    one.unmount();
    // What is in the bucket is all that another host needs.
    one.remount(&hosts.home("elsewhere"));
    assert_eq!(shell(one.path(), "cat of-one/hard; stat -c %s of-other/new").succeeded(), "one\nmore\n5\n");
    one.unmount();
}

/// Promise S72: With `--join-secret` any number of mounts write to one volume
#[test]
fn two_hosts_write_to_one_folder() {
    if require_fuse("two_hosts_write_to_one_folder") {
        write_and_compare(&Hosts::of_folder());
    }
}

/// Promise S72: With `--join-secret` any number of mounts write to one volume
#[test]
fn two_hosts_write_to_one_bucket_of_s3() {
    if !require_fuse("two_hosts_write_to_one_bucket_of_s3") {
        return;
    }
    let server = Server::for_volume();
    let url = format!("s3://{}/volume", server.create_bucket());
    write_and_compare(&Hosts::of(Scratch::new(), url, server.envs()));
}

/// What is open on one host while another one writes, removes or replaces it.
///
/// Promise S73: A file that is opened has the content that was committed last
#[test]
fn open_files_show_what_other_hosts_wrote_and_outlive_their_names() {
    if !require_fuse("open_files_show_what_other_hosts_wrote_and_outlive_their_names") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mounts = [hosts.mount("one", &[]), hosts.mount("other", &[])];
    for (writer, reader) in [(0, 1), (1, 0)] {
        let [writer, reader] = [writer, reader].map(|at: usize| mounts[at].path());
        fs::write(writer.join("file"), "first").expect("written");
        let mut open = fs::File::open(reader.join("file")).expect("opened");
        let mut text = String::new();
        open.read_to_string(&mut text).expect("read");
        assert_eq!(text, "first");
        fs::write(writer.join("file"), "second, and longer").expect("written");
        wait_for("new content in an open file", || {
            let mut text = String::new();
            open.seek(SeekFrom::Start(0)).expect("sought");
            open.read_to_string(&mut text).expect("read");
            text == "second, and longer"
        });
        // Replaced as programs do it.
        fs::write(writer.join("file.new"), "third").expect("written");
        fs::rename(writer.join("file.new"), writer.join("file")).expect("renamed");
        wait_for("the new file", || fs::read_to_string(reader.join("file")).expect("read") == "third");
        let mut old = String::new();
        open.seek(SeekFrom::Start(0)).expect("sought");
        open.read_to_string(&mut old).expect("an open file is read on");
        assert_eq!(old, "second, and longer");
        let metadata = open.metadata().expect("known");
        assert_eq!(metadata.nlink(), 0);
        fs::remove_file(writer.join("file")).expect("removed");
        wait_for("its end", || !reader.join("file").exists());
    }
}

/// What one host's kernel still knows when another one has removed it or made it anew.
///
/// Promise S73: A name that one mount made is found by the others at once
#[test]
fn what_was_removed_elsewhere_is_made_anew_and_what_was_made_anew_is_found() {
    if !require_fuse("what_was_removed_elsewhere_is_made_anew_and_what_was_made_anew_is_found") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mounts = [hosts.mount("one", &[]), hosts.mount("other", &[])];
    for round in 0..60 {
        let (here, there) = (mounts[round % 2].path(), mounts[1 - round % 2].path());
        let (file, folder) = (here.join("file"), here.join("folder"));
        fs::write(&file, "old").expect("made");
        fs::create_dir(&folder).expect("made");
        fs::write(folder.join("in"), "old").expect("made");
        assert!(file.metadata().expect("known").is_file() && folder.join("in").exists());
        // Each of these is told a moment later.
        fs::remove_file(there.join("file")).expect("removed");
        fs::write(&file, "new").expect("a file is made where one was");
        fs::remove_dir_all(there.join("folder")).expect("removed");
        fs::create_dir(there.join("folder")).expect("made anew");
        fs::write(folder.join("in"), "new").expect("a file is made in the directory that is there");
        assert_eq!(fs::read_to_string(there.join("file")).expect("found"), "new");
        assert_eq!(fs::read_to_string(there.join("folder/in")).expect("found"), "new");
        fs::rename(there.join("file"), there.join("folder/moved")).expect("moved");
        fs::rename(there.join("folder"), there.join("elsewhere")).expect("moved");
        fs::create_dir(there.join("folder")).expect("made anew");
        fs::remove_dir_all(there.join("elsewhere")).expect("removed");
        wait_for("what was moved to be gone", || !folder.join("in").exists() && !file.exists());
        fs::remove_dir(&folder).expect("the one that is there is removed");
        wait_for("its end", || !there.join("folder").exists());
    }
}

/// Programs that know nothing of it, each on its own host, in one directory.
///
/// Promise S72: With `--join-secret` any number of mounts write to one volume
#[test]
fn programs_on_two_hosts_share_a_directory() {
    if !require_fuse("programs_on_two_hosts_share_a_directory") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mounts = [hosts.mount("one", &[]), hosts.mount("other", &[])];
    shell(
        mounts[0].path(),
        "git init -q shared && cd shared && git config user.email a@b && git config user.name a",
    )
    .succeeded();
    let both = |line: &str| {
        std::thread::scope(|threads| {
            for (number, mount) in mounts.iter().enumerate() {
                let line = line.replace("$N", &number.to_string());
                threads.spawn(move || shell(mount.path(), &line).succeeded());
            }
        });
    };
    both(
        "mkdir -p logs && for i in $(seq 100); do echo $N $i > logs/$N-$i; done; mkdir own-$N && cp -r /etc/apt own-$N/",
    );
    both("test $(ls logs | wc -l) = 200 && cat logs/* | sort | uniq | wc -l | grep -qx 200");
    // Each takes what it can get hold of, and every file is taken once.
    both("mkdir -p taken-$N && for f in $(ls logs); do mv -n logs/$f taken-$N/ 2>/dev/null || true; done");
    let taken = |number: usize| {
        fs::read_dir(mounts[0].path().join(format!("taken-{number}"))).expect("listed").count()
    };
    wait_for("all to be taken", || taken(0) + taken(1) == 200);
    assert_eq!(shell(mounts[1].path(), "ls logs | wc -l").succeeded(), "0\n");
    for (number, mount) in mounts.iter().enumerate() {
        let line = format!(
            "cd shared && echo {number} > f{number} && git add . && git commit -qm {number} && git fsck --strict"
        );
        wait_for("the other one's commit", || !mount.path().join("shared/.git/index.lock").exists());
        shell(mount.path(), &line).succeeded();
    }
    assert_eq!(
        shell(mounts[0].path(), "cd shared && git log --oneline | wc -l && git status --short | wc -l")
            .succeeded(),
        "2\n0\n"
    );
    check_same(&mounts[0], &mounts[1]);
}

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
    assert_eq!(hosts.status("second")["sharing"]["reconnects"], 1);
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
    let serve = |name: &str, options: &[&str]| {
        Meta::start(&hosts.home(name), &hosts.url, &hosts.secret(), options, &hosts.envs)
    };
    let mut active = serve("meta", &[]);
    let mounts = [hosts.mount("one", &["--join-only"]), hosts.mount("other", &["--join-only"])];
    let mut standby = serve("standby", &["--standby"]);
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
    let mut next = serve("next", &[]);
    assert_eq!(fs::read_to_string(mounts[0].path().join("after")).expect("read"), "by the next one");
    drop(mounts);
    next.end();
}

/// Promise S75: Only who knows the secret joins a volume
#[test]
fn who_may_not_join_is_told_why() {
    if !require_fuse("who_may_not_join_is_told_why") {
        return;
    }
    let hosts = Hosts::of_folder();
    let holder = hosts.mount("holder", &[]);
    let try_mount = |options: &[&str]| {
        let (home, at) = (hosts.home("other"), hosts.scratch.folder("other").display().to_string());
        let ours = ["mount", "-f", &hosts.url, &at];
        let arguments: Vec<&str> = ours.iter().chain(options).copied().collect();
        Forebay::new(&home, arguments).run()
    };
    let without = try_mount(&[]);
    assert!(without.stderr.contains("--join-secret"), "{without}");
    let wrong = hosts.scratch.join("wrong");
    fs::write(&wrong, "what nobody but this host knows").expect("written");
    let stranger = try_mount(&["--join-secret", &wrong.display().to_string()]);
    assert!(stranger.stderr.contains("it holds another secret"), "{stranger}");
    let both = try_mount(&["--join-secret", &hosts.secret(), "--writeback"]);
    assert!(both.stderr.contains("staged on one host"), "{both}");
    fs::write(holder.path().join("file"), "whole").expect("nothing happened to it");
}

/// What people ask of a volume through a mount is done where the tree is.
///
/// Promise S76: Commands about the tree
#[test]
fn commands_on_a_mount_that_joined_are_done_where_the_tree_is() {
    if !require_fuse("commands_on_a_mount_that_joined_are_done_where_the_tree_is") {
        return;
    }
    let hosts = Hosts::of_folder();
    let meta_options = ["--config", &trash_configuration(&hosts.scratch)].map(str::to_owned);
    let options: Vec<&str> = meta_options.iter().map(String::as_str).collect();
    let mut meta = Meta::start(&hosts.home("meta"), &hosts.url, &hosts.secret(), &options, &[]);
    let mut mount = hosts.mount("one", &["--join-only"]);
    let (home, at) = (hosts.home("one"), |name: &str| mount.path().join(name).display().to_string());
    let forebay = |words: &[&str]| Forebay::new(&home, words.iter().copied()).run();
    fs::write(mount.path().join("file"), "text").expect("written");
    let mut open = fs::OpenOptions::new().append(true).open(mount.path().join("file")).expect("opened");
    open.write_all(b" and more").expect("written");
    // Also what is not closed yet.
    forebay(&["clone", &at("file"), &at("copy")]).succeeded();
    assert_eq!(fs::read_to_string(mount.path().join("copy")).expect("read"), "text and more");
    drop(open);
    fs::create_dir(mount.path().join("small")).expect("made");
    forebay(&["quota", "set", &at("small"), "--bytes", "1MiB"]).succeeded();
    let written = fs::write(mount.path().join("small/large"), vec![1; 2 << 20]);
    assert_eq!(written.expect_err("too large").raw_os_error(), Some(libc::EDQUOT));
    fs::remove_file(mount.path().join("copy")).expect("removed");
    assert!(forebay(&["trash", "ls", &at("")]).succeeded().contains("copy"));
    forebay(&["trash", "restore", &at("copy")]).succeeded();
    wait_for("what was restored", || mount.path().join("copy").exists());
    forebay(&["volume", "policy", &at("small"), "packed"]).succeeded();
    assert!(forebay(&["volume", "policy", &at("small")]).succeeded().contains("packed"));
    forebay(&["fsck", &hosts.url]).succeeded();
    forebay(&["gc", &hosts.url]).succeeded();
    // A dump would be a file elsewhere.
    let dump = forebay(&["volume", "dump", &hosts.url, &at("../dump")]);
    assert!(dump.stderr.contains("127.0.0.1:"), "{dump}");
    mount.unmount();
    meta.end();
}

fn trash_configuration(scratch: &Scratch) -> String {
    let path = scratch.join("trash.toml");
    fs::write(&path, "[volume]\ntrash_ms = 3600000\n").expect("written");
    path.display().to_string()
}
