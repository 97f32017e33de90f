//! kill -9: a child process writes and acknowledges batches, and is killed at a random moment. Every durable
//! batch that it acknowledged is there afterwards, and none is half applied.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_io::object::{Bucket, StoreSettings};

use super::lmdb::LmdbSettings;
use super::{Batch, Durability, Engine, LmdbEngine, SlateEngine, SlateSettings};
use crate::testing::{Chance, rounds};

const CHILD: &str = "FOREBAY_CRASH_CHILD";
const KEYS_A_BATCH: u64 = 12;

async fn open(engine: &str, directory: &Path) -> Arc<dyn Engine> {
    match engine {
        "lmdb" => Arc::new(LmdbEngine::open(directory, &LmdbSettings::default()).await.expect("lmdb")),
        _ => {
            let url = format!("file://{}", directory.display()).parse().expect("url");
            let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("bucket");
            Arc::new(SlateEngine::open(&bucket, &SlateSettings::default()).await.expect("slate"))
        }
    }
}

/// The child's half: does nothing unless the parent's variable is set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let Ok(variable) = std::env::var(CHILD) else { return };
    let (engine, directory) = variable.split_once(':').expect("engine:directory");
    let engine = open(engine, Path::new(directory)).await;
    let mut chance = Chance::fresh();
    let first = last(engine.as_ref()).await + 1;
    for number in first.. {
        let mut batch = Batch::default();
        for part in 0..KEYS_A_BATCH {
            batch.put(format!("{part:02}/{number:012}"), number.to_string());
        }
        batch.put("last", number.to_string());
        if chance.below(4) == 0 {
            engine.write(batch, Durability::Buffered).await.expect("write");
        } else {
            engine.write(batch, Durability::Durable).await.expect("write");
            writeln!(std::io::stdout(), "\nack {number}").expect("parent");
        }
    }
}

async fn last(engine: &dyn Engine) -> u64 {
    let value = engine.get(b"last").await.expect("get").unwrap_or(Bytes::from_static(b"0"));
    std::str::from_utf8(&value).expect("text").parse().expect("number")
}

async fn survives_kills(engine: &'static str) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut chance = Chance::fresh();
    for round in 0..rounds(3) {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["kv::crash::child", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, format!("{engine}:{}", directory.path().display()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("the child");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let acknowledged = |line: std::io::Result<String>| {
            line.ok().and_then(|line| line.strip_prefix("ack ").and_then(|number| number.parse::<u64>().ok()))
        };
        let first = lines.by_ref().find_map(acknowledged).expect("the child acknowledges");
        std::thread::sleep(Duration::from_micros(chance.below(150_000)));
        child.kill().expect("kill");
        child.wait().expect("wait");
        let newest = lines.filter_map(acknowledged).last().unwrap_or(first);

        let reopened = open(engine, directory.path()).await;
        let last = last(reopened.as_ref()).await;
        assert!(last >= newest, "round {round}: acknowledged {newest}, found {last}, {chance:?}");
        let pairs = reopened.scan(b"", b"last", usize::MAX).await.expect("scan");
        assert_eq!(
            pairs.len() as u64,
            last * KEYS_A_BATCH,
            "round {round}: a batch is half there, {chance:?}"
        );
        for (key, value) in pairs {
            let number = std::str::from_utf8(&key[3..]).expect("text").parse::<u64>().expect("number");
            assert!(number <= last && value == number.to_string(), "round {round}: {key:?} {chance:?}");
        }
        reopened.close().await.expect("close");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lmdb_survives_kills() {
    survives_kills("lmdb").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slate_survives_kills() {
    survives_kills("slate").await;
}
