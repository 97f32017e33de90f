//! What several hosts see of what each of them writes.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

use forebay_tests::{Mount, require_fuse, shell};
use serde_json::Value;

use super::{Hosts, check_same, make, wait_for};

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
    if require_fuse("two_hosts_write_to_one_bucket_of_s3") {
        write_and_compare(&Hosts::of_s3());
    }
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

/// The tree is asked for no more than it has to be told or to tell.
///
/// Promise S72: With `--join-secret` any number of mounts write to one volume
#[test]
fn a_file_takes_six_requests_to_be_made_and_three_to_be_read() {
    if !require_fuse("a_file_takes_six_requests_to_be_made_and_three_to_be_read") {
        return;
    }
    const FILES: u64 = 300;
    let hosts = Hosts::of_folder();
    let mounts = [hosts.mount("one", &[]), hosts.mount("other", &[])];
    // What the kernel asks again each second, and what is synced every two.
    let beside = |began: Instant| 20 + 10 * began.elapsed().as_secs();
    let requests = || hosts.status("other")["sharing"]["requests"].as_u64().expect("a count");
    let make = |mount: &Mount, name: &str| {
        fs::create_dir(mount.path().join(name)).expect("made");
        for number in 0..FILES {
            fs::write(mount.path().join(name).join(number.to_string()), "some bytes").expect("written");
        }
    };
    let (before, began) = (requests(), Instant::now());
    make(&mounts[1], "own");
    let asked = requests() - before;
    // Attributes of the directory, which each creation changes, lookup, creation, place, commit, end: some of these later.
    assert!((5 * FILES..6 * FILES + beside(began)).contains(&asked), "{asked} requests");
    make(&mounts[0], "others");
    let (before, began) = (requests(), Instant::now());
    for number in 0..FILES {
        let path = mounts[1].path().join("others").join(number.to_string());
        assert_eq!(fs::read_to_string(path).expect("read"), "some bytes");
    }
    let asked = requests() - before;
    // Lookup, opening, end. Ends may come later.
    assert!((2 * FILES..3 * FILES + beside(began)).contains(&asked), "{asked} requests");
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
