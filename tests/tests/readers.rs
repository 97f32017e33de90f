//! Read-only mounts beside a mount for writing, whose tree they follow.

use std::fs;
use std::io::{Read, Seek};
use std::time::{Duration, Instant};

use forebay_tests::s3::Server;
use forebay_tests::{Forebay, Mount, Scratch, assert_same_trees, require_fuse, shell};
use futures::StreamExt;
use serde_json::Value;

/// What only a tree knows: links, modes, owners, attributes, names that are no keys, packed files, files in pieces, and a large
/// file that was just renamed, whose object is where it was.
const MAKE: &str = r#"
mkdir -p plain/deep packed empty moved && echo one > plain/deep/a && ln -s a plain/deep/link && ln plain/deep/a plain/hard
chmod 600 plain/deep/a && chown 12:34 plain && mkfifo plain/pipe && python3 -c 'import os; os.setxattr("plain/hard", "user.k", b"v")'
head -c 9000000 /dev/urandom > plain/pieces && printf x | dd of=plain/pieces bs=1 seek=5000000 conv=notrunc status=none
head -c 3000000 /dev/urandom > plain/old && mv plain/old moved/new && touch "plain/$(printf 'caf\\351')"
for i in $(seq 50); do echo $i > packed/$i; done
"#;

/// What no listing of objects would show of it.
const CHANGE: &str = r#"
rm packed/1 packed/2 && echo other > packed/3 && mv packed/4 plain && mv plain/deep plain/deeper && ln -sf b plain/deeper/link
chmod 640 plain/deeper/a && ln plain/deeper/a empty/again && rm plain/pipe && mkfifo moved/pipe && echo more >> plain/hard
python3 -c 'import os; os.setxattr("plain/hard", "user.k", b"w")' && head -c 5000000 /dev/urandom > plain/pieces
for i in $(seq 51 80); do echo $i > packed/$i; done && mv empty/again plain/again && mkdir -p a/b/c && touch a/b/c/d
"#;

/// A bucket that one mount writes to, and others read.
struct Readers<'a> {
    url: String,
    scratch: &'a Scratch,
    writer: Mount,
}

impl<'a> Readers<'a> {
    fn beside(scratch: &'a Scratch, url: &str, envs: &[(String, String)]) -> Self {
        let home = scratch.join("home-writer");
        let writer = Mount::new(&home, url, &scratch.join("writer"), &[], envs);
        fs::create_dir(writer.path().join("packed")).expect("made");
        let packed = writer.path().join("packed").display().to_string();
        Forebay::new(&home, ["volume", "policy", &packed, "packed"]).run().succeeded();
        let made = Self { url: url.to_owned(), scratch, writer };
        made.write(MAKE);
        made
    }

    /// Runs a line in the writer's mount, and has all of it in the bucket.
    #[track_caller]
    fn write(&self, line: &str) {
        shell(self.writer.path(), line).succeeded();
        let at = self.writer.path().display().to_string();
        Forebay::new(&self.scratch.join("home-writer"), ["sync", &at]).run().succeeded();
    }

    /// Has a reader look at the writer's tree.
    #[track_caller]
    fn refresh(&self, name: &str, reader: &Mount) {
        let at = reader.path().display().to_string();
        Forebay::new(&self.scratch.join(&format!("home-{name}")), ["refresh", &at]).run().succeeded();
    }

    /// What `forebay status` tells of a reader.
    #[track_caller]
    fn status(&self, name: &str) -> Value {
        let home = self.scratch.join(&format!("home-{name}"));
        let text = Forebay::new(&home, ["status", "--json"]).run().succeeded();
        let shown: Value = serde_json::from_str(&text).expect("it is JSON");
        shown["mounts"][0].clone()
    }

    fn mount(&self, name: &str, option: &str, envs: &[(String, String)]) -> Mount {
        let home = self.scratch.join(&format!("home-{name}"));
        Mount::new(&home, &self.url, &self.scratch.join(name), &[option], envs)
    }

    /// A read-only mount that looks when it is told to, and when it has to.
    fn mount_patiently(&self) -> Mount {
        let settings = self.scratch.join("patient.toml");
        fs::write(&settings, "[volume.import]\nfollow_ms = 0\n").expect("written");
        let options = ["--read-only", "--config", settings.to_str().expect("a name")];
        Mount::new(
            &self.scratch.join("home-patient"),
            &self.url,
            &self.scratch.join("patient"),
            &options,
            &[],
        )
    }

    /// Compares all that a reader shows; a data set has no extended attributes, which the kernel would ask for.
    #[track_caller]
    fn check(&self, reader: &Mount) {
        assert_same_trees(self.writer.path(), reader.path(), true);
        let facts = "find . -printf '%p %y %m %U %G %n %s %T@\\n' | sort; cat packed/*";
        assert_eq!(shell(reader.path(), facts).succeeded(), shell(self.writer.path(), facts).succeeded());
        if !reader.path().ends_with("--dataset") {
            let value = "python3 -c 'import os; print(os.getxattr(\"plain/hard\", \"user.k\").decode())'";
            assert_eq!(shell(reader.path(), value).succeeded(), shell(self.writer.path(), value).succeeded());
        }
        let written = shell(reader.path(), "echo new > new-file");
        assert!(written.stderr.contains("Read-only file system"), "{written}");
    }
}

/// Waits for what takes seconds at most.
#[track_caller]
fn wait_for(mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(60), "it never came");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Promise S2: It follows the tree of a mount for writing
/// Promise S8: Any number of read-only mounts may exist beside it
#[test]
fn read_only_mounts_follow_the_tree_of_a_writer() {
    if !require_fuse("read_only_mounts_follow_the_tree_of_a_writer") {
        return;
    }
    let scratch = Scratch::new();
    let bucket = scratch.folder("bucket");
    let url = format!("file://{}", bucket.display());
    let mut readers = Readers::beside(&scratch, &url, &[]);
    let mut mounts = ["--read-only", "--dataset"].map(|option| readers.mount(option, option, &[]));
    mounts.iter().for_each(|reader| readers.check(reader));
    let [reader, dataset] = &mut mounts;
    readers.write(CHANGE);
    readers.refresh("--read-only", reader);
    readers.check(reader);
    // Nobody has to ask.
    readers.write("mkdir waited && chmod 701 waited && rmdir empty");
    wait_for(|| shell(reader.path(), "stat -c %a waited && ! test -e empty").stdout == "701\n");
    readers.check(reader);
    assert_eq!(shell(dataset.path(), "cat plain/deep/a; ls packed | wc -l").succeeded(), "one\n50\n");
    dataset.unmount();
    reader.unmount();
    readers.writer.unmount();
    // And that of one that nobody has mounted for writing.
    let facts = "find . -path ./.forebay/tree.lmdb -prune -o -printf '%p %s %T@\\n' | sort";
    let before = shell(&bucket, facts).succeeded();
    reader.remount(&scratch.join("home-elsewhere"));
    assert_eq!(shell(reader.path(), "readlink plain/deeper/link; cat packed/5").succeeded(), "b\n5\n");
    reader.unmount();
    assert_eq!(before, shell(&bucket, facts).succeeded());
}

/// With rights to read alone.
///
/// Promise S2: It follows the tree of a mount for writing
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_mounts_of_s3_follow_the_tree_of_a_writer() {
    if !require_fuse("read_only_mounts_of_s3_follow_the_tree_of_a_writer") {
        return;
    }
    let Some(server) = Server::fast() else { return };
    let (scratch, bucket) = (Scratch::new(), server.bucket("some/where").await);
    let url = bucket.url().to_string();
    let mut readers = Readers::beside(&scratch, &url, &server.envs());
    let account = server.account(&bucket.url().bucket, &["s3:GetObject", "s3:ListBucket"]);
    let mut mounts = ["--read-only", "--dataset"].map(|option| readers.mount(option, option, &account));
    mounts.iter().for_each(|reader| readers.check(reader));
    let [reader, dataset] = &mut mounts;
    readers.write(CHANGE);
    readers.refresh("--read-only", reader);
    readers.check(reader);
    let status = readers.status("--read-only");
    let behind = status["follows"]["behind_ms"].as_u64().expect("how far it is behind");
    assert!(behind < 60_000 && status["follows"]["error"].is_null(), "{status}");
    // Another one goes on.
    readers.writer.unmount();
    readers.writer.remount(&scratch.join("home-writer"));
    readers.write("mkdir waited && chmod 701 waited && rmdir empty");
    wait_for(|| shell(reader.path(), "stat -c %a waited && ! test -e empty").stdout == "701\n");
    readers.check(reader);
    assert_eq!(shell(dataset.path(), "ls packed | wc -l").succeeded(), "50\n");
    dataset.unmount();
    reader.unmount();
    readers.writer.unmount();
    assert!(!reader.log().contains("cannot be"), "{}", reader.log());
}

/// What a read-only mount keeps on its host was taken for a tree of a mount for writing, which stayed on that host then, where no
/// other one saw it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_was_read_first_has_its_tree_in_it() {
    if !require_fuse("a_bucket_that_was_read_first_has_its_tree_in_it") {
        return;
    }
    let Some(server) = Server::fast() else { return };
    let (scratch, bucket) = (Scratch::new(), server.bucket("data").await);
    let (home, url, folder) = (scratch.join("home"), bucket.url().to_string(), scratch.join("mnt"));
    for options in [&["--read-only"][..], &[]] {
        let mut mount = Mount::new(&home, &url, &folder, options, &server.envs());
        mount.unmount();
        assert!(!mount.log().contains("WARN"), "{}", mount.log());
    }
    let tree = bucket.list(".forebay/tree/").count().await;
    assert!(tree > 0, "the tree is in the bucket");
}

/// Promise S2: A file that is open is shown as it is now, too, and one that was removed or replaced by a rename as it was, as far as
/// its bytes are there: else a read fails with ESTALE.
#[test]
fn open_files_of_a_read_only_mount_follow_the_writer() {
    if !require_fuse("open_files_of_a_read_only_mount_follow_the_writer") {
        return;
    }
    let scratch = Scratch::new();
    let url = format!("file://{}", scratch.folder("bucket").display());
    let mut readers = Readers::beside(&scratch, &url, &[]);
    readers
        .write("for name in grows changes goes gives-way; do echo old > $name; done; seq 1 2000000 > long");
    let mut reader = readers.mount("reader", "--read-only", &[]);
    let names = ["grows", "changes", "goes", "gives-way"];
    let mut files = names.map(|name| fs::File::open(reader.path().join(name)).expect("opened"));
    let mut read = |from: u64| {
        files.each_mut().map(|file| {
            let mut text = String::new();
            file.seek(std::io::SeekFrom::Start(from)).expect("sought");
            file.read_to_string(&mut text).expect("read");
            text
        })
    };
    assert_eq!(read(0), ["old\n"; 4]);
    let mut long = fs::File::open(reader.path().join("long")).expect("opened");
    readers.write(
        "echo more >> grows; printf new | dd of=changes conv=notrunc status=none; rm goes long; \
         echo other > new && mv new gives-way",
    );
    readers.refresh("reader", &reader);
    wait_for(|| !scratch.join("bucket").join("long").exists());
    // Past what was looked at when it was opened.
    long.seek(std::io::SeekFrom::Start(8 << 20)).expect("sought");
    let failed = long.read(&mut [0; 100]).expect_err("its bytes are gone");
    assert_eq!(failed.raw_os_error(), Some(libc::ESTALE));
    assert_eq!(read(0), ["old\nmore\n", "new\n", "old\n", "old\n"]);
    assert_eq!(read(4), ["more\n", "", "", ""]);
    let now = "cat grows changes gives-way; ls | grep -c goes";
    assert_eq!(shell(reader.path(), now).stdout, "old\nmore\nnew\nother\n0\n");
    drop((files, long));
    reader.unmount();
    readers.writer.unmount();
}

/// Bytes that the writer has moved since the reader looked were stale to it until it looked again. Who opened a name that had been
/// renamed over could not read what was opened.
///
/// Promise S2: A read whose bytes lie elsewhere by now, or are gone, has it look at once, and so has an open: who opens a name gets
/// the file that is there by then.
#[test]
fn what_the_writer_moves_is_read_by_who_has_not_looked_since() {
    if !require_fuse("what_the_writer_moves_is_read_by_who_has_not_looked_since") {
        return;
    }
    let scratch = Scratch::new();
    let bucket = scratch.folder("bucket");
    let readers = Readers::beside(&scratch, &format!("file://{}", bucket.display()), &[]);
    readers.write("mkdir d && seq 1 200000 > d/a && echo old > d/b");
    let reader = readers.mount_patiently();
    assert_eq!(shell(reader.path(), "ls d").succeeded(), "a\nb\n");
    readers.write("mv d/a elsewhere && echo new > d/c && mv d/c d/b");
    wait_for(|| {
        let is_there = |name: &str| bucket.join(name).exists();
        // The old object of that name may go before the new one comes.
        let is_new = fs::read(bucket.join("d/b")).is_ok_and(|bytes| bytes == b"new\n");
        is_there("elsewhere") && !is_there("d/a") && is_new
    });
    let lines = shell(reader.path(), "sha256sum < d/a").succeeded();
    assert_eq!(lines, shell(readers.writer.path(), "sha256sum < elsewhere").succeeded());
    wait_for(|| shell(reader.path(), "ls -d d/* elsewhere").stdout == "d/b\nelsewhere\n");
}

/// A program that reads a pointer to the latest of something, which another one renames into its place again and again, failed to
/// read what it had opened.
#[test]
fn a_name_that_is_renamed_over_can_be_read_all_the_time() {
    if !require_fuse("a_name_that_is_renamed_over_can_be_read_all_the_time") {
        return;
    }
    let scratch = Scratch::new();
    let bucket = scratch.folder("bucket");
    let readers = Readers::beside(&scratch, &format!("file://{}", bucket.display()), &[]);
    readers.write("for number in 1 2 3; do echo old > latest-$number; done");
    let reader = readers.mount_patiently();
    assert_eq!(shell(reader.path(), "ls -l | grep -c latest").succeeded(), "3\n");
    for number in 1..=3 {
        readers.write(&format!("echo new-{number} > new && mv new latest-{number}"));
        let name = format!("latest-{number}");
        wait_for(|| fs::read_to_string(bucket.join(&name)).is_ok_and(|text| text.starts_with("new")));
        let text = shell(reader.path(), &format!("cat {name}")).succeeded();
        // It looks when it has to, and at all then.
        assert_eq!(text, format!("new-{number}\n"));
    }
}

/// Promise S2: Where that tree cannot be read, it warns and shows the objects alone.
#[test]
fn a_read_only_mount_over_a_damaged_tree_shows_objects_and_says_so() {
    if !require_fuse("a_read_only_mount_over_a_damaged_tree_shows_objects_and_says_so") {
        return;
    }
    let scratch = Scratch::new();
    let bucket = scratch.folder("bucket");
    let mut readers = Readers::beside(&scratch, &format!("file://{}", bucket.display()), &[]);
    readers.writer.unmount();
    fs::write(bucket.join(".forebay/tree.lmdb/data.mdb"), "no tree").expect("written");
    let mut reader = readers.mount("reader", "--read-only", &[]);
    assert_eq!(shell(reader.path(), "ls; cat plain/deep/a").succeeded(), "moved\nplain\none\n");
    assert!(reader.log().contains("its objects are shown, without links"), "{}", reader.log());
    reader.unmount();
}

/// What it copied of the tree was shown by the next mount, though it was gone with its bucket.
#[test]
fn a_read_only_mount_shows_nothing_of_a_tree_that_is_gone() {
    if !require_fuse("a_read_only_mount_shows_nothing_of_a_tree_that_is_gone") {
        return;
    }
    let scratch = Scratch::new();
    let bucket = scratch.folder("bucket");
    let mut readers = Readers::beside(&scratch, &format!("file://{}", bucket.display()), &[]);
    let mut reader = readers.mount("reader", "--read-only", &[]);
    readers.check(&reader);
    reader.unmount();
    readers.writer.unmount();
    fs::remove_dir_all(&bucket).expect("removed");
    fs::create_dir(&bucket).expect("made");
    fs::write(bucket.join("new"), "new\n").expect("written");
    reader.remount(&scratch.join("home-reader"));
    assert_eq!(shell(reader.path(), "ls && cat new").succeeded(), "new\nnew\n");
    reader.unmount();
}
