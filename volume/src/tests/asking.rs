//! The control socket: who asked and does not listen.

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, Condition, Delay};
use forebay_io::task::TaskGroup;
use forebay_metadata::tree::resolve;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::support::{Fixture, run};
use crate::control::{Identity, Reply, Request, serve};
use crate::warmup::Request as WarmupRequest;

/// More than twice the lines of progress that a socket takes whose other side does not read.
const OBJECTS: u64 = 1_000;

/// `forebay warmup`, suspended with Ctrl-Z, stopped the warmup in the mount with blocks on their way: whoever read one
/// of those waited for ever.
#[test]
fn who_asks_for_a_warmup_and_does_not_listen_holds_nobody_up() {
    run(async {
        let bucket = Bucket::in_memory();
        for number in 0..OBJECTS {
            let key = ObjectKey::new(format!("f{number:04}"));
            bucket.put(&key, "ten bytes.".into(), Condition::Always).await.expect("put");
        }
        // Each block is told of by itself.
        let slow = bucket.with_delay(Delay { request_us: 100, mib_us: 0 });
        let volume = Fixture::new(slow).open().await;
        let (scratch, tasks) = (tempfile::tempdir().expect("scratch"), TaskGroup::new("test-control"));
        let socket = scratch.path().join("control");
        let identity = Identity { source: "test".to_owned(), mount_point: "/test".to_owned() };
        serve(&socket, volume.clone(), identity, &tasks).expect("a control socket");
        let mut asking = UnixStream::connect(&socket).await.expect("a mount");
        let all = WarmupRequest { paths: vec![String::new()], pin: false, dry_run: false, concurrency: 1 };
        let mut line = serde_json::to_string(&Request::Warmup(all)).expect("a request");
        line.push('\n');
        asking.write_all(line.as_bytes()).await.expect("asked");

        // From the other end: they meet where the socket has been full for long.
        for number in (0..OBJECTS).rev() {
            let found = resolve(&**volume.tree(), &format!("f{number:04}")).await.expect("the file");
            let keys = volume.block_keys(found.ino).await.expect("its blocks");
            assert_eq!(volume.blocks().get(&keys[0], 0..10).await.expect("read"), "ten bytes.");
        }
        assert_eq!(volume.blocks().counters().origin_bytes, OBJECTS * 10);
        // Who listens again gets whole lines, the last of them the outcome.
        let (mut lines, mut told, mut outcome) = (BufReader::new(asking).lines(), 0, None);
        while let Some(line) = lines.next_line().await.expect("a line") {
            assert!(outcome.is_none(), "nothing follows the outcome: {line}");
            match serde_json::from_str(&line).expect("a reply") {
                Reply::Progress(_) => told += 1,
                Reply::Warmed(warmed) => outcome = Some(warmed),
                other => panic!("{other:?}"),
            }
        }
        let outcome = outcome.expect("an outcome");
        assert!(outcome.is_complete() && outcome.proved == OBJECTS && told > 0, "{told} {outcome:?}");
    });
}
