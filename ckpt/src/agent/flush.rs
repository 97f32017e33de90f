//! From a slot to a committed step: check, name, upload, commit.

use bytes::Bytes;
use forebay_core::{Error, Result};
use forebay_io::object::{Bucket, Condition};

use super::Seal;
use super::inspect::inspect;
use crate::catalog::{Run, commit};
use crate::manifest::{Checksum, Identity, Manifest, Shard};

/// Brings the shard in `slot` to the bucket and commits the step.
///
/// # Errors
/// `Corrupt` when the slot no longer holds what was sealed: then nothing was uploaded.
pub(super) async fn flush(bucket: &Bucket, run: &Run, seal: &Seal, slot: &Bytes) -> Result<()> {
    let shard = slot.slice(..seal.size as usize);
    let (checked, copy) = (shard.clone(), seal.clone());
    let inspected = forebay_io::task::blocking(move || inspect(&copy, &checked)).await;
    let (identity, crc32c) = inspected.map_err(|error| error.context("hash a shard"))??;
    let manifest = manifest_of(run, seal, identity, crc32c);
    manifest.check()?;
    upload(bucket, &manifest.shards[0], shard).await?;
    commit(bucket, run, &manifest).await.map(drop)
}

fn manifest_of(run: &Run, seal: &Seal, blake3: Identity, crc32c: u32) -> Manifest {
    let key = Shard::key_of(&blake3).as_str().to_owned();
    let (size, header, step) = (seal.size, seal.header, seal.step);
    let shard = Shard { key, size, header, blake3, crc32c: Checksum(crc32c), rank: 0, step };
    let unique = format!("{}/{}/{step}", run.start.nonce, seal.save);
    let commit = blake3::hash(unique.as_bytes()).to_hex()[..32].to_owned();
    Manifest {
        commit,
        run: run.run.clone(),
        incarnation: run.incarnation,
        step,
        created_ms: seal.created_ms,
        world_size: 1,
        parents: Vec::new(),
        shards: vec![shard],
        tensors: seal.tensors.clone(),
        extras: seal.extras.clone(),
    }
}

/// Writes the shard under its identity. The bytes of that key are always the same, so that writing twice is no harm.
async fn upload(bucket: &Bucket, shard: &Shard, data: Bytes) -> Result<()> {
    let key = Shard::key_of(&shard.blake3);
    // One PUT where that is enough, else parts side by side; an upload that fails aborts itself.
    let mut upload = bucket.upload(&key).await?;
    upload.write(data).await?;
    let stored = upload.complete(Condition::Always).await?;
    if stored.size != shard.size {
        let (got, expected) = (stored.size, shard.size);
        return Err(Error::corrupt(format!("the store holds {got} bytes of shard `{key}`, not {expected}")));
    }
    Ok(())
}
