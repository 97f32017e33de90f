//! The bytes of files: holes, appending, mappings, direct I/O, locks, a full bucket.

use super::*;

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
fails(errno.EFBIG, os.ftruncate, file, end + 1)
fails(errno.EFBIG, os.pwrite, file, b"z", end)
fails(errno.EFBIG, fallocate, file, 0, end, 1)
assert os.fstat(file).st_size == end
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

/// Promise S37: O_APPEND and O_DIRECT count as they are at the write: fcntl(F_SETFL) may have changed them since open(2).
#[test]
fn appends_keep_their_order_however_they_are_sent() {
    if !require_fuse("appends_keep_their_order_however_they_are_sent") {
        return;
    }
    let walk = Walk::new();
    walk.python(
        r#"
# One write of many requests, which the kernel may send at once: each goes to the end.
long = b"".join(number.to_bytes(4, "big") * 1024 for number in range(4096))[:-5]
for mode in (os.O_RDWR, os.O_WRONLY):
    for kind in (0, os.O_DIRECT):
        file = os.open("appended", mode | os.O_CREAT | os.O_APPEND | kind)
        os.write(file, b"abc")
        assert os.write(file, long) == len(long)
        os.close(file)
        assert get("appended") == b"abc" + long, (mode, kind)
        os.unlink("appended")

# The flags of the moment count, not those of open.
file = os.open("changing", os.O_RDWR | os.O_CREAT | os.O_APPEND)
os.write(file, b"a" * 4096)
fcntl.fcntl(file, fcntl.F_SETFL, 0)
assert os.pwrite(file, b"b" * 10, 0) == 10 and get("changing") == b"b" * 10 + b"a" * 4086
os.lseek(file, 0, os.SEEK_SET)
fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND | os.O_DIRECT)
assert os.write(file, long) == len(long)
assert get("changing") == b"b" * 10 + b"a" * 4086 + long

# So it is for writes that do not wait: io_setup(2), io_submit(2) and io_getevents(2) of x86-64 and others.
if os.uname().machine == "x86_64":
    import ctypes
    call, context = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_ulong(0)
    assert call(206, 1, ctypes.byref(context)) == 0
    memory = mmap.mmap(-1, 8 << 20)
    memory[:] = (long + bytes(5))[:4096] * 2048
    for number in range(2048):
        memory[number * 4096:number * 4096 + 2] = number.to_bytes(2, "big")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    def iocb(file, address, length, IOCB_CMD_PWRITE=1):
        return struct.pack("QIiHhIQQqQII", 0, 0, 0, IOCB_CMD_PWRITE, 0, file, address, length, 0, 0, 0, 0)
    for flags in (os.O_RDWR | os.O_DIRECT, os.O_WRONLY, os.O_WRONLY | os.O_DIRECT):
        file = os.open("asynchronous", flags | os.O_CREAT | os.O_APPEND)
        for _ in range(2):
            block = ctypes.create_string_buffer(iocb(file, address, len(memory)))
            blocks, events = (ctypes.c_void_p * 1)(ctypes.addressof(block)), (ctypes.c_int64 * 4)()
            assert call(209, context, 1, blocks) == 1 and call(208, context, 1, 1, events, None) == 1
            assert events[2] == len(memory)
        os.close(file)
        assert get("asynchronous") == bytes(memory) * 2, flags
        os.unlink("asynchronous")

# A page that is written back through a handle that appends stays where it is.
file = os.open("mapped-log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
os.write(file, bytes(8192))
memory = mmap.mmap(file, 8192)
memory[:5] = b"first"
memory.flush()
os.write(file, b"end")
assert get("mapped-log") == b"first" + bytes(8187) + b"end"
os.close(file)
memory[4096:4100] = b"last"
memory.close()
assert get("mapped-log") == b"first" + bytes(4091) + b"last" + bytes(4092) + b"end"
"#,
    );
}

/// Promise S36: Bytes that cannot be brought into the bucket are told once by fsync or close, as EIO, ENOSPC or ESTALE; the
/// file then has the content that was committed before.
/// Promise S36: The cause is in the log, with the file's inode, the key and what the store said.
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
# It was open for writing then, too.
fails(errno.ENOSPC, os.close, file)
put("after", b"y" * 1000000)
assert len(get("after")) == 1000000
"#,
    );
    let log = walk.mount.log();
    let told = log.lines().find(|line| line.contains("lost written bytes: the upload failed"));
    let told = told.unwrap_or_else(|| panic!("the log does not say it\n{log}"));
    assert!(told.contains("could not be written to `big`") && told.contains("No space left"), "{told}");
    walk.mount.unmount();
    shell(Path::new("/"), &format!("umount -l {}", bucket.display())).succeeded();
}

/// Promise S4: The same holds when a write with O_SYNC, O_DSYNC, RWF_SYNC or RWF_DSYNC returns, with O_DIRECT and asynchronous
/// ones included.
///
/// The kernel sends no FSYNC after writes that do not come through its page cache: those were lost.
#[test]
fn what_was_written_synchronously_survives_a_kill() {
    if !require_fuse("what_was_written_synchronously_survives_a_kill") {
        return;
    }
    let mut walk = Walk::new();
    let pid = walk.mount.pid();
    walk.python(&format!(
        r#"
put("direct", b"o" * 12288)
put("queued", b"o" * 12288)
os.fsync(os.open("queued", os.O_RDONLY))
for name, flags in [("sync", os.O_WRONLY | os.O_SYNC), ("both", os.O_RDWR | os.O_SYNC),
                    ("log", os.O_WRONLY | os.O_APPEND | os.O_DSYNC)]:
    file = os.open(name, flags | os.O_CREAT, 0o644)
    for number in range(3):
        os.write(file, b"record %d\n" % number)
file = os.open("once", os.O_WRONLY | os.O_CREAT, 0o644)
os.pwritev(file, [b"flagged"], 0, os.RWF_DSYNC)
page = mmap.mmap(-1, 4096)
page[:] = b"d" * 4096
os.pwritev(os.open("direct", os.O_RDWR | os.O_DIRECT | os.O_DSYNC), [page], 4096)

file = os.open("queued", os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
# io_setup(2), io_submit(2) and io_getevents(2) of x86-64.
if os.uname().machine == "x86_64":
    context = ctypes.c_ulong(0)
    assert libc.syscall(206, 1, ctypes.byref(context)) == 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    block = struct.pack("QIiHhIQQqQII", 0, 0, 0, 1, 0, file, address, 4096, 4096, 0, 0, 0)
    block, events = ctypes.create_string_buffer(block), (ctypes.c_int64 * 4)()
    blocks = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    assert libc.syscall(209, context, 1, blocks) == 1
    assert libc.syscall(208, context, 1, 1, events, None) == 1 and events[2] == 4096
else:
    os.pwritev(file, [page], 4096)
os.kill({pid}, 9)
os._exit(0)
"#
    ));
    walk.mount.kill();
    walk.mount.remount(&walk.scratch.join("other-home"));
    walk.python(
        r#"
for name in ["sync", "both", "log"]:
    assert get(name) == b"record 0\nrecord 1\nrecord 2\n", name
assert get("once") == b"flagged"
for name in ["direct", "queued"]:
    assert get(name) == b"o" * 4096 + b"d" * 4096 + b"o" * 4096, name
"#,
    );
}

/// Promise S47: A file that is being written through a write-only descriptor is published by its writers' close or fsync,
/// not by a child that was forked meanwhile and closes its copy of the descriptor
#[test]
fn a_forked_child_publishes_nothing_of_its_parent() {
    if !require_fuse("a_forked_child_publishes_nothing_of_its_parent") {
        return;
    }
    let walk = Walk::new();
    let bucket = walk.scratch.join("bucket");
    walk.python(&format!(
        r#"
bucket = {:?}
file = os.open("file", os.O_WRONLY | os.O_CREAT, 0o644)
def child(work):
    if os.fork() == 0:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0

os.write(file, b"half")
child(lambda: os.close(file))
assert not os.path.exists(bucket + "/file"), "half a file was published"
child(lambda: os.execv("/bin/true", ["true"]))
assert not os.path.exists(bucket + "/file"), "half a file was published"
# One that writes is a writer like its parent.
child(lambda: (os.write(file, b" and half"), os.close(file)))
assert get(bucket + "/file") == b"half and half"
os.write(file, b", whole")
os.close(file)
assert get("file") == b"half and half, whole"
# The object is brought up to date behind that: what is written before it is would be in it.
while get(bucket + "/file") != b"half and half, whole": time.sleep(0.01)

# Nor is there by a copy that is closed after its parent closed the file, and while it writes it anew.
file = os.open("file", os.O_WRONLY)
ready, done = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(done[0], 1)
    os.close(file)
    os.write(ready[1], b"!")
    os._exit(0)
os.pwrite(file, b"HALF", 0)
os.close(file)
file = os.open("file", os.O_WRONLY | os.O_TRUNC)
os.write(file, b"new")
os.write(done[1], b"!")
os.read(ready[0], 1)
os.wait()
# The object is brought up to date once nobody has the file open.
published = get(bucket + "/file")
assert published == b"half and half, whole", published
os.write(file, b" and whole")
os.close(file)
assert get(bucket + "/file") == b"new and whole"

# Whoever opens a file and leaves the writing to a child, as a shell does, has nothing to publish.
file = os.open("redirected", os.O_WRONLY | os.O_CREAT, 0o644)
ready, done = os.pipe(), os.pipe()
if os.fork() == 0:
    os.write(file, b"from the child")
    os.write(ready[1], b"!")
    os.read(done[0], 1)
    os._exit(0)
os.read(ready[0], 1)
os.close(file)
assert not os.path.exists(bucket + "/redirected")
os.write(done[1], b"!")
os.wait()
assert get(bucket + "/redirected") == b"from the child"
"#,
        bucket.display().to_string()
    ));
}
