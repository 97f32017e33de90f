//! Several mounts at one tree: what one process serves to others, over real connections.

mod locks;
mod troubles;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use forebay_core::{ErrorKind, FileKind, FileLayout, InodeId, ObjectKey, Result, Timestamp, VolumeId};
use forebay_io::net::secure::{Host, Identity, Listen, Transport};
use forebay_io::object::{Bucket, Condition};
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::contract::check_all;
use super::model::Pair;
use super::world::*;
use crate::remote::{PROTOCOL, RemoteParts, RemoteTree, Server};
use crate::testing::{Chance, rounds};
use crate::tree::{
    CAPABILITY, Existing, LocalTree, Lookup, OutsideChange, Placement, SetAttributes, Tree, XattrMode,
};

const ROOT: InodeId = InodeId::ROOT;

/// A tree that is served, again and again.
struct Site {
    world: World,
    /// Where it is served now.
    address: Arc<Mutex<Vec<SocketAddr>>>,
    starts: AtomicU64,
    patience: Duration,
    /// How long a mount waits for an answer.
    deadline: Duration,
}

/// One process that serves it.
struct Served {
    tree: Arc<LocalTree>,
    server: Server,
    tasks: TaskGroup,
}

fn host(secret: &[u8]) -> Host {
    let identity = Identity::new(secret, &VolumeId(7).0.to_le_bytes(), PROTOCOL).expect("a secret");
    let listen = Listen { ip: Some(Ipv4Addr::LOCALHOST.into()), port: 0 };
    Host::open(Transport::Tcp, listen, &identity).expect("a port")
}

const SECRET: &[u8] = b"sixteen bytes and more";

impl Site {
    async fn new(kind: Kind) -> Self {
        let mut world = World::new(kind).await;
        world.settings.serves = true;
        let (address, starts) = (Arc::default(), AtomicU64::new(0));
        let deadline = Duration::from_secs(20);
        Self { world, address, starts, patience: Server::PATIENCE, deadline }
    }

    async fn serve(&self) -> Served {
        self.serve_over(self.world.bucket.clone()).await
    }

    /// The same through another handle on the bucket.
    async fn serve_over(&self, bucket: Option<Bucket>) -> Served {
        let (tree, tasks) = (Arc::new(self.world.open_over(bucket).await), TaskGroup::new("server"));
        let host = host(SECRET);
        *self.address.lock() = vec![host.address().expect("it listens")];
        let number = self.starts.fetch_add(1, Ordering::SeqCst);
        let server = Server::start(tree.clone(), host, number, self.patience, &tasks);
        Served { tree, server, tasks }
    }

    async fn join(&self) -> RemoteTree {
        self.try_join(SECRET, VolumeId(7)).await.expect("joined")
    }

    async fn try_join(&self, secret: &[u8], volume: VolumeId) -> Result<RemoteTree> {
        let address = self.address.clone();
        RemoteTree::open(RemoteParts {
            volume,
            host: host(secret),
            find: Arc::new(move || {
                let found = address.lock().clone();
                async move { Ok(found) }.boxed()
            }),
            name: "guest".to_owned(),
            first: Duration::from_secs(20),
            deadline: self.deadline,
            rng: Rng::system(),
        })
        .await
    }

    /// The power goes where it is served.
    async fn crash(&self, served: Served) {
        self.address.lock().clear();
        // First, so that nothing is made durable on the way.
        self.world.disk.fail(false);
        served.tasks.shutdown(Duration::ZERO).await;
        drop(served.server);
        // What was cancelled may still be ending on another thread.
        until("the end of what was cancelled", async || Arc::strong_count(&served.tree) == 1).await;
        let tree = Arc::into_inner(served.tree).expect("nobody else has it");
        self.world.crash(tree, false).await;
    }
}

impl Served {
    async fn end(self) {
        self.server.stop().await;
        self.tree.close().await.expect("closed");
    }
}

async fn create(tree: &dyn Tree, name: &str) -> InodeId {
    make(tree, ROOT, name, FileKind::File).await
}

async fn make(tree: &dyn Tree, parent: InodeId, name: &str, kind: FileKind) -> InodeId {
    let made = tree.create(parent, name.as_bytes(), new_inode(kind), Existing::Refuse).await;
    made.expect("made").0.ino
}

/// Waits for what takes moments.
async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    for _ in 0..2000 {
        if is().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it never came: {what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_that_is_served_keeps_the_contract() {
    for kind in [Kind::Memory, Kind::Lmdb, Kind::Slate] {
        println!("on {kind:?}");
        let site = Site::new(kind).await;
        let served = site.serve().await;
        let guest = site.join().await;
        check_all(&guest).await;
        guest.close().await.expect("closed");
        assert_eq!(served.server.guests(), [], "it said that it ends");
        served.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mounts_of_one_tree_agree_with_the_model() {
    for _ in 0..rounds(4) {
        let mut chance = Chance::fresh();
        let site = Site::new(Kind::Memory).await;
        let served = site.serve().await;
        let guests = [site.join().await, site.join().await];
        let mut pair = Pair::new(vec![&*served.tree, &guests[0], &guests[1]]);
        for step in 0..300 {
            pair.step(&mut chance).await;
            if step % 60 == 59 {
                served.server.cut();
            }
        }
        pair.check().await;
        for guest in &guests {
            guest.close().await.expect("closed");
        }
        served.tree.drain().await.expect("drained");
        served.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_knows_another_secret_or_another_volume_is_turned_away() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let stranger = site.try_join(b"another secret of many bytes", VolumeId(7)).await;
    assert_eq!(kind_of(stranger), ErrorKind::Denied);
    // Of the same scope, which a careless build might have.
    let lost = site.try_join(SECRET, VolumeId(8)).await;
    assert_eq!(kind_of(lost), ErrorKind::Invalid);
    assert_eq!(served.server.guests(), []);
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_mount_hears_what_others_change_and_not_its_own() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let guests = [site.join().await, site.join().await];
    let mut heard =
        [served.tree.outside().listen(), guests[0].outside().listen(), guests[1].outside().listen()];
    let file = create(&guests[0], "a").await;
    // Of what it knows nothing of it is not told.
    guests[1].lookup(ROOT, b"a").await.expect("found");
    site.world.write(&guests[0], file, b"one").await.expect("written");
    let content = OutsideChange::Inode { ino: file, has_content: true };
    let name = OutsideChange::Name { directory: ROOT, name: Bytes::from_static(b"a") };
    for listener in [0, 2] {
        for wanted in [&name, &content] {
            while heard[listener].next().await.expect("told") != *wanted {}
        }
    }
    create(&*served.tree, "b").await;
    create(&guests[1], "c").await;
    let mut told = Vec::new();
    while told.len() < 2 {
        match heard[1].next().await.expect("told") {
            OutsideChange::Name { name, .. } => told.push(name),
            OutsideChange::Inode { ino, .. } => assert_ne!(ino, file, "it made that itself"),
            OutsideChange::Anything => {}
        }
    }
    assert_eq!(told, [&b"b"[..], b"c"]);
    for guest in &guests {
        guest.close().await.expect("closed");
    }
    served.end().await;
}

/// The kernel asks for it before the first write to each file, which is one that was just made as a rule.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_asked_for_the_capability_of_a_file_that_was_just_made() {
    const NAME: &[u8] = b"security.capability";
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let [one, other] = [site.join().await, site.join().await];
    let open = async |name: &str| {
        one.create_opened(ROOT, name.as_bytes(), new_file(), Existing::Accept).await.expect("open")
    };
    let (first, second) = (open("a").await, open("b").await);
    let files = [first.attributes.ino, second.attributes.ino];
    // So that nothing is synced beside.
    one.sync().await.expect("synced");
    let asked = one.requests();
    for file in files {
        let missing = one.xattr(file, NAME).await.expect_err("it has none");
        assert_eq!(missing.kind(), ErrorKind::NoAttribute);
    }
    assert_eq!(one.requests(), asked);
    // By itself, and by another mount.
    one.set_xattr(files[0], NAME, "own".into(), XattrMode::Set).await.expect("set");
    assert_eq!(one.xattr(files[0], NAME).await.expect("it has one"), "own");
    other.set_xattr(files[1], NAME, "other's".into(), XattrMode::Set).await.expect("set");
    until("what the other did", async || {
        one.xattr(files[1], NAME).await.is_ok_and(|value| value == "other's")
    })
    .await;
    open("a").await;
    assert_eq!(one.xattr(files[0], NAME).await.expect("it was there"), "own");
    for guest in [&one, &other] {
        guest.close().await.expect("closed");
    }
    served.end().await;
}

/// The kernel has each write of a caller without privileges take set-id bits away, and each write a capability. Files that were there
/// before cost one or two requests for each of them, and a write waited while nobody served the tree.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_asked_what_a_write_takes_from_a_file_that_is_open() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let [one, other] = [site.join().await, site.join().await];
    let file = create(&other, "a").await;
    let mode = |mode| SetAttributes { mode: Some(mode), ..SetAttributes::default() };
    let lacks_capability = async || one.xattr(file, CAPABILITY).await.is_err();
    assert!(!one.lacks_set_ids(file), "it is not open");
    one.opened(file).await.expect("opened");
    let asked = one.requests();
    for _ in 0..100 {
        assert!(one.lacks_set_ids(file) && lacks_capability().await);
    }
    assert_eq!(one.requests(), asked);
    // By itself, and by another mount. Who asks knows from then on.
    one.set_attributes(file, mode(0o4755)).await.expect("set");
    assert!(!one.lacks_set_ids(file));
    one.attributes(file).await.expect("asked");
    assert!(!one.lacks_set_ids(file), "it has them");
    one.set_attributes(file, mode(0o755)).await.expect("set");
    one.attributes(file).await.expect("asked");
    assert!(one.lacks_set_ids(file));
    other.set_attributes(file, mode(0o2755)).await.expect("set");
    until("what the other did", async || !one.lacks_set_ids(file)).await;
    other.set_attributes(file, mode(0o755)).await.expect("set");
    other.set_xattr(file, CAPABILITY, "cap".into(), XattrMode::Set).await.expect("set");
    until("what the other did", async || !lacks_capability().await).await;
    other.remove_xattr(file, CAPABILITY).await.expect("removed");
    until("what the other did", async || one.attributes(file).await.is_ok() && one.lacks_set_ids(file)).await;
    until("what the other did", lacks_capability).await;
    one.sync().await.expect("synced");
    let asked = one.requests();
    assert!(one.lacks_set_ids(file) && lacks_capability().await);
    assert_eq!(one.requests(), asked, "it was told once");
    // What has them when it is opened.
    let second = create(&other, "b").await;
    other.set_attributes(second, mode(0o4755)).await.expect("set");
    one.opened(second).await.expect("opened");
    assert!(!one.lacks_set_ids(second));
    for guest in [&one, &other] {
        guest.close().await.expect("closed");
    }
    served.end().await;
}

/// Another host gives a file privileges while one writes to it that was not told yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_write_could_not_know_of_goes_with_its_commit() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let [one, other] = [site.join().await, site.join().await];
    let file = create(&other, "a").await;
    one.opened(file).await.expect("opened");
    let set_ids = SetAttributes { mode: Some(0o6755), ..SetAttributes::default() };
    // A write, before which nobody was asked.
    assert!(one.lacks_set_ids(file) && one.xattr(file, CAPABILITY).await.is_err());
    other.set_attributes(file, set_ids.clone()).await.expect("set");
    other.set_xattr(file, CAPABILITY, "cap".into(), XattrMode::Set).await.expect("set");
    until("what the other did", async || !one.lacks_set_ids(file)).await;
    // As anybody may who may write to it.
    one.set_xattr(file, b"user.a", "1".into(), XattrMode::Set).await.expect("set");
    site.world.write(&one, file, b"bytes").await.expect("committed");
    assert_eq!(other.attributes(file).await.expect("known").mode, 0o755);
    assert_eq!(kind_of(other.xattr(file, CAPABILITY).await), ErrorKind::NoAttribute);
    // What is given after the last write, by whoever writes, stays.
    one.attributes(file).await.expect("asked");
    assert!(one.lacks_set_ids(file));
    one.set_attributes(file, set_ids.clone()).await.expect("set");
    site.world.write(&one, file, b"more").await.expect("committed");
    assert_eq!(other.attributes(file).await.expect("known").mode, 0o6755);

    // What is written while a commit is under way is the next one's to see to.
    let clears = SetAttributes { mode: Some(0o755), ..SetAttributes::default() };
    one.set_attributes(file, clears).await.expect("cleared");
    one.attributes(file).await.expect("asked");
    let (layout, generation) = one.layout(file).await.expect("known");
    {
        let mut commit = one.commit_layout(file, generation, layout, Timestamp::default());
        assert!(futures::poll!(commit.as_mut()).is_pending());
        assert!(one.lacks_set_ids(file));
        commit.await.expect("committed");
    }
    other.set_attributes(file, set_ids).await.expect("set");
    site.world.write(&one, file, b"last").await.expect("committed");
    assert_eq!(other.attributes(file).await.expect("known").mode, 0o755);
    for guest in [&one, &other] {
        guest.close().await.expect("closed");
    }
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_hears_of_what_it_may_know_and_of_nothing_else() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let [busy, idle] = [site.join().await, site.join().await];
    let directory = make(&busy, ROOT, "d", FileKind::Directory).await;
    let open = create(&busy, "open").await;
    idle.opened(open).await.expect("opened");
    let mut outside = idle.outside().listen();
    let heard = idle.heard();
    for number in 0..100 {
        let file = make(&busy, directory, &format!("f{number}"), FileKind::File).await;
        site.world.write(&busy, file, b"bytes").await.expect("written");
    }
    // Both of which it knows: the root, of which it asked when it came, and what it has open.
    create(&busy, "last").await;
    site.world.write(&busy, open, b"more").await.expect("written");
    let content = OutsideChange::Inode { ino: open, has_content: true };
    let mut told = Vec::new();
    while told.last() != Some(&content) {
        told.push(outside.next().await.expect("told"));
    }
    assert!(told.contains(&OutsideChange::Name { directory: ROOT, name: "last".into() }));
    assert_eq!(told.len() as u64, idle.heard() - heard);
    let is_known = |change: &OutsideChange| match change {
        OutsideChange::Name { directory, .. } => *directory == ROOT,
        OutsideChange::Inode { ino, .. } => [ROOT, open].contains(ino),
        OutsideChange::Anything => false,
    };
    assert!(told.iter().all(is_known), "{told:?}");
    for guest in [&busy, &idle] {
        guest.close().await.expect("closed");
    }
    served.end().await;
}

/// Each change is made once, however often the way is cut: a name that was made is never found to exist by who made it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_while_the_way_is_cut_is_done_once() {
    const CUTS: u64 = 6;
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let guest = site.join().await;
    let is_over = AtomicBool::new(false);
    let work = async {
        let mut files = 0;
        while !is_over.load(Ordering::SeqCst) {
            let name = format!("f{files}");
            let file = create(&guest, &name).await;
            guest.link(file, ROOT, format!("l{files}").as_bytes()).await.expect("linked once");
            guest.unlink(ROOT, name.as_bytes()).await.expect("unlinked once");
            files += 1;
        }
        files
    };
    let cutting = async {
        for cut in 0..CUTS {
            until("a way", async || guest.reached().is_some_and(|reached| reached.times >= cut)).await;
            served.server.cut();
        }
        is_over.store(true, Ordering::SeqCst);
    };
    let (files, ()) = tokio::join!(work, cutting);
    assert_eq!(paths(&guest).await.len() as u64, files);
    assert_eq!(served.tree.statistics().await.expect("counted").inodes, files + 1);
    guest.close().await.expect("closed");
    served.end().await;
}

/// While one mount writes to a file's own path, another one's content goes elsewhere; who commits last has the file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_mounts_that_write_one_file_lose_no_content_to_each_others_requests() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let (one, other) = (site.join().await, site.join().await);
    let file = create(&one, "a").await;
    one.opened(file).await.expect("opened");
    other.opened(file).await.expect("opened");
    let placement = one.place(file, false).await.expect("placed");
    assert!(matches!(&placement, Placement::Own { key, .. } if key.as_str() == "a"), "{placement:?}");
    // On its way meanwhile.
    let beside = other.place(file, false).await.expect("placed");
    assert!(matches!(beside, Placement::Owned { .. }), "{beside:?}");
    // Nobody finds out in its stead what came of it.
    other.settle(file).await.expect("nothing to settle");
    let theirs = site.world.put_at(&beside, b"theirs").await.expect("put").blob();
    other.commit_layout(file, 0, FileLayout::of_blob(theirs), time(1)).await.expect("committed");
    let own = site.world.put_at(&placement, b"own").await.expect("put").blob();
    let first = one.commit_layout(file, 0, FileLayout::of_blob(own.clone()), time(2)).await;
    assert_eq!(kind_of(first), ErrorKind::Conflict);
    one.commit_layout(file, 1, FileLayout::of_blob(own), time(2)).await.expect("committed over it");
    for tree in [&*served.tree as &dyn Tree, &one, &other] {
        assert_eq!(site.world.read(tree, file).await.expect("whole"), b"own");
    }
    // Free again.
    let next = other.place(file, false).await.expect("placed");
    assert!(matches!(next, Placement::Own { .. }), "{next:?}");
    for tree in [&one, &other] {
        tree.closed(file).await.expect("closed");
        tree.close().await.expect("closed");
    }
    served.tree.drain().await.expect("drained");
    site.world.check_objects(&[("a", "own")]).await;
    served.end().await;
}

/// What one mount is writing to a file's own path is still its own there when another one has brought the file's bytes elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_brings_bytes_elsewhere_leaves_another_mount_its_place() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let (one, other) = (site.join().await, site.join().await);
    let file = create(&one, "a").await;
    one.opened(file).await.expect("opened");
    other.opened(file).await.expect("opened");
    let mut blobs = Vec::new();
    for _ in 0..2 {
        let placement = Placement::Owned { key: other.fresh_blob(), comes_free: false };
        blobs.push(site.world.put_at(&placement, b"before").await.expect("put").blob());
    }
    let mut layouts = blobs.into_iter().map(FileLayout::of_blob);
    let first = layouts.next().expect("a layout");
    let generation = other.commit_layout(file, 0, first, time(1)).await.expect("committed").generation;
    let placement = one.place(file, false).await.expect("placed");
    assert!(matches!(&placement, Placement::Own { key, .. } if key.as_str() == "a"), "{placement:?}");
    other.settle(file).await.expect("nothing to settle");
    other.relocate(file, generation, layouts.next().expect("a layout")).await.expect("relocated");
    let own = FileLayout::of_blob(site.world.put_at(&placement, b"own").await.expect("put").blob());
    one.commit_layout(file, generation, own, time(2)).await.expect("it may lie there");
    for tree in [&*served.tree as &dyn Tree, &one, &other] {
        assert_eq!(site.world.read(tree, file).await.expect("whole"), b"own");
    }
    for tree in [&one, &other] {
        tree.closed(file).await.expect("closed");
        tree.close().await.expect("closed");
    }
    served.tree.drain().await.expect("drained");
    site.world.check_objects(&[("a", "own")]).await;
    served.end().await;
}

/// A mount that is lost has nothing open any more, and keeps nobody from writing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_that_is_lost_leaves_nothing_behind() {
    let mut site = Site::new(Kind::Memory).await;
    site.patience = Duration::from_millis(300);
    let served = site.serve().await;
    let (lost, other) = (site.join().await, site.join().await);
    let (unlinked, written) = (create(&lost, "unlinked").await, create(&lost, "written").await);
    lost.opened(unlinked).await.expect("opened");
    lost.opened(written).await.expect("opened");
    lost.unlink(ROOT, b"unlinked").await.expect("unlinked");
    lost.place(written, false).await.expect("placed");
    let blob = lost.fresh_blob();
    let key = ObjectKey::new(blob.as_str());
    assert!(other.attributes(unlinked).await.is_ok(), "it is open");
    drop(lost);
    until("the lost mount's end", async || {
        other.attributes(unlinked).await.is_err_and(|error| error.kind() == ErrorKind::NotFound)
    })
    .await;
    until("its place", async || served.server.guests().len() == 1).await;
    // What it may still write there is older then.
    assert!(other.is_in_doubt(written).await.expect("known"));
    let layout =
        FileLayout::of_blob(forebay_core::Blob { key, version: forebay_core::Version::new("v"), size: 3 });
    let refused = other.commit_layout(written, 0, layout, time(1)).await;
    assert_eq!(kind_of(refused), ErrorKind::Stale, "its blobs are garbage");
    site.world.write(&other, written, b"other").await.expect("written");
    assert_eq!(site.world.read(&other, written).await.expect("whole"), b"other");
    other.close().await.expect("closed");
    served.end().await;
}

/// Who takes the tree over finds what mounts have open, and lets them go on with what they write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mounts_go_on_with_who_takes_the_tree_over() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let guest = site.join().await;
    let (open, written) = (create(&guest, "open").await, create(&guest, "written").await);
    for file in [open, written, written] {
        guest.opened(file).await.expect("opened");
    }
    site.world.write(&guest, written, b"before").await.expect("written");
    let placement = guest.place(written, false).await.expect("placed");
    let aside = guest.fresh_blob();
    guest.sync().await.expect("synced");
    // In its last second it tells of a name that nobody will find again.
    let forgotten = create(&guest, "forgotten").await;
    site.crash(served).await;
    let waiting = guest.lookup(ROOT, b"open");
    let (looked, served) = tokio::join!(waiting, async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        site.serve().await
    });
    assert!(matches!(looked.expect("answered by the next one"), Lookup::Found(found) if found.ino == open));
    // It is told once that something is lost, whose number is nobody else's.
    assert_eq!(kind_of(guest.attributes(forgotten).await), ErrorKind::NotFound);
    assert_eq!(guest.losses(), 1);
    assert_eq!(kind_of(guest.tell_loss(ROOT)), ErrorKind::Unavailable);
    guest.tell_loss(ROOT).expect("told once");
    guest.sync().await.expect("what is not lost");
    let next = create(&*served.tree, "next").await;
    assert!(next.0 > forgotten.0 + 1000, "{next} may be taken for {forgotten}");
    // What was open is, and what was being written still may be.
    served.tree.unlink(ROOT, b"open").await.expect("unlinked");
    assert_eq!(guest.attributes(open).await.expect("open").nlink, 0);
    guest.closed(open).await.expect("closed");
    assert_eq!(kind_of(guest.attributes(open).await), ErrorKind::NotFound);
    let beside = served.tree.place(written, false).await.expect("placed");
    assert!(matches!(beside, Placement::Owned { .. }), "{beside:?}");
    let own = site.world.put_at(&placement, b"after").await.expect("put").blob();
    let layout = FileLayout::of_blob(own);
    let generation = guest.commit_layout(written, 1, layout, time(3)).await.expect("committed").generation;
    assert_eq!(site.world.read(&*served.tree, written).await.expect("whole"), b"after");
    let size = site.world.bucket().put(
        &aside,
        Bytes::from_static(b"aside"),
        forebay_io::object::Condition::IfAbsent,
    );
    let aside = size.await.expect("put").blob();
    let layout = FileLayout::of_blob(aside);
    guest.commit_layout(written, generation, layout, time(4)).await.expect("its session goes on");
    assert_eq!(site.world.read(&*served.tree, written).await.expect("whole"), b"aside");
    for _ in 0..2 {
        guest.closed(written).await.expect("closed");
    }
    guest.close().await.expect("closed");
    served.end().await;
}

/// What was lost with who served the tree had the generation of what another mount committed next: who had written it, or had it in
/// memory, took the one for the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_content_has_the_generation_of_one_that_was_lost() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let (guest, other) = (site.join().await, site.join().await);
    let file = create(&guest, "a").await;
    site.world.write(&guest, file, b"synced").await.expect("written");
    guest.sync().await.expect("synced");
    let aside = async |text: &'static [u8]| {
        let fresh = guest.fresh_blob();
        let put = site.world.bucket().put(&fresh, Bytes::from_static(text), Condition::IfAbsent);
        FileLayout::of_blob(put.await.expect("put").blob())
    };
    let (layout, generation) = (aside(b"lost").await, guest.layout(file).await.expect("known").1);
    let lost = guest.commit_layout(file, generation, layout, time(3)).await.expect("answered").generation;
    site.crash(served).await;
    let served = site.serve().await;
    assert_eq!(other.layout(file).await.expect("known").1, generation, "it is lost");
    site.world.write(&other, file, b"others").await.expect("written");
    for mount in [&guest, &other] {
        let now = mount.attributes(file).await.expect("known").generation;
        assert!(now > lost + 1000, "{now} may be taken for {lost}");
    }
    let next = aside(b"next").await;
    assert_eq!(kind_of(guest.commit_layout(file, lost, next, time(4)).await), ErrorKind::Conflict);
    guest.close().await.expect("closed");
    other.close().await.expect("closed");
    served.end().await;
}

/// Mounts that do not come back after the tree was taken over are ended like others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mounts_that_do_not_come_back_are_ended() {
    let mut site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let guest = site.join().await;
    let file = create(&guest, "a").await;
    guest.opened(file).await.expect("opened");
    guest.upload_started(&ObjectKey::new("a"), "upload").await.expect("noted");
    guest.place(file, false).await.expect("placed");
    guest.sync().await.expect("synced");
    site.crash(served).await;
    drop(guest);
    site.patience = Duration::from_millis(300);
    let served = site.serve().await;
    let other = site.join().await;
    until("their end", async || {
        let (start, end) = crate::schema::Keys(VolumeId(7)).family(crate::schema::Tag::Session);
        let left =
            served.tree.committer.read(|view| crate::commit::Reads::scan(view, &start, &end, 10)).await;
        // That of the server, and of the mount that is here.
        left.expect("read").len() == 2
    })
    .await;
    site.world.write(&other, file, b"other").await.expect("written");
    assert_eq!(site.world.read(&other, file).await.expect("whole"), b"other");
    other.close().await.expect("closed");
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_hold_up_no_others_and_are_bounded() {
    const MOST: u64 = 512;
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let (gate, begun) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicU64::new(0)));
    let (waiting, counted) = (gate.clone(), begun.clone());
    served.server.on_command(Box::new(move |command| {
        counted.fetch_add(1, Ordering::SeqCst);
        let gate = waiting.clone();
        async move {
            gate.acquire().await.expect("open").forget();
            command
        }
        .boxed()
    }));
    let guest = Arc::new(site.join().await);
    let (mut asked, before) = (JoinSet::new(), guest.requests());
    let mut ask = |number: u64| {
        let guest = guest.clone();
        asked.spawn(async move {
            let said = Bytes::from(number.to_string());
            guest.command(said.clone()).await.expect("answered") == said
        });
    };
    (0..MOST - 1).for_each(&mut ask);
    until("the commands", async || begun.load(Ordering::SeqCst) == MOST - 1).await;
    assert_eq!(guest.lookup(ROOT, b"a").await.expect("answered beside them"), Lookup::Miss);
    (MOST - 1..MOST + 100).for_each(&mut ask);
    until("as many as there may be", async || begun.load(Ordering::SeqCst) == MOST).await;
    until("all that is asked", async || guest.requests() == before + 1 + MOST + 100).await;
    // Behind those that wait in the stream, and so none of them has begun before it.
    let behind = tokio::spawn({
        let guest = guest.clone();
        async move { guest.lookup(ROOT, b"a").await }
    });
    gate.add_permits(1);
    until("one more", async || begun.load(Ordering::SeqCst) == MOST + 1).await;
    assert!(!behind.is_finished());
    gate.add_permits(MOST as usize + 100);
    assert_eq!(behind.await.expect("no panic").expect("answered"), Lookup::Miss);
    assert!(asked.join_all().await.into_iter().all(|is_own| is_own));
    guest.close().await.expect("closed");
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_mounts_one_makes_each_name_and_all_hear_of_it() {
    const MOUNTS: usize = 48;
    const NAMES: usize = 32;
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    let joined = futures::future::join_all((0..MOUNTS).map(|_| site.join())).await;
    let guests: Vec<Arc<RemoteTree>> = joined.into_iter().map(Arc::new).collect();
    let mut racing = JoinSet::new();
    let mut heard = Vec::new();
    for guest in &guests {
        guest.read_directory(ROOT, None, NAMES).await.expect("shown");
        heard.push(guest.outside().listen());
    }
    for (number, guest) in guests.iter().cloned().enumerate() {
        racing.spawn(async move {
            let mut made = HashMap::new();
            for name in (0..NAMES).map(|name| format!("{:02}", (name + number) % NAMES)) {
                match guest.create(ROOT, name.as_bytes(), new_file(), Existing::Refuse).await {
                    Ok((attributes, is_new)) => {
                        assert!(is_new);
                        made.insert(Bytes::from(name), attributes.ino);
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Exists, "{error}"),
                }
            }
            (number, made)
        });
    }
    let mut made = vec![HashMap::new(); MOUNTS];
    for (number, own) in racing.join_all().await {
        made[number] = own;
    }
    let all: BTreeMap<Bytes, InodeId> =
        made.iter().flatten().map(|(name, ino)| (name.clone(), *ino)).collect();
    assert_eq!((all.len(), made.iter().map(HashMap::len).sum::<usize>()), (NAMES, NAMES), "each by one");
    for (number, guest) in guests.iter().enumerate() {
        let page = guest.read_directory(ROOT, None, NAMES + 1).await.expect("shown");
        let shown = page.entries.into_iter().map(|entry| (entry.name, entry.attributes.ino));
        assert!(shown.eq(all.clone()), "mount {number}");
        let mut told = HashSet::new();
        while told.len() < NAMES - made[number].len() {
            if let OutsideChange::Name { name, .. } = heard[number].next().await.expect("told") {
                assert!(!made[number].contains_key(&name), "it made that itself");
                told.insert(name);
            }
        }
    }
    assert_eq!(served.server.guests().iter().filter(|guest| guest.is_here).count(), MOUNTS);
    for guest in &guests {
        guest.close().await.expect("closed");
    }
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_panics_is_told_and_costs_no_other() {
    let site = Site::new(Kind::Memory).await;
    let served = site.serve().await;
    served.server.on_command(Box::new(|_| panic!("as this test has it")));
    let guest = site.join().await;
    let failed = guest.command(Bytes::from_static(b"anything")).await;
    assert_eq!(kind_of(failed), ErrorKind::Bug);
    assert_eq!(guest.lookup(ROOT, b"a").await.expect("answered"), Lookup::Miss);
    assert_eq!(guest.reached().expect("it is there").times, 0, "on the same stream");
    guest.close().await.expect("closed");
    served.end().await;
}
