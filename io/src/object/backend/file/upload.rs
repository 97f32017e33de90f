//! Uploads in parts: one staging file each, written at the parts' own offsets.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

use forebay_core::{Timestamp, Version};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{PutPayload, PutResult, Result};
use parking_lot::RwLock;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{Inner, STAGING, Wanted, copy_bytes, io_error, open_object, sync, version_of};
use crate::disk::{is_local, open_direct, write_direct};
use crate::object::error::STORE;
use crate::object::key::address;
use crate::object::request::{PastCache, UploadId, UploadsPage};
use crate::object::types::{Condition, put_mode};

/// The folder of unfinished uploads, below the staging folder: `uploads/ID/data` and `uploads/ID/key`.
pub(super) const UPLOADS: &str = "uploads";

/// Shared by those who write parts of an upload, whole for who completes it: a part that was given up while it was written
/// changes no file that has its key already.
type Turn = Arc<RwLock<()>>;

/// An upload of this process.
#[derive(Debug)]
pub(super) struct Begun {
    /// Its file, whose lock tells others that it goes on.
    _locked: File,
    /// The file as it is written past the page cache, where that was asked for and the file system has it.
    past_cache: Option<Arc<File>>,
    /// Whether a part was begun.
    has_parts: bool,
    turn: Turn,
}

impl Inner {
    pub(super) fn create_upload(
        &self,
        key: Path,
        token: String,
        past_cache: Option<PastCache>,
        wanted: &Wanted,
    ) -> Result<UploadId> {
        let upload = UploadId { key, id: self.rng.name(), token };
        let folder = self.upload_path(&upload);
        let create = || {
            self.create_below_root(&folder)?;
            std::fs::write(folder.join("key"), upload.key.as_ref())?;
            let (path, mut direct) = (folder.join("data"), None);
            let file = File::create_new(&path)?;
            file.lock()?;
            // A server may be slow to write through, and has a cache of its own.
            if let Some(PastCache(bytes)) = past_cache.filter(|_| is_local(&file)) {
                take_room(&file, bytes)?;
                direct = open_direct(&path).map(Arc::new);
            }
            wanted.check()?;
            Ok(Begun { _locked: file, past_cache: direct, has_parts: false, turn: Arc::default() })
        };
        let begun = create().map_err(|error| {
            // Nobody was told its id; what stays is swept.
            let _ = std::fs::remove_dir_all(&folder);
            io_error(&upload.key, error)
        })?;
        self.uploads.lock().insert(upload.id.clone(), begun);
        Ok(upload)
    }

    fn upload_path(&self, upload: &UploadId) -> PathBuf {
        self.root.join(STAGING).join(UPLOADS).join(&upload.id)
    }

    fn open_upload(&self, upload: &UploadId) -> Result<File> {
        let path = self.upload_path(upload).join("data");
        OpenOptions::new().write(true).open(path).map_err(|error| io_error(&upload.key, error))
    }

    pub(super) fn write_part(
        &self,
        upload: &UploadId,
        offset: u64,
        payload: &PutPayload,
        wanted: &Wanted,
    ) -> Result<PartId> {
        let file = self.open_upload(upload)?;
        let (turn, direct) = self.begin_part(upload)?;
        let _turn = turn.read();
        let mut at = offset;
        for bytes in payload {
            let write = || {
                wanted.check()?;
                let written = direct.as_ref().map_or(Ok(0), |direct| write_direct(direct, bytes, at))?;
                file.write_all_at(&bytes[written..], at + written as u64)
            };
            write().map_err(|error| io_error(&upload.key, error))?;
            at += bytes.len() as u64;
        }
        Ok(part_id(offset, at - offset))
    }

    /// Notes a part. Returns what is held while it is written, and the file as it is written past the page cache.
    fn begin_part(&self, upload: &UploadId) -> Result<(Turn, Option<Arc<File>>)> {
        let mut uploads = self.uploads.lock();
        let begun = uploads.get_mut(&upload.id).ok_or_else(|| gone(upload))?;
        begun.has_parts = true;
        Ok((begun.turn.clone(), begun.past_cache.clone()))
    }

    /// Of another process's upload, which may have any number of them, as if it had.
    pub(super) fn has_parts(&self, upload: &UploadId) -> bool {
        self.uploads.lock().get(&upload.id).is_none_or(|begun| begun.has_parts)
    }

    pub(super) fn copy_part(
        &self,
        upload: &UploadId,
        offset: u64,
        (from, version, range): (&Path, Option<&Version>, Range<u64>),
        wanted: &Wanted,
    ) -> Result<PartId> {
        let length = range.end - range.start;
        let copy = |error| io_error(from, error);
        let (mut source, metadata) = open_object(&self.file_of(from)).map_err(copy)?;
        let before = version_of(&metadata);
        let mut target = self.open_upload(upload)?;
        let (turn, _) = self.begin_part(upload)?;
        let _turn = turn.read();
        target.seek(SeekFrom::Start(offset)).map_err(copy)?;
        source.seek(SeekFrom::Start(range.start)).map_err(copy)?;
        let copied = copy_bytes(&mut source, &mut target, length, wanted).map_err(copy)?;
        let after = version_of(&source.metadata().map_err(copy)?);
        if version.is_some_and(|wanted| wanted.as_str() != before) || before != after {
            let source = "the object to copy from was replaced".into();
            return Err(object_store::Error::Precondition { path: from.to_string(), source });
        }
        if copied != length {
            return Err(copy(io::Error::new(io::ErrorKind::InvalidInput, "the range ends past the object")));
        }
        Ok(part_id(offset, length))
    }

    pub(super) fn complete(
        &self,
        upload: &UploadId,
        parts: &[PartId],
        condition: &Condition,
        wanted: &Wanted,
    ) -> Result<PutResult> {
        let file = self.open_upload(upload)?;
        let turn = self.uploads.lock().get(&upload.id).map(|begun| begun.turn.clone());
        let turn = turn.ok_or_else(|| gone(upload))?;
        let _turn = turn.write();
        let size = parts.iter().try_fold(0, |end, part| match read_part_id(part) {
            Some((offset, length)) if offset == end => Ok(end + length),
            _ => Err(object_store::Error::Generic {
                store: STORE,
                source: format!("part {} of {} does not start at byte {end}", part.content_id, upload.key)
                    .into(),
            }),
        })?;
        let finish = || {
            wanted.check()?;
            // Another attempt's file may have its name already: its time is its version.
            if file.metadata()?.len() != size {
                file.set_len(size)?;
            }
            sync(&file, &upload.token, wanted)
        };
        finish().map_err(|error| io_error(&upload.key, error))?;
        let folder = self.upload_path(upload);
        let put = self.publish(
            &folder.join("data"),
            &upload.key,
            &put_mode(condition),
            upload.token.clone(),
            wanted,
        )?;
        // The object is visible and durable; an upload's empty folder that stays behind is listed and aborted later.
        let _ = std::fs::remove_dir_all(&folder);
        self.uploads.lock().remove(&upload.id);
        Ok(put)
    }

    pub(super) fn abort(&self, upload: &UploadId) -> Result<()> {
        self.uploads.lock().remove(&upload.id);
        match std::fs::remove_dir_all(self.upload_path(upload)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(&upload.key, error)),
            _ => Ok(()),
        }
    }

    pub(super) fn list_uploads(&self, prefix: &str) -> Result<UploadsPage> {
        let mut page = UploadsPage::default();
        let read = || -> io::Result<Vec<_>> {
            match std::fs::read_dir(self.root.join(STAGING).join(UPLOADS)) {
                Ok(entries) => entries.collect(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
                Err(error) => Err(error),
            }
        };
        for entry in read().map_err(|error| io_error(&Path::from(prefix), error))? {
            // An upload that ends while this looks at it has no key or no metadata any more.
            let (Ok(id), Ok(key)) =
                (entry.file_name().into_string(), std::fs::read_to_string(entry.path().join("key")))
            else {
                continue;
            };
            let (Some(key), Ok(metadata)) = (address(&key), entry.metadata()) else { continue };
            if key.as_ref().starts_with(prefix) {
                let started = Timestamp { seconds: metadata.mtime(), nanos: metadata.mtime_nsec() as u32 };
                page.uploads.push((UploadId { key, id, token: String::new() }, started));
            }
        }
        Ok(page)
    }
}

fn gone(upload: &UploadId) -> object_store::Error {
    io_error(&upload.key, io::ErrorKind::NotFound.into())
}

/// Takes the room for a file of so many bytes, where the file system can.
fn take_room(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => Err(error.into()),
        _ => Ok(()),
    }
}

fn part_id(offset: u64, length: u64) -> PartId {
    PartId { content_id: format!("{offset}+{length}") }
}

fn read_part_id(part: &PartId) -> Option<(u64, u64)> {
    let (offset, length) = part.content_id.split_once('+')?;
    Some((offset.parse().ok()?, length.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use forebay_core::ObjectKey;
    use futures::future::FutureExt;
    use object_store::path::Path;
    use object_store::{PutMultipartOptions, PutOptions, PutPayload};

    use crate::mem::SharedMemory;
    use crate::object::backend::file::Directory;
    use crate::object::progress::Progress;
    use crate::object::request::{Reply, Request, Service, UploadId};
    use crate::object::{Bucket, BucketUrl, Condition, StoreSettings, UploadOptions};

    fn create(key: &str) -> Request {
        let (options, token) = (PutMultipartOptions::default(), String::new());
        Request::Create { key: Path::from(key), options, token, conditional: true }
    }

    fn part(upload: &UploadId, bytes: usize) -> Request {
        let payload = PutPayload::from(vec![7; bytes]);
        Request::Part { upload: upload.clone(), index: 0, offset: 0, payload }
    }

    fn put(key: &str, bytes: usize) -> Request {
        let (options, token) = (PutOptions::default(), String::new());
        Request::Put { key: Path::from(key), payload: PutPayload::from(vec![7; bytes]), options, token }
    }

    async fn begin(directory: &Directory, bytes: usize) -> (UploadId, Request) {
        let upload = directory.call(create("parts")).await.and_then(Reply::upload).expect("an upload");
        let parts = vec![directory.call(part(&upload, bytes)).await.and_then(Reply::part).expect("a part")];
        (upload.clone(), Request::Complete { upload, parts, condition: Condition::Always })
    }

    /// A disk that had some GB to write before it answered the fsync was given up after ten seconds.
    #[tokio::test]
    async fn a_file_that_is_synced_is_heard_of_as_its_bytes_come_to_the_disk() {
        let folder = tempfile::tempdir().expect("scratch");
        let directory = Directory::new(folder.path().to_owned());
        let is_heard_of = async |request: Request| {
            let progress = Progress::default();
            progress.watch(directory.call(request)).await.expect("done");
            progress.made().now_or_never().is_some()
        };
        for (bytes, is_long) in [(1 << 20, false), (20 << 20, true)] {
            let (_, complete) = begin(&directory, bytes).await;
            assert_eq!(is_heard_of(complete).await, is_long, "{bytes} bytes in parts");
            let from = Path::from("parts");
            let (to, options) = (Path::from("copy"), object_store::CopyOptions::default());
            let copy = Request::Copy { from, to, bytes: bytes as u64, options };
            assert!(is_heard_of(copy).await, "{bytes} bytes copied");
        }
    }

    /// A disk whose sync takes longer than an attempt has each of them begun anew: none ended.
    #[tokio::test]
    async fn a_sync_counts_as_getting_on_for_a_while() {
        let folder = tempfile::tempdir().expect("scratch");
        let (directory, progress) = (Directory::new(folder.path().to_owned()), Progress::default());
        let (syncing, is_done) = std::sync::mpsc::channel::<()>();
        let work = directory.run_wanted(move |_, wanted| {
            wanted.syncs.store(true, std::sync::atomic::Ordering::SeqCst);
            is_done.recv().ok();
            Ok(())
        });
        let mut work = std::pin::pin!(progress.watch(work));
        for _ in 0..2 {
            tokio::select! {
                _ = &mut work => panic!("it still syncs"),
                () = progress.made() => {}
            }
        }
        drop(syncing);
        work.await.expect("it ends");
    }

    /// What was given up came into effect later, over what had been written meanwhile.
    #[test]
    fn what_was_given_up_before_it_began_has_no_effect() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.max_blocking_threads(1).enable_all().build().expect("a runtime");
        let folder = tempfile::tempdir().expect("scratch");
        let directory = Directory::new(folder.path().to_owned());
        runtime.block_on(async {
            let (upload, complete) = begin(&directory, 10).await;
            let longer = part(&upload, 20);
            // The one thread is busy, so that all of these wait for it when they are given up.
            let (busy, is_free) = std::sync::mpsc::channel::<()>();
            let works = crate::task::blocking(move || is_free.recv());
            let mut works = std::pin::pin!(works);
            assert!(futures::poll!(&mut works).is_pending());
            for request in [create("other"), longer, complete, put("whole", 10)] {
                assert!(directory.call(request).now_or_never().is_none());
            }
            drop(busy);
            assert!(works.await.expect("it ran").is_err());
            // Who comes last has waited for all before.
            crate::task::blocking(|| ()).await.expect("it ran");
        });
        let mut uploads = std::fs::read_dir(folder.path().join(".forebay/staging/uploads")).expect("uploads");
        let data = uploads.next().expect("one upload").expect("it").path().join("data");
        assert!(uploads.next().is_none(), "another was begun");
        assert_eq!(data.metadata().expect("its file").len(), 10, "a part was written");
        for key in ["parts", "whole"] {
            assert!(!folder.path().join(key).exists(), "{key} is there");
        }
    }

    #[tokio::test]
    async fn what_goes_past_the_page_cache_is_the_same() {
        let folder = tempfile::tempdir().expect("scratch");
        let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
        let length = (20 << 20) + 12_345;
        let memory = SharedMemory::create("test", length).expect("memory");
        let mut filled = memory.map_write(0..length).expect("map");
        filled.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 31 + i / 4096) as u8);
        let bytes = Bytes::from_owner(memory.map_read(0..length).expect("map"));
        // Aligned all the way; parts that begin anywhere; an announced length that is not kept.
        for (start, announced) in [(0, length), (1, length - 1), (4096, length), (0, 1)] {
            let key = ObjectKey::new(format!("a/{start}-{announced}"));
            let past_cache = Some(announced as u64);
            let options = UploadOptions { conditional: false, past_cache, ..UploadOptions::default() };
            let mut upload = bucket.upload_with(&key, options).expect("upload");
            upload.write(bytes.slice(start..start + 4096)).await.expect("write");
            upload.write(bytes.slice(start + 4096..)).await.expect("write");
            upload.complete(Condition::Always).await.expect("complete");
            let (found, _) = bucket.get_whole(&key).await.expect("get");
            assert!(found == bytes.slice(start..), "from {start} on");
        }
        let options = UploadOptions { past_cache: Some(1 << 60), ..UploadOptions::default() };
        let mut upload = bucket.upload_with(&ObjectKey::new("b"), options).expect("upload");
        upload.write(bytes.clone()).await.expect_err("no room");
        drop(upload);
        let left = std::fs::read_dir(folder.path().join(".forebay/staging/uploads")).expect("list").count();
        assert_eq!(left, 0, "nothing stays of it");
    }
}
