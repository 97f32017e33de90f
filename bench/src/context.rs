//! What every scenario is given: sizes, places, a runtime for the baselines, and ways to make data.

use std::fs::File;
use std::future::Future;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use tokio::runtime::Runtime;

use crate::raw::ObjectStoreClient;

/// How much to measure, and with what.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs a figure.
    pub pairs: usize,
    /// Small files in a data set.
    pub files: usize,
    /// Bytes of a large file.
    pub large: u64,
    /// Bytes of the state that the checkpoint scenario saves.
    pub state: u64,
    /// Bytes read and written by the memory scenario.
    pub volume: u64,
    /// Of the checkpoint scenario these parts; none for all.
    pub parts: Vec<String>,
    /// The `forebay` binary.
    pub forebay: PathBuf,
    /// The Python interpreter that has torch and forebay.
    pub python: PathBuf,
    /// The `juicefs` binary to compare with.
    pub juicefs: Option<PathBuf>,
    /// Where scratch files go: on the disk whose file system is the baseline.
    pub work: PathBuf,
}

/// A scenario's surroundings.
#[derive(Debug)]
pub struct Context {
    /// How much to measure.
    pub settings: Settings,
    /// Scratch files; removed in the end.
    pub folder: tempfile::TempDir,
    runtime: Runtime,
}

/// Bytes of a part of a large object, ours and the baselines'.
pub const PART: u64 = 8 << 20;
/// Requests in flight of who reads a store that is near.
pub const IN_FLIGHT: usize = 8;
/// Files in one directory of a data set.
const FILES_IN_DIRECTORY: usize = 200;

impl Context {
    /// Surroundings with a fresh scratch folder.
    pub fn new(settings: Settings) -> Result<Self> {
        if !settings.forebay.exists() {
            bail!("{} does not exist: `make bench` builds it", settings.forebay.display());
        }
        std::fs::create_dir_all(&settings.work)?;
        let folder = tempfile::Builder::new().prefix("forebay-bench-").tempdir_in(&settings.work)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        Ok(Self { settings, folder, runtime })
    }

    /// Surroundings of its own for a part of a scenario with fewer files.
    pub fn with_files(&self, files: usize) -> Result<Self> {
        Self::new(Settings { files: files.min(self.settings.files), ..self.settings.clone() })
    }

    /// Waits for a baseline's work.
    pub fn wait<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.runtime.block_on(work)
    }

    /// A folder in the scratch folder, made if need be.
    pub fn place(&self, name: &str) -> Result<PathBuf> {
        let path = self.folder.path().join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// Puts a data set of `count` files of `size` bytes below `prefix` in the store.
    pub fn put_files(
        &self,
        client: &ObjectStoreClient,
        prefix: &str,
        count: usize,
        size: usize,
    ) -> Result<()> {
        let keys: Vec<String> = names(count).map(|name| format!("{prefix}/{name}")).collect();
        self.wait(client.put_many(&keys, noise(size), 16))
    }

    /// Writes the same data set below `folder`.
    pub fn write_files(&self, folder: &Path, count: usize, size: usize) -> Result<()> {
        let data = noise(size);
        for name in names(count) {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().context("a file lies in a folder")?)?;
            File::create(&path)?.write_all(&data).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    }

    /// Writes the same bytes as [`Self::put_large`] puts; gives how many.
    pub fn write_large(&self, path: &Path, size: u64) -> Result<u64> {
        let (part, mut file) = (noise(PART as usize), File::create(path)?);
        for _ in 0..size.div_ceil(PART) {
            file.write_all(&part).with_context(|| format!("writing {}", path.display()))?;
        }
        file.sync_all()?;
        Ok(file.metadata()?.len())
    }

    /// Puts an object of at least one whole [`PART`].
    pub fn put_large(&self, client: &ObjectStoreClient, key: &str, size: u64) -> Result<()> {
        let parts = size.div_ceil(PART) as usize;
        self.wait(client.put_multipart(key, noise(PART as usize), parts))
    }
}

/// Relative paths of a data set: 200 files a directory.
pub fn names(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|index| format!("{:04}/{index:06}.bin", index / FILES_IN_DIRECTORY))
}

/// The same bytes on every run, which no compression shrinks.
pub fn noise(size: usize) -> Bytes {
    random_words().flat_map(u64::to_le_bytes).take(size).collect::<Vec<u8>>().into()
}

/// Words by Marsaglia's xorshift64, the same on every run.
fn random_words() -> impl Iterator<Item = u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

/// The same order on every run, which nobody foresees: Fisher and Yates's shuffle.
pub fn shuffled(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
    for (last, word) in (1..paths.len()).rev().zip(random_words()) {
        paths.swap(last, (word % (last as u64 + 1)) as usize);
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_keeps_every_path() {
        for count in [1, 2, 7, 1000] {
            let paths: Vec<PathBuf> = names(count).map(PathBuf::from).collect();
            let mut order = shuffled(paths.clone());
            assert!(count < 8 || order != paths);
            order.sort();
            assert_eq!(order, paths);
        }
        assert!(noise(1 << 12).iter().filter(|byte| **byte == 0).count() < 64);
    }
}
