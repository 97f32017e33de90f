//! Ways that are cut, or slow, and processes that may not act for a while: what comes of what was asked meanwhile.

use forebay_io::object::{Delay, Faults};
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
    let begun = tokio::time::Instant::now();
    for _ in 0..150 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        served.server.cut();
    }
    until("the way", async || guest.reached().is_some()).await;
    let times = guest.reached().map_or(0, |reached| reached.times);
    let most = begun.elapsed().as_millis() as u64 / 250 + 1;
    assert!((2..=most).contains(&times), "{times} of {most}");
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

/// A mount with so many files open that have no content yet, after who served it was lost: whoever serves the tree next, over this
/// bucket, looks for their content in the store.
async fn taken_over(files: usize, site: &Site, next: Option<Bucket>) -> (RemoteTree, Vec<InodeId>, Served) {
    let served = site.serve().await;
    let guest = site.join().await;
    let mut open = Vec::new();
    for number in 0..files {
        let file = create(&guest, &format!("f{number}")).await;
        guest.opened(file).await.expect("opened");
        open.push(file);
    }
    guest.sync().await.expect("synced");
    site.crash(served).await;
    until("its loss", async || guest.reached().is_none()).await;
    (guest, open, site.serve_over(next).await)
}

/// Asserts that these files are open once each.
async fn check_open_once(guest: &RemoteTree, open: &[InodeId]) {
    for (number, file) in open.iter().enumerate() {
        guest.unlink(ROOT, format!("f{number}").as_bytes()).await.expect("unlinked");
        assert_eq!(guest.attributes(*file).await.expect("open").nlink, 0);
        guest.closed(*file).await.expect("closed");
        assert_eq!(kind_of(guest.attributes(*file).await), ErrorKind::NotFound, "{number}");
    }
}

/// What it was told before it was cut off went on, and did not know of what it was told again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_that_is_cut_off_while_it_is_taken_over_has_each_file_open_once() {
    let (site, faults) = (Site::new(Kind::Memory).await, Faults::new());
    let look = faults.gate(1);
    let bucket = site.world.bucket().with_faults(&faults);
    let (guest, open, served) = taken_over(3, &site, Some(bucket)).await;
    look.reached().await;
    served.server.cut();
    until("the cut", async || served.server.guests().iter().all(|guest| !guest.is_here)).await;
    until("its return", async || served.server.guests().iter().all(|guest| guest.is_here)).await;
    // It says what it has open.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(guest.reached().is_none(), "the store has not answered");
    look.open();
    check_open_once(&guest, &open).await;
    guest.close().await.expect("closed");
    served.end().await;
}

/// It said nothing meanwhile, and was cut off after seven seconds, each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_whose_files_take_long_to_be_taken_over_is_not_cut_off() {
    let (site, faults) = (Site::new(Kind::Memory).await, Faults::new());
    let look = faults.gate(1);
    let bucket = site.world.bucket().with_faults(&faults);
    let (guest, open, served) = taken_over(1, &site, Some(bucket)).await;
    look.reached().await;
    let begun = tokio::time::Instant::now();
    while begun.elapsed() < Duration::from_secs(9) {
        assert!(served.server.guests().iter().all(|guest| guest.is_here), "{:?}", begun.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(guest.reached().is_none(), "the store has not answered");
    look.open();
    check_open_once(&guest, &open).await;
    guest.close().await.expect("closed");
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_many_files_of_a_mount_want_of_the_store_is_asked_at_once_when_it_is_taken_over() {
    const LOOK: Duration = Duration::from_millis(100);
    let site = Site::new(Kind::Memory).await;
    let bucket = site.world.bucket().with_delay(Delay { request_us: LOOK.as_micros() as u64, mib_us: 0 });
    let (guest, open, served) = taken_over(64, &site, Some(bucket)).await;
    let begun = tokio::time::Instant::now();
    until("the takeover", async || guest.reached().is_some()).await;
    let took = begun.elapsed();
    assert!(took < LOOK * 64 / 2, "{took:?}, one after another they take longer");
    check_open_once(&guest, &open).await;
    guest.close().await.expect("closed");
    served.end().await;
}

/// It was forgotten once nobody waited for it any more: the file stayed open where the tree is, and what was unlinked stayed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_closed_while_nobody_hears_it_is_closed_later() {
    let mut site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let patient = site.join().await;
    site.deadline = Duration::from_secs(1);
    let guest = site.join().await;
    let file = create(&patient, "a").await;
    guest.opened(file).await.expect("opened");
    let address = std::mem::take(&mut *site.address.lock());
    served.server.cut();
    until("the cut", async || guest.reached().is_none()).await;
    guest.closed(file).await.expect("nobody waits for it");
    // Twice as long as anybody waits.
    for _ in 0..2 {
        assert_eq!(kind_of(guest.lookup(ROOT, b"a").await), ErrorKind::Unavailable);
    }
    *site.address.lock() = address;
    until("another way", async || guest.reached().is_some()).await;
    patient.unlink(ROOT, b"a").await.expect("unlinked");
    until("its end", async || patient.attributes(file).await.is_err()).await;
    for mount in [guest, patient] {
        mount.close().await.expect("closed");
    }
    served.end().await;
}

/// Who had given up waiting for a file to be opened never closed it: it stayed open where the tree is, and what was unlinked stayed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_whose_opening_was_given_up_is_not_open() {
    let (mut site, faults) = (Site::new(Kind::Memory).await, Faults::new());
    let served = site.serve_over(Some(site.world.bucket().with_faults(&faults))).await;
    let patient = site.join().await;
    site.deadline = Duration::from_secs(1);
    let guest = site.join().await;
    // The answer comes late, or by another way.
    for (opens, is_cut) in [(false, false), (true, false), (true, true)] {
        let file = create(&patient, "a").await;
        let look = faults.gate(1);
        let opened = match opens {
            true => guest.opened(file).await.map(drop),
            false => guest.create_opened(ROOT, b"a", new_file(), Existing::Accept).await.map(drop),
        };
        assert_eq!(kind_of(opened), ErrorKind::Unavailable, "the store has not answered");
        look.reached().await;
        if is_cut {
            let before = guest.reached();
            served.server.cut();
            until("another way", async || guest.reached().is_some_and(|now| Some(now) != before)).await;
        }
        patient.unlink(ROOT, b"a").await.expect("unlinked");
        look.open();
        until("its end", async || patient.attributes(file).await.is_err()).await;
    }
    let file = create(&patient, "b").await;
    guest.opened(file).await.expect("opened");
    patient.unlink(ROOT, b"b").await.expect("unlinked");
    assert!(patient.attributes(file).await.is_ok(), "it is open");
    guest.closed(file).await.expect("closed");
    assert_eq!(kind_of(patient.attributes(file).await), ErrorKind::NotFound);
    for mount in [guest, patient] {
        mount.close().await.expect("closed");
    }
    served.end().await;
}
