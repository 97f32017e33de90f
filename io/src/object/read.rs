//! Reading objects: one range, many ranges at once, straight into a buffer.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use forebay_core::{Error, ErrorKind, ObjectKey, Result, Version};
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::{GetOptions, GetRange, GetResult};

use super::bucket::info;
use super::request::Request;
use super::{Bucket, ObjectInfo};

/// Ranges above this are fetched in parts of it, side by side, by [`Bucket::get_into`].
const PART_BYTES: u64 = 8 << 20;
/// Parts of one read in flight.
const PARTS_IN_FLIGHT: usize = 8;
/// How often an object that is read whole is begun, while others replace it.
const MOST_WHOLE_READS: usize = 4;

impl Bucket {
    /// Bytes `range` of the object, in one ranged GET; fewer where the object ends before the range does.
    ///
    /// # Errors
    /// `Stale` when `version` is given and the key holds another one; `NotFound` when the key is gone; `Invalid`
    /// when the object ends before the range starts.
    pub async fn get(&self, key: &ObjectKey, version: Option<&Version>, range: Range<u64>) -> Result<Bytes> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let object = self.open_range(key, version, Some(range)).await?;
        self.collect(object).await
    }

    /// As [`Bucket::get`], handed on as it arrives: for those who copy the bytes on anyway.
    pub async fn get_stream(
        &self,
        key: &ObjectKey,
        version: Option<&Version>,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes>>> {
        let object = self.open_range(key, version, Some(range)).await?;
        let bucket = self.clone();
        Ok(object.into_stream().map_err(move |error| bucket.read_error(error)).boxed())
    }

    /// A whole object and what the store says about it, from one GET. One that is replaced while it is read, and whose
    /// body broke, is read again. Memory is taken as the object has bytes: what others may write is read by
    /// [`Bucket::get_whole_at_most`].
    ///
    /// # Errors
    /// As [`Bucket::get`]; `Stale` where it was replaced again and again.
    pub async fn get_whole(&self, key: &ObjectKey) -> Result<(Bytes, ObjectInfo)> {
        self.get_whole_at_most(key, u64::MAX).await
    }

    /// As [`Bucket::get_whole`], of an object that has `most_bytes` at most where it is what it should be: of a longer
    /// one nothing is read.
    ///
    /// # Errors
    /// As [`Bucket::get_whole`]; `Corrupt`, with its length, for a longer one.
    pub async fn get_whole_at_most(&self, key: &ObjectKey, most_bytes: u64) -> Result<(Bytes, ObjectInfo)> {
        for _ in 1..MOST_WHOLE_READS {
            match self.read_whole(key, most_bytes).await {
                Err(error) if error.kind() == ErrorKind::Stale => {}
                read => return read,
            }
        }
        self.read_whole(key, most_bytes).await
    }

    async fn read_whole(&self, key: &ObjectKey, most_bytes: u64) -> Result<(Bytes, ObjectInfo)> {
        let object = self.open_range(key, None, None).await?;
        let info = info(object.meta.clone());
        // Of the body as well: a store may say two lengths.
        let bytes = info.size.max(object.range.end.saturating_sub(object.range.start));
        if bytes > most_bytes {
            let fact = format!("`{key}` has {bytes} bytes, more than the {most_bytes} that it may have");
            return Err(Error::corrupt(fact));
        }
        Ok((self.collect(object).await?, info))
    }

    /// Bytes `range` of the object as a stream, in order, fetched in parts of `part_bytes` of which up to eight are
    /// in flight or waiting to be taken. All parts are of one version: the one given, else the one found first.
    ///
    /// # Errors
    /// As [`Bucket::get`], each at the part it concerns.
    pub fn get_parallel(
        &self,
        key: &ObjectKey,
        version: Option<&Version>,
        range: Range<u64>,
        part_bytes: u64,
    ) -> BoxStream<'static, Result<Bytes>> {
        let (bucket, key, version) = (self.clone(), key.clone(), version.cloned());
        let start = async move {
            let version = bucket.pin(&key, version).await?;
            let parts = futures::stream::iter(split(range, part_bytes.max(1))).map(move |part| {
                let (bucket, key, version) = (bucket.clone(), key.clone(), version.clone());
                async move { bucket.get(&key, version.as_ref(), part).await }
            });
            Ok::<_, Error>(parts.buffered(PARTS_IN_FLIGHT))
        };
        futures::stream::once(start).try_flatten().boxed()
    }

    /// Bytes `range` of the object, straight into `buffer`, which is as long as the range. Large ranges are fetched
    /// in parts side by side. When this fails, or its future is dropped, the buffer holds anything.
    ///
    /// # Errors
    /// As [`Bucket::get`], and `Invalid` when the object ends before the range does.
    pub async fn get_into(
        &self,
        key: &ObjectKey,
        version: Option<&Version>,
        range: Range<u64>,
        buffer: &mut [u8],
    ) -> Result<()> {
        if buffer.len() as u64 != range.end.saturating_sub(range.start) {
            return Err(Error::invalid(format!("{} bytes of buffer for range {range:?}", buffer.len())));
        }
        if buffer.len() as u64 <= PART_BYTES {
            return self.fill(key, version, range, buffer).await;
        }
        let version = self.pin(key, version.cloned()).await?;
        let parts = split(range, PART_BYTES).zip(buffer.chunks_mut(PART_BYTES as usize));
        let version = version.as_ref();
        // Collected, because the compiler cannot show that a stream of this closure may change threads.
        let filled: Vec<_> = parts.map(|(part, buffer)| self.fill(key, version, part, buffer)).collect();
        futures::stream::iter(filled).buffer_unordered(PARTS_IN_FLIGHT).try_collect().await
    }

    /// As [`Bucket::get_into`] for a small range, into memory that holds nothing else.
    ///
    /// # Errors
    /// As [`Bucket::get_into`].
    pub async fn get_own(
        &self,
        key: &ObjectKey,
        version: Option<&Version>,
        range: Range<u64>,
    ) -> Result<Bytes> {
        let length = range.end.saturating_sub(range.start) as usize;
        let mut own = Vec::with_capacity(length);
        let mut body = self.get_stream(key, version, range.clone()).await?;
        while let Some(bytes) = body.try_next().await?
            && own.len() + bytes.len() <= length
        {
            own.extend_from_slice(&bytes);
        }
        if own.len() == length { Ok(own.into()) } else { Err(short(key, own.len(), &range)) }
    }

    /// The version that several requests for one object must agree on.
    async fn pin(&self, key: &ObjectKey, version: Option<Version>) -> Result<Option<Version>> {
        if version.is_some() {
            return Ok(version);
        }
        let found = self.head(key).await?;
        let found = found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no object {key}")))?;
        Ok(Some(found.version).filter(|version| !version.as_str().is_empty()))
    }

    async fn fill(
        &self,
        key: &ObjectKey,
        version: Option<&Version>,
        range: Range<u64>,
        buffer: &mut [u8],
    ) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let object = self.open_range(key, version, Some(range.clone())).await?;
        let mut body = object.into_stream();
        let mut at = 0;
        while let Some(bytes) = body.try_next().await.map_err(|error| self.read_error(error))? {
            let target = buffer.get_mut(at..at + bytes.len()).ok_or_else(|| short(key, at, &range))?;
            target.copy_from_slice(&bytes);
            at += bytes.len();
        }
        if at == buffer.len() { Ok(()) } else { Err(short(key, at, &range)) }
    }

    async fn open_range(
        &self,
        key: &ObjectKey,
        version: Option<&Version>,
        range: Option<Range<u64>>,
    ) -> Result<GetResult> {
        let if_match = version.map(|version| version.as_str().to_owned());
        let options = GetOptions { range: range.map(GetRange::Bounded), if_match, ..GetOptions::default() };
        let request = Request::Get { key: self.path(key)?, options };
        let reply = self.raw(request).await.map_err(|error| self.read_error(error))?;
        reply.object().map_err(|error| self.error(error))
    }

    /// Gathers a body into one buffer, without a copy when it comes in one piece.
    async fn collect(&self, object: GetResult) -> Result<Bytes> {
        let length = (object.range.end - object.range.start) as usize;
        let mut body = object.into_stream();
        let Some(first) = body.try_next().await.map_err(|error| self.read_error(error))? else {
            return Ok(Bytes::new());
        };
        if first.len() == length {
            return Ok(first);
        }
        let mut whole = BytesMut::with_capacity(length);
        whole.extend_from_slice(&first);
        while let Some(bytes) = body.try_next().await.map_err(|error| self.read_error(error))? {
            whole.extend_from_slice(&bytes);
        }
        Ok(whole.freeze())
    }

    /// A failed precondition of a read means that the object was replaced.
    fn read_error(&self, error: object_store::Error) -> Error {
        match error {
            object_store::Error::Precondition { path, .. } => {
                Error::new(ErrorKind::Stale, format!("object {path} was replaced"))
            }
            other => self.error(other),
        }
    }
}

fn short(key: &ObjectKey, at: usize, range: &Range<u64>) -> Error {
    Error::invalid(format!("{key} ends {at} bytes into range {range:?}"))
}

/// Cuts `range` into parts of `part_bytes`, the last one shorter.
fn split(range: Range<u64>, part_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    let starts = (range.start..end).step_by(usize::try_from(part_bytes).unwrap_or(usize::MAX));
    starts.map(move |start| start..end.min(start.saturating_add(part_bytes)))
}
