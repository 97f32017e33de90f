"""A program beside the test: it maps a file, holds locks, and asks what somebody else may do.

Each line that comes in is a request of words, each answer a line: an errno, and bytes in hexadecimal. Mapped memory is
touched by system calls alone, for which a page that the file does not have is EFAULT; a program would die of SIGBUS.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MS_SYNC, MAP_FAILED, PAGE = 4, 2**64 - 1, 4096
GETLK = {"process": 5, "file": 36}
SETLK = {"process": 6, "file": 37}
KINDS = {"shared": fcntl.F_RDLCK, "alone": fcntl.F_WRLCK, "free": fcntl.F_UNLCK, "ask": fcntl.F_WRLCK}
FLOCKS = {"shared": fcntl.LOCK_SH, "alone": fcntl.LOCK_EX, "free": fcntl.LOCK_UN}

root = sys.argv[1].encode()
stage = os.memfd_create("stage")
held = {}


class Mapping:
    """Mapped bytes of a file, which is open by the mapping alone."""

    def __init__(self, path, offset, length):
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.ESPIPE, "no file")
            both = mmap.PROT_READ | mmap.PROT_WRITE
            self.start = libc.mmap(None, length, both, mmap.MAP_SHARED, file, offset)
            if self.start in (None, MAP_FAILED):
                raise OSError(ctypes.get_errno(), "mmap")
            # Names the file and does not open it.
            self.name = os.open(f"/proc/self/fd/{file}", os.O_PATH | os.O_CLOEXEC)
        finally:
            os.close(file)
        self.offset, self.length = offset, -(-length // PAGE) * PAGE
        self.bytes = memoryview((ctypes.c_char * self.length).from_address(self.start)).cast("B")

    def room(self, at, size):
        """Bytes from `at` on that a file of `size` has."""
        return max(0, min(self.length, size - self.offset) - at)

    def store(self, at, data):
        data = data[: self.room(at, os.fstat(self.name).st_size)]
        os.pwrite(stage, data, 0)
        stored = os.preadv(stage, [self.bytes[at : at + len(data)]], 0) if data else 0
        return str(stored).encode()

    def load(self, at, length):
        whole = -(-os.fstat(self.name).st_size // PAGE) * PAGE
        room = min(length, self.room(at, whole))
        if room <= 0:
            if at >= self.length:
                raise OSError(errno.EFAULT, "beyond the mapping")
            os.pwritev(stage, [self.bytes[at : at + 1]], 0)
            raise AssertionError("a page beyond the file's end")
        loaded = os.pwritev(stage, [self.bytes[at : at + room]], 0)
        return os.pread(stage, loaded, 0)

    def sync(self):
        if libc.msync(self.start, self.length, MS_SYNC):
            raise OSError(ctypes.get_errno(), "msync")

    def touch(self):
        """What POSIX has the next msync do to the times."""
        file = f"/proc/self/fd/{self.name}"
        os.utime(file, ns=(os.stat(file).st_atime_ns, time.time_ns()))

    def end(self):
        self.bytes.release()
        os.close(self.name)
        libc.munmap(self.start, self.length)


mapping = None


def unmap():
    global mapping
    if mapping:
        mapping.end()
    mapping = None


def remap(path, offset, length):
    global mapping
    before, mapping = mapping, Mapping(path, offset, length)
    if before:
        before.end()


def take(slot, path):
    drop(slot)
    if stat.S_ISFIFO(os.stat(path).st_mode):
        # Held open it would have a reader, of which what has no kernel knows nothing.
        raise OSError(errno.ENXIO, "a pipe")
    held[slot] = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def drop(slot):
    if slot in held:
        os.close(held.pop(slot))


def lock(slot, path, kind, how, start, length):
    if slot not in held:
        take(slot, path)
    if kind == "flock":
        return fcntl.flock(held[slot], FLOCKS[how] | fcntl.LOCK_NB)
    wanted = struct.pack("hhqqi4x", KINDS[how], os.SEEK_SET, start, length, 0)
    if how != "ask":
        fcntl.fcntl(held[slot], SETLK[kind], wanted)
        return None
    found, _, start, length, holder = struct.unpack("hhqqi4x", fcntl.fcntl(held[slot], GETLK[kind], wanted))
    if found == fcntl.F_UNLCK:
        return b"free"
    return f"{found} from {start} for {length} by {'a process' if holder > 0 else 'a file'}".encode()


def may(path, user, group, wanted):
    """As access(2), as somebody else, who need not pass what lies above the root."""
    folder = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        os.setegid(group)
        os.seteuid(user)
        return str(os.access(path, wanted, dir_fd=folder, effective_ids=True)).encode()
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.close(folder)


def mapped():
    if not mapping:
        raise OSError(errno.EBADF, "nothing is mapped")
    return mapping


def below(word):
    return os.path.join(root, bytes.fromhex(word))


def answer(words):
    match words:
        case ["map", path, offset, length]:
            return remap(below(path), int(offset), int(length))
        case ["store", at, data]:
            return mapped().store(int(at), bytes.fromhex(data))
        case ["load", at, length]:
            return mapped().load(int(at), int(length))
        case ["sync"]:
            return mapped().sync()
        case ["touch"]:
            return mapped().touch()
        case ["unmap"]:
            return unmap()
        case ["take", slot, path]:
            return take(slot, below(path))
        case ["drop", slot]:
            return drop(slot)
        case ["lock", slot, path, kind, how, start, length]:
            return lock(slot, below(path), kind, how, int(start), int(length))
        case ["may", path, user, group, wanted]:
            return may(bytes.fromhex(path), int(user), int(group), int(wanted))
        case _:
            raise AssertionError(words)


os.setgroups([])
for line in sys.stdin:
    try:
        said = answer(line.removesuffix("\n").split(" "))
        print(0, (said or b"").hex(), flush=True)
    except OSError as error:
        print(error.errno, "", flush=True)
