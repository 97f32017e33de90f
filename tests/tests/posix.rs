//! What POSIX promises of files, asked of a real mount by small Python programs.

use std::path::Path;

use forebay_tests::settings::skip;
use forebay_tests::{Forebay, Mount, Scratch, require_fuse, scale, shell};

/// What every program starts with.
const PRELUDE: &str = r#"
import ctypes, errno, fcntl, mmap, os, stat, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def put(path, content):
    with open(path, "wb") as file:
        file.write(content)

def get(path):
    with open(path, "rb") as file:
        return file.read()

def fails(code, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except OSError as error:
        assert error.errno == code, (errno.errorcode[error.errno], errno.errorcode[code])
    else:
        raise AssertionError(f"did not fail with {errno.errorcode[code]}")

def as_user(uid, gid, call):
    """Runs `call` as another user and returns the errno it failed with, or 0."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            call()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"#;

/// A mounted empty folder.
struct Walk {
    mount: Mount,
    scratch: Scratch,
}

impl Walk {
    fn new() -> Self {
        Self::over(|_| {})
    }

    /// Over a folder that `fill` puts something into.
    fn over(fill: impl FnOnce(&Path)) -> Self {
        Self::with(&[], fill)
    }

    /// The same with further options.
    fn with(more: &[&str], fill: impl FnOnce(&Path)) -> Self {
        let scratch = Scratch::new();
        let bucket = scratch.folder("bucket");
        fill(&bucket);
        let source = format!("file://{}", bucket.display());
        let options = [&["-o", "suid,dev,allow_other"], more].concat();
        let mount = Mount::new(&scratch.join("home"), &source, &scratch.join("mnt"), &options, &[]);
        Self { scratch, mount }
    }

    /// Runs Python in the mount.
    #[track_caller]
    fn python(&self, script: &str) -> String {
        let file = self.scratch.join("script.py");
        std::fs::write(&file, format!("{PRELUDE}{script}")).expect("the scratch folder is writable");
        shell(self.mount.path(), &format!("python3 {}", file.display())).succeeded()
    }
}

/// Promise S30: A file may have holes up to 16 TiB: they read as zeros, take no room in the bucket and do not count in
/// `st_blocks`; SEEK_HOLE and SEEK_DATA find them, and fallocate makes them.
#[test]
fn holes_take_no_room() {
    if !require_fuse("holes_take_no_room") {
        return;
    }
    let mut walk = Walk::new();
    walk.python(
        r#"
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
def fallocate(file, mode, offset, length):
    if libc.fallocate(file, mode, offset, length):
        raise OSError(ctypes.get_errno(), "fallocate")

end = 16 << 40
file = os.open("sparse", os.O_RDWR | os.O_CREAT)
os.pwrite(file, b"a", 1 << 20)
os.pwrite(file, b"z", end - 1)
for _ in range(2):
    at = os.fstat(file)
    assert at.st_size == end and at.st_blocks * 512 < 1 << 20, at
    assert os.lseek(file, 0, os.SEEK_DATA) == 1 << 20
    assert os.lseek(file, 1 << 20, os.SEEK_HOLE) == (1 << 20) + 1
    assert os.lseek(file, (1 << 20) + 1, os.SEEK_DATA) == end - 1
    fails(errno.ENXIO, os.lseek, file, end, os.SEEK_DATA)
    assert os.pread(file, 3, (1 << 20) - 1) == b"\0a\0" and os.pread(file, 3, end - 2) == b"\0z"
    os.fsync(file)
os.close(file)

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
file = os.open("allocated", os.O_RDWR | os.O_CREAT)
fallocate(file, 0, 0, 8192)
fallocate(file, KEEP_SIZE, 0, 16384)
assert os.fstat(file).st_size == 8192
os.pwrite(file, b"x" * 8192, 0)
fallocate(file, 0, 0, 8192)
fallocate(file, PUNCH_HOLE | KEEP_SIZE, 4096, 2048)
fallocate(file, ZERO_RANGE, 8000, 1000)
fallocate(file, ZERO_RANGE | KEEP_SIZE, 8500, 9000)
assert os.pread(file, 1 << 20, 0) == b"x" * 4096 + bytes(2048) + b"x" * 1856 + bytes(1000)
for mode in [PUNCH_HOLE, 0x08, 0x20, 0x40]:
    fails(errno.EOPNOTSUPP, fallocate, file, mode, 0, 4096)
"#,
    );
    walk.mount.unmount();
    walk.mount.remount(&walk.scratch.join("other-home"));
    walk.python("assert os.stat('sparse').st_size == 16 << 40 and os.stat('sparse').st_blocks < 4096");
}

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

/// Promise S34: POSIX access control lists are kept and enforced: the mode and the list follow each other, and what is
/// made in a directory with a default list takes its list from there instead of the umask.
#[test]
fn access_control_lists_are_enforced_and_inherited() {
    if !require_fuse("access_control_lists_are_enforced_and_inherited") {
        return;
    }
    let mut walk = Walk::new();
    let lists = r#"
ACCESS, DEFAULT, NONE = "system.posix_acl_access", "system.posix_acl_default", 0xffffffff
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
def acl(*entries):
    packed = [struct.pack("<HHI", tag, bits, *(named or [NONE])) for tag, bits, *named in entries]
    return struct.pack("<I", 2) + b"".join(packed)
def mode(path):
    return os.stat(path).st_mode & 0o7777
"#;
    walk.python(&format!(
        r#"{lists}
put("file", b"secret")
os.chmod("file", 0o640)
read = lambda: get("file")
assert as_user(1234, 4321, read) == errno.EACCES
os.setxattr("file", ACCESS, acl((USER_OBJ, 6), (USER, 7, 1234), (GROUP_OBJ, 4), (MASK, 6), (OTHER, 0)))
assert mode("file") == 0o660 and as_user(1234, 4321, read) == 0 and as_user(1235, 4321, read) == errno.EACCES
os.chmod("file", 0o600)
masked = acl((USER_OBJ, 6), (USER, 7, 1234), (GROUP_OBJ, 4), (MASK, 0), (OTHER, 0))
assert os.getxattr("file", ACCESS) == masked and as_user(1234, 4321, read) == errno.EACCES
os.chmod("file", 0o640)
assert as_user(1234, 4321, read) == 0 and ACCESS in os.listxattr("file")
os.removexattr("file", ACCESS)
fails(errno.ENODATA, os.getxattr, "file", ACCESS)
os.setxattr("file", ACCESS, acl((USER_OBJ, 6), (GROUP_OBJ, 4), (OTHER, 4)))
assert mode("file") == 0o644
fails(errno.ENODATA, os.getxattr, "file", ACCESS)
fails(errno.EACCES, os.setxattr, "file", DEFAULT, masked)
fails(errno.EINVAL, os.setxattr, "file", ACCESS, acl((USER_OBJ, 6), (USER, 7, 1234), (OTHER, 4)))

os.mkdir("shared")
default = acl((USER_OBJ, 7), (USER, 5, 1234), (GROUP_OBJ, 5), (MASK, 7), (OTHER, 0))
os.setxattr("shared", DEFAULT, default)
os.umask(0o077)
put("shared/file", b"text")
os.mkdir("shared/below", 0o755)
os.mkfifo("shared/pipe", 0o666)
os.symlink("file", "shared/link")
put("plain", b"")
os.mkdir("private")
assert mode("plain") == 0o600 and mode("private") == 0o700, "the umask holds without a default list"
inherited = acl((USER_OBJ, 6), (USER, 5, 1234), (GROUP_OBJ, 5), (MASK, 6), (OTHER, 0))
assert mode("shared/file") == 0o660 and os.getxattr("shared/file", ACCESS) == inherited
assert mode("shared/pipe") == 0o660 and mode("shared/below") == 0o750
assert os.getxattr("shared/below", DEFAULT) == default
os.makedirs("shared/below/deep")
assert os.getxattr("shared/below/deep", DEFAULT) == default
"#
    ));
    walk.mount.unmount();
    walk.mount.remount(&walk.scratch.join("other-home"));
    walk.python(&format!(
        r#"{lists}
assert as_user(1234, 4321, lambda: get("shared/file")) == 0
assert as_user(1235, 4321, lambda: get("shared/file")) == errno.EACCES
"#
    ));
}

/// Promise S35: What `forebay refresh` finds in the bucket, and what `forebay clone` makes, is seen at once through the
/// mount, however long the kernel may keep names.
#[test]
fn outside_changes_are_seen_at_once_after_a_refresh() {
    if !require_fuse("outside_changes_are_seen_at_once_after_a_refresh") {
        return;
    }
    let walk = Walk::with(&["-o", "ttl=3600"], |bucket| {
        std::fs::create_dir(bucket.join("d")).expect("a folder");
        for name in ["replaced", "removed", "d/below"] {
            std::fs::write(bucket.join(name), name).expect("an object");
        }
    });
    let (mount, bucket) = (walk.mount.path().to_owned(), walk.scratch.join("bucket"));
    let shown =
        |name: &str| std::fs::read_to_string(mount.join(name)).unwrap_or_else(|error| error.to_string());
    for name in ["replaced", "removed", "d/below"] {
        assert_eq!(shown(name), name);
    }
    assert!(shown("new").contains("No such file") && shown("d/clone").contains("No such file"));
    std::fs::write(bucket.join("replaced"), "another text").expect("an object");
    std::fs::write(bucket.join("new"), "new").expect("an object");
    std::fs::remove_file(bucket.join("removed")).expect("an object");
    assert_eq!(shown("removed"), "removed", "the kernel keeps names for an hour");
    let home = walk.scratch.join("home");
    Forebay::new(&home, ["refresh".as_ref(), mount.as_os_str()]).run().succeeded();
    let (from, to) = (mount.join("new"), mount.join("d/clone"));
    Forebay::new(&home, ["clone".as_ref(), from.as_os_str(), to.as_os_str()]).run().succeeded();
    let (mut waits, soon) = (0, std::time::Duration::from_millis(10));
    while shown("removed") == "removed" || shown("d/clone") != "new" {
        waits += 1;
        assert!(waits < 1000, "the kernel was not told");
        std::thread::sleep(soon);
    }
    assert_eq!((shown("replaced").as_str(), shown("new").as_str()), ("another text", "new"));
    let mut names: Vec<_> =
        std::fs::read_dir(&mount).expect("a listing").flatten().map(|e| e.file_name()).collect();
    names.sort();
    assert_eq!(names, ["d", "new", "replaced"]);
}

/// Notifications and requests in the same directories, all at once: none waits for the other for ever.
#[test]
fn a_storm_of_notifications_stops_no_request() {
    if !require_fuse("a_storm_of_notifications_stops_no_request") {
        return;
    }
    let mut walk =
        Walk::with(&["-o", "ttl=3600"], |bucket| std::fs::create_dir(bucket.join("d")).expect("a folder"));
    let (mount, bucket) = (walk.mount.path().to_owned(), walk.scratch.join("bucket"));
    let home = walk.scratch.join("home");
    let running = std::sync::atomic::AtomicBool::new(true);
    let rounds = 20 * scale();
    std::thread::scope(|scope| {
        let (mount, running) = (&mount, &running);
        let busy: Vec<_> = (0..4)
            .map(|worker| {
                scope.spawn(move || {
                    let mut done = 0_u64;
                    while running.load(std::sync::atomic::Ordering::Relaxed) {
                        let own = mount.join(format!("d/own-{worker}-{}", done % 7));
                        std::fs::write(&own, format!("{done}")).expect("written");
                        // Objects of the storm come and go; that they can be asked for is what matters.
                        for number in 0..30 {
                            let _ = std::fs::metadata(mount.join(format!("d/storm-{number}")));
                        }
                        assert!(std::fs::read_dir(mount.join("d")).expect("a listing").flatten().count() > 0);
                        let renamed = mount.join(format!("d/renamed-{worker}"));
                        std::fs::rename(&own, &renamed).expect("renamed");
                        assert_eq!(std::fs::read_to_string(&renamed).expect("read"), format!("{done}"));
                        std::fs::remove_file(&renamed).expect("removed");
                        done += 1;
                    }
                    done
                })
            })
            .collect();
        for round in 0..rounds {
            for number in 0..30 {
                let object = bucket.join(format!("d/storm-{number}"));
                match (round + number) % 3 {
                    0 => drop(std::fs::remove_file(&object)),
                    _ => std::fs::write(&object, format!("{round}")).expect("an object"),
                }
            }
            let directory = mount.join("d");
            Forebay::new(&home, ["refresh".as_ref(), directory.as_os_str()]).run().succeeded();
        }
        running.store(false, std::sync::atomic::Ordering::Relaxed);
        for worker in busy {
            assert!(worker.join().expect("a worker ends") > 0, "every worker got on");
        }
    });
    walk.mount.unmount();
}

/// Promise S36: Bytes that cannot be brought into the bucket are told once by fsync or close, as EIO, ENOSPC or ESTALE; the
/// file then has the content that was committed before.
#[test]
fn a_full_bucket_is_told_once() {
    if !require_fuse("a_full_bucket_is_told_once") {
        return;
    }
    let mut is_small = false;
    let mut walk = Walk::over(|bucket| {
        is_small = shell(bucket, "mount -t tmpfs -o size=40m forebay-test .").code == Some(0);
    });
    if !is_small {
        return skip("a_full_bucket_is_told_once", "mounting a tmpfs needs root");
    }
    let bucket = walk.scratch.join("bucket");
    walk.python(
        r#"
put("small", b"small")
file = os.open("big", os.O_RDWR | os.O_CREAT)
os.pwrite(file, b"before", 0)
os.fsync(file)
writer = os.open("big", os.O_WRONLY | os.O_TRUNC)
for at in range(64):
    try:
        os.pwrite(writer, b"x" * (1 << 20), at << 20)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        break
fails(errno.ENOSPC, os.fsync, writer)
os.fsync(writer)
os.close(writer)
assert os.pread(file, 100, 0) == b"before" and get("small") == b"small"
os.unlink("big")
os.close(file)
put("after", b"y" * 1000000)
assert len(get("after")) == 1000000
"#,
    );
    walk.mount.unmount();
    shell(Path::new("/"), &format!("umount -l {}", bucket.display())).succeeded();
}

/// Promise S37: Appending writers of one file never mix: each write of up to 128 KiB with O_APPEND stays whole and loses
/// no other, from any number of processes.
#[test]
fn appending_writers_do_not_mix() {
    if !require_fuse("appending_writers_do_not_mix") {
        return;
    }
    let walk = Walk::new();
    walk.python(
        r#"
def append(writer):
    file = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in range(100):
        size = [50, 5000, 128 << 10][number % 3]
        os.write(file, (b"%d %d " % (writer, number)).ljust(size - 1, b"%d" % writer) + b"\n")
    os.close(file)
    os._exit(0)
children = []
for writer in range(4):
    child = os.fork()
    if child == 0:
        append(writer)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
lines = get("log").split(b"\n")
assert lines.pop() == b"" and len(lines) == 400
for writer in range(4):
    own = [line.split(b" ") for line in lines if line.startswith(b"%d " % writer)]
    assert [int(number) for _, number, _ in own] == list(range(100))
    assert all(set(rest) == {ord("0") + writer} for _, _, rest in own)
"#,
    );
}

/// Promise S38: Within one mount flock, fcntl and open-file-description locks hold between processes; shared writable
/// mappings are written back by msync, and after the last close; O_DIRECT reads and writes what others see.
#[test]
fn locks_mappings_and_direct_io_work() {
    if !require_fuse("locks_mappings_and_direct_io_work") {
        return;
    }
    let mut walk = Walk::new();
    walk.python(
        r#"
file = os.open("locked", os.O_RDWR | os.O_CREAT)
def child(call):
    return as_user(0, 0, call)
NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
fcntl.flock(file, fcntl.LOCK_EX)
assert child(lambda: fcntl.flock(os.open("locked", os.O_RDWR), NOW)) == errno.EAGAIN
fcntl.flock(file, fcntl.LOCK_UN)
assert child(lambda: fcntl.flock(os.open("locked", os.O_RDWR), NOW)) == 0
fcntl.lockf(file, fcntl.LOCK_EX, 10, 0)
assert child(lambda: fcntl.lockf(os.open("locked", os.O_RDWR), NOW, 5, 5)) == errno.EAGAIN
assert child(lambda: fcntl.lockf(os.open("locked", os.O_RDWR), NOW, 5, 10)) == 0
fcntl.lockf(file, fcntl.LOCK_UN)
F_OFD_SETLK = 37
fcntl.fcntl(file, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 10, 0))
other = os.open("locked", os.O_RDWR)
fails(errno.EAGAIN, fcntl.fcntl, other, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 5, 10, 0))

put("mapped", bytes(3 * 4096))
file = os.open("mapped", os.O_RDWR)
memory = mmap.mmap(file, 3 * 4096)
memory[:5] = b"first"
memory.flush()
assert get("mapped")[:5] == b"first"
os.close(file)
memory[8192:8196] = b"last"
memory.close()

page = mmap.mmap(-1, 8192)
page[:] = b"d" * 8192
file = os.open("direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
assert os.writev(file, [page]) == 8192 and get("direct") == b"d" * 8192
put("direct", b"e" * 8192)
assert os.preadv(file, [page], 0) == 8192 and page[:] == b"e" * 8192
"#,
    );
    walk.mount.unmount();
    walk.mount.remount(&walk.scratch.join("other-home"));
    walk.python("mapped = get('mapped'); assert mapped[:5] == b'first' and mapped[8192:8196] == b'last'");
}

/// Promise S39: Times have nanoseconds and may lie before 1970, UTIME_NOW and UTIME_OMIT are honoured, reading changes no
/// access time, and writing or changing the owner takes set-id bits away as POSIX says.
#[test]
fn times_and_modes_follow_posix() {
    if !require_fuse("times_and_modes_follow_posix") {
        return;
    }
    let mut walk = Walk::new();
    let times = r#"
at = os.stat("times")
assert (at.st_atime_ns, at.st_mtime_ns) == (-1_500_000_000, 1_234_567_890_123_456_789)
"#;
    walk.python(&format!(
        r#"
put("times", b"text")
os.utime("times", ns=(-1_500_000_000, 1_234_567_890_123_456_789))
get("times")
{times}
put("omit", b"")
os.utime("omit", ns=(7, 8))
class Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanos", ctypes.c_long)]
NOW, OMIT = (1 << 30) - 1, (1 << 30) - 2
assert libc.utimensat(-100, b"omit", (Time * 2)(Time(0, OMIT), Time(5, 6)), 0) == 0
assert (os.stat("omit").st_atime_ns, os.stat("omit").st_mtime_ns) == (7, 5_000_000_006)
assert libc.utimensat(-100, b"omit", (Time * 2)(Time(0, NOW), Time(0, OMIT)), 0) == 0
assert abs(os.stat("omit").st_atime - time.time()) < 60 and os.stat("omit").st_mtime_ns == 5_000_000_006

mode = lambda path: os.stat(path).st_mode & 0o7777
put("set", b"x")
os.chmod("set", 0o6755)
os.chown("set", 1000, 1000)
assert mode("set") == 0o755
os.chmod("set", 0o6777)
def write():
    with open("set", "r+b") as file:
        file.write(b"y")
assert as_user(1234, 4321, write) == 0 and mode("set") == 0o777
os.mkdir("sticky")
os.chmod("sticky", 0o1777)
put("sticky/of-root", b"")
assert as_user(1234, 4321, lambda: os.unlink("sticky/of-root")) == errno.EPERM
assert as_user(1234, 4321, lambda: os.rename("sticky/of-root", "sticky/other")) == errno.EPERM
assert as_user(1234, 4321, lambda: put("sticky/own", b"")) == 0 and os.stat("sticky/own").st_uid == 1234
os.mkdir("group")
os.chown("group", 0, 777)
os.chmod("group", 0o2775)
os.mkdir("group/below")
assert os.stat("group/below").st_gid == 777 and mode("group/below") & 0o2000
"#
    ));
    walk.mount.unmount();
    walk.mount.remount(&walk.scratch.join("other-home"));
    walk.python(times);
}

/// Promise S40: A directory may have a million entries: listing it takes memory in proportion to a few bytes a name, and
/// renaming it is one change however many it has.
#[test]
fn large_directories_are_listed_and_renamed_whole() {
    if !require_fuse("large_directories_are_listed_and_renamed_whole") {
        return;
    }
    let mut walk = Walk::new();
    let count = 4000 * scale();
    let resident = |walk: &Walk| {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", walk.mount.pid())).expect("a process");
        let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("a size").to_owned();
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("KiB") << 10
    };
    walk.python(&format!(
        r#"
os.mkdir("large")
for number in range({count}):
    os.mkfifo(f"large/entry-{{number:08}}")
"#
    ));
    let before = resident(&walk);
    walk.python(&format!(
        r#"
seen, extra = [], 0
with os.scandir("large") as entries:
    for entry in entries:
        seen.append(entry.name)
        if len(seen) % 5 == 0:
            os.mkfifo(f"large/added-{{extra}}")
            extra += 1
        if len(seen) % 3 == 0:
            os.unlink(f"large/{{entry.name}}")
old = [name for name in seen if name.startswith("entry-")]
assert len(old) == len(set(old)) == {count}, (len(old), len(set(old)))
left = sorted(os.listdir("large"))
os.rename("large", "renamed")
assert sorted(os.listdir("renamed")) == left and not os.path.exists("large")
os.fsync(os.open(".", os.O_RDONLY))
put("../left", "\n".join(left).encode())
"#
    ));
    // A few bytes a name in the cursors, and the map of hot entries.
    let grown = resident(&walk).saturating_sub(before);
    assert!(grown < (64 << 20) + 200 * count, "{grown} bytes for {count} names");
    walk.mount.kill();
    walk.mount.remount(&walk.scratch.join("home"));
    walk.python(
        r#"assert sorted(os.listdir("renamed")) == get("../left").decode().split("\n") and not os.path.exists("large")"#,
    );
}
