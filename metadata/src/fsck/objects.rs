//! The tree's blobs against the bucket's objects: one listing, streamed.

use std::collections::{HashMap, HashSet};

use forebay_core::{Blob, ObjectKey, Result};
use forebay_io::object::{Bucket, ObjectInfo};
use futures::stream::TryStreamExt;

use super::damage::{Damage, MISSING};
use super::evidence::Known;
use super::facts::{Facts, Use};
use crate::records::session_of;
use crate::schema::HolderState;
use crate::volume_file::VolumeRecord;

/// What the comparison came to.
#[derive(Debug, Default)]
pub(super) struct Compared {
    pub(super) damage: Vec<Damage>,
    /// Blobs that only the tree knows of and that are not there as they were, and how they are instead.
    pub(super) lacking: HashMap<Blob, &'static str>,
    pub(super) known: Known,
    pub(super) objects: u64,
    pub(super) changed_outside: u64,
    pub(super) foreign: u64,
    pub(super) foreign_bytes: u64,
}

/// Looks every object of the bucket up in `facts`.
pub(super) async fn compare(bucket: &Bucket, facts: &Facts) -> Result<Compared> {
    let mut wanted: HashMap<&ObjectKey, Vec<(&Blob, &Use)>> = HashMap::with_capacity(facts.blobs.len());
    for (blob, used) in &facts.blobs {
        wanted.entry(&blob.key).or_default().push((blob, used));
    }
    let queued: HashSet<&ObjectKey> = facts.deletions.iter().map(|(key, _)| key).collect();
    let mut compared = Compared::default();
    let mut listing = bucket.list("");
    while let Some(info) = listing.try_next().await? {
        match wanted.remove(&info.key) {
            Some(uses) => {
                compared.objects += 1;
                compared.known.there(&info.key, uses.iter().any(|(blob, _)| is_held(facts, blob)));
                for (blob, _) in uses {
                    if let Some(why) = fault(blob, &info) {
                        compared.lacks(facts, blob, why);
                    }
                }
            }
            None if info.key.as_str() == VolumeRecord::KEY => compared.known.has_record = true,
            // What came back after it was given up is for people to look at.
            None if facts.given_up.contains(&info.key) => {}
            None if queued.contains(&info.key) || facts.named.contains(&info.key) => {}
            None => compared.unnamed(facts, info),
        }
    }
    for (key, uses) in wanted {
        if uses.iter().any(|(blob, _)| blob.staged_on().is_none()) {
            let is_held = |(blob, _): &(&Blob, &Use)| blob.staged_on().is_none() && is_held(facts, blob);
            compared.known.missing(key, uses.iter().any(is_held));
        }
        for (blob, used) in uses {
            match blob.staged_on() {
                Some(host) => compared.damage.push(Damage::NotUploaded {
                    ino: used.ino,
                    key: blob.key.clone(),
                    host: host.to_owned(),
                }),
                None => compared.lacks(facts, blob, MISSING),
            }
        }
    }
    Ok(compared)
}

/// How the object differs from the blob; stores without versions are asked for the size only.
fn fault(blob: &Blob, info: &ObjectInfo) -> Option<&'static str> {
    let is_versioned = !blob.version.as_str().is_empty() && blob.staged_on().is_none();
    let has_versions = is_versioned && !info.version.as_str().is_empty();
    match () {
        () if blob.size != info.size => Some("of another size"),
        () if has_versions && blob.version != info.version => Some("of another version"),
        () => None,
    }
}

/// Whether it holds bytes that only the tree knows of: all do but an object at the path of its own file, which is the
/// user's to change, and the next listing shows it.
fn is_held(facts: &Facts, blob: &Blob) -> bool {
    let is_claimed = matches!(facts.claims.get(&blob.key), Some(HolderState::Held(_)));
    blob.is_owned() || is_claimed || facts.lent.contains_key(blob)
}

impl Compared {
    /// Takes note of an object that no record names. Blobs of living sessions are on their way.
    fn unnamed(&mut self, facts: &Facts, info: ObjectInfo) {
        let ObjectInfo { key, size: bytes, .. } = info;
        if !key.as_str().starts_with(Blob::OWNED_PREFIX) {
            return;
        }
        match session_of(&key) {
            Some(session) if facts.sessions.living.contains(&session) => {}
            // gc frees none of them, and a dump may name them.
            Some(session) if !facts.sessions.known.contains(&session) => {
                self.foreign += 1;
                self.foreign_bytes += bytes;
            }
            _ => self.damage.push(Damage::LeakedBlob { key, bytes }),
        }
    }

    fn lacks(&mut self, facts: &Facts, blob: &Blob, why: &'static str) {
        if is_held(facts, blob) {
            self.lacking.insert(blob.clone(), why);
        } else {
            self.changed_outside += 1;
        }
    }
}
