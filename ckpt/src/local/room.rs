//! Room for a copy below a ceiling: what may go for it, and what must stay.
//!
//! Each rank has an equal share of the ceiling, and deletes only its own part of steps, and that of ranks which there are no
//! longer: no two ranks count or delete the same file.

use std::collections::{BTreeMap, BTreeSet};

use forebay_core::{ObjectKey, Result};
use forebay_io::object::ObjectInfo;
use futures::TryStreamExt;

use super::{Local, NoteKey, SEALS, age};
use crate::arena::{Held, HeldStep, attempt_of};
use crate::manifest::{ShardKey, write_local};

/// A start's place among all starts, and a step of it; none where another start saved it.
type Age = Option<(usize, u64)>;

/// A rank's files of one step, seals first.
#[derive(Default)]
struct Files {
    keys: Vec<ObjectKey>,
    bytes: u64,
}

impl Local {
    /// Makes room for a rank's part of a step, where all ranks together may have `ceiling` bytes here; says whether there
    /// is any. Steps that are in the store go first, the oldest before others, then those that no restore would take. The
    /// newest step that is whole stays until it is in the store, and so does one that is being `read` for it. Where all that is
    /// not enough, nothing goes.
    pub async fn make_room(
        &self,
        held: &Held,
        starts: &[String],
        ceiling: u64,
        read: Option<&HeldStep>,
    ) -> Result<bool> {
        let share = ceiling / u64::from(held.world_size.max(1));
        let wanted = held.seal.size + write_local(held)?.len() as u64;
        if wanted > share {
            return Ok(false);
        }
        let notes = self.notes().await?;
        let listed = self.list_files().await?;
        let Some(starts) = self.present(starts).await? else { return Ok(false) };
        let starts = &starts[..];
        let durable: BTreeSet<Age> = notes
            .iter()
            .filter(|note| note.is_durable)
            .map(|note| age(starts, &note.attempt, note.step))
            .collect();
        let newest = self.whole_steps(starts, &notes).into_iter().next();
        let newest = newest.and_then(|step| age(starts, attempt_of(&step.name.start), step.name.step));
        let mut files = files(held, starts, &listed);
        let mut left: u64 = files.values().map(|files| files.bytes).sum();
        let read = read.and_then(|read| age(starts, attempt_of(&read.start), read.step));
        let may_go = |of: &Age| of.is_none() || (*of != read && (durable.contains(of) || *of < newest));
        let mut order: Vec<Age> = files.keys().copied().filter(may_go).collect();
        order.sort_by_key(|of| (of.is_some() && !durable.contains(of), *of));
        let mut going = Vec::new();
        for files in order.into_iter().filter_map(|of| files.remove(&of)) {
            if left + wanted <= share {
                break;
            }
            left -= files.bytes;
            going.extend(files.keys);
        }
        if left + wanted > share {
            return Ok(false);
        }
        self.0.delete_many(&going).await?;
        Ok(true)
    }

    /// Seals, and shards.
    async fn list_files(&self) -> Result<[Vec<ObjectInfo>; 2]> {
        Ok([self.0.list(SEALS).try_collect().await?, self.0.list("shards").try_collect().await?])
    }
}

/// What a rank is to count, by step.
fn files(held: &Held, starts: &[String], [seals, shards]: &[Vec<ObjectInfo>; 2]) -> BTreeMap<Age, Files> {
    let mut found: BTreeMap<Age, Files> = BTreeMap::new();
    // An agent that takes another one's place writes the same files again; another save of the step has its own.
    let seal = NoteKey::of(&held.name(), held.rank, held.world_size, false).object();
    let replaced = [held.key().object(), seal];
    let mut take = |attempt: &str, step, rank: u32, ObjectInfo { key, size, .. }: &ObjectInfo| {
        if rank % held.world_size.max(1) == held.rank && !replaced.contains(key) {
            let files = found.entry(age(starts, attempt, step)).or_default();
            files.keys.push(key.clone());
            files.bytes += size;
        }
    };
    for object in seals {
        // That a step is in the store is told to other ranks, too, and takes no bytes.
        if let Some(note) = NoteKey::parse(&object.key).filter(|note| !note.is_durable) {
            take(&note.attempt, note.step, note.rank, object);
        }
    }
    for object in shards {
        if let Some(shard) = ShardKey::parse(object.key.as_str()) {
            take(&shard.attempt, shard.step, shard.rank, object);
        }
    }
    found
}
