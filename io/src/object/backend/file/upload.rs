//! Uploads in parts: one staging file each, written at the parts' own offsets.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use forebay_core::{Timestamp, Version};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{PutPayload, PutResult, Result};

use super::{Inner, STAGING, io_error, version_of};
use crate::object::error::STORE;
use crate::object::key::address;
use crate::object::request::{UploadId, UploadsPage};
use crate::object::types::{Condition, put_mode};

/// The folder of unfinished uploads, below the staging folder: `uploads/ID/data` and `uploads/ID/key`.
pub(super) const UPLOADS: &str = "uploads";

impl Inner {
    pub(super) fn create_upload(&self, key: Path, token: String) -> Result<UploadId> {
        let upload = UploadId { key, id: self.rng.name(), token };
        let folder = self.upload_path(&upload);
        let create = || {
            self.create_below_root(&folder)?;
            std::fs::write(folder.join("key"), upload.key.as_ref())?;
            let file = File::create_new(folder.join("data"))?;
            file.lock().map(|()| file)
        };
        let file = create().map_err(|error| io_error(&upload.key, error))?;
        self.uploads.lock().insert(upload.id.clone(), file);
        Ok(upload)
    }

    fn upload_path(&self, upload: &UploadId) -> PathBuf {
        self.root.join(STAGING).join(UPLOADS).join(&upload.id)
    }

    fn open_upload(&self, upload: &UploadId) -> Result<File> {
        let path = self.upload_path(upload).join("data");
        OpenOptions::new().write(true).open(path).map_err(|error| io_error(&upload.key, error))
    }

    pub(super) fn write_part(&self, upload: &UploadId, offset: u64, payload: &PutPayload) -> Result<PartId> {
        let file = self.open_upload(upload)?;
        let mut at = offset;
        for bytes in payload {
            file.write_all_at(bytes, at).map_err(|error| io_error(&upload.key, error))?;
            at += bytes.len() as u64;
        }
        Ok(part_id(offset, at - offset))
    }

    pub(super) fn copy_part(
        &self,
        upload: &UploadId,
        offset: u64,
        from: &Path,
        version: Option<&Version>,
        range: Range<u64>,
    ) -> Result<PartId> {
        let length = range.end - range.start;
        let copy = |error| io_error(from, error);
        let mut source = File::open(self.file_of(from)).map_err(copy)?;
        let before = version_of(&source.metadata().map_err(copy)?);
        let mut target = self.open_upload(upload)?;
        target.seek(SeekFrom::Start(offset)).map_err(copy)?;
        source.seek(SeekFrom::Start(range.start)).map_err(copy)?;
        let copied = io::copy(&mut io::Read::take(&mut source, length), &mut target).map_err(copy)?;
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
    ) -> Result<PutResult> {
        let file = self.open_upload(upload)?;
        let size = parts.iter().try_fold(0, |end, part| match read_part_id(part) {
            Some((offset, length)) if offset == end => Ok(end + length),
            _ => Err(object_store::Error::Generic {
                store: STORE,
                source: format!("part {} of {} does not start at byte {end}", part.content_id, upload.key)
                    .into(),
            }),
        })?;
        let sync = || {
            file.set_len(size)?;
            file.sync_all()
        };
        sync().map_err(|error| io_error(&upload.key, error))?;
        let folder = self.upload_path(upload);
        let put =
            self.publish(&folder.join("data"), &upload.key, &put_mode(condition), upload.token.clone())?;
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

fn part_id(offset: u64, length: u64) -> PartId {
    PartId { content_id: format!("{offset}+{length}") }
}

fn read_part_id(part: &PartId) -> Option<(u64, u64)> {
    let (offset, length) = part.content_id.split_once('+')?;
    Some((offset.parse().ok()?, length.parse().ok()?))
}
