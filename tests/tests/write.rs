//! Writing through a mount with the programs people use, and finding it again in the bucket.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, StoreSettings};
use forebay_tests::process::start;
use forebay_tests::s3::Server;
use forebay_tests::{
    Forebay, Mount, Names, Scratch, assert_same_trees, require_fuse, sample_tree, scale, shell,
};
use futures::TryStreamExt;

/// A mounted empty bucket; unmounted before what is below it goes.
struct Walk {
    mount: Mount,
    scratch: Scratch,
    bucket: Bucket,
    server: Option<Server>,
}

impl Walk {
    /// Over a folder.
    async fn new() -> Self {
        let scratch = Scratch::new();
        let url = format!("file://{}", scratch.folder("bucket").display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
        Self::mount(scratch, bucket, None, &[])
    }

    /// Over an S3 server.
    async fn s3(server: Server, options: &[&str]) -> Self {
        let bucket = server.bucket("some/prefix").await;
        Self::mount(Scratch::new(), bucket, Some(server), options)
    }

    fn mount(scratch: Scratch, bucket: Bucket, server: Option<Server>, options: &[&str]) -> Self {
        let variables = server.as_ref().map(Server::envs).unwrap_or_default();
        let url = bucket.url().to_string();
        let mount = Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), options, &variables);
        Self { scratch, bucket, mount, server }
    }

    /// Runs bash in the mount.
    #[track_caller]
    fn sh(&self, script: &str) -> String {
        shell(self.mount.path(), script).succeeded()
    }

    /// Runs Python in the mount.
    #[track_caller]
    fn python(&self, script: &str) -> String {
        let file = self.scratch.join("script.py");
        std::fs::write(&file, script).expect("the scratch folder is writable");
        self.sh(&format!("python3 {}", file.display()))
    }

    /// Unmounts and mounts on a machine that never saw the bucket.
    fn move_to_another_machine(&mut self) {
        self.mount.unmount();
        self.mount.remount(&self.scratch.join("other-home"));
    }

    /// Checks that every file of `source` is an object below `prefix`, byte for byte, where its path is a key. In a
    /// folder, names over 239 bytes are none: the store needs room for a suffix.
    async fn check_objects(&self, source: &Path, prefix: &str) {
        let mut folders = vec![source.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("folder").map(|entry| entry.expect("entry")) {
                let path = entry.path();
                let kind = entry.file_type().expect("type");
                if kind.is_dir() {
                    folders.push(path);
                    continue;
                }
                let below = path.strip_prefix(source).expect("below the source");
                let fits = self.server.is_some() || entry.file_name().len() <= 239;
                if kind.is_file() && fits && !below.starts_with("odd") {
                    let key = ObjectKey::new(format!("{prefix}/{}", below.display()));
                    let found = self.bucket.get_whole(&key).await;
                    let (bytes, _) = found.unwrap_or_else(|error| panic!("{key}: {error}"));
                    assert!(bytes == std::fs::read(&path).expect("file"), "object {key} differs");
                }
            }
        }
    }
}

/// Promise S5: A file written front to back is, once closed, an object at the file's own path with the same bytes.
/// Promise S9: Names, modes, links, extended attributes and empty directories are in the bucket: an empty state
/// directory is enough to mount it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cp_and_tar_write_plain_objects_that_another_machine_mounts() {
    if require_fuse("cp_and_tar_write_plain_objects_that_another_machine_mounts") {
        copy_and_move(Walk::new().await).await;
    }
}

/// Promise S9: Names, modes, links, extended attributes and empty directories are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cp_and_tar_write_to_s3_and_another_machine_mounts() {
    if require_fuse("cp_and_tar_write_to_s3_and_another_machine_mounts") {
        copy_and_move(Walk::s3(Server::start(), &[]).await).await;
    }
}

async fn copy_and_move(mut walk: Walk) {
    let source = walk.scratch.folder("source");
    sample_tree(&source, Names::Any);
    let from = source.display();
    walk.sh(&format!("cp -a {from} copied"));
    walk.sh(&format!("tar -C {from} -cf archive.tar . && mkdir untarred && tar -C untarred -xf archive.tar"));
    for moved in [false, true] {
        if moved {
            walk.move_to_another_machine();
        }
        for name in ["copied", "untarred"] {
            assert_same_trees(&source, &walk.mount.path().join(name), true);
            walk.check_objects(&source, name).await;
        }
    }
    walk.mount.unmount();
}

/// Promise S6: A rename replaces, refuses or exchanges its target in one step; a directory moves with all below it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renames_of_files_and_directories() {
    if !require_fuse("renames_of_files_and_directories") {
        return;
    }
    let mut walk = Walk::new().await;
    walk.sh("mkdir -p a/b/c && echo one > a/b/c/one && echo two > two && mv a moved && mv two moved/b/c/one");
    walk.sh("test ! -e a && test ! -e two && [[ $(cat moved/b/c/one) = two ]]");
    let renameat2 = "
import ctypes, os, errno
libc = ctypes.CDLL(None, use_errno=True)
def rename(a, b, flags):
    if libc.renameat2(-100, a.encode(), -100, b.encode(), flags): return ctypes.get_errno()
    return 0
for name in 'xy': open(name, 'w').write(name)
assert rename('x', 'y', 1) == errno.EEXIST
assert rename('x', 'y', 2) == 0 and open('x').read() == 'y' and open('y').read() == 'x'
os.makedirs('full/inside'); os.mkdir('hollow'); os.mkdir('spare')
assert rename('spare', 'full', 0) == errno.ENOTEMPTY
assert rename('full', 'hollow', 0) == 0 and os.listdir('hollow') == ['inside']
assert rename('hollow', 'hollow/inside/deeper', 0) == errno.EINVAL
assert rename('x', 'hollow', 0) == errno.EISDIR and rename('hollow', 'x', 0) == errno.ENOTDIR
assert rename('x', 'absent/x', 0) == errno.ENOENT
";
    walk.python(renameat2);
    let listing = "find . -mindepth 1 | sort; cat x y moved/b/c/one";
    let before = walk.sh(listing);
    walk.move_to_another_machine();
    assert_eq!(before, walk.sh(listing));
    walk.mount.unmount();
}

/// Promise S5: A file written front to back is, once closed, an object at the file's own path with the same bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_take_the_names_of_directories_and_back() {
    if require_fuse("files_take_the_names_of_directories_and_back") {
        // In both stores no name is a file and a directory, so that each waits for the other to go.
        exchange_kinds(Walk::new().await).await;
        exchange_kinds(Walk::s3(Server::for_volume(), &[]).await).await;
    }
}

async fn exchange_kinds(mut walk: Walk) {
    let large = format!("head -c {} /dev/urandom", 9 << 20);
    walk.sh("mkdir w && cd w && echo file > a && mkdir b && for i in {1..40}; do echo $i > b/$i; done && sync b/1 a");
    walk.sh(&format!(
        "cd w && mv a t && mv b a && mv t b && echo new > b && {large} > a/large && echo new > a/1"
    ));
    walk.sh(&format!("cd w && mkdir c && {large} > c/x && mv c/x y && rmdir c && {large} > c"));
    walk.sh("cd w && echo d > d && mv d e && mkdir d && mv e d/d && mkdir f && echo f > f/f && mv f/f g && rmdir f && mv g f");
    walk.sh("cd w && echo h > h && rm h && mkdir h && echo h > h/h && rm -r h && echo again > h");
    let plain = walk.scratch.folder("plain");
    walk.sh(&format!("cp -a w/. {}/", plain.display()));
    walk.move_to_another_machine();
    assert_same_trees(&plain, &walk.mount.path().join("w"), true);
    // Moves go on behind everybody's back.
    let files = shell(&plain, "find . -type f -printf 'w/%P\\n' | LC_ALL=C sort").succeeded();
    for _ in 0..300 {
        let objects = walk.bucket.list("w").try_collect::<Vec<_>>().await.expect("a listing");
        let mut keys: Vec<_> = objects.iter().map(|object| object.key.as_str()).collect();
        keys.sort_unstable();
        if keys.iter().copied().eq(files.lines()) {
            break;
        }
        // Who moves them rests for half a minute after what could not be done, unless there is something new.
        walk.sh("echo > fresh && rm fresh");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    walk.check_objects(&plain, "w").await;
    walk.mount.unmount();
}

/// Promise S7: A file that is removed while open keeps its bytes until its last close.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_attributes_and_open_files_behave_as_posix_says() {
    if !require_fuse("links_attributes_and_open_files_behave_as_posix_says") {
        return;
    }
    let mut walk = Walk::new().await;
    walk.python(
        "
import os, errno, stat
open('f', 'w').write('first')
os.link('f', 'g'); assert os.stat('f').st_nlink == 2 and os.stat('f').st_ino == os.stat('g').st_ino
open('g', 'a').write(' second'); assert open('f').read() == 'first second'
os.unlink('f'); assert os.stat('g').st_nlink == 1
os.symlink('g', 's'); assert os.readlink('s') == 'g' and open('s').read() == 'first second'
os.setxattr('g', 'user.colour', b'blue\\0green'); assert os.getxattr('g', 'user.colour') == b'blue\\0green'
assert os.listxattr('g') == ['user.colour']
for flag, want in ((os.XATTR_CREATE, errno.EEXIST),):
    try: os.setxattr('g', 'user.colour', b'', flag); assert False
    except OSError as e: assert e.errno == want, e
try: os.getxattr('g', 'user.absent'); assert False
except OSError as e: assert e.errno == errno.ENODATA, e
os.chmod('g', 0o640); os.utime('g', (1_000_000_000, 1_100_000_000))
assert stat.S_IMODE(os.stat('g').st_mode) == 0o640 and os.stat('g').st_mtime == 1_100_000_000
# Open and removed.
h = open('h', 'w+b'); h.write(b'kept' * 100_000); h.flush(); os.fsync(h.fileno()); os.unlink('h')
assert not os.path.exists('h')
h.seek(0); assert h.read() == b'kept' * 100_000
h.write(b'more'); h.seek(-4, 2); assert h.read() == b'more'; h.close()
# A directory with entries stays, an empty one goes.
os.makedirs('d/e')
try: os.rmdir('d'); assert False
except OSError as e: assert e.errno == errno.ENOTEMPTY, e
os.rmdir('d/e'); os.rmdir('d')
open('t', 'wb').write(b'x' * 10_000); os.truncate('t', 100); assert os.path.getsize('t') == 100
with open('t', 'ab') as t: t.write(b'end')
assert open('t', 'rb').read() == b'x' * 100 + b'end'
os.truncate('t', 5000); assert open('t', 'rb').read()[103:] == bytes(4897)
",
    );
    walk.move_to_another_machine();
    walk.python(
        "
import os, stat
assert sorted(os.listdir('.')) == ['g', 's', 't'], os.listdir('.')
assert open('g').read() == 'first second' and os.readlink('s') == 'g' and os.path.getsize('t') == 5000
assert os.getxattr('g', 'user.colour') == b'blue\\0green'
assert stat.S_IMODE(os.stat('g').st_mode) == 0o640 and os.stat('g').st_mtime == 1_100_000_000
",
    );
    walk.mount.unmount();
}

/// The kernel refuses to truncate a program that runs, and nothing was lost then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_runs_is_not_emptied() {
    if !require_fuse("a_program_that_runs_is_not_emptied") {
        return;
    }
    let mut walk = Walk::new().await;
    walk.python(
        "
import errno, os, shutil, subprocess
shutil.copyfile(shutil.which('sleep'), 'program'); os.chmod('program', 0o755)
size = os.path.getsize('program')
running = subprocess.Popen(['./program', '60'])
for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC):
    try: os.open('program', flags); assert False, flags
    except OSError as e: assert e.errno == errno.ETXTBSY, e
    assert os.path.getsize('program') == size and running.poll() is None, flags
running.kill(); running.wait()
assert open('program', 'rb').read() == open(shutil.which('sleep'), 'rb').read()
",
    );
    walk.mount.unmount();
}

/// close() is answered before the kernel gives the file back, and a file in owned blobs is sealed after that. A change
/// of size that came in between was laid over the closing file and forgotten with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_size_set_right_after_close_is_kept() {
    if !require_fuse("a_size_set_right_after_close_is_kept") {
        return;
    }
    let mut walk = Walk::new().await;
    walk.python(
        "
import os
for i in range(100):
    with open(f'f{i}', 'wb') as f: f.write(b'x' * 1000)
    with open(f'f{i}', 'ab') as f: f.write(b'end')
    os.truncate(f'f{i}', 5000 + i)
",
    );
    walk.move_to_another_machine();
    walk.python(
        "
import os
for i in range(100):
    assert open(f'f{i}', 'rb').read() == b'x' * 1000 + b'end' + bytes(3997 + i), (i, os.path.getsize(f'f{i}'))
",
    );
    walk.mount.unmount();
}

/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket: killing the mount and losing its
/// disk loses none of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_synced_survives_kill_and_loss_of_the_disk() {
    if require_fuse("what_was_synced_survives_kill_and_loss_of_the_disk") {
        sync_and_kill(Walk::new().await, 3 * scale()).await;
    }
}

/// Promise S4: When fsync returns, the file's bytes and its name are in the bucket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_synced_to_s3_survives_kill_and_loss_of_the_disk() {
    if require_fuse("what_was_synced_to_s3_survives_kill_and_loss_of_the_disk") {
        // The killed mount's lease would be waited for.
        sync_and_kill(Walk::s3(Server::start(), &["--take-over"]).await, 2 * scale()).await;
    }
}

/// Files of a round, the last of them synced last: at plain paths, in a packed directory and at a name that is no key. No
/// listing finds the bytes of the latter two, nor anybody's mode.
const SYNCED: &str = "
import os, sys
def names(r):
    plain = [b'deep/er/%d-%d' % (r, i) for i in range(3)]
    odd = [b'packed/%d' % r, b'deep/odd-\\xff-%d' % r]
    return plain + (odd if r % 2 else odd[::-1])
def content(r, name): return bytes([r % 256, len(name)]) * 50_000
";

/// Kills the mount while all that was synced is open still, so that no close stands in for an fsync.
async fn sync_and_kill(mut walk: Walk, rounds: usize) {
    walk.sh("mkdir -p deep/er packed");
    let packed = walk.mount.path().join("packed").display().to_string();
    Forebay::new(&walk.scratch.join("home"), ["volume", "policy", &packed, "packed"]).run().succeeded();
    for round in 0..rounds {
        let script = format!(
            "{SYNCED}
held = []
for name in names({round}):
    f = open(name, 'wb', 0); held.append(f)
    f.write(content({round}, name)); os.fchmod(f.fileno(), 0o604); os.fsync(f.fileno())
for f in held: f.write(b'may be lost')
held.append(open('unsynced-{round}', 'wb', 0)); held[-1].write(b'may be lost')
print('synced', flush=True); sys.stdin.read(); os._exit(0)
"
        );
        let mut command = Command::new("python3");
        command.args(["-c", &script]).current_dir(walk.mount.path());
        let mut writer = start(command.stdin(Stdio::piped()).stdout(Stdio::piped())).expect("python starts");
        let mut told = String::new();
        let output = writer.stdout.as_mut().expect("it is piped");
        BufReader::new(output).read_line(&mut told).expect("it can be read");
        assert_eq!(told, "synced\n", "round {round}");
        walk.mount.kill();
        drop(writer.stdin.take());
        writer.wait().expect("it ends");
        walk.mount.remount(&walk.scratch.join(&format!("home-{round}")));
        walk.python(&format!(
            "{SYNCED}
for r in range({round} + 1):
    for name in names(r):
        found, want = open(name, 'rb').read(), content(r, name)
        assert found[:len(want)] == want and found[len(want):] in (b'', b'may be lost'), (name, len(found))
        assert os.stat(name).st_mode & 0o777 == 0o604, (name, oct(os.stat(name).st_mode))
"
        ));
        let plain = walk.bucket.list("packed").try_collect::<Vec<_>>().await.expect("a listing");
        assert!(plain.is_empty(), "{plain:?} would be found without the tree");
    }
    walk.mount.unmount();
}

/// What is written gets it, however it came to its key; what the tree writes for itself does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_get_the_storage_class_that_a_mount_was_given() {
    if !require_fuse("files_get_the_storage_class_that_a_mount_was_given") {
        return;
    }
    let options = ["--take-over", "--storage-class", "STANDARD_IA"];
    let mut walk = Walk::s3(Server::start(), &options).await;
    walk.sh("echo small > small && head -c 9000000 /dev/zero > large && echo moved > before && sync -f .");
    walk.sh("mv before after && mkdir d && cp large d/copied && mv large d/large");
    walk.mount.unmount();
    let server = walk.server.as_ref().expect("it is over S3");
    let objects: Vec<_> = walk.bucket.list("").try_collect().await.expect("a listing");
    let mut classed = Vec::new();
    for object in objects {
        let key = object.key.as_str();
        let class = server.storage_class(&format!("{}/some/prefix/{key}", walk.bucket.url().bucket));
        match key.starts_with(".forebay/") && !key.starts_with(".forebay/blobs/") {
            true => assert_eq!(class, None, "{key}"),
            false => assert_eq!(class.as_deref(), Some("STANDARD_IA"), "{key}"),
        }
        classed.extend(class.map(|_| key.to_owned()));
    }
    classed.retain(|key| !key.starts_with(".forebay/"));
    assert_eq!(classed, ["after", "d/copied", "d/large", "small"]);
    let url = walk.bucket.url().to_string();
    let folder = walk.scratch.folder("other").display().to_string();
    let line = ["mount", &url, &folder, "--storage-class", "NO_SUCH", "--take-over"];
    let home = walk.scratch.folder("third-home");
    let refused = Forebay::new(&home, line).envs(&server.envs()).run();
    refused.failed_with("InvalidStorageClass", "the store has no such storage class");
    for (class, told) in [
        ("STANDARD_IA", "STANDARD_IA, of what is written"),
        ("NO_SUCH", "hint: the store has no such storage class"),
        ("GLACIER", "hint: GLACIER_IR can be read at once"),
    ] {
        let variables = [server.envs(), vec![("AWS_STORAGE_CLASS".to_owned(), class.to_owned())]].concat();
        let doctor = Forebay::new(&home, ["doctor", &url]).envs(&variables).run();
        assert!(doctor.stdout.contains(told), "{doctor}");
    }
}
