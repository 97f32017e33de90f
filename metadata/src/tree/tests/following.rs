//! Read-only trees that follow the tree of a mount for writing, whatever listings find meanwhile on both sides.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_core::{ErrorKind, FileKind, InodeId, VolumeId};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, FaultMode, Faults, OperationKind};
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;

use futures::{StreamExt, TryStreamExt};

use super::crash::disturbed_step;
use super::world::*;
use crate::commit::{Committer, CommitterSettings};
use crate::follow::{Follower, Leader, Look, MOST_EDITS};
use crate::kv::{MemEngine, MemStore};
use crate::schema::Keys;
use crate::testing::{Chance, rounds};
use crate::tree::{
    Existing, LocalTree, OutsideChange, RenameMode, SetAttributes, Tree, TreeParts, TreeSettings, XattrMode,
    resolve, walk,
};

/// Longer than any test: trees are looked at when a test says so.
const NEVER: Duration = Duration::from_secs(1 << 30);

/// A read-only mount's tree, copied from the one in the world's bucket.
async fn follower(world: &World) -> LocalTree {
    follower_over(world, world.bucket().clone()).await
}

/// The same through another handle on the bucket.
async fn follower_over(world: &World, bucket: Bucket) -> LocalTree {
    follower_by(bucket, world.clock.clone()).await
}

/// The same by another clock.
async fn follower_by(bucket: Bucket, clock: Clock) -> LocalTree {
    let bucket = bucket.read_only();
    let engine = MemEngine::open(&MemStore::default());
    let mut follower = Follower::new(Leader::Bucket(bucket.clone()), Keys(VolumeId(7)));
    follower.copy(&engine).await.expect("copied");
    let parts = TreeParts {
        volume: VolumeId(7),
        committer: Committer::start(std::sync::Arc::new(engine), CommitterSettings::default()),
        bucket: Some(bucket),
        session: 1 << 40,
        clock,
        rng: Rng::system(),
        tasks: TaskGroup::new("follower"),
    };
    let settings = TreeSettings { read_only: true, follows: true, ..TreeSettings::default() };
    let tree = LocalTree::open(parts, settings).await.expect("the tree opens");
    tree.follow(follower, NEVER).expect("it follows");
    tree
}

async fn catch_up(tree: &LocalTree) {
    tree.catch_up().await.expect("caught up");
}

/// What a tree shows: by path all that stat, listxattr and read tell but for access times.
async fn shown(world: &World, tree: &LocalTree) -> BTreeMap<String, String> {
    let mut shown = BTreeMap::new();
    for path in paths(tree).await {
        let found = resolve(tree, path.trim_end_matches('/')).await.expect("found");
        let mut text = format!("{} {:?} {:o} {} {}", found.ino, found.kind, found.mode, found.uid, found.gid);
        for name in tree.xattrs(found.ino).await.expect("names") {
            let value = tree.xattr(found.ino, &name).await.expect("a value");
            text += &format!(" {name:?}={value:?}");
        }
        text += &match found.kind {
            FileKind::File => {
                let bytes = world.read(tree, found.ino).await;
                format!(" {} {} {:?} {bytes:?}", found.nlink, found.size, found.mtime)
            }
            FileKind::Symlink => format!(" -> {:?}", tree.read_link(found.ino).await.expect("a target")),
            _ => format!(" {}", found.nlink),
        };
        shown.insert(path, text);
    }
    shown
}

#[tokio::test]
async fn what_the_writer_synced_is_shown_and_told() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    make_directory(&writer, "d").await.expect("made");
    world.write_path(&writer, "d/a", "old").await.expect("written");
    writer.sync().await.expect("synced");
    let reader = follower(&world).await;
    let a = resolve(&reader, "d/a").await.expect("found");
    assert_eq!(a.ino, resolve(&writer, "d/a").await.expect("found").ino);
    let mut heard = reader.outside().listen();
    // What other tools do not see: a mode, a link, a rename of what is not moved yet, an empty directory.
    let mode = SetAttributes { mode: Some(0o600), ..Default::default() };
    writer.set_attributes(a.ino, mode).await.expect("set");
    make_directory(&writer, "d/empty").await.expect("made");
    rename(&writer, "d", "e", RenameMode::Replace).await.expect("renamed");
    let (file, _) = writer.create(InodeId::ROOT, b"new", new_file(), Existing::Refuse).await.expect("made");
    catch_up(&reader).await;
    assert_eq!(paths(&reader).await, ["d/", "d/a"], "nothing of it is durable");
    writer.sync().await.expect("synced");
    assert_eq!(paths(&reader).await, ["d/", "d/a"], "and it was not looked at");
    catch_up(&reader).await;
    assert_eq!(paths(&reader).await, ["e/", "e/a", "e/empty/", "new"]);
    assert_eq!(shown(&world, &reader).await, shown(&world, &writer).await);
    let mut told = Vec::new();
    while let Some(Ok(change)) = futures::FutureExt::now_or_never(heard.next()) {
        told.push(change);
    }
    let name = |name: &'static str| OutsideChange::Name { directory: InodeId::ROOT, name: name.into() };
    for expected in
        [name("d"), name("e"), name("new"), OutsideChange::Inode { ino: a.ino, has_content: false }]
    {
        assert!(told.contains(&expected), "{expected:?} is not in {told:?}");
    }
    world.write(&writer, file.ino, b"bytes").await.expect("written");
    writer.sync().await.expect("synced");
    catch_up(&reader).await;
    assert_eq!(world.read(&reader, file.ino).await.expect("bytes"), b"bytes");
    let change = OutsideChange::Inode { ino: file.ino, has_content: true };
    let mut is_told = false;
    while let Some(Ok(told)) = futures::FutureExt::now_or_never(heard.next()) {
        is_told |= told == change;
    }
    assert!(is_told);
    reader.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// What a listing shows before the tree tells of it is what the tree tells of, from then on.
#[tokio::test]
async fn what_was_listed_first_is_the_writers_file_then() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    make_directory(&writer, "d").await.expect("made");
    world.write_path(&writer, "d/replaced", "old").await.expect("written");
    writer.sync().await.expect("synced");
    let reader = follower(&world).await;
    world.put("theirs/x", b"of another tool").await;
    world.put("d/other", b"too").await;
    world.write_path(&writer, "d/new", "new").await.expect("written");
    world.write_path(&writer, "d/replaced", "newer").await.expect("written");
    world.pass_ttl();
    // Its tree knows nothing of the last three yet.
    assert_eq!(paths(&reader).await, ["d/", "d/new", "d/other", "d/replaced", "theirs/", "theirs/x"]);
    assert_eq!(world.read_path(&reader, "d/replaced").await.expect("bytes"), "newer");
    let listed = resolve(&reader, "d/new").await.expect("found");
    assert!(listed.ino.0 >= crate::schema::OWN_NUMBERS, "{} is of this mount", listed.ino);
    reader.opened(listed.ino).await.expect("open");
    let other = resolve(&reader, "theirs/x").await.expect("found").ino;
    writer.sync().await.expect("synced");
    catch_up(&reader).await;
    assert_eq!(shown(&world, &reader).await["d/new"], shown(&world, &writer).await["d/new"]);
    assert_eq!(shown(&world, &reader).await["d/replaced"], shown(&world, &writer).await["d/replaced"]);
    assert_eq!(
        resolve(&reader, "theirs/x").await.expect("found").ino,
        other,
        "what it says nothing of stays"
    );
    // Who has it open goes on with what was opened.
    assert_eq!(reader.attributes(listed.ino).await.expect("open").nlink, 0);
    assert_eq!(world.read(&reader, listed.ino).await.expect("bytes"), b"new");
    reader.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// A file that is removed is kept for who has it open, and so are its bytes for a day.
#[tokio::test]
async fn what_is_removed_stays_for_who_has_it_open() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    world.write_path(&writer, "a", "bytes").await.expect("written");
    let ino = resolve(&writer, "a").await.expect("found").ino;
    writer.set_xattr(ino, b"user.x", "v".into(), XattrMode::Set).await.expect("set");
    writer.sync().await.expect("synced");
    let reader = follower(&world).await;
    reader.opened(ino).await.expect("open");
    unlink(&writer, "a").await.expect("unlinked");
    writer.sync().await.expect("synced");
    catch_up(&reader).await;
    assert_eq!(reader.attributes(ino).await.expect("open").nlink, 0);
    assert_eq!(world.read(&reader, ino).await.expect("bytes"), b"bytes");
    assert_eq!(reader.xattr(ino, b"user.x").await.expect("kept"), "v");
    reader.closed(ino).await.expect("closed");
    reader.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// Each look asks for one object of the log, and a change is brought by few requests, however large the tree is.
#[tokio::test]
async fn a_look_costs_one_request() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    make_directory(&writer, "d").await.expect("made");
    for number in 0..300 {
        world.write_path(&writer, &format!("d/{number}"), "text").await.expect("written");
    }
    writer.sync().await.expect("synced");
    // Its own, without those of the writer's engine.
    let faults = Faults::new();
    let reader = follower_over(&world, world.bucket().with_faults(&faults)).await;
    let requests =
        || [OperationKind::Get, OperationKind::Head, OperationKind::List].map(|kind| faults.seen(kind));
    let before = requests();
    let following = reader.following.get().expect("it follows");
    for _ in 0..10 {
        assert_eq!(following.look().await.expect("looked"), Look::Whole);
    }
    let after = requests();
    let taken: u64 = after.iter().sum::<u64>() - before.iter().sum::<u64>();
    assert!(taken <= 11, "and the log is listed once: {before:?} {after:?}");
    make_directory(&writer, "d/new").await.expect("made");
    writer.sync().await.expect("synced");
    let before: u64 = requests().iter().sum();
    assert_eq!(following.look().await.expect("looked"), Look::Whole);
    let taken = requests().iter().sum::<u64>() - before;
    assert!(taken <= 6, "{taken} requests for one object of the log, and the next one");
    assert!(resolve(&reader, "d/new").await.is_ok());
    reader.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// However many ask at once, the tree is looked at twice: what those see who came while the first look was under way was asked
/// for after them.
#[tokio::test]
async fn many_who_ask_at_once_have_the_tree_looked_at_twice() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    make_directory(&writer, "d").await.expect("made");
    writer.sync().await.expect("synced");
    let faults = Faults::new();
    let reader = follower_by(world.bucket().with_faults(&faults), Clock::system()).await;
    let requests = || -> u64 {
        let kinds = [OperationKind::Get, OperationKind::Head, OperationKind::List];
        kinds.map(|kind| faults.seen(kind)).iter().sum()
    };
    catch_up(&reader).await;
    let before = requests();
    catch_up(&reader).await;
    let once = requests() - before;
    assert!(once > 0);
    make_directory(&writer, "e").await.expect("made");
    writer.sync().await.expect("synced");
    catch_up(&reader).await;
    let before = requests();
    let gate = faults.gate(1);
    let all_are_there = async {
        gate.reached().await;
        gate.open();
    };
    futures::future::join(futures::future::join_all((0..20).map(|_| catch_up(&reader))), all_are_there).await;
    assert!(requests() - before <= 2 * once, "{} requests, {once} for one", requests() - before);
    assert!(resolve(&reader, "e").await.is_ok());
    reader.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// A store that is away leaves the tree as it was, and says how old it is.
#[tokio::test]
async fn a_tree_that_cannot_be_looked_at_is_shown_as_it_was() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    make_directory(&writer, "d").await.expect("made");
    writer.sync().await.expect("synced");
    let reader = follower(&world).await;
    world.clock.advance(Duration::from_secs(7));
    let lag = reader.lag().expect("it follows");
    assert_eq!((lag.behind, lag.error), (Some(Duration::from_secs(7)), None));
    // Its log is damaged in the next place.
    let tree = world.bucket().list(".forebay/tree/wal");
    let log: Vec<_> = tree.map_ok(|info| info.key.as_str().to_owned()).try_collect().await.expect("listed");
    let number = |key: &String| key.rsplit_once('/')?.1.strip_suffix(".sst")?.parse::<u64>().ok();
    let last = log.iter().filter_map(number).max().expect("it has a log");
    world.put(&format!(".forebay/tree/wal/{:020}.sst", last + 1), &[7; 4096]).await;
    let error = reader.catch_up().await.expect_err("damaged");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let lag = reader.lag().expect("it follows");
    assert_eq!(lag.behind, Some(Duration::from_secs(7)));
    assert!(lag.error.is_some());
    assert_eq!(paths(&reader).await, ["d/"]);
    reader.close().await.expect("closed");
}

/// Who slept for longer than the log is kept compares the tree, and finds a volume that is another one.
#[tokio::test]
async fn who_comes_late_for_the_log_compares_the_tree() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    make_directory(&writer, "d").await.expect("made");
    writer.sync().await.expect("synced");
    let reader = follower(&world).await;
    let following = reader.following.get().expect("it follows");
    for name in ["e", "f"] {
        make_directory(&writer, name).await.expect("made");
        writer.sync().await.expect("synced");
    }
    // All of it is in tables then.
    writer.close().await.expect("closed");
    let writer = world.open().await;
    let log: Vec<_> = world.bucket().list(".forebay/tree/wal").try_collect().await.expect("listed");
    let last = log.iter().map(|info| info.key.clone()).max().expect("it has a log");
    for info in &log {
        if info.key != last {
            world.delete(info.key.as_str()).await;
        }
    }
    world.clock.advance(Duration::from_secs(300));
    assert_eq!(following.look().await.expect("looked"), Look::Compared { has_log: true });
    assert_eq!(paths(&reader).await, ["d/", "e/", "f/"]);
    assert_eq!(following.look().await.expect("looked"), Look::Whole);
    writer.close().await.expect("closed");
    // Somebody empties the bucket.
    let all: Vec<_> = world.bucket().list("").try_collect().await.expect("listed");
    for info in all {
        world.delete(info.key.as_str()).await;
    }
    world.clock.advance(Duration::from_secs(300));
    following.look().await.expect_err("it is no volume any more");
    assert!(reader.lag().expect("it follows").error.is_some());
    reader.close().await.expect("closed");
}

/// An object of the log that is there says nothing of the next one, which may be gone.
#[tokio::test]
async fn a_gap_in_the_log_is_found_by_who_asks_for_all() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    writer.sync().await.expect("synced");
    let reader = follower(&world).await;
    let before: Vec<_> = world.bucket().list(".forebay/tree/wal").try_collect().await.expect("listed");
    for name in ["d", "e"] {
        make_directory(&writer, name).await.expect("made");
        writer.sync().await.expect("synced");
    }
    writer.close().await.expect("closed");
    let writer = world.open().await;
    let log: Vec<_> = world.bucket().list(".forebay/tree/wal").try_collect().await.expect("listed");
    let mut since: Vec<_> =
        log.iter().map(|info| &info.key).filter(|key| before.iter().all(|old| old.key != **key)).collect();
    since.sort();
    assert!(since.len() > 2, "{since:?}");
    for key in &since[1..since.len() - 1] {
        world.delete(key.as_str()).await;
    }
    catch_up(&reader).await;
    assert_eq!(paths(&reader).await, ["d/", "e/"]);
    reader.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// A store that is away is told, and followed again once it is back.
#[tokio::test]
async fn a_store_that_comes_back_is_followed_again() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    writer.sync().await.expect("synced");
    let faults = Faults::new();
    let reader = follower_over(&world, world.bucket().with_faults(&faults).with_deadline_ms(30)).await;
    make_directory(&writer, "d").await.expect("made");
    writer.sync().await.expect("synced");
    for kind in [OperationKind::Head, OperationKind::Get, OperationKind::List] {
        (1..=200).for_each(|nth| _ = faults.script(kind, nth, FaultMode::Before));
    }
    let looked = reader.following.get().expect("it follows").look().await.expect_err("it is away");
    assert!(faults.injected() > 0 && reader.lag().expect("it follows").error.is_some(), "{looked}");
    faults.clear();
    catch_up(&reader).await;
    assert!(reader.lag().expect("it follows").error.is_none());
    assert_eq!(paths(&reader).await, ["d/"]);
    reader.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// A comparison of more than one transaction shows no name before what it names.
#[tokio::test]
async fn a_large_difference_shows_no_name_without_its_file() {
    let world = World::new(Kind::Slate).await;
    let writer = world.open().await;
    writer.sync().await.expect("synced");
    let reader = std::sync::Arc::new(follower(&world).await);
    make_directory(&writer, "d").await.expect("made");
    let directory = resolve(&writer, "d").await.expect("found").ino;
    for number in 0..MOST_EDITS / 2 {
        let name = format!("{number}");
        writer.create(directory, name.as_bytes(), new_file(), Existing::Refuse).await.expect("made");
    }
    writer.sync().await.expect("synced");
    reader.following.get().expect("it follows").lose().await;
    let reading = reader.clone();
    let walk = async move {
        let mut most = 0;
        while most < MOST_EDITS / 2 {
            let Ok(directory) = resolve(&*reading, "d").await else {
                tokio::task::yield_now().await;
                continue;
            };
            let page = reading.read_directory(directory.ino, None, 1 << 20).await.expect("whole");
            most = page.entries.len().max(most);
            if !page.complete {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    let (compared, ()) = tokio::join!(reader.following.get().expect("it follows").look(), walk);
    assert_eq!(compared.expect("looked"), Look::Compared { has_log: true });
    let found = resolve(&*reader, "d/7").await.expect("found");
    assert_eq!(found.ino, resolve(&writer, "d/7").await.expect("found").ino);
    reader.close().await.expect("closed");
    writer.close().await.expect("closed");
}

/// Any history of a writer, of other tools, and of listings on both sides: in the end both show the same.
#[tokio::test]
async fn random_histories_are_followed() {
    for _ in 0..rounds(8) {
        let mut chance = Chance::fresh();
        let world = World::new(Kind::Slate).await;
        for directory in ["d", "d/f", "e", "e/f"] {
            world.put(&format!("{directory}/z"), directory.as_bytes()).await;
        }
        let writer = world.open().await;
        let reader = follower(&world).await;
        for step in 0..80 {
            match chance.below(4) {
                0 => attribute_step(&writer, &mut chance, step).await,
                _ => disturbed_step(&world, &writer, &mut chance, step).await,
            }
            match chance.below(14) {
                0 => writer.drain().await.expect("drained"),
                1 => world.pass_ttl(),
                2 | 3 => drop(paths(&reader).await),
                4 => reader.following.get().expect("it follows").lose().await,
                5 | 6 => {
                    writer.sync().await.expect("synced");
                    catch_up(&reader).await;
                }
                7 => {
                    // Between a listing and what it becomes.
                    let listing = async {
                        // What goes meanwhile may be gone.
                        walk(&reader, InodeId::ROOT).for_each(async |_| {}).await;
                    };
                    let looking = async {
                        writer.sync().await.expect("synced");
                        catch_up(&reader).await;
                    };
                    tokio::join!(listing, looking);
                }
                _ => {}
            }
        }
        for _ in 0..3 {
            writer.drain().await.expect("drained");
            world.pass_ttl();
            paths(&writer).await;
        }
        writer.sync().await.expect("synced");
        catch_up(&reader).await;
        world.pass_ttl();
        assert_eq!(shown_at_names(&world, &reader).await, shown_at_names(&world, &writer).await);
        // What they differ in is looked for in the tree as a whole, and nothing is found.
        reader.following.get().expect("it follows").lose().await;
        catch_up(&reader).await;
        assert_eq!(shown_at_names(&world, &reader).await, shown_at_names(&world, &writer).await);
        reader.close().await.expect("closed");
        writer.close().await.expect("closed");
    }
}

/// But for what depends on who listed what, and when: objects beside what is no file, by what the name was then, and files
/// whose object was replaced by an outsider before it was moved, and deleted, which go where the former was seen.
async fn shown_at_names(world: &World, tree: &LocalTree) -> BTreeMap<String, String> {
    let mut shown = shown(world, tree).await;
    shown.retain(|path, text| !path.ends_with(".object") && !text.contains("Err(Error { kind: NotFound"));
    shown
}

/// One change of what is no object's.
async fn attribute_step(tree: &LocalTree, chance: &mut Chance, step: u32) {
    let place = ["", "d/", "e/", "d/f/"][chance.below(4) as usize];
    let path = format!("{place}{}", ["a", "b", "z", "l"][chance.below(4) as usize]);
    let Ok((directory, name)) = split(tree, &path).await else { return };
    match chance.below(5) {
        0 => drop(make_directory(tree, &path).await),
        1 => drop(tree.remove_directory(directory, name.as_bytes()).await),
        2 => {
            let new =
                crate::tree::NewInode { target: format!("{step}").into(), ..new_inode(FileKind::Symlink) };
            drop(tree.create(directory, name.as_bytes(), new, Existing::Refuse).await);
        }
        _ => {
            let Ok(found) = resolve(tree, &path).await else { return };
            match chance.below(3) {
                0 => drop(tree.link(found.ino, InodeId::ROOT, b"linked").await),
                1 => {
                    let mode = SetAttributes { mode: Some(step as u16 & 0o777), ..Default::default() };
                    drop(tree.set_attributes(found.ino, mode).await);
                }
                _ => {
                    drop(tree.set_xattr(found.ino, b"user.x", format!("{step}").into(), XattrMode::Set).await)
                }
            }
        }
    }
}
