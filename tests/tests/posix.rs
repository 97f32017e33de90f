//! What POSIX promises of files, asked of a real mount by small Python programs.

use forebay_tests::{Mount, Scratch, require_fuse, shell};

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
        let scratch = Scratch::new();
        let source = format!("file://{}", scratch.folder("bucket").display());
        let options = ["-o", "suid,dev,allow_other"];
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
