//! What every engine must do, run over all of them. Each store outlives the engines opened on it.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use forebay_core::ErrorKind;
use forebay_io::object::Bucket;

use super::lmdb::LmdbSettings;
use super::{
    Batch, Durability, Engine, LmdbEngine, MemEngine, MemStore, Pair, SlateEngine, SlateSettings, Snapshot,
};
use crate::testing::{Chance, rounds};

/// A place that an engine can be opened on again and again.
pub(crate) enum Store {
    Mem(MemStore),
    Lmdb(tempfile::TempDir),
    Slate(Bucket),
}

impl Store {
    pub(crate) fn mem() -> Self {
        Self::Mem(MemStore::default())
    }

    pub(crate) fn lmdb() -> Self {
        Self::Lmdb(tempfile::tempdir().expect("a temporary directory"))
    }

    pub(crate) fn slate() -> Self {
        Self::Slate(Bucket::in_memory())
    }

    pub(crate) async fn open(&self) -> Arc<dyn Engine> {
        match self {
            Self::Mem(store) => Arc::new(MemEngine::open(store)),
            Self::Lmdb(directory) => {
                Arc::new(LmdbEngine::open(directory.path(), &LmdbSettings::default()).await.expect("lmdb"))
            }
            Self::Slate(bucket) => {
                Arc::new(SlateEngine::open(bucket, &SlateSettings::default()).await.expect("slate"))
            }
        }
    }
}

/// Declares each contract as a test of each engine.
macro_rules! contract {
    ($($name:ident)*) => {
        contract!(@engine mem: $($name)*);
        contract!(@engine lmdb: $($name)*);
        contract!(@engine slate: $($name)*);
    };
    (@engine $engine:ident: $($name:ident)*) => {
        mod $engine {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(&super::Store::$engine()).await;
                }
            )*
        }
    };
}

contract! {
    scans_are_ordered_and_bounded batches_are_atomic_and_ordered snapshots_do_not_move
    sizes_are_checked reopening_keeps_what_is_durable large_batches random_operations_match_a_model
    a_closed_engine_refuses fast_reads_agree
}

fn batch(changes: &[(&str, Option<&str>)]) -> Batch {
    let mut batch = Batch::default();
    for (key, value) in changes {
        let value = value.map(|value| Bytes::copy_from_slice(value.as_bytes()));
        batch.change(Bytes::copy_from_slice(key.as_bytes()), value);
    }
    batch
}

fn pairs(expected: &[(&str, &str)]) -> Vec<Pair> {
    let bytes = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    expected.iter().map(|(key, value)| (bytes(key), bytes(value))).collect()
}

async fn scans_are_ordered_and_bounded(store: &Store) {
    let engine = store.open().await;
    let written =
        batch(&[("b", Some("2")), ("a", Some("1")), ("d", Some("")), ("c", Some("3")), ("b\0", Some("4"))]);
    engine.write(written, Durability::Durable).await.expect("write");
    let all = [("a", "1"), ("b", "2"), ("b\0", "4"), ("c", "3"), ("d", "")];
    let check = async |start: &str, end: &str, limit, expected: &[(&str, &str)]| {
        let found = engine.scan(start.as_bytes(), end.as_bytes(), limit).await.expect("scan");
        assert_eq!(found, pairs(expected), "{start:?}..{end:?} limit {limit}");
    };
    check("", "", 10, &all).await;
    check("", "", 2, &all[..2]).await;
    check("", "", 0, &[]).await;
    check("b", "c", 10, &all[1..3]).await;
    check("b", "b", 10, &[]).await;
    check("c", "b", 10, &[]).await;
    check("bb", "", 10, &all[3..]).await;
    check("d", "d\0", 10, &all[4..]).await;
    check("e", "", 10, &[]).await;
    assert_eq!(engine.get(b"d").await.expect("get"), Some(Bytes::new()), "an empty value is a value");
    assert_eq!(engine.get(b"bb").await.expect("get"), None);
    assert_eq!(engine.get(b"").await.expect("get"), None);
}

async fn batches_are_atomic_and_ordered(store: &Store) {
    let engine = store.open().await;
    let first = batch(&[("a", Some("1")), ("a", Some("2")), ("b", Some("1")), ("b", None), ("c", None)]);
    engine.write(first, Durability::Buffered).await.expect("write");
    assert_eq!(engine.scan(b"", b"", 10).await.expect("scan"), pairs(&[("a", "2")]));
    engine.write(batch(&[("a", None), ("a", Some("3"))]), Durability::Buffered).await.expect("write");
    engine.write(Batch::default(), Durability::Durable).await.expect("an empty batch");
    assert_eq!(engine.get(b"a").await.expect("get").as_deref(), Some(&b"3"[..]));
    // A batch that is refused leaves nothing behind.
    let mut refused = batch(&[("a", Some("4"))]);
    refused.put(Bytes::new(), "x");
    let error = engine.write(refused, Durability::Durable).await.expect_err("an empty key");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(engine.get(b"a").await.expect("get").as_deref(), Some(&b"3"[..]));
}

async fn snapshots_do_not_move(store: &Store) {
    let engine = store.open().await;
    engine.write(batch(&[("a", Some("1")), ("b", Some("1"))]), Durability::Durable).await.expect("write");
    let before: Box<dyn Snapshot> = engine.snapshot().expect("snapshot");
    let change = batch(&[("a", None), ("b", Some("2")), ("c", Some("2"))]);
    engine.write(change, Durability::Durable).await.expect("write");
    assert_eq!(before.scan(b"", b"", 10).await.expect("scan"), pairs(&[("a", "1"), ("b", "1")]));
    assert_eq!(before.get(b"c").await.expect("get"), None);
    assert_eq!(before.get(b"a").await.expect("get").as_deref(), Some(&b"1"[..]));
    let after = engine.snapshot().expect("snapshot");
    assert_eq!(after.scan(b"", b"", 10).await.expect("scan"), pairs(&[("b", "2"), ("c", "2")]));
}

async fn sizes_are_checked(store: &Store) {
    let engine = store.open().await;
    let limits = engine.limits();
    assert!(limits.max_key_bytes >= 1200, "{limits:?}");
    let mut largest = Batch::default();
    let (key, value) = (vec![b'k'; limits.max_key_bytes], vec![b'v'; 1 << 20]);
    largest.put(key.clone(), value.clone());
    engine.write(largest, Durability::Durable).await.expect("the largest key");
    assert_eq!(engine.get(&key).await.expect("get").as_deref(), Some(&value[..]));
    for (key, value) in [(limits.max_key_bytes + 1, 1), (1, limits.max_value_bytes + 1)] {
        let mut over = Batch::default();
        over.put(vec![0; key], vec![0; value]);
        let error = engine.write(over, Durability::Durable).await.expect_err("over the limit");
        assert_eq!(error.kind(), ErrorKind::TooLarge);
    }
    assert_eq!(engine.get(&vec![b'q'; limits.max_key_bytes + 1]).await.expect("get"), None);
}

async fn reopening_keeps_what_is_durable(store: &Store) {
    let mut epochs = Vec::new();
    for round in 0..4u8 {
        let engine = store.open().await;
        epochs.push(engine.epoch());
        let found = engine.scan(b"", b"", 100).await.expect("scan");
        assert_eq!(found.len(), usize::from(round) * 3, "{found:?}");
        for (name, durability) in [("x", Durability::Durable), ("y", Durability::Buffered)] {
            let mut change = Batch::default();
            change.put(format!("{name}{round}"), vec![round]);
            engine.write(change, durability).await.expect("write");
        }
        engine.sync().await.expect("sync");
        engine
            .write(batch(&[(&format!("z{round}"), Some("closed"))]), Durability::Buffered)
            .await
            .expect("write");
        engine.close().await.expect("close");
        engine.close().await.expect("closing again");
    }
    assert!(epochs.is_sorted_by(|before, after| before < after), "{epochs:?}");
}

async fn large_batches(store: &Store) {
    let engine = store.open().await;
    let mut written = Batch::default();
    for number in 0..20_000u32 {
        written.put(number.to_be_bytes().to_vec(), vec![number as u8; 64]);
    }
    engine.write(written, Durability::Durable).await.expect("write");
    let found = engine.scan(&100u32.to_be_bytes(), &19_900u32.to_be_bytes(), usize::MAX).await.expect("scan");
    assert_eq!(found.len(), 19_800);
    assert!(found.is_sorted());
    let mut gone = Batch::default();
    (0..19_999u32).for_each(|number| gone.delete(number.to_be_bytes().to_vec()));
    engine.write(gone, Durability::Durable).await.expect("write");
    assert_eq!(engine.scan(b"", b"", 10).await.expect("scan").len(), 1);
}

async fn random_operations_match_a_model(store: &Store) {
    let mut chance = Chance::fresh();
    let mut engine = store.open().await;
    let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    let key = |chance: &mut Chance| {
        let length = 1 + chance.below(3) as usize;
        (0..length).map(|_| b"ab\0\xff"[chance.below(4) as usize]).collect::<Vec<u8>>()
    };
    for _ in 0..rounds(150) {
        let mut change = Batch::default();
        for _ in 0..chance.below(6) {
            let key = key(&mut chance);
            if chance.below(3) == 0 {
                model.remove(&key);
                change.delete(key);
            } else {
                let length = chance.below(40) as usize;
                let value = chance.bytes(length);
                model.insert(key.clone(), value.clone());
                change.put(key, value);
            }
        }
        let durability = if chance.below(4) == 0 { Durability::Durable } else { Durability::Buffered };
        engine.write(change, durability).await.expect("write");
        if chance.below(25) == 0 {
            engine.close().await.expect("close");
            engine = store.open().await;
        }
        let probe = key(&mut chance);
        assert_eq!(engine.get(&probe).await.expect("get").as_deref(), model.get(&probe).map(Vec::as_slice));
        let (start, end, limit) = (key(&mut chance), key(&mut chance), chance.below(12) as usize);
        let found = engine.scan(&start, &end, limit).await.expect("scan");
        let expected: Vec<_> = match start < end {
            true => model.range(start..end).take(limit).collect(),
            false => Vec::new(),
        };
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(expected).all(|((k, v), (key, value))| k == key && v == value));
    }
}

async fn a_closed_engine_refuses(store: &Store) {
    let engine = store.open().await;
    engine.close().await.expect("close");
    assert!(engine.write(batch(&[("a", Some("1"))]), Durability::Durable).await.is_err());
    assert!(engine.get(b"a").await.is_err());
    assert!(engine.scan(b"", b"", 1).await.is_err());
    assert!(engine.snapshot().is_err());
    assert!(engine.sync().await.is_err());
}

async fn fast_reads_agree(store: &Store) {
    let engine = store.open().await;
    engine.write(batch(&[("a", Some("1")), ("b", Some("2"))]), Durability::Buffered).await.expect("write");
    match (engine.get_now(b"a"), engine.scan_now(b"a", b"b", 5)) {
        (None, None) => assert!(matches!(store, Store::Slate(_)), "only a bucket may block"),
        (Some(value), Some(found)) => {
            assert_eq!(value.expect("get").as_deref(), Some(&b"1"[..]));
            assert_eq!(found.expect("scan"), pairs(&[("a", "1")]));
        }
        other => panic!("one blocks and the other does not: {other:?}"),
    }
}

#[tokio::test]
async fn a_second_opener_of_a_directory_is_told_who_has_it() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let first = LmdbEngine::open(directory.path(), &LmdbSettings::default()).await.expect("first");
    let error = LmdbEngine::open(directory.path(), &LmdbSettings::default()).await.err().expect("second");
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.message().contains(&format!("process {}", std::process::id())), "{error}");
    first.close().await.expect("close");
    LmdbEngine::open(directory.path(), &LmdbSettings::default()).await.expect("after the first closed");
}

#[tokio::test]
async fn a_full_map_is_no_space_and_keeps_what_was_there() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let settings = LmdbSettings { map_bytes: 1 << 20 };
    let engine = LmdbEngine::open(directory.path(), &settings).await.expect("open");
    engine.write(batch(&[("kept", Some("1"))]), Durability::Durable).await.expect("write");
    let mut large = batch(&[("kept", Some("2"))]);
    large.put("large", vec![7; 2 << 20]);
    let error = engine.write(large, Durability::Durable).await.expect_err("it does not fit");
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert_eq!(engine.get(b"kept").await.expect("get").as_deref(), Some(&b"1"[..]));
    engine.write(batch(&[("kept", Some("3"))]), Durability::Durable).await.expect("a smaller one fits");
}

#[tokio::test]
async fn a_damaged_file_is_corrupt_and_never_a_crash() {
    let fill = async |directory: &std::path::Path| {
        let engine = LmdbEngine::open(directory, &LmdbSettings::default()).await.expect("open");
        let mut many = Batch::default();
        (0..5000u32).for_each(|number| many.put(number.to_be_bytes().to_vec(), vec![1; 100]));
        engine.write(many, Durability::Durable).await.expect("write");
        engine.close().await.expect("close");
    };
    // Not a tree at all.
    let directory = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(directory.path().join("data.mdb"), vec![0x5a; 20_000]).expect("garbage");
    let error = LmdbEngine::open(directory.path(), &LmdbSettings::default()).await.err().expect("garbage");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.hint().is_some());
    // Cut short: the first pages are there, the rest is gone.
    let directory = tempfile::tempdir().expect("a temporary directory");
    fill(directory.path()).await;
    let file = std::fs::OpenOptions::new().write(true).open(directory.path().join("data.mdb")).expect("file");
    file.set_len(16_384).expect("cut");
    let read = match LmdbEngine::open(directory.path(), &LmdbSettings::default()).await {
        Ok(engine) => engine.scan(b"", b"", usize::MAX).await.map(drop),
        Err(error) => Err(error),
    };
    assert_eq!(read.expect_err("pages are gone").kind(), ErrorKind::Corrupt);
    // The same for who only looks.
    let directory = tempfile::tempdir().expect("a temporary directory");
    fill(directory.path()).await;
    let (view, _) = LmdbEngine::view(directory.path(), &LmdbSettings::default()).await.expect("a tree");
    assert_eq!(view.scan(b"", b"", usize::MAX).await.expect("whole").len(), 5000);
    drop(view);
    let file = std::fs::OpenOptions::new().write(true).open(directory.path().join("data.mdb")).expect("file");
    file.set_len(16_384).expect("cut");
    let read = match LmdbEngine::view(directory.path(), &LmdbSettings::default()).await {
        Ok((view, _)) => view.scan(b"", b"", usize::MAX).await.map(drop),
        Err(error) => Err(error),
    };
    assert_eq!(read.expect_err("pages are gone").kind(), ErrorKind::Corrupt);
}

/// LMDB keeps what changes while somebody reads, and took one that was killed for somebody who reads.
#[tokio::test]
async fn a_reader_that_was_killed_keeps_no_pages_of_lmdb() {
    const WHERE: &str = "FOREBAY_TEST_LMDB_READER";
    if let Ok(directory) = std::env::var(WHERE) {
        // The reader, in a process of its own.
        let (view, _) = LmdbEngine::view(directory, &LmdbSettings::default()).await.expect("a tree");
        println!("reads {}", view.scan(b"", b"", 1).await.expect("read").len());
        std::thread::sleep(std::time::Duration::from_secs(600));
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let engine = LmdbEngine::open(directory.path(), &LmdbSettings::default()).await.expect("open");
    let change = async |rounds: u32| {
        for round in 0..rounds {
            let mut batch = Batch::default();
            (0..20_u8).for_each(|key| batch.put(vec![key], vec![round as u8; 3000]));
            engine.write(batch, Durability::Durable).await.expect("written");
        }
    };
    let size = || std::fs::metadata(directory.path().join("data.mdb")).expect("there").len();
    change(20).await;
    let before = size();
    let mut reader = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "kv::contract::a_reader_that_was_killed_keeps_no_pages_of_lmdb", "--nocapture"])
        .env(WHERE, directory.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("spawn");
    let lines = std::io::BufRead::lines(std::io::BufReader::new(reader.stdout.take().expect("its output")));
    assert!(lines.map_while(|line| line.ok()).any(|line| line.contains("reads 1")));
    change(20).await;
    assert!(size() > before, "it reads what was");
    reader.kill().expect("kill");
    reader.wait().expect("wait");
    // Until the dead are looked for.
    change(270).await;
    let settled = size();
    change(100).await;
    assert_eq!(size(), settled, "pages are used again");
}
