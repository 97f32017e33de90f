//! What has lost its last name while programs had it.

use super::*;

/// Run in an empty folder: it tells what it has seen, which is the same on every file system.
const HELD: &str = r#"
def told(what, call):
    try:
        print(what, call())
    except OSError as error:
        print(what, errno.errorcode[error.errno])

def kind(descriptor):
    found = os.fstat(descriptor)
    return stat.filemode(found.st_mode), found.st_nlink, found.st_uid, found.st_gid, found.st_rdev

def make(name):
    os.umask(0)
    os.mkdir(f"{name}-directory", 0o751)
    os.mkfifo(f"{name}-pipe", 0o640)
    os.mknod(f"{name}-device", stat.S_IFCHR | 0o604, os.makedev(1, 3))
    os.mknod(f"{name}-socket", stat.S_IFSOCK | 0o600)
    os.symlink("nowhere", f"{name}-link")
    put(f"{name}-file", b"bytes")
    return [f"{name}-{kind}" for kind in ("directory", "pipe", "device", "socket", "link", "file")]

# By descriptors that open nothing, and by those that open what is no file.
ways = {
    "path": lambda name: os.open(name, os.O_PATH | os.O_NOFOLLOW),
    "open": lambda name: os.open(name, os.O_RDWR if name.endswith(("pipe", "device", "file")) else os.O_RDONLY),
}
held = {}
for how in ("removed", "replaced"):
    for way, opens in ways.items():
        for name in make(f"{how}-{way}"):
            if way == "open" and name.endswith(("socket", "link")):
                continue
            held[name] = opens(name)
            if how == "removed":
                (os.rmdir if name.endswith("directory") else os.unlink)(name)
            elif name.endswith("directory"):
                os.mkdir("other")
                os.rename("other", name)
            else:
                put("other", b"")
                os.rename("other", name)
# Once at once, and once when the kernel has forgotten what it was told.
for moment in ("at once", "later"):
    for name, descriptor in held.items():
        told(f"{moment} {name}", lambda: kind(descriptor))
    time.sleep(1.5)

# A pipe is read and written to, as `cat <&3` does after `exec 3<>p; rm p`.
pipe = held["removed-open-pipe"]
os.write(pipe, b"through")
told("pipe", lambda: (os.read(pipe, 7), os.fstat(pipe).st_nlink))
os.write(held["removed-open-device"], b"nothing")
# A directory that is no more is empty, and takes nothing.
directory = held["removed-open-directory"]
told("listing", lambda: os.listdir(directory))
told("making in it", lambda: os.mkdir("in", dir_fd=directory))
told("looking in it", lambda: os.stat("in", dir_fd=directory))
told("its mode", lambda: (os.fchmod(directory, 0o700), kind(directory)))
told("its owner", lambda: (os.fchown(directory, 5, 6), kind(directory)))
told("its times", lambda: (os.utime(directory, (7, 8)), os.fstat(directory).st_mtime))
told("a list", lambda: os.getxattr(f"/proc/self/fd/{directory}", "system.posix_acl_access"))
told("syncing it", lambda: os.fsync(directory))
# The last descriptor that has it open goes, and another one stays.
put("two", b"longer than before")
held["two"] = os.open("two", os.O_PATH)
writer = os.open("two", os.O_WRONLY | os.O_APPEND)
os.unlink("two")
os.write(writer, b", and longer")
os.close(writer)
time.sleep(1.5)
told("a file", lambda: (kind(held["two"]), os.fstat(held["two"]).st_size))

# A program's own directory, as its owner and as others.
def within():
    os.mkdir("cwd", 0o755)
    os.chdir("cwd")
    os.rmdir("../cwd")
    time.sleep(1.5)
    told("listing .", lambda: os.listdir("."))
    told("stat .", lambda: os.stat(".").st_nlink)
    told("making", lambda: open("new", "w"))
    told("access", lambda: os.access(".", os.R_OK | os.X_OK))
    sys.stdout.flush()
os.chmod(".", 0o777)
child = os.fork()
if child == 0:
    within()
    os._exit(as_user(1234, 4321, lambda: os.listdir(".")))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for descriptor in held.values():
    os.close(descriptor)
print(os.popen("mkfifo p; exec 3<>p; rm p; echo words >&3; timeout 1 cat <&3; mkdir d; cd d; rmdir ../d; sleep 1.2; ls -la; echo $?").read())
"#;

/// Promise S79: What a mount has removed, or replaced by a rename, is still what it was to who has it: fstat(2) of a pipe, a
/// device, a directory, or a descriptor opened with O_PATH tells its attributes, without links, and a directory is empty.
#[test]
fn what_was_removed_is_still_what_it_was_to_who_has_it() {
    if !require_fuse("what_was_removed_is_still_what_it_was_to_who_has_it") {
        return;
    }
    let walk = Walk::new();
    let plain = walk.scratch.folder("plain");
    let on_mount = walk.python(HELD);
    // The same program, as it was written for the mount.
    let script = walk.scratch.join("script.py");
    let on_plain = shell(&plain, &format!("python3 {}", script.display())).succeeded();
    assert_eq!(on_mount, on_plain);
    // Once nobody has them, nothing is left.
    let left = walk.python("print(sorted(os.listdir('.')))");
    assert!(left.contains("replaced-path-pipe") && !left.contains("removed-open-pipe"), "{left}");
}
