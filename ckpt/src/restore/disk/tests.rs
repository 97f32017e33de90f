//! A disk that hangs is left, whoever waits for it in the kernel, and what it gives later goes nowhere.

use std::future::pending;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_io::object::{BucketUrl, Faults, StoreSettings};

use super::super::source::Source;
use super::super::tests::store;
use super::super::{Read, Segment, Target, read_local};
use super::*;
use crate::local::{Local, PATIENCE};
use crate::manifest::SliceKind::Flat;
use crate::region::Region;

const LENGTH: u64 = 1000;
/// Elements of which more are there than is read at once.
const MANY: u64 = 300 << 10;
/// Creates a file with a lease on it, and tells of it and of who asks for it; ends with its input.
const LEASE: &str = r#"
import fcntl, signal, sys
signal.signal(signal.SIGIO, lambda *_: print("asked for", flush=True))
with open(sys.argv[1], "w") as file:
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    print("leased", flush=True)
    sys.stdin.read()
"#;

/// Restores a tensor of two shards while the disk hangs at a request; says what came of it.
async fn hang_at(request: u64) -> Error {
    let (inner, faults, clock) = (Bucket::in_memory(), Faults::new(), Clock::manual());
    let slices = [(Flat, &[0][..], &[400][..], 0), (Flat, &[400], &[600], 1)];
    let (manifest, _) = store(&inner, &[("w", &[LENGTH], &slices)]).await;
    let (local, runtime) = (Local::of_test(inner.with_faults(&faults)), Handle::current());
    let gate = faults.gate(request);
    let ticking = clock.clone();
    let restore = move || {
        let mut bytes = vec![9; LENGTH as usize * 4];
        let targets = vec![Target { tensor: 0, region: Region::whole(&[LENGTH]), bytes: &mut bytes }];
        read_local((&runtime, &local, &clock), &manifest, targets, 1)
    };
    let restore = tokio::task::spawn_blocking(restore);
    gate.reached().await;
    // What the other shard still gives counts from when it does.
    while !restore.is_finished() {
        ticking.advance(PATIENCE);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    restore.await.expect("join").expect_err("a disk that hangs")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_begins_to_hang_is_left() {
    // While the two shards are looked at, and while they are read.
    for request in 1..=4 {
        let error = hang_at(request).await;
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.message().contains("did not answer for 60 s"), "{error}");
    }
}

#[tokio::test]
async fn a_disk_is_waited_for_as_long_as_it_gives_anything() {
    let (bucket, clock, runtime) = (Bucket::in_memory(), Clock::manual(), Handle::current());
    let disk = Disk::new(&runtime, &bucket, &clock);
    let second = Duration::from_secs(1);
    for _ in 0..5 {
        clock.advance(PATIENCE - second);
        disk.wait(async {}).await.expect("it answered");
    }
    let mut stuck = pin!(disk.wait(pending::<()>()));
    clock.advance(PATIENCE - second);
    assert!(futures::poll!(&mut stuck).is_pending());
    // What others of the restore are given counts as well.
    disk.wait(async {}).await.expect("it answered");
    clock.advance(PATIENCE - second);
    assert!(futures::poll!(&mut stuck).is_pending() && !disk.hangs());
    clock.advance(second);
    assert_eq!(stuck.await.expect_err("it hangs").kind(), ErrorKind::Unavailable);
    assert!(disk.hangs());
}

#[test]
fn a_thread_that_hangs_in_the_kernel_holds_nothing() {
    let scratch = tempfile::tempdir().expect("scratch");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let url: BucketUrl = format!("file://{}", scratch.path().display()).parse().expect("a URL");
    let bucket = runtime.block_on(Bucket::open(&url, &StoreSettings::default())).expect("open");
    // What lies between is not wanted.
    let slices = [
        ("w", &[MANY][..], &[(Flat, &[0][..], &[MANY][..], 0)][..]),
        ("x", &[99], &[(Flat, &[0], &[99], 0)]),
        ("y", &[MANY], &[(Flat, &[0], &[MANY], 0)]),
    ];
    let (manifest, contents) = runtime.block_on(store(&bucket, &slices));
    let (local, clock) = (Local::of_test(bucket.clone()), Clock::manual());
    let mut found = [vec![0; MANY as usize * 4], vec![0; MANY as usize * 4]];
    let targets = found.iter_mut().zip([0, 2]).map(|(bytes, tensor)| {
        let region = Region::whole(&[MANY]);
        Target { tensor, region, bytes }
    });
    read_local((runtime.handle(), &local, &clock), &manifest, targets.collect(), 2).expect("read");
    assert!(found[0] == contents[0] && found[1] == contents[2]);

    // Whoever opens a file that is leased waits in the kernel for the holder.
    let shard = &manifest.shards[0];
    let path = scratch.path().join(&shard.key);
    std::fs::remove_file(&path).expect("remove");
    let mut lessee = Command::new("python3")
        .args(["-c", LEASE])
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3");
    let mut lines = BufReader::new(lessee.stdout.take().expect("its output")).lines();
    assert_eq!(lines.next().expect("a line").expect("read"), "leased");
    let mut bytes = vec![9; 4000];
    let disk = Disk::new(runtime.handle(), &bucket, &clock);
    let (start, range) = (shard.header, shard.header..shard.header + 4000);
    let segment = Segment { shard: 0, start, slice: (0, 0), target: &mut bytes };
    let read = Mutex::new(Some(Read { shard: 0, range, segments: vec![segment] }));
    clock.advance(PATIENCE);
    let outcome = Source::Disk(&disk).read(&manifest, || read.lock().take(), 1);
    assert_eq!(outcome.map(|parts| parts.len()).expect_err("it hangs").kind(), ErrorKind::Unavailable);
    // The thread is there still, and goes on once the holder ends; without it this waits.
    assert_eq!(lines.next().expect("a line").expect("read"), "asked for");
    drop(lessee.stdin.take());
    assert!(lessee.wait().expect("wait").success());
}
