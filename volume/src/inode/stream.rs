//! Written bytes on their way to the store before the file is committed: as a stream while the file is written front to
//! back, else in blobs of its own.

use bytes::Bytes;
use forebay_core::{FileLayout, Result};
use forebay_io::mem::Permit;
use forebay_io::object::Upload;
use forebay_metadata::tree::Placement;

use super::{OpenInode, Writer};
use crate::content::Content;
use crate::store::not_written;

/// A whole object on its way to the store, front to back.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) upload: Upload,
    pub(super) placement: Placement,
}

impl OpenInode {
    /// Whether written bytes of it are in memory, or on their way to the store.
    pub(crate) fn holds_memory(&self) -> bool {
        self.look(|content| content.dirty() > 0 || !content.readable())
    }

    /// Frees the memory that written bytes take: a running upload sends what it holds back, or is completed when
    /// `finish` says so, and inline bytes go to a blob of their own. Returns the bytes that the upload goes on holding
    /// back: too few for a part. Does nothing where somebody has the turn, and so never waits for another writer: that one
    /// brings the bytes to the store itself, or is done soon.
    pub(crate) async fn relieve(&self, finish: bool) -> Result<u64> {
        if !self.holds_memory() {
            return Ok(0);
        }
        let Ok(mut writer) = self.writer.try_lock() else { return Ok(0) };
        if finish {
            self.finish_stream(&mut writer).await?;
        }
        if let Some(stream) = &mut writer.stream {
            return match stream.upload.relieve().await {
                Ok(kept) => Ok(kept),
                Err(error) => Err(self.lose_stream(&mut writer, error).await),
            };
        }
        self.pack(&mut writer).await.map(|()| 0)
    }

    /// Moves inline bytes out of memory: onto the local disk where they are staged, else into a running upload if they
    /// are the whole file and their writer is at its end, else into an owned blob. Who writes elsewhere has the upload
    /// completed, and may be in the middle of what others are to see whole.
    pub(super) async fn spill(&self, writer: &mut Writer, is_at_end: bool) -> Result<()> {
        if self.store.can_stage(self.look(Content::dirty))
            && let Some(blob) = self.store.stage(self.ino, &self.look(Content::pack)).await
        {
            self.content.write().packed_into(&blob);
            writer.permits.clear();
            return Ok(());
        }
        let (whole, layout) = self.look(|content| (content.whole_inline(), content.layout().clone()));
        if !is_at_end || whole.is_none() && !self.store.is_staged_stream(&layout) {
            return self.pack(writer).await;
        }
        let (mut upload, placement) = self.store.start_upload(self.ino).await?;
        let sent = match whole {
            Some(parts) => send_charged(&mut upload, parts, &mut writer.permits).await,
            None => self.store.carry(&layout, 0..layout.size(), &mut upload).await.map(drop),
        };
        if let Err(error) = sent {
            // The bytes are still here.
            writer.permits.append(&mut upload.take_permits());
            drop(upload);
            self.store.failed(self.ino, &placement, &error).await;
            return Err(error);
        }
        // What is left is of bytes that were written over.
        writer.permits.clear();
        self.content.write().start_stream();
        writer.stream = Some(Stream { upload, placement });
        Ok(())
    }

    /// Lets go of what was written over, if that is half of what is in memory: a page that is written again and again, as
    /// databases do, never leaves for that alone. Returns whether it was.
    pub(super) fn condense(&self, writer: &mut Writer) -> bool {
        let (live, dirty) = self.look(|content| (content.inline(), content.dirty()));
        if live > dirty / 2 {
            return false;
        }
        let packed = self.look(Content::pack);
        self.content.write().condense(&packed);
        let charged: u64 = writer.permits.iter().map(Permit::bytes).sum();
        let mut spare = charged.saturating_sub(live);
        while spare > 0
            && let Some(mut last) = writer.permits.pop()
        {
            spare -= last.split(spare).bytes();
            if last.bytes() > 0 {
                writer.permits.push(last);
            }
        }
        true
    }

    /// Puts all inline bytes into one owned blob.
    pub(super) async fn pack(&self, writer: &mut Writer) -> Result<()> {
        if self.is_retired() {
            return Ok(());
        }
        let packed = self.look(Content::pack);
        if !packed.is_empty() {
            let blob = self.store.put_owned(self.ino, packed).await?;
            self.note_early(&blob);
            self.content.write().packed_into(&blob);
            self.discard_superseded();
        }
        writer.permits.clear();
        Ok(())
    }

    /// Completes a running upload and commits it as the whole file.
    pub(super) async fn finish_stream(&self, writer: &mut Writer) -> Result<()> {
        let Some(Stream { upload, placement }) = writer.stream.take() else { return Ok(()) };
        if self.is_retired() {
            let aborted = upload.abort().await;
            self.store.ended(self.ino, &placement).await;
            return aborted;
        }
        let committed = match self.store.complete(upload, &placement).await {
            Ok(info) => self.replace_layout(FileLayout::of_blob(info.blob())).await,
            Err(error) => Err(not_written(self.ino, placement.key(), error)),
        };
        match committed {
            Err(error) => {
                self.store.failed(self.ino, &placement, &error).await;
                Err(self.lose_stream(writer, error).await)
            }
            Ok(()) => Ok(()),
        }
    }
}

/// Appends `parts` to an upload, and with them what charges them.
async fn send_charged(upload: &mut Upload, parts: Vec<Bytes>, permits: &mut Vec<Permit>) -> Result<()> {
    for mut part in parts {
        while !part.is_empty() {
            let Some(permit) = permits.last_mut() else {
                upload.write(std::mem::take(&mut part)).await?;
                break;
            };
            let bytes = permit.bytes().min(part.len() as u64);
            let share = permit.split(bytes);
            if permit.bytes() == 0 {
                permits.pop();
            }
            upload.write_charged(part.split_to(bytes as usize), share).await?;
        }
    }
    Ok(())
}
