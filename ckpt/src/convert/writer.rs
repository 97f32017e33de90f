//! A step that one process writes from front to back, a piece at a time: as large as it may be, no more of it than what is
//! on its way to the store lies in memory.
//!
//! Where everything will lie, and that it holds together, is known before the first byte is sent. Nothing is there before
//! [`StepWriter::commit`].

use std::collections::HashMap;

use bytes::Bytes;
use forebay_core::checksum::Crc32c;
use forebay_core::{Error, Result};
use forebay_io::clock::{Clock, Moment};
use forebay_io::object::{Bucket, Condition, ObjectInfo, Upload, UploadOptions};

use crate::catalog::{Alive, OLD, Run, Start, begin_run, commit, deleted, missing};
use crate::manifest::{Checksum, Extra, Identity, Manifest, Shard, ShardKey, Slice, Tensor};
use crate::shard::{ShardLayout, TensorSpec};

/// Bytes of parts that are sent at once.
const IN_FLIGHT: u64 = 64 << 20;

/// What is to be written next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Which of the tensors given, from 0.
    pub tensor: usize,
    /// Where it begins among that one's bytes.
    pub start: u64,
    /// Its bytes.
    pub length: u64,
}

/// Every slice in the order of the file's bytes, and which tensor and slice of the manifest it is.
type Order = Vec<(Piece, (usize, usize))>;

/// A step on its way into a bucket. One that is dropped leaves nothing but a start without steps.
#[derive(Debug)]
pub struct StepWriter {
    bucket: Bucket,
    run: Run,
    upload: Upload,
    clock: Clock,
    begun: Moment,
    /// Else a start that goes on in the same place takes an upload of hours for a dead one's.
    alive: Alive,
    /// What will be committed, but for checksums of what was not written yet.
    manifest: Manifest,
    order: Order,
    /// How many of them were written.
    written: usize,
    whole: Crc32c,
}

impl StepWriter {
    /// Begins `step` as a start of the run of its own. `tensors` may hold parts of one tensor under its name.
    ///
    /// # Errors
    /// `Invalid` when the parts of a tensor overlap or are not all of it; then nothing was written.
    pub async fn begin(bucket: &Bucket, start: Start, step: u64, tensors: &[TensorSpec]) -> Result<Self> {
        let layout = ShardLayout::of(tensors)?;
        let created_ms = start.started_ms;
        let (parts, order) = describe(tensors, &layout)?;
        let mut manifest = Manifest {
            commit: commit_name(&start, step),
            run: commit_name(&start, step),
            incarnation: 1,
            step,
            created_ms,
            world_size: 1,
            parents: Vec::new(),
            shards: vec![shard(&layout, step, 1, "00000000")],
            tensors: parts,
            extras: Vec::new(),
        };
        let odd = |fault| Error::invalid(format!("what is to be saved does not hold together: {fault}"));
        manifest.check().map_err(odd)?;
        let run = begin_run(bucket, start).await?;
        (manifest.run, manifest.incarnation) = (run.run.clone(), run.incarnation);
        manifest.shards = vec![shard(&layout, step, run.incarnation, run.attempt())];
        let (bytes_in_flight, length) = (IN_FLIGHT, Some(manifest.shards[0].size));
        let options =
            UploadOptions { conditional: false, bytes_in_flight, length, ..UploadOptions::default() };
        let upload = bucket.upload_with(&manifest.shards[0].object(), options)?;
        let mut whole = Crc32c::default();
        whole.update(&layout.header);
        let clock = Clock::system();
        let (begun, alive) = (clock.now(), Alive::new(clock.clone(), bucket.clone(), run.save(step), 0));
        let (bucket, written) = (bucket.clone(), 0);
        let mut writer = Self { bucket, run, upload, clock, begun, alive, manifest, order, written, whole };
        if let Err(error) = writer.upload.write(layout.header.into()).await {
            writer.abort().await;
            return Err(error);
        }
        Ok(writer)
    }

    /// What is to be written, in order.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.order[self.written..].iter().map(|(piece, _)| *piece)
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        let shard = &self.manifest.shards[0];
        shard.size - shard.header
    }

    /// Writes the next piece; waits while too much is on its way.
    ///
    /// # Errors
    /// What keeps the store from taking it; the step can then only be given up.
    pub async fn write(&mut self, data: Bytes) -> Result<()> {
        let next = self.order.get(self.written).filter(|(piece, _)| piece.length == data.len() as u64);
        let Some((_, (tensor, slice))) = next else {
            return Err(Error::bug(format!("{} bytes that are no piece of the step", data.len())));
        };
        let slice = &mut self.manifest.tensors[*tensor].slices[*slice];
        (slice.crc32c, slice.blake3) = (Checksum(forebay_core::crc32c(&data)), Identity::of(&data));
        self.whole.update(&data);
        self.written += 1;
        self.alive.during(self.upload.write(data)).await
    }

    /// Makes the step exist, once all pieces were written.
    pub async fn commit(self, extras: Vec<Extra>) -> Result<()> {
        let Self { bucket, run, upload, clock, begun, mut alive, mut manifest, order, written, whole } = self;
        if written != order.len() {
            let message = format!("{written} pieces of {} were written", order.len());
            forget(&alive).await;
            return Err(Error::bug(message));
        }
        let stored = alive.during(upload.complete(Condition::Always)).await;
        let is_old = || clock.now().since(begun) > OLD;
        let committed = Self::conclude(&bucket, &run, &mut manifest, (stored, whole), is_old, extras).await;
        forget(&alive).await;
        committed
    }

    async fn conclude(
        bucket: &Bucket,
        run: &Run,
        manifest: &mut Manifest,
        (stored, whole): (Result<ObjectInfo>, Crc32c),
        is_old: impl Fn() -> bool,
        extras: Vec<Extra>,
    ) -> Result<()> {
        let stored = stored?.size;
        let shard = &mut manifest.shards[0];
        if stored != shard.size {
            let (key, size) = (&shard.key, shard.size);
            return Err(Error::corrupt(format!("the store holds {stored} bytes of `{key}`, not {size}")));
        }
        shard.crc32c = Checksum(whole.value());
        manifest.extras = extras;
        // A host that was suspended told nobody that the save goes on.
        if is_old()
            && let Some(shard) = missing(bucket, manifest.shards.iter()).await?
        {
            return Err(deleted(manifest.step, &shard));
        }
        commit(bucket, run, manifest).await.map(drop)
    }

    /// Gives the step up.
    pub async fn abort(self) {
        if let Err(error) = self.upload.abort().await {
            tracing::warn!(%error, "an upload that is not wanted stays until garbage is collected");
        }
        forget(&self.alive).await;
    }
}

/// A note that stays is garbage, not a failure of the step.
async fn forget(alive: &Alive) {
    if let Err(error) = alive.forget().await {
        tracing::warn!(%error, "a note of a save that is over stays until garbage is collected");
    }
}

/// What no other commit has.
fn commit_name(start: &Start, step: u64) -> String {
    blake3::hash(format!("{}/1/{step}", start.nonce).as_bytes()).to_hex()[..32].to_owned()
}

fn shard(layout: &ShardLayout, step: u64, incarnation: u64, attempt: &str) -> Shard {
    let (attempt, layout_of) = (attempt.to_owned(), ShardKey::layout_of(&layout.header));
    let key = ShardKey { step, incarnation, attempt, rank: 0, save: 1, layout: layout_of };
    let (key, header) = (key.object().as_str().to_owned(), layout.header.len() as u64);
    Shard { key, size: layout.size, header, crc32c: Checksum(0), rank: 0, step }
}

/// The tensors, with slices whose checksums are not known yet, and these in the order of the file.
fn describe(specs: &[TensorSpec], layout: &ShardLayout) -> Result<(Vec<Tensor>, Order)> {
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    let mut order = Vec::new();
    for (index, (spec, range)) in specs.iter().zip(&layout.ranges).enumerate() {
        let TensorSpec { name, dtype, shape, region } = spec;
        let number = *known.entry(name).or_insert(tensors.len());
        if number == tensors.len() {
            let (name, dtype) = (name.clone(), dtype.name.into());
            tensors.push(Tensor { name, dtype, shape: shape.clone(), slices: Vec::new() });
        }
        let tensor = &mut tensors[number];
        if (tensor.dtype.as_str(), &tensor.shape) != (dtype.name, shape) {
            return Err(Error::invalid(format!(
                "the parts of tensor `{name}` are not of one type and shape"
            )));
        }
        if !region.fits(shape) {
            return Err(Error::invalid(format!("a part of tensor `{name}` lies outside of it")));
        }
        let mut at = range.start;
        for piece in region.pieces(shape, dtype.size) {
            let (start, end) = (at, at + piece.elements() * dtype.size);
            let place = (number, tensor.slices.len());
            order.push((
                Piece { tensor: index, start: start - range.start, length: end - start },
                start,
                place,
            ));
            let (crc32c, blake3) = (Checksum(0), Identity::UNKNOWN);
            let crate::region::Region { kind, offsets, lengths } = piece;
            tensor.slices.push(Slice { kind, offsets, lengths, shard: 0, start, end, crc32c, blake3 });
            at = end;
        }
    }
    order.sort_by_key(|(piece, start, _)| (*start, piece.length));
    Ok((tensors, order.into_iter().map(|(piece, _, place)| (piece, place)).collect()))
}

#[cfg(test)]
mod tests;
