//! Ways that are cut, or slow, and processes that may not act for a while: what comes of what was asked meanwhile.

use tokio::io::AsyncWriteExt;

use super::*;

/// What a new mount of this volume says first (`HELLO` in `metadata/src/remote/wire.rs`).
const HELLO: &[u8] = b"\x09\0\0\0\0\x07\xac\x02\x01\x03h-1";

/// What was asked while the lease had lapsed was never answered after it was held again, and cut the stream each time that it was asked
/// once more, so that nothing else was answered either.
///
/// Promise S10: Nothing has to be mounted again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_while_the_lease_has_lapsed_is_done_once_when_it_is_held_again() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let (lease, runs) = (site.world.lease.clone(), Arc::new(AtomicU64::new(0)));
    let (lapsing, counted) = (lease.clone(), runs.clone());
    served.server.on_command(Box::new(move |command| {
        // It is done, and may not be told.
        lapsing.lapse(1, u64::MAX);
        counted.fetch_add(1, Ordering::SeqCst);
        std::future::ready(command).boxed()
    }));
    let guest = site.join().await;
    lease.lapse(1, u64::MAX);
    let asked = async {
        let changes = ["a", "b", "c"].map(|name| make(&guest, ROOT, name, FileKind::Directory));
        let (made, looked) = tokio::join!(futures::future::join_all(changes), guest.lookup(ROOT, b"none"));
        assert_eq!(looked.expect("answered"), Lookup::Miss);
        made.len()
    };
    let renewing = async {
        // So long that it was cut off, and turned away.
        until("the end of its stream", async || guest.reached().is_none()).await;
        tokio::time::sleep(Duration::from_millis(600)).await;
        lease.renew();
    };
    let within = |asked| tokio::time::timeout(Duration::from_secs(10), asked);
    assert_eq!(tokio::join!(within(asked.boxed()), renewing).0.expect("answered"), 3);
    assert_eq!(paths(&guest).await, ["a/", "b/", "c/"]);
    let command = guest.command(Bytes::from_static(b"told later"));
    let renewing = async {
        until("the command", async || runs.load(Ordering::SeqCst) == 1).await;
        until("the end of its stream", async || guest.reached().is_none()).await;
        lease.renew();
    };
    let told = tokio::join!(within(command.map(|told| told.map_or(0, |told| told.len())).boxed()), renewing);
    assert_eq!(told.0.expect("answered"), 10);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    guest.close().await.expect("closed");
    served.end().await;
}

/// Each time costs handshakes, and a look at where the tree is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_cut_off_again_and_again_pauses_between() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let guest = site.join().await;
    for _ in 0..150 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        served.server.cut();
    }
    until("the way", async || guest.reached().is_some()).await;
    let times = guest.reached().map_or(0, |reached| reached.times);
    assert!((2..12).contains(&times), "{times}");
    guest.close().await.expect("closed");
    served.end().await;
}

/// It was taken to be here for as long as the process lived: what it had open stayed, and the process's end waited for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_gone_before_it_is_let_in_is_waited_for_no_longer_than_others() {
    let mut site = Site::new(Kind::Memory).await;
    site.patience = Duration::from_millis(300);
    let served = site.serve().await;
    let (mut mount, stream) = tokio::io::duplex(1 << 10);
    mount.write_all(HELLO).await.expect("room");
    drop(mount);
    let error = served.server.serve(Box::new(stream)).await.expect_err("nobody hears it");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(served.server.guests().iter().all(|guest| !guest.is_here), "{:?}", served.server.guests());
    until("its end", async || served.server.guests().is_empty()).await;
    served.end().await;
}
