//! Upkeep of a bucket: what crashed mounts left is freed, what is wrong is found and mended.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use forebay_tests::process::start;
use forebay_tests::s3::Server;
use forebay_tests::{Forebay, Mount, Outcome, Scratch, require_fuse};
use futures::TryStreamExt;
use serde_json::Value;

fn forebay(home: &Path, args: &[&str]) -> Outcome {
    Forebay::new(home, args).run()
}

#[track_caller]
fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A process that runs Python in `folder` up to its last line, and then holds its files open. One of its own, because
/// any fork of this one would flush what it has open.
struct Writer(Child);

impl Writer {
    fn run(folder: &Path, script: &str) -> Self {
        let script = format!("import os, time\n{script}\nprint('done', flush=True)\ntime.sleep(600)");
        let mut command = Command::new("python3");
        command.args(["-c", &script]).current_dir(folder).stdout(Stdio::piped());
        let mut child = start(&mut command).expect("python starts");
        let mut line = String::new();
        let printed = BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut line);
        assert!(printed.is_ok() && line == "done\n", "the writer failed: {line}");
        Self(child)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes 23 MiB into the file `name` back to front, which is more than is held in memory, and commits none of it.
fn scatter(folder: &Path, name: &str) -> Writer {
    let script = "file = os.open('NAME', os.O_RDWR)\n\
                  for at in range(23, 0, -1): os.pwrite(file, bytes([at]) * (1 << 20), at << 21)";
    Writer::run(folder, &script.replace("NAME", name))
}

/// Files and bytes below a folder.
fn count(folder: &Path) -> (u64, u64) {
    let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.expect("an entry").path());
    entries.fold((0, 0), |(files, bytes), path| {
        let (more_files, more_bytes) = match path.is_dir() {
            true => count(&path),
            false => (1, fs::metadata(&path).expect("metadata").len()),
        };
        (files + more_files, bytes + more_bytes)
    })
}

#[test]
fn what_a_killed_mount_packed_and_did_not_commit_is_freed() {
    if !require_fuse("what_a_killed_mount_packed_and_did_not_commit_is_freed") {
        return;
    }
    let scratch = Scratch::new();
    let (home, bucket, folder) = (scratch.folder("home"), scratch.folder("bucket"), scratch.join("mnt"));
    let source = format!("file://{}", bucket.display());
    let mut mount = Mount::new(&home, &source, &folder, &[], &[]);
    let kept: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
    fs::write(folder.join("kept"), &kept).expect("written");
    let synced = fs::File::open(folder.join("kept")).expect("open");
    synced.sync_all().expect("synced");
    drop(synced);
    let writer = scatter(&folder, "kept");
    let gc = |home: &Path, more: &[&str]| forebay(home, &[&["gc", &source, "--json"][..], more].concat());
    let alive = parse(&gc(&home, &[]).succeeded());
    assert_eq!(alive["blobs"], 0, "the mount is asked, and what it writes is on its way: {alive}");
    let elsewhere = forebay(&scratch.folder("elsewhere"), &["gc", &source]);
    elsewhere.failed_with("mounted read-write by", "unmount it there");
    mount.kill();
    drop(writer);

    let blobs = bucket.join(".forebay/blobs");
    let (files, bytes) = count(&blobs);
    assert!(bytes > 8 << 20, "{files} files, {bytes} bytes");
    let found = parse(&gc(&home, &["--dry-run"]).succeeded());
    assert_eq!(
        (found["blobs"].as_u64(), found["blob_bytes"].as_u64()),
        (Some(files), Some(bytes)),
        "{found}"
    );
    assert_eq!(count(&blobs), (files, bytes), "a dry run frees nothing");
    let freed = parse(&gc(&home, &[]).succeeded());
    assert_eq!(
        (freed["blobs"].as_u64(), freed["blob_bytes"].as_u64()),
        (Some(files), Some(bytes)),
        "{freed}"
    );
    assert_eq!(count(&blobs), (0, 0));
    let again = forebay(&home, &["gc", &source]).succeeded();
    assert!(again.contains("blobs freed") && again.lines().count() == 8, "{again}");
    mount.remount(&home);
    assert_eq!(fs::read(folder.join("kept")).expect("bytes"), kept);
    mount.unmount();
}

#[test]
fn an_upload_that_a_killed_mount_had_begun_ends_with_the_next_mount() {
    if !require_fuse("an_upload_that_a_killed_mount_had_begun_ends_with_the_next_mount") {
        return;
    }
    let scratch = Scratch::new();
    let (home, bucket, folder) = (scratch.folder("home"), scratch.folder("bucket"), scratch.join("mnt"));
    let source = format!("file://{}", bucket.display());
    let mut mount = Mount::new(&home, &source, &folder, &[], &[]);
    // What is synced is synced with all that came before.
    let script = "file = open('streamed', 'wb', buffering=0)\n\
                  file.write(bytes(40 << 20))\n\
                  other = open('other', 'wb')\n\
                  os.fsync(other.fileno())";
    let (writer, uploads) = (Writer::run(&folder, script), bucket.join(".forebay/staging/uploads"));
    // Its parts go behind the writer's back.
    while count(&uploads).1 < 16 << 20 {
        std::thread::sleep(Duration::from_millis(10));
    }
    mount.kill();
    drop(writer);
    mount.remount(&home);
    assert_eq!(count(&uploads), (0, 0));
    mount.unmount();
}

#[test]
fn a_volume_is_checked_mounted_or_not_and_repaired_unmounted() {
    if !require_fuse("a_volume_is_checked_mounted_or_not_and_repaired_unmounted") {
        return;
    }
    let scratch = Scratch::new();
    let (home, bucket, folder) = (scratch.folder("home"), scratch.folder("bucket"), scratch.join("mnt"));
    let source = format!("file://{}", bucket.display());
    let fsck = |more: &[&str]| forebay(&home, &[&["fsck", &source][..], more].concat());
    fs::write(bucket.join("outside"), "an outsider's").expect("written");
    let mut mount = Mount::new(&home, &source, &folder, &[], &[]);
    fs::create_dir(folder.join("d")).expect("made");
    fs::write(folder.join("d/f"), "bytes").expect("written");
    fs::hard_link(folder.join("d/f"), folder.join("g")).expect("linked");
    let checked = parse(&fsck(&["--json"]).succeeded());
    assert_eq!(
        (&checked["findings"], &checked["entries"]),
        (&Value::Array(Vec::new()), &4.into()),
        "{checked}"
    );
    fsck(&["--repair"]).failed_with("cannot be repaired while it is mounted", "unmount it");
    let writer = scatter(&folder, "d/f");
    mount.kill();
    drop(writer);
    fsck(&[]).failed_with("things are wrong", "forebay gc");
    let shown = fsck(&[]);
    assert!(shown.stdout.contains("leaked-blob") && shown.stdout.contains("damaged"), "{shown:?}");
    let mended = parse(&fsck(&["--repair", "--json"]).succeeded());
    assert!(mended["findings"].as_array().is_some_and(|found| !found.is_empty()), "{mended}");
    assert!(fsck(&[]).succeeded().starts_with("clean"));
    assert_eq!(count(&bucket.join(".forebay/blobs")), (0, 0));
    mount.remount(&home);
    assert_eq!(fs::read_to_string(folder.join("g")).expect("bytes"), "bytes");
    mount.unmount();
    assert!(fsck(&[]).succeeded().starts_with("clean"));
}

#[test]
fn a_file_that_lost_bytes_comes_to_lost_and_found() {
    if !require_fuse("a_file_that_lost_bytes_comes_to_lost_and_found") {
        return;
    }
    let scratch = Scratch::new();
    let (home, bucket, folder) = (scratch.folder("home"), scratch.folder("bucket"), scratch.join("mnt"));
    let source = format!("file://{}", bucket.display());
    let fsck = |more: &[&str]| forebay(&home, &[&["fsck", &source][..], more].concat());
    let mut mount = Mount::new(&home, &source, &folder, &[], &[]);
    fs::create_dir(folder.join("d")).expect("made");
    fs::write(folder.join("d/sound"), "sound").expect("written");
    // A name that is no key: the bytes lie in a blob of Forebay's.
    fs::write(folder.join("d/name#1"), "bytes").expect("written");
    fs::hard_link(folder.join("d/name#1"), folder.join("again")).expect("linked");
    mount.unmount();
    let blobs = bucket.join(".forebay/blobs");
    assert_eq!(count(&blobs), (1, 5));
    fs::remove_dir_all(&blobs).expect("lost");

    fsck(&[]).failed_with("1 things are wrong", "--repair");
    // All that ever was there is missing, as where a file system is not mounted.
    fsck(&["--repair"]).failed_with("1 things are wrong", "--accept-loss");
    assert_eq!(fsck(&["--accept-loss"]).code, Some(2), "it says how to repair");
    let repaired = fsck(&["--repair", "--accept-loss", "--json"]);
    assert_eq!(repaired.code, Some(3), "a repair that gives bytes up is no success: {repaired}");
    let mended = parse(&repaired.stdout);
    assert_eq!(mended["lost"], 1, "{mended}");
    let [finding] = mended["findings"].as_array().expect("a list").as_slice() else { panic!("{mended}") };
    let detail = finding["detail"].as_str().expect("text");
    assert_eq!((&finding["kind"], &finding["mended"]), (&"dangling-extent".into(), &true.into()));
    let refuge = detail.split('`').find(|word| word.starts_with("/lost+found/")).expect("its new place");
    assert!(detail.contains("the bytes 0-4 of `d/name#1`"), "{detail}");
    let object = finding["lost"][0].as_str().expect("text");
    assert!(object.starts_with("0-4 .forebay/blobs/") && object.ends_with("@0+5"), "{object}");
    let again = parse(&fsck(&["--json"]).succeeded());
    assert_eq!(again["findings"], Value::Array(Vec::new()));

    mount.remount(&home);
    let file = folder.join(refuge.trim_start_matches('/'));
    assert_eq!(fs::read(&file).expect("bytes"), [0; 5]);
    let script = "import os, sys; print([os.getxattr(sys.argv[1], 'user.forebay.' + name) for name in ('lost', 'lost-names', 'lost-objects')])";
    let told =
        forebay_tests::shell(&folder, &format!("python3 -c \"{script}\" '{}'", file.display())).succeeded();
    assert_eq!(told.trim(), format!(r"[b'0-4', b'd/name#1\x00again', b'{object}']"));
    let names = forebay_tests::shell(&folder, "find . -type f | sort").succeeded();
    assert_eq!(names, format!("./d/sound\n.{refuge}\n"));
    mount.unmount();
    assert!(fsck(&[]).succeeded().starts_with("clean"));
}

#[test]
fn a_tree_that_was_lost_is_loaded_from_its_dump() {
    if !require_fuse("a_tree_that_was_lost_is_loaded_from_its_dump") {
        return;
    }
    let scratch = Scratch::new();
    let (home, bucket, folder) = (scratch.folder("home"), scratch.folder("bucket"), scratch.join("mnt"));
    let source = format!("file://{}", bucket.display());
    let path = |name: &str| scratch.join(name).display().to_string();
    let volume = |args: &[&str]| forebay(&home, &[&["volume"][..], args].concat());
    let mut mount = Mount::new(&home, &source, &folder, &[], &[]);
    let shell = |script: &str| forebay_tests::shell(&folder, script).succeeded();
    shell(
        "mkdir d && echo bytes > d/f && chmod 741 d/f && ln d/f g && ln -s d/f l && touch -d @1000000000 d/f && \
         printf bytes > 'd/name#1'",
    );
    let inside = folder.join("inside").display().to_string();
    let warned = volume(&["dump", &source, &inside]);
    assert!(warned.stderr.contains("inside lies in the volume that it is a dump of"), "{warned}");
    fs::remove_file(&inside).expect("removed");
    let before = shell("sync && find . -printf '%p %y %m %n %s %T@ %l\\n' | sort");
    let online = parse(&volume(&["dump", &source, &path("online"), "--json"]).succeeded());
    assert!(online["records"].as_u64().is_some_and(|records| records > 8), "{online}");
    volume(&["dump", &source, &path("online")]).failed_with("online", "a new file only");
    volume(&["dump", &source, "-"]).failed_with("by its mount", "name a file");
    volume(&["load", &path("online"), &source]).failed_with("while it is mounted", "unmount it");
    mount.unmount();
    volume(&["dump", &source, &path("offline")]).succeeded();
    volume(&["load", &path("online"), &source]).failed_with("has a tree already", "--force");
    let other = format!("file://{}", scratch.folder("other").display());
    volume(&["load", &path("online"), &other]).failed_with("is of the volume", "--of-another-volume");
    volume(&["dump", &source, &path("offline")]).failed_with("offline", "a new file only");

    fs::remove_dir_all(bucket.join(".forebay/tree.lmdb")).expect("the tree is lost");
    mount.remount(&home);
    mount.unmount();
    let (blobs, bytes) = count(&bucket.join(".forebay/blobs"));
    assert!(blobs > 0);
    let checked = forebay(&home, &["fsck", &source, "--repair"]).succeeded();
    let told = format!("{blobs} blobs of another tree ({bytes} B), which nothing frees");
    assert!(checked.contains(&told), "{checked}");
    let checked = parse(&forebay(&home, &["fsck", &source, "--json"]).succeeded());
    assert_eq!((&checked["foreign"], &checked["foreign_bytes"]), (&blobs.into(), &bytes.into()), "{checked}");
    fs::remove_dir_all(bucket.join(".forebay/tree.lmdb")).expect("so is the one that was begun anew");
    let mut damaged = fs::read(path("offline")).expect("the dump");
    damaged.truncate(damaged.len() - 9);
    fs::write(path("damaged"), damaged).expect("written");
    volume(&["load", &path("damaged"), &source]).failed_with("damaged at byte", "nothing was changed");
    fs::write(path("stranger"), "no dump").expect("written");
    volume(&["load", &path("other"), &source])
        .failed_with("other: the dump is damaged at byte 0", "`forebay volume dump` wrote");
    volume(&["load", &path("none"), &source])
        .failed_with("none: No such file", "`forebay volume dump` wrote");
    volume(&["dump", &source, &path("none/dump")]).failed_with("none/dump: No such file", "mkdir -p");
    let loaded = parse(&volume(&["load", &path("offline"), &source, "--json"]).succeeded());
    assert!(loaded["records"].as_u64().is_some_and(|records| records > 8), "{loaded}");
    mount.remount(&home);
    assert_eq!(shell("find . -printf '%p %y %m %n %s %T@ %l\\n' | sort"), before);
    assert_eq!(shell("cat g l"), "bytes\nbytes\n");
    mount.unmount();
    let piped =
        format!("{} volume load - {source} --force < {}", Forebay::binary().display(), path("online"));
    let home_state = format!("HOME={0} XDG_STATE_HOME={0}/state {piped}", home.display());
    forebay_tests::shell(&scratch.join("home"), &home_state).succeeded();
    assert!(forebay(&home, &["fsck", &source]).succeeded().starts_with("clean"));
}

/// A typo in a URL is no clean volume, and who only looks makes none.
#[test]
fn what_is_no_volume_is_told_and_stays_as_it_is() {
    let scratch = Scratch::new();
    let (home, bucket) = (scratch.folder("home"), scratch.folder("bucket"));
    fs::write(bucket.join("a"), "a").expect("write");
    let source = format!("file://{}", bucket.display());
    let dump = scratch.join("dump").display().to_string();
    for command in
        [&["fsck", &source][..], &["gc", &source, "--dry-run"], &["volume", "dump", &source, &dump]]
    {
        forebay(&home, command)
            .failed_with("is no volume: nobody ever mounted it for writing", "check the URL");
    }
    let left: Vec<_> =
        fs::read_dir(&bucket).expect("list").map(|entry| entry.expect("entry").file_name()).collect();
    assert_eq!(left, ["a"]);
    assert!(!scratch.join("dump").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_volume_of_an_s3_bucket_is_told_and_stays_as_it_is() {
    let server = Server::shared();
    let bucket = server.bucket("bare").await;
    let scratch = Scratch::new();
    let home = scratch.folder("home");
    let source = bucket.url().to_string();
    let fsck = Forebay::new(&home, ["fsck", &source]).envs(&server.envs()).run();
    fsck.failed_with("is no volume: nobody ever mounted it for writing", "check the URL");
    let found: Vec<_> = bucket.list("").try_collect().await.expect("list");
    assert!(found.is_empty(), "{found:?}");
}
