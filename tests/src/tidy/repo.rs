//! The files under check: the whole checkout, or a sample held in memory.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Something that is not as it must be.
#[derive(Debug)]
pub struct Finding {
    /// Path from the root of the checkout.
    pub file: String,
    /// Line from 1; 0 is the file as a whole.
    pub line: usize,
    /// What is wrong, and what to do instead where that is not plain.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.message)
    }
}

/// Text files by their path from the root, separated by `/`.
#[derive(Debug, Default)]
pub struct Repo {
    files: BTreeMap<String, String>,
}

impl Repo {
    /// Folders that hold what was built or fetched, never sources.
    const SKIPPED: &[&str] = &["target", "out", "__pycache__", ".git", ".venv", ".pytest_cache"];

    /// Reads every text file below `root`; what is not UTF-8 is left out.
    pub fn read(root: &Path) -> std::io::Result<Self> {
        let mut repo = Self::default();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder)? {
                let entry = entry?;
                let name = entry.file_name();
                if entry.file_type()?.is_dir() {
                    if !Self::SKIPPED.iter().any(|skipped| name == *skipped) {
                        folders.push(entry.path());
                    }
                } else if let Ok(text) = std::fs::read_to_string(entry.path()) {
                    let path = entry.path();
                    let path = path.strip_prefix(root).expect("every entry lies below the root");
                    repo.files.insert(path.to_string_lossy().into_owned(), text);
                }
            }
        }
        Ok(repo)
    }

    /// A repository of the given (path, text) pairs.
    pub fn of(files: &[(&str, &str)]) -> Self {
        Self { files: files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect() }
    }

    /// All files in path order.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// The text of one file.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }
}
