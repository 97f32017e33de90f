//! Temporary folders that go away with the test.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::starting;

/// A temporary folder, removed on drop.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// An empty folder.
    pub fn new() -> Self {
        starting::prepare();
        Self(TempDir::with_prefix("forebay-test-").expect("the temporary folder is writable"))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A path in it, which need not exist.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// A folder in it, made if need be.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.join(name);
        std::fs::create_dir_all(&path).expect("a scratch folder can be made");
        path
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}
