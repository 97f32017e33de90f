//! A bucket that is copied object by object, and taken for the same volume there.

use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, Condition};
use forebay_tests::s3::Server;
use forebay_tests::{DISK_CACHE, Forebay, Mount, Outcome, Scratch, TestBucket, require_fuse, shell};
use futures::TryStreamExt;
use serde_json::Value;

/// Files of all kinds: written at random places, hard and symbolic links, modes, attributes, holes, names that are no keys.
const FILL: &str = r#"
import os, random
rng = random.Random(7)
os.makedirs('d/empty')
open('d/f', 'wb').write(rng.randbytes(300_000))
os.chmod('d/f', 0o741)
os.link('d/f', 'g')
os.symlink('d/f', 'l')
os.setxattr('d/f', 'user.x', b'\0\xff')
os.utime('d/f', ns=(5, 1_000_000_000_123_456_789))
for name in (b'scattered', b'no-key-\xff'):
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o640)
    for at in range(40):
        os.pwrite(file, rng.randbytes(1 << 16), rng.randrange(1 << 24))
        if at % 10 == 9:
            os.fsync(file)
    os.truncate(file, (1 << 24) + (1 << 16))
    os.close(file)
open('large', 'wb').write(rng.randbytes(11 << 20))
open('deleted', 'w').write('deleted')
open('name#1', 'w').write('in a blob of its own')
open('before', 'w').write('renamed')
os.rename('before', 'after')
os.mkdir('packed')
"#;

/// What is written there to `name#1`, which is no key in a folder: the blob of these bytes is found by them.
const NO_KEY: &str = "in a blob of its own";

/// Small files that are closed together, and what is made of what is there.
const MORE: &str = r#"
import os
for number in range(20):
    open(f'packed/{number}', 'w').write(f'packed {number}')
os.unlink('deleted')
open('later', 'w').write('changed')
"#;

/// Everything that a program sees of a tree, a line each.
const TELL: &str = r#"
import hashlib, os, stat
for folder, folders, files in os.walk(b'.'):
    folders.sort()
    for name in sorted(folders + files):
        path = os.path.join(folder, name)
        found = os.lstat(path)
        names = os.listxattr(path, follow_symlinks=False)
        kept = {name: os.getxattr(path, name, follow_symlinks=False) for name in sorted(names)}
        what = ''
        if stat.S_ISLNK(found.st_mode):
            what = os.readlink(path)
        elif stat.S_ISREG(found.st_mode):
            try:
                what = hashlib.sha256(open(path, 'rb').read()).hexdigest()
            except OSError as error:
                what = os.strerror(error.errno)
        print(path, oct(found.st_mode), found.st_nlink, found.st_uid, found.st_size, found.st_mtime_ns, kept, what)
"#;

/// A volume on one machine, with what it shows.
struct Walk {
    scratch: Scratch,
    home: PathBuf,
    envs: Vec<(String, String)>,
}

impl Walk {
    fn new(envs: Vec<(String, String)>) -> Self {
        let scratch = Scratch::new();
        Self { home: scratch.folder("home"), scratch, envs }
    }

    fn forebay(&self, words: &[&str]) -> Outcome {
        Forebay::new(&self.home, words).envs(&self.envs).run()
    }

    fn mount(&self, source: &str) -> Mount {
        let options = [&["--trash", "1d"], DISK_CACHE].concat();
        Mount::new(&self.home, source, &self.scratch.join("mnt"), &options, &self.envs)
    }

    #[track_caller]
    fn python(&self, program: &str) -> String {
        let file = self.scratch.join("program.py");
        fs::write(&file, program).expect("written");
        shell(&self.scratch.join("mnt"), &format!("python3 {}", file.display())).succeeded()
    }

    /// Fills the volume and unmounts it. Returns what it shows, and a dump of it.
    #[track_caller]
    fn fill(&self, source: &str) -> (String, PathBuf) {
        let mut mount = self.mount(source);
        let at = |name: &str| mount.path().join(name).display().to_string();
        self.python(FILL);
        self.forebay(&["volume", "policy", &at("packed"), "packed"]).succeeded();
        self.python(MORE);
        self.forebay(&["clone", &at("d"), &at("clone")]).succeeded();
        self.forebay(&["clone", &at("large"), &at("lent")]).succeeded();
        self.python("open('large', 'r+b').write(b'the lender is another now')");
        self.forebay(&["sync", &at(".")]).succeeded();
        let told = self.python(TELL);
        mount.unmount();
        let dump = self.scratch.join("dump");
        self.forebay(&["volume", "dump", source, &dump.display().to_string()]).succeeded();
        (told, dump)
    }

    /// Adopts the copy, which is whole, and finds in it what the volume showed.
    #[track_caller]
    fn adopt(&self, copy: &str, told: &str) {
        let at = self.scratch.join("mnt").display().to_string();
        self.forebay(&["mount", copy, &at]).failed_with("seems to be a copy", "forebay volume adopt");
        let report = parse(&self.forebay(&["volume", "adopt", copy, "--json"]).succeeded());
        assert!(report["objects"].as_u64().is_some_and(|objects| objects > 5), "{report}");
        assert_eq!((&report["changed"], &report["files"]), (&report["objects"], &0.into()), "{report}");
        self.compare(copy, told);
    }

    #[track_caller]
    fn compare(&self, copy: &str, told: &str) {
        let mut mount = self.mount(copy);
        assert_eq!(self.python(TELL), told);
        // What a listing shows is what is known.
        self.forebay(&["refresh", &mount.path().display().to_string()]).succeeded();
        assert_eq!(self.python(TELL), told);
        let deleted = mount.path().join("deleted");
        self.forebay(&["trash", "restore", &deleted.display().to_string()]).succeeded();
        assert_eq!(fs::read_to_string(&deleted).expect("bytes"), "deleted");
        fs::write(mount.path().join("later"), "written here").expect("written");
        mount.unmount();
        assert!(self.forebay(&["fsck", copy]).succeeded().starts_with("clean"));
    }
}

#[track_caller]
fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Copies a folder as `cp -r` does: no times, no attributes.
#[track_caller]
fn copy(from: &Path, to: &Path) -> String {
    shell(Path::new("/"), &format!("cp -r {} {}", from.display(), to.display())).succeeded();
    format!("file://{}", to.display())
}

/// The files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Promise S70: A bucket that was copied or moved object by object is the same volume once `forebay volume adopt` has
/// taken the copy for it: names, modes, owners, times, links, extended attributes, clones, packed files and the trash are
/// there, with their bytes.
/// Promise S70: A volume that is mounted for writing is not adopted.
#[test]
fn a_copied_folder_is_the_same_volume_once_it_is_adopted() {
    if !require_fuse("a_copied_folder_is_the_same_volume_once_it_is_adopted") {
        return;
    }
    let walk = Walk::new(Vec::new());
    let bucket = walk.scratch.folder("bucket");
    let (told, dump) = walk.fill(&format!("file://{}", bucket.display()));
    let whole = copy(&bucket, &walk.scratch.join("whole"));
    walk.adopt(&whole, &told);

    let adopt = |source: &str| walk.forebay(&["volume", "adopt", source]);
    let mut mount = walk.mount(&whole);
    adopt(&whole).failed_with("while it is mounted", "unmount it");
    let elsewhere = Forebay::new(&walk.scratch.folder("elsewhere"), ["volume", "adopt", &whole]).run();
    elsewhere.failed_with("mounted read-write by", "unmount it there");
    mount.unmount();
    fs::create_dir(walk.scratch.join("none")).expect("made");
    adopt(&format!("file://{}", walk.scratch.join("none").display()))
        .failed_with("has no .forebay/volume.json", "volume load --moved");

    // Without its tree, which a dump has.
    let bare = copy(&bucket, &walk.scratch.join("bare"));
    fs::remove_dir_all(walk.scratch.join("bare/.forebay/tree.lmdb")).expect("removed");
    adopt(&bare).failed_with("no tree of the volume", "volume load --moved");
    let load = ["volume", "load", &dump.display().to_string(), &bare, "--moved", "--json"];
    let report = parse(&walk.forebay(&load).succeeded());
    assert_eq!(report["adopted"]["files"], 0, "{report}");
    walk.compare(&bare, &told);
}

/// It was refused as a copy from then on, and adopting it gave the clone the other bytes.
#[test]
fn what_is_replaced_in_an_adopted_copy_is_an_outsiders() {
    if !require_fuse("what_is_replaced_in_an_adopted_copy_is_an_outsiders") {
        return;
    }
    let walk = Walk::new(Vec::new());
    let bucket = walk.scratch.folder("bucket");
    let source = format!("file://{}", bucket.display());
    let mut mount = walk.mount(&source);
    walk.python("for name in 'fg': open(name, 'w').write('hello\\n')");
    let at = |name: &str| mount.path().join(name).display().to_string();
    walk.forebay(&["clone", &at("f"), &at("c")]).succeeded();
    mount.unmount();
    let moved = copy(&bucket, &walk.scratch.join("moved"));
    walk.forebay(&["volume", "adopt", &moved]).succeeded();
    fs::write(walk.scratch.join("moved/f"), "world\n").expect("replaced");
    let mut mount = walk.mount(&moved);
    assert_eq!(shell(mount.path(), "cat f g").succeeded(), "world\nhello\n");
    assert!(shell(mount.path(), "cat c").stderr.contains("Stale file handle"));
    mount.unmount();
    // A copy of that one is one again.
    let again = copy(&walk.scratch.join("moved"), &walk.scratch.join("again"));
    Forebay::new(&walk.home, ["mount", &again, &walk.scratch.join("mnt").display().to_string()])
        .run()
        .failed_with("seems to be a copy", "volume adopt");
}

/// Promise S70: Files that need an object which is missing or has another size are named, the exit code is 3, and no
/// byte of them is read from another object.
#[test]
fn what_was_not_copied_is_named_and_cannot_be_read() {
    if !require_fuse("what_was_not_copied_is_named_and_cannot_be_read") {
        return;
    }
    let walk = Walk::new(Vec::new());
    let bucket = walk.scratch.folder("bucket");
    let (told, _) = walk.fill(&format!("file://{}", bucket.display()));
    let part = copy(&bucket, &walk.scratch.join("part"));
    let mut blobs = files(&walk.scratch.join("part/.forebay/blobs")).into_iter();
    let lost = blobs.find(|path| fs::read(path).expect("bytes") == NO_KEY.as_bytes()).expect("a blob");
    let bytes = fs::read(&lost).expect("bytes");
    fs::remove_file(&lost).expect("removed");
    let adopted = walk.forebay(&["volume", "adopt", &part, "--json"]);
    assert_eq!(adopted.code, Some(3), "{adopted}");
    let report = parse(&adopted.stdout);
    assert_eq!((&report["files"], &report["lacking"]), (&1.into(), &1.into()), "{report}");
    assert_eq!(report["named"][0]["path"], "name#1", "{report}");
    assert_eq!(report["named"][0]["why"], "missing", "{report}");

    let mut mount = walk.mount(&part);
    let now = walk.python(TELL);
    let differing: Vec<&str> =
        now.lines().zip(told.lines()).filter(|(now, told)| now != told).map(|(now, _)| now).collect();
    let [line] = differing.as_slice() else { panic!("{differing:#?}") };
    assert!(line.starts_with("b'./name#1'") && line.ends_with("Stale file handle"), "{line}");
    mount.unmount();
    // Copied at last.
    fs::write(&lost, bytes).expect("written");
    let shown = walk.forebay(&["volume", "adopt", &part]).succeeded();
    assert!(shown.contains("files that cannot be read  0"), "{shown}");
    walk.compare(&part, &told);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_of_a_store_that_was_copied_in_other_parts_is_the_same_volume_once_it_is_adopted() {
    if !require_fuse(
        "a_bucket_of_a_store_that_was_copied_in_other_parts_is_the_same_volume_once_it_is_adopted",
    ) {
        return;
    }
    let server = Server::for_volume();
    let walk = Walk::new(server.envs());
    let [from, to] = [server.create_bucket(), server.create_bucket()];
    let (told, _) = walk.fill(&format!("s3://{from}/a/prefix"));
    server.copy_in_parts(&format!("{from}/a/prefix/"), &format!("{to}/another/"));
    walk.adopt(&format!("s3://{to}/another"), &told);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_that_was_copied_to_a_store_is_the_same_volume_with_its_dump() {
    if !require_fuse("a_folder_that_was_copied_to_a_store_is_the_same_volume_with_its_dump") {
        return;
    }
    let server = Server::for_volume();
    let walk = Walk::new(server.envs());
    let folder = TestBucket::folder(&walk.scratch.folder("bucket")).await;
    let (told, dump) = walk.fill(&folder.source());
    let bucket = server.bucket("from-a-folder").await;
    put_all(&folder, &bucket).await;
    let source = bucket.url().to_string();
    walk.forebay(&["volume", "adopt", &source]).failed_with("has no .forebay/volume.json", "load --moved");
    let load = ["volume", "load", &dump.display().to_string(), &source, "--moved"];
    walk.forebay(&load).failed_with("is of the volume", "--of-another-volume");
    let loaded = walk.forebay(&[&load[..], &["--of-another-volume"]].concat()).succeeded();
    assert!(loaded.contains("files that cannot be read  0"), "{loaded}");
    walk.compare(&source, &told);
}

/// Puts every object but those of the tree and the volume's own record.
async fn put_all(from: &Bucket, to: &Bucket) {
    let found: Vec<ObjectKey> = from.list("").map_ok(|info| info.key).try_collect().await.expect("a listing");
    let is_carried = |key: &ObjectKey| {
        !key.as_str().starts_with(".forebay/") || key.as_str().starts_with(".forebay/blobs/")
    };
    for key in found.into_iter().filter(is_carried) {
        let (bytes, _): (Bytes, _) = from.get_whole(&key).await.expect("an object");
        to.put(&key, bytes, Condition::Always).await.expect("put");
    }
}
