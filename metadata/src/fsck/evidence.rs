//! What has to be seen before bytes are given up: the store answers for the place where they were, not too much is missing
//! at once, and twice, with other work between, it is said that they are not there.
//!
//! A file system that is not mounted, a server that is empty, or a cache that is behind say "missing" of all that is there.

use std::collections::{HashMap, HashSet};

use forebay_core::{Blob, ObjectKey};

use super::damage::{Loss, MISSING};
use crate::mover::Mover;
use crate::volume_file::VolumeRecord;

/// Fewer missing objects are never too many.
const FEW: u64 = 10;
/// One in so many known objects may be missing.
const MOST_SHARE: u64 = 10;

/// What a check does about what it finds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Repair {
    /// Nothing.
    #[default]
    No,
    /// Mends what can be mended. Bytes are given up only where the store shows other objects beside them, and not if
    /// more than a tenth of all are missing.
    Careful,
    /// Mends, and gives up all that the store says is missing.
    AcceptLoss,
}

impl From<bool> for Repair {
    fn from(repair: bool) -> Self {
        if repair { Self::Careful } else { Self::No }
    }
}

/// Which of the objects that the tree needs the bucket showed.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// By the directories of their keys.
    places: HashMap<String, Place>,
    /// Some owned blob, and some object, that was there.
    owned: Option<ObjectKey>,
    any: Option<ObjectKey>,
    /// Objects that hold bytes which only the tree knows of, and those of them that were missing.
    held: u64,
    missing: u64,
    /// All that the tree knows of, and those of them that were missing.
    all: u64,
    absent: u64,
    /// Whether the volume's own record was there.
    pub(super) has_record: bool,
}

#[derive(Debug, Default)]
struct Place {
    missing: u64,
    seen: Option<ObjectKey>,
}

fn directory(key: &ObjectKey) -> &str {
    key.as_str().rsplit_once('/').map_or("", |(directory, _)| directory)
}

fn is_owned(key: &ObjectKey) -> bool {
    key.as_str().starts_with(Blob::OWNED_PREFIX)
}

impl Known {
    /// Notes an object that is there; `is_held` if only the tree knows what it holds.
    pub(super) fn there(&mut self, key: &ObjectKey, is_held: bool) {
        self.held += u64::from(is_held);
        self.all += 1;
        self.any.get_or_insert_with(|| key.clone());
        if is_owned(key) {
            self.owned.get_or_insert_with(|| key.clone());
        }
        if self.places.get(directory(key)).is_none_or(|place| place.seen.is_none()) {
            self.places.entry(directory(key).to_owned()).or_default().seen = Some(key.clone());
        }
    }

    /// Notes one that is missing; `is_held` if only the tree knew what it held.
    pub(super) fn missing(&mut self, key: &ObjectKey, is_held: bool) {
        self.held += u64::from(is_held);
        self.missing += u64::from(is_held);
        self.all += 1;
        self.absent += 1;
        self.places.entry(directory(key).to_owned()).or_default().missing += 1;
    }

    /// An object that shows that the place of `key` can be seen: one beside it, or, where no other was ever known there, the
    /// next best.
    fn witness(&self, key: &ObjectKey) -> Option<&ObjectKey> {
        let place = self.places.get(directory(key));
        match place {
            Some(Place { seen: Some(seen), .. }) => Some(seen),
            Some(place) if place.missing > 1 => None,
            _ if is_owned(key) => self.owned.as_ref(),
            _ => self.any.as_ref(),
        }
    }

    /// Why nothing at all is to be given up.
    fn is_too_much(&self) -> Option<String> {
        let is_many = |missing: u64, of: u64| missing >= FEW && missing.saturating_mul(MOST_SHARE) > of;
        let (missing, of, which) = match self {
            Self { missing, held, .. } if is_many(*missing, *held) => (missing, held, "hold bytes of files"),
            Self { absent, all, .. } if is_many(*absent, *all) => {
                (absent, all, "files need or were listed for")
            }
            _ => return None,
        };
        Some(format!(
            "{missing} of the {of} objects that {which} are missing: is all of the bucket there, and is it the right one?"
        ))
    }
}

/// Looks at what is to be given up.
pub(super) struct Evidence<'a> {
    mover: &'a Mover,
    known: &'a Known,
    repair: Repair,
    /// What was missing at the first look, and, at the second, whether it is.
    missing: HashSet<&'a ObjectKey>,
    gone: HashMap<&'a ObjectKey, bool>,
    witnesses: HashMap<ObjectKey, bool>,
    /// Why something was not given up that the store says is missing.
    pub(super) refused: Option<String>,
}

impl<'a> Evidence<'a> {
    /// Takes the first look at what `losses` miss.
    pub(super) async fn gather(
        mover: &'a Mover,
        known: &'a Known,
        repair: Repair,
        losses: Vec<&'a Loss>,
    ) -> Self {
        let keys: HashSet<&ObjectKey> =
            losses.into_iter().filter(|loss| loss.why == MISSING).map(|loss| &loss.blob.key).collect();
        let mut missing = HashSet::new();
        for key in keys {
            if is_there(mover, key).await == Some(false) {
                missing.insert(key);
            }
        }
        Self { mover, known, repair, missing, gone: HashMap::new(), witnesses: HashMap::new(), refused: None }
    }

    /// Whether the object is certainly gone: the second look.
    pub(super) async fn is_final(&mut self, loss: &'a Loss) -> bool {
        let key = &loss.blob.key;
        if loss.why != MISSING || !self.missing.contains(key) {
            return false;
        }
        if let Some(known) = self.gone.get(key) {
            return *known;
        }
        if self.repair != Repair::AcceptLoss
            && let Some(why) = self.objection(key).await
        {
            self.refused.get_or_insert(why);
            self.gone.insert(key, false);
            return false;
        }
        let is_gone = is_there(self.mover, key).await == Some(false);
        self.gone.insert(key, is_gone);
        is_gone
    }

    /// What speaks against giving up what is missing at `key`.
    async fn objection(&mut self, key: &ObjectKey) -> Option<String> {
        let why = self.known.is_too_much();
        if why.is_some() {
            return why;
        }
        let record = self.known.has_record.then(|| ObjectKey::new(VolumeRecord::KEY));
        let Some(witness) = self.known.witness(key).cloned() else {
            let place = if is_owned(key) { Blob::OWNED_PREFIX } else { directory(key) };
            return Some(format!(
                "none of the objects that files need below `{place}` is there: is all of the bucket there, and is it the \
                 right one?"
            ));
        };
        for witness in [Some(witness), record].into_iter().flatten() {
            let is_seen = match self.witnesses.get(&witness) {
                Some(known) => *known,
                None => is_there(self.mover, &witness).await == Some(true),
            };
            self.witnesses.insert(witness.clone(), is_seen);
            if !is_seen {
                return Some(format!("`{witness}` was there and is not seen now"));
            }
        }
        None
    }
}

/// Whether the object is there now. Only the store's own answer counts.
async fn is_there(mover: &Mover, key: &ObjectKey) -> Option<bool> {
    match mover.bucket().head(key).await {
        Ok(found) => Some(found.is_some()),
        Err(error) => {
            tracing::warn!(%error, %key, "the store does not say whether it is there");
            None
        }
    }
}
