//! What becomes of names that change without the kernel having asked for it.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_core::ObjectKey;
use forebay_io::object::Condition;
use forebay_tests::Door;
use forebay_tests::s3::Server;

use super::*;

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
    assert!(shown("removed").contains("No such file"));
    assert_eq!(shown("d/clone"), "new");
    assert_eq!((shown("replaced").as_str(), shown("new").as_str()), ("another text", "new"));
    let mut names: Vec<_> =
        std::fs::read_dir(&mount).expect("a listing").flatten().map(|e| e.file_name()).collect();
    names.sort();
    assert_eq!(names, ["d", "new", "replaced"]);
}

/// Longest that a storm may take in all: it takes seconds, and a few deadlines of the store where that is in trouble.
const STORM_DEADLINE: Duration = Duration::from_secs(150);
/// Objects that come and go in it.
const STORM: usize = 30;

/// Promise S68: Another tool may put, replace or delete an object while its file is open, or a clone of it is there: each
/// read then gives the bytes of the version that was opened, or fails with ESTALE. ENOENT is for names: once a listing or
/// `forebay refresh` finds the object gone, there is no such file.
#[test]
fn a_file_whose_object_is_gone_is_stale_while_it_is_open() {
    if !require_fuse("a_file_whose_object_is_gone_is_stale_while_it_is_open") {
        return;
    }
    for more in [&[][..], &["--read-only"], &["--dataset"]] {
        let mut walk = Walk::with(more, |bucket| {
            for name in ["data", "lent"] {
                std::fs::write(bucket.join(name), vec![7; 6 << 20]).expect("an object");
            }
        });
        let (home, is_writable) = (walk.scratch.join("home"), more.is_empty());
        let path = |name: &str| walk.mount.path().join(name).into_os_string();
        if is_writable {
            Forebay::new(&home, ["clone".into(), path("lent"), path("copy")]).run().succeeded();
        }
        let file = std::fs::File::open(walk.mount.path().join("data")).expect("open");
        for name in ["data", "lent"] {
            std::fs::remove_file(walk.scratch.join("bucket").join(name)).expect("an object");
        }
        let read = |told: &str| {
            let mut page = [0; 4096];
            let refused = file.read_exact_at(&mut page, 5 << 20).expect_err("its bytes are gone");
            assert_eq!(refused.raw_os_error(), Some(libc::ESTALE), "{more:?}, {told}: {refused}");
        };
        read("before a refresh");
        assert!(walk.mount.log().contains("the object is gone"), "{}", walk.mount.log());
        if is_writable {
            walk.python(
                r#"
source, copy, own = os.open("lent", os.O_RDONLY), os.open("copy", os.O_RDWR), os.open("own", os.O_RDWR | os.O_CREAT)
fails(errno.ESTALE, os.pread, source, 4096, 0)
fails(errno.ESTALE, os.pread, copy, 4096, 0)
fails(errno.ESTALE, os.sendfile, own, source, 0, 4096)
assert os.copy_file_range(source, own, 1 << 20, 0, 0) == 1 << 20
fails(errno.ESTALE, os.pread, own, 4096, 0)
child = os.fork()
if child == 0:
    mmap.mmap(copy, 4096, prot=mmap.PROT_READ)[0]
    os._exit(0)
import signal
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS
os.pwrite(copy, b"new", 1 << 20)
os.fsync(copy)
fails(errno.ESTALE, os.pread, copy, 4096, 0)
os.ftruncate(own, 0)
os.pwrite(own, b"whole", 0)
os.fsync(own)
assert os.pread(own, 10, 0) == b"whole"
"#,
            );
        }
        if more != ["--dataset"] {
            Forebay::new(&home, ["refresh".as_ref(), walk.mount.path().as_os_str()]).run().succeeded();
            let missing = std::fs::File::open(walk.mount.path().join("data")).expect_err("it is gone");
            assert_eq!(missing.raw_os_error(), Some(libc::ENOENT), "{more:?}: {missing}");
            read("after a refresh");
        }
        drop(file);
        walk.mount.unmount();
    }
}

/// Notifications and requests in the same directories, all at once: none waits for the other for ever.
#[test]
fn a_storm_of_notifications_stops_no_request() {
    if !require_fuse("a_storm_of_notifications_stops_no_request") {
        return;
    }
    let mut walk =
        Walk::with(&["-o", "ttl=3600"], |bucket| std::fs::create_dir(bucket.join("d")).expect("a folder"));
    let bucket = walk.scratch.join("bucket");
    let put = |number, object: Option<String>| {
        let path = bucket.join(format!("d/storm-{number}"));
        match object {
            None => drop(std::fs::remove_file(&path)),
            Some(text) => std::fs::write(&path, text).expect("an object"),
        }
    };
    storm(&walk.mount, &[], &walk.scratch.join("home"), 20 * scale(), put);
    walk.mount.unmount();
}

/// Nor while the store fails, delays and loses answers.
#[test]
fn a_storm_of_notifications_over_a_troubled_store_stops_no_request() {
    if !require_fuse("a_storm_of_notifications_over_a_troubled_store_stops_no_request") {
        return;
    }
    let (server, scratch, mut rng) = (Server::for_volume(), Scratch::new(), Seeded::new());
    let door = Door::new(server.address()).expect("loopback has free ports");
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let bucket = runtime.block_on(server.bucket("a/prefix"));
    let (home, variables) = (scratch.join("home"), server.envs_at(door.endpoint()));
    let url = bucket.url().to_string();
    let mut mount = Mount::new(&home, &url, &scratch.join("mnt"), &["-o", "ttl=3600"], &variables);
    std::fs::create_dir(mount.path().join("d")).expect("a directory");
    let put = |number, object: Option<String>| {
        let key = ObjectKey::new(format!("d/storm-{number}"));
        runtime.block_on(async {
            match object {
                None => bucket.delete(&key).await.expect("deleted"),
                Some(text) => drop(bucket.put(&key, text.into(), Condition::Always).await.expect("put")),
            }
        });
    };
    door.trouble(rng.random(), 10);
    // How many requests a storm sends, a tenth of which is in trouble, depends on how long it takes.
    let troubles = || door.troubles().values().sum::<usize>();
    for _ in 0..10 {
        storm(&mount, &variables, &home, 5 * scale(), put);
        if troubles() >= 10 {
            break;
        }
    }
    assert!(troubles() >= 10, "the store failed too seldom: {:?}", door.troubles());
    mount.unmount();
}

/// Programs write, list, rename and read in the directory `d` while it is refreshed after each of `rounds` changes that
/// `put` makes to its objects outside: the one of a number has the text, or is gone.
fn storm(
    mount: &Mount,
    variables: &[(String, String)],
    home: &Path,
    rounds: usize,
    put: impl Fn(usize, Option<String>),
) {
    let directory = &mount.path().join("d");
    let running = &AtomicBool::new(true);
    let work = || {
        std::thread::scope(|scope| {
            // Ends the workers also when a refresh failed.
            let _calm = Calm(running);
            let busy: Vec<_> =
                (0..4).map(|worker| scope.spawn(move || in_the_storm(directory, worker, running))).collect();
            for round in 0..rounds {
                for number in 0..STORM {
                    put(number, ((round + number) % 3 != 0).then(|| round.to_string()));
                }
                let refresh = Forebay::new(home, ["refresh".as_ref(), directory.as_os_str()]);
                refresh.envs(variables).run().succeeded();
            }
            running.store(false, Ordering::Relaxed);
            for worker in busy {
                assert!(worker.join().expect("a worker ends") > 0, "every worker got on");
            }
        });
    };
    mount.within(STORM_DEADLINE, work);
}

/// What one program does in `directory` until it is no longer `running`. Returns how often.
fn in_the_storm(directory: &Path, worker: usize, running: &AtomicBool) -> u64 {
    let mut done = 0;
    while running.load(Ordering::Relaxed) {
        let own = directory.join(format!("own-{worker}-{}", done % 7));
        std::fs::write(&own, format!("{done}")).expect("written");
        // Objects of the storm come and go; that they can be asked for is what matters.
        for number in 0..STORM {
            let _ = std::fs::metadata(directory.join(format!("storm-{number}")));
        }
        assert!(std::fs::read_dir(directory).expect("a listing").flatten().count() > 0);
        let renamed = directory.join(format!("renamed-{worker}"));
        std::fs::rename(&own, &renamed).expect("renamed");
        assert_eq!(std::fs::read_to_string(&renamed).expect("read"), format!("{done}"));
        std::fs::remove_file(&renamed).expect("removed");
        done += 1;
    }
    done
}

/// Tells that nothing is running any more when it goes.
struct Calm<'a>(&'a AtomicBool);

impl Drop for Calm<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// The deadline above ends a call that would never return: the test that made it fails, and the next one runs.
#[test]
fn a_call_that_hangs_fails_the_test_that_made_it() {
    if !require_fuse("a_call_that_hangs_fails_the_test_that_made_it") {
        return;
    }
    let mut walk = Walk::new();
    shell(Path::new("/"), &format!("kill -STOP {}", walk.mount.pid())).succeeded();
    let (mount, name) = (&walk.mount, walk.mount.path().join("name"));
    let call = || mount.within(Duration::from_millis(200), || std::fs::write(name, "never").is_err());
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).expect_err("it hangs");
    let message = failed.downcast_ref::<String>().expect("a message");
    assert!(message.contains("took longer than 200ms"), "{message}");
    assert!(!walk.mount.wait().success());
    shell(Path::new("/"), &format!("umount -l {}", walk.mount.path().display())).succeeded();
}
