//! Writing an object front to back, in parts.
//!
//! Bytes are cut into parts that are sent side by side while more are written. What never outgrows one part is
//! sent as a single PUT. Parts grow, as the length is seldom known and their number is bounded; some stores (Cloudflare's
//! R2) want all but the last of one size, and get them so. Completion, and the abort of an upload that is dropped, run as
//! tasks of the bucket: they go on when the caller's future is dropped.

mod sizes;
mod piece;

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::units::MIB;
use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version};
use futures::stream::{FuturesUnordered, StreamExt};
use object_store::multipart::PartId;
use object_store::{PutMultipartOptions, PutPayload};
use tokio::time::Instant;

use self::piece::Piece;
pub use self::sizes::{COPY_PART_BYTES, MAX_PARTS, MIN_PART_BYTES, even_part_size, part_size};
use super::error::is_about_parts;
use super::request::{PastCache, Request, UploadId};
use super::unanswered::Active;
use super::{Bucket, Condition, ObjectInfo};
use crate::mem::Permit;
use crate::task::Task;

/// Told of uploads in parts, so that those of a process that died are found.
#[async_trait]
pub trait UploadNotes: Send + Sync + std::fmt::Debug {
    /// The store is about to be asked for an upload, which it may begin and not tell.
    ///
    /// # Errors
    /// What keeps it from being asked.
    async fn starting(&self) -> Result<()> {
        Ok(())
    }

    /// The store has begun an upload and calls it `id`; no part of it was sent yet.
    async fn started(&self, key: &ObjectKey, id: &str);

    /// It was completed or aborted.
    async fn ended(&self, id: &str);
}

/// How an upload is carried out.
#[derive(Debug, Clone)]
pub struct UploadOptions {
    /// Parts in flight at once. Default 32: S3 gives each 85 to 90 MB/s ("Performance design patterns for Amazon S3").
    pub parts_in_flight: usize,
    /// Bytes of parts in flight at once; a single larger part may still be. Default 256 MiB.
    pub bytes_in_flight: u64,
    /// A fixed part size instead of [`part_size`].
    pub part_bytes: Option<u64>,
    /// Its length, where that is known: parts that have to be alike are chosen by it. Default unknown.
    pub length: Option<u64>,
    /// Who is told where it begins and ends. Default nobody.
    pub notes: Option<Arc<dyn UploadNotes>>,
    /// Its length, where that is known and nobody reads it soon: a directory on a disk of this host takes the room at once and
    /// writes memory that is aligned to pages past the page cache, at a tenth of the processor time. Default none.
    pub past_cache: Option<u64>,
    /// Whether it may be completed on a condition. Default true; without, Google's store spares a copy.
    pub conditional: bool,
    /// What the object is to be known by, as in [`Bucket::put_as`]. Default chance.
    pub token: Option<String>,
}

impl Default for UploadOptions {
    fn default() -> Self {
        Self {
            parts_in_flight: 32,
            bytes_in_flight: 256 * MIB,
            part_bytes: None,
            length: None,
            notes: None,
            past_cache: None,
            conditional: true,
            token: None,
        }
    }
}

/// An object being written front to back. Dropping it before [`Upload::complete`] aborts it.
#[derive(Debug)]
pub struct Upload {
    /// Gone once the upload is being finished, so that a drop then does nothing.
    state: Option<State>,
}

#[derive(Debug)]
struct State {
    bucket: Bucket,
    key: ObjectKey,
    options: UploadOptions,
    /// Whether all parts but the last have to be alike, as far as was known when it was begun.
    is_even: bool,
    /// Written and not yet cut into a part.
    pending: Vec<Piece>,
    pending_bytes: u64,
    /// The request that starts the upload, kept so that a dropped `write` does not forget it.
    creating: Option<Task<Result<UploadId>>>,
    upload: Option<UploadId>,
    /// Since the store was asked for the upload, until it has ended.
    active: Option<Active>,
    /// When the store had answered.
    answered: Option<Instant>,
    running: FuturesUnordered<Task<Sent>>,
    running_bytes: u64,
    parts: Vec<Option<PartId>>,
    /// Bytes of each of them.
    lengths: Vec<u64>,
    /// Bytes in parts that were sent or are being sent.
    offset: u64,
    failed: Option<Error>,
}

/// The outcome of one part.
#[derive(Debug)]
struct Sent {
    index: usize,
    bytes: u64,
    part: Result<PartId>,
}

impl Upload {
    pub(super) fn new(bucket: Bucket, key: ObjectKey, options: UploadOptions) -> Self {
        let state = State {
            is_even: bucket.wants_even_parts(),
            bucket,
            key,
            options,
            pending: Vec::new(),
            pending_bytes: 0,
            creating: None,
            upload: None,
            active: None,
            answered: None,
            running: FuturesUnordered::new(),
            running_bytes: 0,
            parts: Vec::new(),
            lengths: Vec::new(),
            offset: 0,
            failed: None,
        };
        Self { state: Some(state) }
    }

    fn state(&mut self) -> &mut State {
        self.state.as_mut().expect("the state is taken only by methods that consume the upload")
    }

    /// Appends bytes; waits while too many parts are in flight. Cancel-safe: the bytes are taken in any case.
    ///
    /// # Errors
    /// That of the first part that failed for good; the upload can then only be aborted.
    pub async fn write(&mut self, data: Bytes) -> Result<()> {
        let state = self.state();
        state.push(data, None);
        state.send_full_parts().await
    }

    /// As [`Upload::write`]; `permit`, which charges these bytes, is given back piece by piece as the store has them.
    ///
    /// Up to one part's bytes stay here until more are written. Whoever finds the budget exhausted calls
    /// [`Upload::relieve`] before waiting for it, since this upload may be what holds it.
    pub async fn write_charged(&mut self, data: Bytes, permit: Permit) -> Result<()> {
        let state = self.state();
        state.push(data, Some(permit));
        state.send_full_parts().await
    }

    /// Sends what is held back now, though it may be less than a part, if it is enough for a part of its own
    /// ([`Bucket::least_part_bytes`]). Returns the bytes that stay. Cancel-safe.
    pub async fn relieve(&mut self) -> Result<u64> {
        let state = self.state();
        while state.pending_bytes >= state.least_part_bytes() {
            state.send_part(state.pending_bytes.min(state.part_bytes().max(MIN_PART_BYTES))).await?;
        }
        state.check().map(|()| state.pending_bytes)
    }

    /// Appends `range` of another object of the bucket without moving its bytes through this host, except for the
    /// few that fill up a part too small to stand alone; where all have to be alike, for what does not fill one. Not cancel-safe: drop the upload with the future.
    ///
    /// # Errors
    /// `Unsupported` where the store has no part copy; `Conflict`, at the latest from [`Upload::complete`], when the
    /// object no longer has `version`, if the store checks it ([`super::Capabilities::conditional_part_copy`]).
    pub async fn copy_from(&mut self, from: &ObjectKey, version: &Version, range: Range<u64>) -> Result<()> {
        self.state().copy_from(from, version, range).await
    }

    /// Has what is written from here on cut into parts of so many bytes. Where all have to be alike, the first was one of them.
    pub fn cut_into(&mut self, part_bytes: u64) {
        let state = self.state();
        if !state.is_even || state.parts.is_empty() {
            state.options.part_bytes = Some(part_bytes);
        }
    }

    /// What charges the bytes that were not sent; they are charged to nobody then.
    pub fn take_permits(&mut self) -> Vec<Permit> {
        self.state().pending.iter_mut().filter_map(|piece| piece.permit.take()).collect()
    }

    /// Whether any of it was sent: then it is not one PUT.
    pub fn is_in_parts(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.offset > 0)
    }

    /// Parts that were sent, of [`MAX_PARTS`]: short ones count as much as others.
    pub fn parts(&self) -> usize {
        self.state.as_ref().map_or(0, |state| state.parts.len())
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.state.as_ref().map_or(0, |state| state.offset + state.pending_bytes)
    }

    /// Makes the object visible, whole, if `condition` holds. Goes on as a task of the bucket when the future is
    /// dropped. When it fails, the upload is aborted.
    ///
    /// # Errors
    /// `Conflict` when the condition does not hold; `Unsupported` where the store cannot check it for uploads in
    /// parts.
    pub async fn complete(mut self, condition: Condition) -> Result<ObjectInfo> {
        if !self.state().options.conditional && condition != Condition::Always {
            return Err(Error::bug("an upload that was started for no condition is completed on one"));
        }
        let state = self.state.take().expect("an upload is completed once");
        let tasks = state.bucket.tasks().clone();
        tasks.spawn(format!("complete {}", state.key), state.complete(condition)).await?
    }

    /// Gives the upload up and frees its parts. Goes on as a task of the bucket when the future is dropped.
    pub async fn abort(mut self) -> Result<()> {
        let state = self.state.take().expect("an upload is aborted once");
        let tasks = state.bucket.tasks().clone();
        tasks.spawn(format!("abort {}", state.key), state.abort()).await?
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(state) = self.state.take().filter(State::is_known_to_the_store) else { return };
        if tokio::runtime::Handle::try_current().is_err() {
            tracing::warn!(key = %state.key, "upload dropped outside a runtime: its parts stay until collected");
            return;
        }
        let tasks = state.bucket.tasks().clone();
        tasks.spawn(format!("abort {}", state.key), async move {
            let key = state.key.clone();
            if let Err(error) = state.abort().await {
                tracing::warn!(%key, %error, "dropped upload could not be aborted: its parts stay until collected");
            }
        });
    }
}

impl State {
    fn is_known_to_the_store(&self) -> bool {
        self.creating.is_some() || self.upload.is_some()
    }

    fn push(&mut self, data: Bytes, permit: Option<Permit>) {
        self.pending_bytes += data.len() as u64;
        if data.is_empty() {
            return;
        }
        let piece = Piece { data, permit };
        match self.pending.pop() {
            Some(last) => self.pending.extend(last.with(piece)),
            None => self.pending.push(piece),
        }
    }

    fn part_bytes(&self) -> u64 {
        let by_rule = || match self.is_even {
            true => even_part_size(self.options.length),
            false => part_size(self.parts.len()),
        };
        self.options.part_bytes.unwrap_or_else(by_rule).max(1)
    }

    /// The least bytes of a part that is not the last.
    fn least_part_bytes(&self) -> u64 {
        if self.is_even { self.part_bytes() } else { MIN_PART_BYTES }
    }

    /// Whether a store that wants all parts but the last alike, and the last no larger, does not get them.
    fn is_uneven(&self) -> bool {
        match self.lengths.as_slice() {
            [first, between @ .., last] => between.iter().any(|length| length != first) || last > first,
            _ => false,
        }
    }

    /// Sends parts while there is more than one part's worth of bytes: what may yet be the whole object stays.
    async fn send_full_parts(&mut self) -> Result<()> {
        while self.pending_bytes > self.part_bytes() {
            self.send_part(self.part_bytes()).await?;
        }
        self.check()
    }

    fn check(&self) -> Result<()> {
        match &self.failed {
            Some(error) => Err(error.duplicate()),
            None => Ok(()),
        }
    }

    /// Sends the first `bytes` of what is pending as the next part. Cancel-safe: nothing is taken before the last
    /// await.
    async fn send_part(&mut self, bytes: u64) -> Result<()> {
        let upload = self.begin().await?;
        self.wait_for_room(bytes).await?;
        let (payload, permits) = self.take(bytes);
        let (index, offset) = (self.parts.len(), self.offset);
        self.start(Request::Part { upload, index, offset, payload }, permits);
        Ok(())
    }

    /// Sends the next part as a task. What of it travels is in memory here until it is done.
    fn start(&mut self, request: Request, permits: Vec<Permit>) {
        let (bucket, index) = (self.bucket.clone(), self.parts.len());
        let (length, bytes) = (request.moved_bytes(), request.sent_bytes());
        self.parts.push(None);
        self.lengths.push(length);
        self.offset += length;
        self.running_bytes += bytes;
        let task = self.bucket.tasks().spawn(format!("part {index} of {}", self.key), async move {
            let reply = bucket.call(request).await;
            let part = reply.and_then(|reply| reply.part().map_err(|error| bucket.error(error)));
            drop(permits);
            Sent { index, bytes, part }
        });
        self.running.push(task);
    }

    /// The upload's id, from the store on first use.
    async fn begin(&mut self) -> Result<UploadId> {
        if let Some(upload) = &self.upload {
            return Ok(upload.clone());
        }
        if self.creating.is_none() {
            let (bucket, key) = (self.bucket.clone(), self.bucket.path(&self.key)?);
            self.active = Some(bucket.unanswered().enter(&key));
            let (mut options, conditional) = (PutMultipartOptions::default(), self.options.conditional);
            self.options.past_cache.map(|bytes| options.extensions.insert(PastCache(bytes)));
            let token = self.options.token.clone().unwrap_or_else(|| bucket.token());
            let request = Request::Create { key, options, token, conditional };
            let (notes, named) = (self.options.notes.clone(), self.key.clone());
            let create = async move {
                if let Some(notes) = &notes {
                    notes.starting().await?;
                }
                let upload = bucket.call(request).await?.upload().map_err(|error| bucket.error(error))?;
                if let Some(notes) = notes {
                    notes.started(&named, &upload.id).await;
                }
                Ok(upload)
            };
            self.creating = Some(self.bucket.tasks().spawn(format!("start upload {}", self.key), create));
        }
        let creating = self.creating.as_mut().expect("it was just set");
        let created = creating.await.and_then(|created| created);
        self.creating = None;
        let upload = created?;
        self.answered = Some(Instant::now());
        self.upload = Some(upload.clone());
        Ok(upload)
    }

    async fn wait_for_room(&mut self, bytes: u64) -> Result<()> {
        if self.parts.len() >= MAX_PARTS {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("{} needs more than {MAX_PARTS} parts", self.key),
            ));
        }
        while !self.running.is_empty()
            && (self.running.len() >= self.options.parts_in_flight
                || self.running_bytes + bytes > self.options.bytes_in_flight)
        {
            self.wait_for_one().await;
        }
        self.check()
    }

    async fn wait_for_one(&mut self) {
        match self.running.next().await {
            Some(Ok(Sent { index, bytes, part: Ok(part) })) => {
                self.running_bytes -= bytes;
                self.parts[index] = Some(part);
            }
            Some(Ok(Sent { bytes, part: Err(error), .. })) => {
                self.running_bytes -= bytes;
                self.failed.get_or_insert(error);
            }
            Some(Err(error)) => drop(self.failed.get_or_insert(error)),
            None => {}
        }
    }

    /// The first `bytes` of what is pending, and what charges them.
    fn take(&mut self, bytes: u64) -> (PutPayload, Vec<Permit>) {
        let mut left = bytes;
        let mut taken = Vec::new();
        let mut rest = Vec::new();
        for mut piece in std::mem::take(&mut self.pending) {
            let length = piece.data.len() as u64;
            if left == 0 {
                rest.push(piece);
            } else if length <= left {
                left -= length;
                taken.push(piece);
            } else {
                taken.push(piece.split_to(left as usize));
                left = 0;
                rest.push(piece);
            }
        }
        self.pending = rest;
        self.pending_bytes -= bytes;
        let (data, permits): (Vec<_>, Vec<_>) =
            taken.into_iter().map(|piece| (piece.data, piece.permit)).unzip();
        (data.into_iter().collect(), permits.into_iter().flatten().collect())
    }

    async fn copy_from(&mut self, from: &ObjectKey, version: &Version, range: Range<u64>) -> Result<()> {
        let length = range.end - range.start;
        let is_whole = self.offset + self.pending_bytes == 0 && self.options.length == Some(length);
        // Pieces of one range are alike by themselves.
        if self.is_even && !is_whole {
            return self.copy_evenly(from, version, range).await;
        }
        let mut at = range.start;
        // A part before another must not be too small: the next bytes of the range fill it up.
        if self.pending_bytes > 0 && self.pending_bytes < MIN_PART_BYTES {
            let end = range.end.min(at + MIN_PART_BYTES - self.pending_bytes);
            let filling = self.bucket.get(from, Some(version), at..end).await?;
            self.push(filling, None);
            at = end;
        }
        if at == range.end {
            return self.send_full_parts().await;
        }
        if range.end - at < MIN_PART_BYTES {
            let rest = self.bucket.get(from, Some(version), at..range.end).await?;
            self.push(rest, None);
            return self.send_full_parts().await;
        }
        while self.pending_bytes > 0 {
            self.send_part(self.pending_bytes.min(self.part_bytes().max(MIN_PART_BYTES))).await?;
        }
        let pieces = (range.end - at).div_ceil(COPY_PART_BYTES);
        let piece = (range.end - at).div_ceil(pieces);
        while at < range.end {
            let end = range.end.min(at + piece);
            self.copy_part(from, version, at..end).await?;
            at = end;
        }
        self.check()
    }

    /// The same where all parts but the last have to be alike: what does not fill one passes through this host.
    async fn copy_evenly(&mut self, from: &ObjectKey, version: &Version, range: Range<u64>) -> Result<()> {
        let (mut at, part) = (range.start, self.part_bytes());
        loop {
            while self.pending_bytes >= part {
                self.send_part(part).await?;
            }
            let left = range.end - at;
            if left == 0 {
                return self.check();
            }
            let is_end = self.options.length == Some(self.offset + left);
            let end = range.end.min(at + part - self.pending_bytes);
            if self.pending_bytes == 0 && (left >= part || is_end) {
                self.copy_part(from, version, at..end).await?;
            } else {
                let carried = self.bucket.get(from, Some(version), at..end).await?;
                self.push(carried, None);
            }
            at = end;
        }
    }

    /// Has `range` of another object become the next part.
    async fn copy_part(&mut self, from: &ObjectKey, version: &Version, range: Range<u64>) -> Result<()> {
        let (from, upload) = (self.bucket.path(from)?, self.begin().await?);
        self.wait_for_room(0).await?;
        let (index, offset, version) = (self.parts.len(), self.offset, Some(version.clone()));
        self.start(Request::CopyPart { upload, index, offset, from, version, range }, Vec::new());
        Ok(())
    }

    async fn complete(mut self, condition: Condition) -> Result<ObjectInfo> {
        if self.upload.is_none() && self.creating.is_none() && self.failed.is_none() {
            let (payload, _permits) = self.take(self.pending_bytes);
            return self.bucket.put_payload(&self.key, payload, condition, self.options.token.take()).await;
        }
        match self.finish(condition).await {
            Ok(info) => Ok(info),
            Err(error) => {
                let key = self.key.clone();
                if let Err(left) = self.abort().await {
                    tracing::warn!(%key, error = %left, "failed upload could not be aborted: its parts stay");
                }
                Err(error)
            }
        }
    }

    async fn finish(&mut self, condition: Condition) -> Result<ObjectInfo> {
        let upload = self.begin().await?;
        while self.pending_bytes > 0 {
            self.send_part(self.pending_bytes.min(self.part_bytes())).await?;
        }
        while !self.running.is_empty() {
            self.wait_for_one().await;
        }
        self.check()?;
        let parts: Option<Vec<PartId>> = self.parts.drain(..).collect();
        let parts = parts.ok_or_else(|| Error::bug(format!("{} lacks a part", self.key)))?;
        self.end_unanswered(&upload).await;
        let id = upload.id.clone();
        let completed = self.bucket.raw(Request::Complete { upload, parts, condition }).await;
        let reply = completed.map_err(|error| self.not_completed(error))?;
        self.note_end(&id).await;
        let put = reply.put().map_err(|error| self.bucket.error(error))?;
        let mut info = self.bucket.written(&self.key, put.e_tag, self.offset);
        if info.version.as_str().is_empty() {
            let found = self.bucket.head(&self.key).await?;
            info = found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{} is gone", self.key)))?;
        }
        Ok(info)
    }

    /// Why it was not completed. A store that is found to want all parts but the last alike gets them so from now on.
    fn not_completed(&self, error: object_store::Error) -> Error {
        let (is_about_parts, error) = (is_about_parts(&error), self.bucket.error(error));
        if !is_about_parts || !self.is_uneven() {
            return error;
        }
        self.bucket.want_even_parts();
        let fact = format!("the parts of {} were not all of one size, which this store wants", self.key);
        Error::new(ErrorKind::Unavailable, fact).with_source(error).with_hint(
            "write it again: parts are alike from now on; with even_parts of [volume.store] they always are",
        )
    }

    /// Waits for the parts under way, then frees everything: a part that arrives after the abort, even one whose sender
    /// has left, may stay for ever.
    async fn abort(mut self) -> Result<()> {
        if !self.is_known_to_the_store() {
            return Ok(());
        }
        let upload = self.begin().await?;
        while self.running.next().await.is_some() {}
        self.end_unanswered(&upload).await;
        let id = upload.id.clone();
        self.bucket.call(Request::Abort { upload }).await?;
        self.note_end(&id).await;
        Ok(())
    }

    /// Ends what the store began for this upload and did not tell of.
    async fn end_unanswered(&self, upload: &UploadId) {
        let (Some(active), Some(answered)) = (&self.active, self.answered) else { return };
        match active.settle(&self.bucket, upload, answered).await {
            Ok(0) => {}
            Ok(ended) => tracing::info!(key = %self.key, ended, "uploads whose beginning went unanswered"),
            Err(error) => tracing::warn!(key = %self.key, %error, "unanswered uploads are looked for later"),
        }
    }

    async fn note_end(&self, id: &str) {
        if let Some(notes) = &self.options.notes {
            notes.ended(id).await;
        }
    }
}

#[cfg(test)]
mod tests;
