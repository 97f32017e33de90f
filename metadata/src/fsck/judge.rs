//! What is wrong with the records among themselves: facts in, damage out.

use std::collections::HashMap;

use forebay_core::{Blob, FileKind, InodeId, ObjectKey, Version};

use super::damage::Damage;
use super::facts::{Facts, Node};
use crate::schema::{Counters, HolderState, Usage};

/// Everything that the records alone show to be wrong, but for the names that are to be put right.
pub(super) fn judge(facts: &mut Facts) -> Vec<Damage> {
    let mut damage = std::mem::take(&mut facts.damage);
    for (ino, node) in &facts.nodes {
        damage.extend(judge_node(facts, *ino, node));
    }
    damage.extend(judge_imports(facts));
    damage.extend(judge_trash(facts));
    damage.extend(judge_quotas(facts));
    damage.extend(judge_references(facts));
    damage.extend(judge_members(facts));
    damage.extend(judge_loans(facts));
    let is_empty = |(key, state): &(&ObjectKey, &HolderState)| !is_made(facts, key, state);
    damage
        .extend(facts.claims.iter().filter(is_empty).map(|(key, _)| Damage::EmptyClaim { key: key.clone() }));
    damage.extend(judge_counters(facts));
    damage
}

fn judge_node(facts: &Facts, ino: InodeId, node: &Node) -> Option<Damage> {
    let is_directory = node.kind == FileKind::Directory;
    let subdirectories = node.subdirectories;
    let is_root = ino == InodeId::ROOT;
    if node.names == 0 && !is_root {
        let is_kept = facts.open.contains(&ino) || facts.trashed.contains_key(&ino);
        return (node.nlink > 0 || !is_kept).then_some(Damage::LostInode {
            ino,
            kind: node.kind,
            subdirectories,
        });
    }
    let further = node.names.saturating_sub(1);
    let is_known = node.is_first_there && node.links == further && node.bad_links == 0;
    if !is_root && !is_known {
        return Some(Damage::WrongNames { ino, names: Vec::new() });
    }
    let found = if is_directory { 2 + subdirectories } else { node.names };
    (node.nlink != found).then_some(Damage::WrongLinkCount { ino, recorded: node.nlink, found })
}

fn judge_imports(facts: &Facts) -> Vec<Damage> {
    let mut damage = Vec::new();
    let is_directory =
        |ino: &InodeId| facts.nodes.get(ino).is_some_and(|node| node.kind == FileKind::Directory);
    for (ino, state) in &facts.imports {
        let why = match &state.prefix {
            _ if !is_directory(ino) => "it is no directory",
            // Directories that were renamed are listed from their old place until the mover has been there.
            Some(prefix) if facts.moving.is_empty() && facts.path(*ino).as_ref() != Some(prefix) => {
                "it is listed from a place that is not its own"
            }
            _ => continue,
        };
        damage.push(Damage::WrongImportState { ino: *ino, why });
    }
    for (ino, _) in facts.nodes.iter().filter(|(ino, _)| is_directory(ino)) {
        if !facts.imports.contains_key(ino) && !facts.trashed.contains_key(ino) {
            damage.push(Damage::WrongImportState { ino: *ino, why: "it has no place to be listed from" });
        }
    }
    damage
}

/// What is in the trash has no name.
fn judge_trash(facts: &Facts) -> Vec<Damage> {
    let is_deleted = |ino: &InodeId| facts.nodes.get(ino).is_some_and(|node| node.names == 0);
    let stray = facts.trashed.iter().filter(|(ino, _)| !is_deleted(ino));
    stray.map(|(ino, due_ms)| Damage::StrayTrash { ino: *ino, due_ms: *due_ms }).collect()
}

/// An inode counts in every directory above its first name; what no path leads to counts nowhere.
fn judge_quotas(facts: &Facts) -> Vec<Damage> {
    /// Deeper than any path that a program can open.
    const MOST_DEPTH: usize = 4096;
    let mut found: HashMap<InodeId, Usage> = HashMap::new();
    let named = facts.nodes.iter().filter(|(ino, node)| node.names > 0 && **ino != InodeId::ROOT);
    for (_, node) in named.take_while(|_| !facts.quotas.is_empty()) {
        let (mut at, mut counting) = (node.parent, Vec::new());
        for _ in 0..MOST_DEPTH {
            counting.extend(facts.quotas.contains_key(&at).then_some(at));
            match facts.nodes.get(&at) {
                _ if at == InodeId::ROOT => break,
                Some(above) if above.names > 0 => at = above.parent,
                _ => {
                    counting.clear();
                    break;
                }
            }
        }
        for directory in counting {
            let counted = found.entry(directory).or_default();
            *counted = *counted + Usage { inodes: 1, ..Usage::of_bytes(node.size) };
        }
    }
    let is_directory =
        |ino: &InodeId| facts.nodes.get(ino).is_some_and(|node| node.kind == FileKind::Directory);
    let wrong = facts.quotas.iter().filter_map(|(ino, quota)| {
        let found = is_directory(ino).then(|| found.get(ino).copied().unwrap_or_default());
        // One that is still being counted is right when that is done.
        let is_right = found.is_some_and(|found| !quota.is_counted || found == quota.usage);
        (!is_right).then_some(Damage::WrongQuota { ino: *ino, recorded: quota.usage, found })
    });
    wrong.collect()
}

/// Counts are of inodes, by key; versions of one owned key do not differ.
fn judge_references(facts: &Facts) -> Vec<Damage> {
    let mut found: HashMap<&ObjectKey, (&Blob, u64)> = HashMap::new();
    for (blob, used) in facts.blobs.iter().filter(|(blob, _)| blob.is_owned()) {
        found.entry(&blob.key).or_insert((blob, 0)).1 += used.inodes;
    }
    let mut damage = Vec::new();
    for (key, (blob, found)) in &found {
        let recorded = facts.references.get(*key).copied().unwrap_or(0);
        if recorded != *found {
            damage.push(Damage::WrongReferences { blob: (*blob).clone(), recorded, found: *found });
        }
    }
    for (key, recorded) in
        facts.references.iter().filter(|(key, count)| **count > 0 && !found.contains_key(key))
    {
        let blob = Blob { key: key.clone(), version: Version::new(""), size: 0 };
        damage.push(Damage::WrongReferences { blob, recorded: *recorded, found: 0 });
    }
    damage
}

/// Who refers to a segment is recorded, and nobody else.
fn judge_members(facts: &Facts) -> Vec<Damage> {
    let wrong = facts.in_segments.symmetric_difference(&facts.members);
    let damage = wrong.map(|member| {
        let (segment, ino) = member.clone();
        Damage::WrongMember { segment, ino, is_recorded: facts.members.contains(member) }
    });
    damage.collect()
}

fn judge_loans(facts: &Facts) -> Vec<Damage> {
    let all = facts.lent.keys().chain(facts.loans.keys().filter(|blob| !facts.lent.contains_key(blob)));
    let wrong = all.filter_map(|blob| {
        let recorded = facts.loans.get(blob).map_or(0, |loan| loan.count);
        let found = facts.lent.get(blob).copied().unwrap_or(0);
        (recorded != found).then(|| Damage::WrongLoan { blob: blob.clone(), recorded, found })
    });
    wrong.collect()
}

/// Whether a file, a write, a deletion or a renamed directory makes the claim.
fn is_made(facts: &Facts, key: &ObjectKey, state: &HolderState) -> bool {
    match state {
        HolderState::Held(ino) => {
            let home = facts.nodes.get(ino).and_then(|node| node.home.as_ref());
            home.is_some_and(|home| home.key == *key)
        }
        HolderState::Intended(ino) => {
            facts.intents.get(ino) == Some(key) || facts.unreadable_intents.contains(ino)
        }
        HolderState::Doomed { due_ms } => facts.deletions.contains(&(key.clone(), *due_ms)),
        HolderState::Subtree(ino) => facts.moving.contains(ino),
    }
}

fn judge_counters(facts: &Facts) -> Option<Damage> {
    let recorded = facts.counters;
    let next_ino =
        recorded.map_or(0, |counters| counters.next_ino).max(facts.first_free).max(InodeId::ROOT.0 + 1);
    let found = Counters { next_ino, inodes: facts.nodes.len() as u64, bytes: facts.bytes };
    (recorded != Some(found)).then_some(Damage::WrongCounters { recorded, found })
}
