//! Packed directories as a user has them: the policy, what it saves in requests, compaction, and the way back.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_core::ObjectKey;
use forebay_io::object::{Counters, OperationKind};
use forebay_tests::{Forebay, Mount, Outcome, Scratch, TestBucket, require_fuse, shell};
use futures::TryStreamExt;
use serde_json::Value;

/// Files of 2 to 6 KiB that the walk writes.
const FILES: usize = 1000;

/// Eight writers at once, each file as a program writes it that knows nothing of the others.
const WRITE: &str = r#"
import concurrent.futures, hashlib, os

def content(number):
    seed = hashlib.sha256(str(number).encode()).digest()
    return (seed * 200)[: 2048 + number * 4]

def write(number):
    file = open(f"d/sub/f{number:04}", "wb", buffering=0)
    file.write(content(number))
    return file

os.mkdir("d/sub")
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for first in range(0, 1000, 250):
        files = list(pool.map(write, range(first, first + 250)))
        # Those share an object that come while others are on their way: nothing is done between two closes.
        list(pool.map(lambda file: file.close(), files))
open("d/empty", "w").close()
open("d/large", "wb").write(b"l" * 300_000)
open("plain", "w").write("plain")
os.sync()
os.fsync(os.open("d/sub", os.O_RDONLY))
"#;

const READ: &str = r#"
import hashlib
for number in range(1000):
    seed = hashlib.sha256(str(number).encode()).digest()
    expected = (seed * 200)[: 2048 + number * 4]
    assert open(f"d/sub/f{number:04}", "rb").read() == expected, number
assert open("d/empty").read() == "" and open("d/large").read() == "l" * 300_000
"#;

/// A mount of a bucket, on one machine after another.
struct Walk<'a> {
    bucket: &'a TestBucket,
    scratch: Scratch,
    mount: Mount,
    home: PathBuf,
    moves: usize,
}

impl<'a> Walk<'a> {
    fn new(bucket: &'a TestBucket) -> Self {
        let scratch = Scratch::new();
        let (home, folder) = (scratch.folder("home"), scratch.join("mnt"));
        let mount = Mount::new(&home, &bucket.source(), &folder, &["--take-over"], &bucket.envs());
        Self { bucket, scratch, mount, home, moves: 0 }
    }

    fn forebay(&self, words: &[&str]) -> Outcome {
        Forebay::new(&self.home, words).envs(&self.bucket.envs()).run()
    }

    #[track_caller]
    fn json(&self, words: &[&str]) -> Value {
        parse(&self.forebay(&[words, &["--json"]].concat()).succeeded())
    }

    fn at(&self, path: &str) -> String {
        self.mount.path().join(path).display().to_string()
    }

    #[track_caller]
    fn python(&self, program: &str) {
        let file = self.scratch.join("program.py");
        fs::write(&file, program).expect("written");
        shell(self.mount.path(), &format!("python3 {}", file.display())).succeeded();
    }

    /// Objects that the mount has asked for so far.
    fn gets(&self) -> u64 {
        let status = self.json(&["status"]);
        let counters: Counters =
            serde_json::from_value(status["mounts"][0]["store"].clone()).expect("counters");
        counters.of(OperationKind::Get).requests
    }

    fn unmount(&mut self) {
        self.mount.unmount();
    }

    fn remount_elsewhere(&mut self) {
        self.moves += 1;
        self.home = self.scratch.folder(&format!("home-{}", self.moves));
        self.mount.remount(&self.home);
    }

    /// Keys in the bucket: of segments, and of what other tools see.
    async fn keys(&self) -> (Vec<String>, Vec<String>) {
        let found: Vec<_> =
            self.bucket.list("").map_ok(|info| info.key).try_collect().await.expect("a listing");
        let keys = found.iter().map(|key| key.as_str().to_owned());
        let keys = keys.filter(|key| key.contains("/segment-") || !key.starts_with(".forebay/"));
        keys.partition(|key| key.starts_with(".forebay/"))
    }
}

#[track_caller]
fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Promise S54: In a packed directory small files share objects
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_files_share_objects_and_come_back_as_plain_ones() {
    if require_fuse("small_files_share_objects_and_come_back_as_plain_ones") {
        let folder = Scratch::new();
        pack_and_export(&TestBucket::folder(folder.path()).await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_files_on_s3_share_objects_and_come_back_as_plain_ones() {
    if require_fuse("small_files_on_s3_share_objects_and_come_back_as_plain_ones") {
        pack_and_export(&TestBucket::s3().await).await;
    }
}

async fn pack_and_export(bucket: &TestBucket) {
    let mut walk = Walk::new(bucket);
    fs::create_dir(walk.mount.path().join("d")).expect("made");
    let d = walk.at("d");
    assert_eq!(walk.json(&["volume", "policy", &d])["policy"], "plain");
    assert_eq!(walk.forebay(&["volume", "policy", &d, "packed"]).succeeded().trim(), "packed");
    walk.forebay(&["volume", "policy", &walk.at("nowhere")]).failed_with("nowhere", "");
    fs::remove_dir(walk.mount.path().join("d")).expect("removed");
    fs::create_dir(walk.mount.path().join("d")).expect("made");
    assert_eq!(walk.json(&["volume", "policy", &d])["policy"], "plain", "another directory");
    walk.forebay(&["volume", "policy", &d, "packed"]).succeeded();
    walk.python(WRITE);
    let (segments, plain) = walk.keys().await;
    assert!(segments.len() <= FILES * 3 / 4, "{} objects for {FILES} files", segments.len());
    assert_eq!(plain, ["d/large", "plain"]);
    walk.unmount();

    // Cold: on a machine that never saw the bucket.
    walk.remount_elsewhere();
    let before = walk.gets();
    walk.python(READ);
    let gets = walk.gets() - before;
    assert!(gets <= segments.len() as u64 + 100, "{gets} GETs for {} segments", segments.len());
    let compacted = walk.json(&["gc", &bucket.source()]);
    assert_eq!(compacted["segments"].as_u64(), Some(segments.len() as u64), "{compacted}");
    walk.unmount();
    walk.remount_elsewhere();
    let before = walk.gets();
    walk.python(READ);
    let gets = walk.gets() - before;
    assert!(gets <= 100, "{gets} GETs for 4 MiB and what the tree reads");
    check_export(&mut walk).await;
}

/// Promise S56: `forebay volume export` makes each packed file an object at its own path with the same bytes. What it
/// cannot export it names, with an exit code; run again it goes on with that.
async fn check_export(walk: &mut Walk<'_>) {
    let (bucket, d) = (walk.bucket, walk.at("d"));
    assert_eq!(walk.json(&["volume", "policy", &walk.at("d/sub")])["policy"], "packed");
    shell(walk.mount.path(), "echo odd > $'d/\\xff'").succeeded();
    let failed = walk.forebay(&["volume", "export", &d]);
    failed.failed_with("1 files could not be exported", "run it again");
    shell(walk.mount.path(), "rm $'d/\\xff'").succeeded();
    let exported = walk.json(&["volume", "export", &d, "--plain"]);
    assert_eq!(exported["exported"].as_u64(), Some(0), "it was there before: {exported}");
    assert_eq!(exported["directories"].as_u64(), Some(2), "{exported}");
    assert_eq!((&exported["complete"], exported["failed"].as_u64()), (&Value::Bool(true), Some(0)));
    walk.python(READ);
    for number in [0, 1, 499, 999] {
        let key = format!("d/sub/f{number:04}");
        let (bytes, _) = bucket.get_whole(&ObjectKey::new(key.as_str())).await.expect("an object");
        let read = fs::read(walk.mount.path().join(&key)).expect("read");
        assert!(bytes == read && read.len() == 2048 + number * 4, "{key}");
    }
    fs::write(walk.mount.path().join("d/sub/later"), "later").expect("written");
    assert_eq!(bucket.text("d/sub/later").await, "later", "not packed any more");
    walk.unmount();
    let checked = walk.forebay(&["fsck", &bucket.source()]).succeeded();
    assert!(checked.starts_with("clean"), "{checked}");
    let (_, plain) = walk.keys().await;
    assert_eq!(plain.len(), FILES + 4, "each file is an object");
}

/// A dump carries policy and packed files; what it is loaded over is the same volume.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_of_packed_directories_is_loaded_again() {
    if !require_fuse("a_dump_of_packed_directories_is_loaded_again") {
        return;
    }
    let folder = Scratch::new();
    let bucket = TestBucket::folder(folder.path()).await;
    let mut walk = Walk::new(&bucket);
    walk.forebay(&["volume", "policy", &walk.at(""), "packed"]).succeeded();
    shell(walk.mount.path(), "for i in 1 2 3; do echo $i > f$i; done; cp f1 copy; mkdir d; echo 4 > d/f4")
        .succeeded();
    walk.unmount();
    let dump = walk.scratch.join("dump");
    let dump = dump.display().to_string();
    walk.forebay(&["volume", "dump", &bucket.source(), &dump]).succeeded();
    fs::remove_dir_all(folder.path().join(".forebay/tree.lmdb")).expect("the tree goes");
    walk.forebay(&["volume", "load", &dump, &bucket.source()]).succeeded();
    walk.remount_elsewhere();
    assert_eq!(shell(walk.mount.path(), "cat f1 f2 f3 copy d/f4").succeeded(), "1\n2\n3\n1\n4\n");
    assert_eq!(walk.json(&["volume", "policy", &walk.at("d")])["policy"], "packed");
    fs::write(walk.mount.path().join("d/new"), "new").expect("written");
    assert!(!Path::new(&folder.path().join("d/new")).exists(), "packed");
    walk.unmount();
    walk.forebay(&["fsck", &bucket.source()]).succeeded();
}
