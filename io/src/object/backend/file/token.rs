//! The token of the write that made a file, kept with the file as an extended attribute.
//!
//! A program that writes the file in place leaves its attributes there, so the attribute also says when the file was
//! last written and how large it was: of a file that changed since then, nobody knows the writer. Some file systems keep
//! no such attributes; there a token is known to the process alone that wrote.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};
use rustix::io::Errno;

/// Its name; `user.` is where Linux keeps what belongs to programs.
const ATTRIBUTE: &str = "user.forebaywrite";
/// More than any token with its stamp. Short as they are, they fit into an inode of ext4 and take no block.
const MOST_BYTES: usize = 256;
/// Times that a file is marked until its stamp fits.
const ATTEMPTS: usize = 3;

/// Syncs a staged file, with the token of its write if it has one.
pub(super) fn sync(file: &File, token: &str) -> io::Result<()> {
    if token.is_empty() {
        return file.sync_all();
    }
    if held(file, &file.metadata()?).as_deref() == Some(token) {
        return file.sync_all();
    }
    for _ in 0..ATTEMPTS {
        let stamp = stamp_of(&file.metadata()?);
        match fsetxattr(file, ATTRIBUTE, format!("{token} {stamp}").as_bytes(), XattrFlags::empty()) {
            // File systems that keep none say so in several ways.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM | Errno::ACCESS | Errno::INVAL) => {
                return file.sync_all();
            }
            marked => marked?,
        }
        file.sync_all()?;
        // Over a network, the server's time of the last write may take the place of this host's with the sync.
        if stamp_of(&file.metadata()?) == stamp {
            break;
        }
    }
    Ok(())
}

/// The token of the write that made the file as it is now, empty where it is none of Forebay's; `None` where the file
/// system keeps none, or does not tell.
pub(super) fn held(file: &File, metadata: &Metadata) -> Option<String> {
    let mut value = [0; MOST_BYTES];
    let length = match fgetxattr(file, ATTRIBUTE, &mut value) {
        Ok(length) => length,
        Err(Errno::NODATA | Errno::RANGE) => 0,
        Err(_) => return None,
    };
    let text = std::str::from_utf8(&value[..length]).unwrap_or_default();
    let token =
        text.split_once(' ').filter(|(_, stamp)| *stamp == stamp_of(metadata)).map(|(token, _)| token);
    Some(token.unwrap_or_default().to_owned())
}

/// When a file was last written, in nanoseconds, and its size.
fn stamp_of(metadata: &Metadata) -> String {
    let nanos = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    format!("{nanos:x}-{:x}", metadata.len())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use bytes::Bytes;
    use forebay_core::ObjectKey;

    use crate::object::{Authorship, Bucket, BucketUrl, Condition, StoreSettings, UploadOptions};

    async fn author(bucket: &Bucket, key: &str, token: &str) -> Authorship {
        bucket.head_of(&ObjectKey::new(key), token).await.expect("head").expect("an object").1
    }

    /// What is asked of a store that keeps tokens: `later` is its handle in a process that comes later.
    async fn check_tokens(bucket: &Bucket, later: &Bucket) {
        let (key, bytes) = (ObjectKey::new("d/a"), Bytes::from_static(b"bytes"));
        bucket.put_as(&key, bytes.clone(), Condition::IfAbsent, "first").await.expect("put");
        assert_eq!(author(later, "d/a", "first").await, Authorship::Ours);
        assert_eq!(author(later, "d/a", "second").await, Authorship::Others);
        bucket.put_as(&key, bytes.clone(), Condition::Always, "second").await.expect("put");
        assert_eq!(author(later, "d/a", "first").await, Authorship::Others, "it was replaced");
        assert_eq!(author(later, "d/a", "second").await, Authorship::Ours);
        let options = UploadOptions { token: Some("third".into()), ..UploadOptions::default() };
        let mut upload = bucket.upload_with(&ObjectKey::new("parts"), options).expect("upload");
        upload.write(Bytes::from(vec![1; 9 << 20])).await.expect("a part");
        upload.complete(Condition::IfAbsent).await.expect("complete");
        assert_eq!(author(later, "parts", "third").await, Authorship::Ours);
        bucket.copy(&key, &ObjectKey::new("copy"), 1, &Condition::Always).await.expect("copy");
        assert_eq!(author(later, "copy", "second").await, Authorship::Ours, "a copy takes the token along");
        bucket.put(&key, bytes, Condition::Always).await.expect("put");
        assert_eq!(author(later, "d/a", "second").await, Authorship::Others, "a write without a token");
    }

    #[tokio::test]
    async fn a_file_keeps_the_token_of_its_write_as_an_object_does() {
        let memory = Bucket::in_memory();
        check_tokens(&memory, &memory).await;
        let folder = tempfile::tempdir().expect("scratch");
        let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
        let open = async || Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
        let (bucket, later) = (open().await, open().await);
        check_tokens(&bucket, &later).await;
        // An outsider writes the file in place, with all its attributes; renamed, it is what it was.
        let (key, bytes) = (ObjectKey::new("e"), Bytes::from_static(b"bytes"));
        bucket.put_as(&key, bytes, Condition::Always, "last").await.expect("put");
        let blocks = std::fs::metadata(folder.path().join("e")).expect("file").blocks();
        assert!(blocks <= 8, "{blocks} blocks of 512 bytes: the attribute takes none");
        std::fs::rename(folder.path().join("e"), folder.path().join("f")).expect("renamed");
        assert_eq!(author(&later, "f", "last").await, Authorship::Ours);
        std::fs::write(folder.path().join("f"), "theirs").expect("written");
        assert_eq!(author(&later, "f", "last").await, Authorship::Others);
    }
}
