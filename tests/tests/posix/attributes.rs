//! Access control lists, times, modes and set-id bits.

use super::*;

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

/// Promise S46: With the mount option `relatime` a file remembers when it was read: the first time after a change of it,
/// and then once a day.
#[test]
fn relatime_notes_the_first_read_after_a_change() {
    if !require_fuse("relatime_notes_the_first_read_after_a_change") {
        return;
    }
    let mut walk =
        Walk::with(&["--relatime"], |bucket| std::fs::write(bucket.join("old"), "old").expect("written"));
    walk.python(
        r#"
def read(path):
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert os.readv(file, [mmap.mmap(-1, 4096)]) > 0
    os.close(file)
    return os.stat(path)

put("file", b"x")
first = read("file")
assert first.st_atime_ns > first.st_mtime_ns, first
assert read("file") == first, "it was read since the last change"
put("file", b"y")
second = read("file")
assert second.st_atime_ns > second.st_mtime_ns > first.st_atime_ns
os.utime("file", ns=(7, 8))
assert os.stat("file").st_atime_ns == 7
assert read("file").st_atime_ns > second.st_atime_ns
os.utime("old", (time.time() - 86_500, time.time() - 86_600))
assert abs(read("old").st_atime - time.time()) < 60
file = os.open("file", os.O_RDONLY)
os.fsync(file)
put("atime", str(os.stat("file").st_atime_ns).encode())
"#,
    );
    walk.mount.unmount();
    walk.mount.remount(&walk.scratch.join("other-home"));
    walk.python("assert os.stat('file').st_atime_ns == int(get('atime'))");
}
