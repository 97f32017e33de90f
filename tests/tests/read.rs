//! Reading a bucket that nobody prepared, with the programs people use.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::{BLOCK_SIZE, ObjectKey};
use forebay_io::object::{Bucket, Condition};
use forebay_tests::s3::Server;
use forebay_tests::{
    Door, Forebay, Mount, Names, Scratch, assert_same_trees, require_fuse, sample_tree, shell,
};
use futures::StreamExt;

/// Promise S1: Every object of a bucket that nobody prepared is a file at the path its key spells, if it spells one, with the object's
/// bytes.
#[test]
fn cp_and_ls_out_of_an_unprepared_folder() {
    if !require_fuse("cp_and_ls_out_of_an_unprepared_folder") {
        return;
    }
    let scratch = Scratch::new();
    let (source, bucket) = (scratch.folder("source"), scratch.folder("bucket"));
    sample_tree(&source, Names::Keys);
    shell(&source, &format!("cp -a . {}", bucket.display())).succeeded();
    let url = format!("file://{}", bucket.display());
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &[], &[]);
    read_every_way(&source, mount.path(), &scratch.folder("copy"));
    mount.unmount();
}

/// Promise S2: A read-only mount writes nothing to the bucket.
#[test]
fn a_read_only_mount_leaves_the_bucket_alone() {
    if !require_fuse("a_read_only_mount_leaves_the_bucket_alone") {
        return;
    }
    let scratch = Scratch::new();
    let (source, bucket) = (scratch.folder("source"), scratch.folder("bucket"));
    sample_tree(&source, Names::Keys);
    shell(&source, &format!("cp -a . {}", bucket.display())).succeeded();
    let listing = || shell(&bucket, "find . -printf '%p %s %T@ %C@\\n' | sort").succeeded();
    let before = listing();
    let url = format!("file://{}", bucket.display());
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &["--read-only"], &[]);
    read_every_way(&source, mount.path(), &scratch.folder("copy"));
    let written = shell(mount.path(), "echo new > new-file");
    assert!(written.stderr.contains("Read-only file system"), "{written}");
    mount.unmount();
    assert_eq!(before, listing());
}

/// What was told to the mount that came upon a file first counted for good, and without that all was root's.
#[test]
fn owners_and_modes_of_found_files_are_each_mounts_own() {
    if !require_fuse("owners_and_modes_of_found_files_are_each_mounts_own") {
        return;
    }
    let scratch = Scratch::new();
    let (bucket, home) = (scratch.folder("bucket"), scratch.join("home"));
    shell(&bucket, "mkdir d && echo a > a && echo b > d/b && echo c > c").succeeded();
    let url = format!("file://{}", bucket.display());
    let mount = |options: &[&str]| Mount::new(&home, &url, &scratch.join("mnt"), options, &[]);
    let shown = |mount: &Mount| shell(mount.path(), "stat -c '%u %g %a %n' . a c d d/b").succeeded();
    let own = |flag: &str| shell(&bucket, &format!("id -{flag}")).succeeded().trim().to_owned();
    let (user, group) = (own("u"), own("g"));
    for (options, uid, gid, file, directory) in [
        (&["--uid", "1000", "--gid", "100"][..], "1000", "100", "644", "755"),
        (&["--uid", "9", "--file-mode", "0600", "--dir-mode", "0700"], "9", &group, "600", "700"),
        (&["--read-only", "-o", "gid=7"], &user, "7", "644", "755"),
        (&[], &user, &group, "644", "755"),
    ] {
        let mut mount = mount(options);
        let names = [(".", directory), ("a", file), ("c", file), ("d", directory), ("d/b", file)];
        let expected: String = names.map(|(name, mode)| format!("{uid} {gid} {mode} {name}\n")).concat();
        assert_eq!(shown(&mount), expected, "{options:?}");
        mount.unmount();
    }
    let mut first = mount(&["--uid", "1000", "--gid", "100"]);
    shell(first.path(), "chown 5 a && chmod 640 c && chgrp 6 d && echo new > d/new").succeeded();
    first.unmount();
    let mut second = mount(&["--uid", "9", "--gid", "9", "--file-mode", "0444"]);
    assert_eq!(shown(&second), "9 9 755 .\n5 9 444 a\n9 9 640 c\n9 6 755 d\n9 9 444 d/b\n");
    let made = shell(second.path(), "stat -c '%u %g' d/new").succeeded();
    assert_eq!(made.trim(), format!("{user} {group}"), "who made it has it");
    second.unmount();
}

/// Such objects were left out without a word of which they were, and `rm -r` of their directory succeeded until the next listing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_path_spells_is_named_and_keeps_its_directory() {
    if !require_fuse("what_no_path_spells_is_named_and_keeps_its_directory") {
        return;
    }
    let (scratch, server) = (Scratch::new(), Server::start());
    let bucket = server.bucket("data").await;
    let (name, url) = (bucket.url().bucket.clone(), bucket.url().to_string());
    for key in ["d%2Fa", "d%2F%2Fb", "d%2F%2Fc"] {
        server.put_raw(&format!("{name}/data%2F{key}"));
    }
    let settings = scratch.join("settings.toml");
    std::fs::write(&settings, "[volume.import]\nttl_ms = 1\n").expect("written");
    let settings = settings.display().to_string();
    let mut mount = Mount::new(
        &scratch.join("home"),
        &url,
        &scratch.join("mnt"),
        &["--config", &settings],
        &server.envs(),
    );
    for _ in 0..3 {
        assert_eq!(shell(mount.path(), "ls d").succeeded().trim(), "a");
    }
    let refused = shell(mount.path(), "rm -r d");
    assert!(refused.stderr.contains("Directory not empty"), "{refused}");
    let log = mount.log();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("objects are not shown")).collect();
    assert!(told.len() == 1 && told[0].contains("d//"), "told once, with the first key: {log}");
    mount.unmount();
}

/// Promise S1: Every object of a bucket that nobody prepared is a file
/// Promise S2: A read-only mount writes nothing to the bucket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cp_and_ls_out_of_an_s3_bucket_that_may_only_be_read() {
    if !require_fuse("cp_and_ls_out_of_an_s3_bucket_that_may_only_be_read") {
        return;
    }
    let (scratch, server) = (Scratch::new(), Server::start());
    let source = scratch.folder("source");
    sample_tree(&source, Names::Keys);
    let bucket = server.bucket("data/set").await;
    upload(&source, &source, &bucket).await;
    let listing = async || bucket.list("").map(|info| info.expect("listing")).collect::<Vec<_>>().await;
    let before = listing().await;
    let url = bucket.url().to_string();
    let options = ["--read-only"];
    let mut mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &options, &server.envs());
    read_every_way(&source, mount.path(), &scratch.folder("copy"));
    mount.unmount();
    assert_eq!(before, listing().await);
}

/// Promise S2: A read-only mount writes nothing to the bucket.
///
/// Here the store itself would refuse: the account may list and get, and nothing else. What needs more says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_account_that_may_only_read_mounts_read_only() {
    if !require_fuse("an_account_that_may_only_read_mounts_read_only") {
        return;
    }
    let Some(server) = Server::fast() else { return };
    let (scratch, bucket) = (Scratch::new(), server.bucket("data/set").await);
    let source = scratch.folder("source");
    sample_tree(&source, Names::Keys);
    // This server decodes keys twice.
    shell(&source, "rm -r *%* names/*%* *+* names/*+*").succeeded();
    upload(&source, &source, &bucket).await;
    let listing = async || {
        let objects = bucket.list("").map(|info| info.expect("listing")).collect::<Vec<_>>().await;
        (objects, bucket.list_uploads("").await.expect("uploads"))
    };
    let before = listing().await;
    let reader = server.account(&bucket.url().bucket, &["s3:GetObject", "s3:ListBucket"]);
    let (url, home, folder) = (bucket.url().to_string(), scratch.folder("home"), scratch.folder("mnt"));
    for option in ["--read-only", "--dataset"] {
        let mut mount = Mount::new(&scratch.join(option), &url, &folder, &[option], &reader);
        let copy = scratch.folder(&format!("copy{option}"));
        read_every_way(&source, mount.path(), &copy);
        let written = shell(mount.path(), "echo new > new-file");
        assert!(written.stderr.contains("Read-only file system"), "{written}");
        mount.unmount();
    }
    let forebay = |line: &[&str]| Forebay::new(&home, line).envs(&reader).run();
    let cache = scratch.join("cache").display().to_string();
    forebay(&["warmup", &url, "--cache-dir", &cache]).succeeded();
    let checked = forebay(&["doctor", &url]).stdout;
    assert!(checked.contains("these credentials may not write"), "{checked}");
    let mnt = folder.display().to_string();
    forebay(&["mount", &url, &mnt]).failed_with("cannot be written with these credentials", "--read-only");
    assert_eq!(before, listing().await);
}

/// Puts every file below `folder` at its path from `root`.
async fn upload(root: &Path, folder: &Path, bucket: &Bucket) {
    for entry in std::fs::read_dir(folder).expect("folder").map(|entry| entry.expect("entry").path()) {
        if entry.is_dir() {
            Box::pin(upload(root, &entry, bucket)).await;
            continue;
        }
        let key = entry.strip_prefix(root).expect("below the root").to_str().expect("sample names are text");
        let bytes = std::fs::read(&entry).expect("file").into();
        bucket.put(&ObjectKey::new(key), bytes, Condition::Always).await.expect("put");
    }
}

/// Copies, lists and sums `mounted` and compares all of it with `source`.
fn read_every_way(source: &Path, mounted: &Path, copy: &Path) {
    shell(mounted, "tar -cf - . | tar -t > /dev/null").succeeded();
    shell(mounted, &format!("cp -a . {}", copy.display())).succeeded();
    assert_same_trees(source, copy, false);
    assert_same_trees(source, mounted, false);
    let names = |folder: &Path| shell(folder, "ls -AR . | grep -v '^total'").succeeded();
    assert_eq!(names(source), names(mounted));
    let sums =
        |folder: &Path| shell(folder, "find . -type f -print0 | sort -z | xargs -0 md5sum").succeeded();
    assert_eq!(sums(source), sums(mounted));
    shell(mounted, "ls -lR . > /dev/null").succeeded();
}

/// A large object behind a door that counts.
struct Counted {
    scratch: Scratch,
    server: Server,
    door: Door,
    url: String,
    bytes: Vec<u8>,
}

/// Longest that a fetch in the background may take to show.
const DEADLINE: Duration = Duration::from_secs(60);

impl Counted {
    async fn new() -> Self {
        let server = Server::for_volume();
        let bucket = server.bucket("data").await;
        let bytes: Vec<u8> =
            (0..13 * BLOCK_SIZE + 4321).map(|at| at.wrapping_mul(0x9E37_79B9).to_be_bytes()[4]).collect();
        bucket.put(&ObjectKey::new("large"), bytes.clone().into(), Condition::Always).await.expect("put");
        let door = Door::new(server.address()).expect("loopback has free ports");
        Self { scratch: Scratch::new(), server, door, url: bucket.url().to_string(), bytes }
    }

    /// Mounts with an empty cache and opens the object.
    fn open(&self, home: &str) -> (Mount, File) {
        let (home, variables) = (self.scratch.join(home), self.server.envs_at(self.door.endpoint()));
        let mount = Mount::new(&home, &self.url, &self.scratch.join("mnt"), &["--read-only"], &variables);
        let file = File::open(mount.path().join("large")).expect("the object is a file");
        (mount, file)
    }

    #[track_caller]
    fn read(&self, file: &File, range: Range<u64>) {
        let mut got = vec![0; (range.end - range.start) as usize];
        file.read_exact_at(&mut got, range.start).expect("it can be read");
        assert!(got == self.bytes[range.start as usize..range.end as usize], "bytes {range:?} differ");
    }

    /// Adds the ranges of the object that were asked for since the last call.
    fn asked(&self, ranges: &mut Vec<Range<u64>>) {
        for request in self.door.take_requests().iter().filter(|request| request.contains("/large")) {
            let range = request.split_once(" bytes=").and_then(|(_, range)| range.split_once('-'));
            let (first, last) = range.unwrap_or_else(|| panic!("{request} names no range"));
            let number = |text: &str| text.parse::<u64>().expect("a number");
            ranges.push(number(first)..number(last) + 1);
        }
    }

    /// Waits until the object was asked for up to `end` and says how far it was.
    #[track_caller]
    fn asked_up_to(&self, end: u64, ranges: &mut Vec<Range<u64>>) -> u64 {
        let started = Instant::now();
        loop {
            self.asked(ranges);
            let reached = ranges.iter().map(|range| range.end).max().unwrap_or_default();
            if reached >= end {
                return reached;
            }
            assert!(started.elapsed() < DEADLINE, "only {ranges:?} were asked for, not up to {end}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequential_reader_is_served_ahead_and_each_byte_fetched_once() {
    if !require_fuse("a_sequential_reader_is_served_ahead_and_each_byte_fetched_once") {
        return;
    }
    const MIB: u64 = 1 << 20;
    let counted = Counted::new().await;
    let (mut mount, file) = counted.open("home");
    let (size, mut ranges) = (counted.bytes.len() as u64, Vec::new());
    counted.read(&file, 0..MIB);
    let first = counted.asked_up_to(MIB, &mut ranges);
    (1..20).for_each(|at| counted.read(&file, at * MIB..(at + 1) * MIB));
    let later = counted.asked_up_to(20 * MIB + 4 * BLOCK_SIZE, &mut ranges) - 20 * MIB;
    assert!(first - MIB < later, "{first} bytes were asked for after one MiB, {later} ahead after 20");
    assert!(later <= 9 * BLOCK_SIZE, "{later} bytes ahead are past the largest window");
    (20..size / MIB).for_each(|at| counted.read(&file, at * MIB..(at + 1) * MIB));
    counted.read(&file, size / MIB * MIB..size);
    drop(file);
    mount.unmount();
    counted.asked(&mut ranges);
    ranges.sort_by_key(|range| range.start);
    let ends = [0].into_iter().chain(ranges.iter().map(|range| range.end));
    assert!(ends.eq(ranges.iter().map(|range| range.start).chain([size])), "each byte once: {ranges:?}");
    assert!(ranges.len() as u64 <= size.div_ceil(BLOCK_SIZE), "{ranges:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_reads_through_a_mount_fetch_nothing_extra() {
    if !require_fuse("random_reads_through_a_mount_fetch_nothing_extra") {
        return;
    }
    let counted = Counted::new().await;
    let (mut mount, file) = counted.open("home");
    let (places, mut ranges) = ([0, 9, 2, 12, 5, 7], Vec::new());
    for block in places {
        let start = block * BLOCK_SIZE + 20_480;
        counted.read(&file, start..start + 4096);
    }
    drop(file);
    mount.unmount();
    counted.asked(&mut ranges);
    let wanted = places.map(|block| block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE);
    assert_eq!(ranges, wanted, "one block for each read");
}
