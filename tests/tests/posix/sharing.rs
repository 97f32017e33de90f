//! Files that share bytes: copy_file_range and `forebay clone`.

use super::*;

/// Bytes that went to and from the store, by `forebay status`.
fn moved_bytes(walk: &Walk) -> u64 {
    let shown = Forebay::new(&walk.scratch.join("home"), ["status", "--json"]).run().succeeded();
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    let operations = shown["mounts"][0]["store"]["operations"].as_array().expect("operations").clone();
    operations.iter().map(|kind| kind[1]["bytes"].as_u64().expect("a count")).sum()
}

const COPY: &str = r#"
def copy(source, target):
    """copy_file_range to the end; returns the bytes copied."""
    reader, writer = os.open(source, os.O_RDONLY), os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    total = 0
    while count := os.copy_file_range(reader, writer, 1 << 40):
        total += count
    os.close(reader)
    os.close(writer)
    return total
"#;

/// Promise S32: copy_file_range and `forebay clone` share bytes instead of moving them: a file of any size is copied
/// without reading or writing a byte of it.
#[test]
fn a_huge_file_is_copied_without_moving_a_byte() {
    if !require_fuse("a_huge_file_is_copied_without_moving_a_byte") {
        return;
    }
    let walk = Walk::over(|bucket| {
        let huge = std::fs::File::create(bucket.join("huge")).expect("a file");
        huge.set_len(100 << 30).expect("holes");
        std::os::unix::fs::FileExt::write_all_at(&huge, b"middle", 50 << 30).expect("bytes");
    });
    let before = moved_bytes(&walk);
    walk.python(&format!(
        r#"{COPY}
assert copy("huge", "copy") == 100 << 30
assert os.stat("copy").st_size == 100 << 30
file = os.open("holes", os.O_RDWR | os.O_CREAT)
os.truncate("holes", 100 << 30)
os.close(file)
"#
    ));
    let clone = |from: &str, to: &str| {
        let (from, to) = (walk.mount.path().join(from), walk.mount.path().join(to));
        let words = ["clone".into(), from.into_os_string(), to.into_os_string()];
        Forebay::new(&walk.scratch.join("home"), words).run().succeeded()
    };
    let shown = clone("huge", "clone");
    assert!(shown.contains("100 GiB"), "{shown}");
    clone("holes", "holes.clone");
    assert_eq!(moved_bytes(&walk), before, "bytes read and written");
    walk.python(
        r#"
for name in ["huge", "copy", "clone"]:
    file = os.open(name, os.O_RDONLY)
    assert os.fstat(file).st_size == 100 << 30
    assert os.pread(file, 8, (50 << 30) - 1) == b"\0middle\0", name
assert os.stat("holes.clone").st_size == 100 << 30 and os.stat("holes.clone").st_blocks == 0
"#,
    );
    assert!(moved_bytes(&walk) > before, "only reading moves bytes");
}

/// So they are by programs that copy by copy_file_range: short files put together are one object, as if they had been written.
#[test]
fn short_files_are_put_together_by_cat() {
    if !require_fuse("short_files_are_put_together_by_cat") {
        return;
    }
    let walk = Walk::new();
    walk.python(
        r#"
import random, subprocess
random.seed(7)
os.mkdir("parts")
parts = [random.randbytes(random.randrange(1, 3000)) for _ in range(600)]
for number, part in enumerate(parts):
    put(f"parts/{number:03}", part)
subprocess.run("cat parts/* > whole", shell=True, check=True)
assert get("whole") == b"".join(parts)
os.fsync(os.open("whole", os.O_RDONLY))
"#,
    );
    let whole = std::fs::metadata(walk.scratch.join("bucket/whole")).expect("an object at its path");
    let shown = std::fs::metadata(walk.mount.path().join("whole")).expect("the file");
    assert_eq!(whole.len(), shown.len());
}

/// Promise S33: Files that share bytes are independent: writing, truncating, renaming or removing one changes no other,
/// also over a crash.
#[test]
fn copies_are_independent() {
    if !require_fuse("copies_are_independent") {
        return;
    }
    let mut walk = Walk::new();
    walk.python(&format!(
        r#"{COPY}
import random
random.seed(5)
names = ["overwritten", "removed", "renamed", "patched", "cut"]
big = random.randbytes(6 << 20)
for name in names:
    put(name, name.encode() + big)
    assert copy(name, name + ".copy") == len(name) + len(big)
    copy(name + ".copy", name + ".second")
put("overwritten", b"short")
os.unlink("removed")
os.rename("renamed", "elsewhere")
put("renamed", b"another")
with open("patched", "r+b") as file:
    file.seek(1000)
    file.write(b"patch")
with open("patched.copy", "r+b") as file:
    file.seek(2000)
    file.write(b"other")
os.truncate("cut", 10)
part = os.open("part", os.O_RDWR | os.O_CREAT)
source = os.open("cut.copy", os.O_RDONLY)
os.pwrite(part, b"x" * 3000, 0)
assert os.copy_file_range(source, part, 1000, 500, 1000) == 1000
assert os.copy_file_range(part, part, 500, 1000, 5000) == 500
assert os.copy_file_range(source, part, 10, 1 << 40, 0) == 0
os.fsync(part)
os.sync()
for path in [".", "part"]:
    os.fsync(os.open(path, os.O_RDONLY))
"#
    ));
    let check = r#"
import random
random.seed(5)
big = random.randbytes(6 << 20)
def with_patch(content, at, patch):
    return content[:at] + patch + content[at + len(patch):]
for name in ["overwritten", "removed", "renamed", "patched", "cut"]:
    whole = name.encode() + big
    assert get(name + ".second") == whole, name
    assert get(name + ".copy") == (with_patch(whole, 2000, b"other") if name == "patched" else whole), name
assert get("overwritten") == b"short" and not os.path.exists("removed")
assert get("elsewhere") == b"renamed" + big and get("renamed") == b"another"
assert get("patched") == with_patch(b"patched" + big, 1000, b"patch")
assert get("cut") == (b"cut" + big)[:10]
whole = b"cut" + big
assert get("part") == b"x" * 1000 + whole[500:1500] + b"x" * 1000 + bytes(2000) + whole[500:1000]
"#;
    walk.python(check);
    walk.mount.kill();
    walk.mount.remount(&walk.scratch.join("home"));
    walk.python(check);
    walk.mount.unmount();
    walk.mount.remount(&walk.scratch.join("other-home"));
    walk.python(check);
    walk.python("for name in os.listdir('.'): os.unlink(name)");
    walk.mount.unmount();
    let blobs = walk.scratch.join("bucket/.forebay/blobs");
    let plain: Vec<_> = std::fs::read_dir(walk.scratch.join("bucket")).expect("a folder").flatten().collect();
    assert_eq!(plain.len(), 1, "only .forebay is left: {plain:?} {blobs:?}");
}

/// A tree is cloned with all that its entries are.
#[test]
fn a_tree_is_cloned_with_modes_times_and_attributes() {
    if !require_fuse("a_tree_is_cloned_with_modes_times_and_attributes") {
        return;
    }
    let walk = Walk::new();
    walk.python(
        r#"
os.makedirs("tree/below")
put("tree/file", b"content" * 1000)
put("tree/below/empty", b"")
os.setxattr("tree/file", "user.a", b"value")
os.symlink("file", "tree/link")
os.mkfifo("tree/below/pipe")
os.chmod("tree/file", 0o640)
os.chown("tree/file", 12, 34)
for path in ["tree/file", "tree/below", "tree"]:
    os.utime(path, ns=(1_000_000_007, 2_000_000_009))
"#,
    );
    let clone = |from: &str, to: &str, format: &[&str]| {
        let paths = [from, to].map(|path| walk.mount.path().join(path).display().to_string());
        let words = format.iter().copied().chain(["clone", &paths[0], &paths[1]]);
        Forebay::new(&walk.scratch.join("home"), words).run()
    };
    let shown = clone("tree", "copy", &["--json"]).succeeded();
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!(shown, serde_json::json!({ "directories": 2, "files": 4, "bytes": 7000 }));
    walk.python(
        r#"
def shape(top):
    found = []
    for path, directories, files in os.walk(top):
        for name in [".", *directories, *files]:
            full = os.path.join(path, name)
            at = os.lstat(full)
            times = (at.st_mtime_ns,) if stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode) else ()
            found.append((os.path.relpath(full, top), at.st_mode, at.st_uid, at.st_gid, at.st_size, *times))
    return sorted(found)
assert shape("tree") == shape("copy"), (shape("tree"), shape("copy"))
assert get("copy/file") == b"content" * 1000 and os.getxattr("copy/file", "user.a") == b"value"
assert os.readlink("copy/link") == "file"
"#,
    );
    clone("tree", "tree/inside", &[]).failed_with("into itself", "outside of it");
    clone("tree", "copy", &[]).failed_with("exists", "does not exist yet");
    clone("missing", "x", &[]).failed_with("missing", "a path in a mount");
}

/// Promise S53: `forebay clone` shows a tree as it is at one moment: no change that is made meanwhile is in the copy in part.
/// What was written before is in it. Either all of the copy is made or nothing.
#[test]
fn a_clone_shows_one_moment() {
    if !require_fuse("a_clone_shows_one_moment") {
        return;
    }
    let mut walk = Walk::new();
    let (files, clones, home) = (300, 5 * scale(), walk.scratch.join("home"));
    // Files go from one directory to the other and back, and a file is always written before its twin.
    walk.python(&format!(
        r#"
import subprocess
for directory in ["tree/here", "tree/there/below"]:
    os.makedirs(directory)
for number in range({files}):
    put(f"tree/here/{{number}}", b"%d" % number * 100)
running, renames, rounds = True, 0, 0
def rename(worker):
    global renames
    here, there = "tree/here", "tree/there/below"
    while running:
        for number in range(worker, {files}, 2):
            os.rename(f"{{here}}/{{number}}", f"{{there}}/{{number}}")
            renames += 1
        here, there = there, here
def write():
    global rounds
    while running:
        for name in ["first", "second"]:
            put(f"tree/{{name}}.new", b"%d" % rounds * 1000)
            os.rename(f"tree/{{name}}.new", f"tree/{{name}}")
        rounds += 1
put("tree/first", b""), put("tree/second", b"")
workers = [threading.Thread(target=rename, args=(worker,)) for worker in range(2)]
workers.append(threading.Thread(target=write))
for worker in workers: worker.start()
environment = dict(os.environ, HOME={home:?}, XDG_STATE_HOME={home:?} + "/state")
opened = open("tree/open", "wb")
for clone in range({clones}):
    before = renames
    opened.write(b"%d" % clone)
    opened.flush()
    subprocess.run([{binary:?}, "clone", "tree", f"clone-{{clone}}"], env=environment, check=True, stdout=subprocess.DEVNULL)
    while renames < before + {files} or rounds <= clone: time.sleep(0.001)
running = False
for worker in workers: worker.join()
"#,
        binary = Forebay::binary(),
    ));
    let check = format!(
        r#"
for clone in range({clones}):
    top = f"clone-{{clone}}"
    found = os.listdir(f"{{top}}/here") + os.listdir(f"{{top}}/there/below")
    assert sorted(map(int, found)) == list(range({files})), (clone, len(found), len(set(found)))
    for directory in ["here", "there/below"]:
        for name in os.listdir(f"{{top}}/{{directory}}"):
            assert get(f"{{top}}/{{directory}}/{{name}}") == name.encode() * 100, (clone, name)
    first, second = get(f"{{top}}/first"), get(f"{{top}}/second")
    assert first == second or int(first[:len(first) // 1000]) == int(second[:len(second) // 1000] or b"-1") + 1
    assert get(f"{{top}}/open") == b"".join(b"%d" % number for number in range(clone + 1))
"#
    );
    walk.python(&check);
    walk.mount.unmount();
    walk.mount.remount(&walk.scratch.join("other-home"));
    walk.python(&check);
    walk.mount.unmount();
    let source = format!("file://{}", walk.scratch.join("bucket").display());
    Forebay::new(&walk.scratch.join("home"), ["fsck", &source]).run().succeeded();
}
