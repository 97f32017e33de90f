//! A tree that lies in a directory: LMDB, which is for a disk of one host. Where the directory is on a file system that several
//! may share, that is told when it is opened.

use std::path::Path;

use forebay_core::Result;
use forebay_io::disk::shared_file_system;
use forebay_io::task::blocking;
use forebay_metadata::kv::{LmdbEngine, LmdbSettings};

/// Opens the tree in `directory`, which is inside a bucket that is a directory itself, or the state directory.
///
/// # Errors
/// As [`LmdbEngine::open`].
pub(crate) async fn open(directory: &Path, inside_bucket: bool) -> Result<LmdbEngine> {
    let engine = LmdbEngine::open(directory, &LmdbSettings::default()).await?;
    let opened = directory.to_owned();
    if let Some(file_system) = blocking(move || shared_file_system(&opened)).await? {
        tracing::warn!(directory = %directory.display(), "{}", unsafe_on(file_system, inside_bucket));
    }
    Ok(engine)
}

/// What is to be feared of a tree on such a file system, and what helps.
fn unsafe_on(file_system: &str, inside_bucket: bool) -> String {
    let hint = match inside_bucket {
        true => {
            "have one host mount this bucket, and others join it (--join-secret): no host beside that, for reading neither"
        }
        false => "give a --state-dir on a disk of this host",
    };
    format!(
        "the tree lies on {file_system}, which hosts may share: LMDB, which keeps it, maps its file into memory and locks it, \
         which hosts do not surely see of each other there. Two that open it at once may damage it: {hint}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_names_the_cause_and_what_helps() {
        let told = unsafe_on("NFS", false);
        assert!(told.starts_with("the tree lies on NFS, which hosts may share: LMDB"), "{told}");
        assert!(told.ends_with("may damage it: give a --state-dir on a disk of this host"), "{told}");
        let told = unsafe_on("Lustre", true);
        assert!(told.contains("lies on Lustre") && told.contains("--join-secret"), "{told}");
        assert!(!told.contains("--state-dir"), "the tree is in the bucket: {told}");
    }
}
