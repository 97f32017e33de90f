//! What a tree names, and which of that can be there.

use std::collections::{HashMap, HashSet};

use forebay_core::{Blob, ObjectKey, Version};

use super::naming::{Naming, Role};

/// The objects that the records of a tree name.
#[derive(Debug, Default)]
pub(super) struct Named {
    pub(super) blobs: HashSet<Blob>,
    /// The contents that are known of a key of the user's.
    plain: HashMap<ObjectKey, Contents>,
    /// Lent objects and the copies that are meant instead.
    pub(super) moved: HashMap<Blob, Blob>,
    /// The keys of writes that may or may not have happened.
    pub(super) intended: HashSet<ObjectKey>,
}

/// Versions of one key.
#[derive(Debug, Default)]
struct Contents {
    /// As files' own objects.
    homes: HashSet<Version>,
    /// As anything else, but for what lies elsewhere by now.
    others: HashSet<Version>,
}

impl Contents {
    /// The one that is there: what a file has as its own, else the only one.
    fn current(&self) -> Option<&Version> {
        let found = if self.homes.is_empty() { &self.others } else { &self.homes };
        found.iter().next().filter(|_| found.len() == 1)
    }
}

impl Named {
    /// Takes what a record names. Loans come before layouts.
    pub(super) fn take(&mut self, mut record: Naming) {
        match &record {
            Naming::Loan(loan) => {
                self.moved.extend(loan.moved.clone().map(|copy| (loan.blob.clone(), copy)));
            }
            Naming::Intent(intent) => drop(self.intended.insert(intent.key.clone())),
            _ => {}
        }
        for (role, blob) in record.blobs() {
            if !blob.is_owned() {
                let contents = self.plain.entry(blob.key.clone()).or_default();
                match role {
                    Role::Home => drop(contents.homes.insert(blob.version.clone())),
                    _ if self.moved.contains_key(blob) => {}
                    _ => drop(contents.others.insert(blob.version.clone())),
                }
            }
            if !self.blobs.contains(blob) {
                self.blobs.insert(blob.clone());
            }
        }
    }

    /// The plain objects that were replaced before the bucket was copied, as far as records tell: what lies at their keys is
    /// another content, whatever its size.
    pub(super) fn replaced(&self) -> HashSet<Blob> {
        let is_current = |blob: &Blob| {
            let contents = self.plain.get(&blob.key);
            contents.and_then(Contents::current).is_some_and(|version| *version == blob.version)
        };
        let replaced = self.blobs.iter().filter(|blob| !blob.is_owned() && !is_current(blob));
        replaced.cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use forebay_core::{Extent, FileKind, Source, Timestamp};

    use super::*;
    use crate::schema::{Deletion, Inode, Loan};

    fn blob(key: &str, version: &str) -> Blob {
        Blob { key: ObjectKey::new(key), version: Version::new(version), size: 1 }
    }

    fn file(home: Option<&str>, layout: &[&str]) -> Naming {
        let mut inode = Inode::new(FileKind::File, 0o644, (0, 0), Timestamp::default());
        inode.home = home.map(|version| blob("k", version));
        let extent = |(at, version): (usize, &&str)| Extent {
            offset: at as u64,
            length: 1,
            source: Source::Blob { blob: blob("k", version), offset: 0 },
        };
        inode.extents = layout.iter().enumerate().map(extent).collect();
        Naming::Inode(Box::new(inode))
    }

    fn doomed(version: &str) -> Naming {
        Naming::Deletion(Deletion { blob: blob("k", version), session: None })
    }

    fn lent(version: &str, is_moved: bool) -> Naming {
        let moved = is_moved.then(|| blob(".forebay/blobs/s/n", "v"));
        Naming::Loan(Loan { blob: blob("k", version), count: 1, moved })
    }

    #[track_caller]
    fn check(records: Vec<Naming>, replaced: &[&str]) {
        let mut named = Named::default();
        records.into_iter().for_each(|record| named.take(record));
        let mut found: Vec<String> =
            named.replaced().into_iter().map(|blob| blob.version.as_str().to_owned()).collect();
        found.sort();
        assert_eq!(found, replaced);
    }

    #[test]
    fn of_several_contents_of_a_key_one_at_most_is_there() {
        check(vec![file(Some("1"), &["1"])], &[]);
        check(vec![lent("1", false), file(Some("1"), &["1"]), file(None, &["1"])], &[]);
        check(vec![doomed("1")], &[]);
        check(vec![doomed("1"), file(None, &["1"])], &[]);
        // What was deleted is not what was written there since.
        check(vec![doomed("1"), file(Some("2"), &["2"])], &["1"]);
        // Lent bytes that were copied away before the object was replaced.
        check(vec![lent("1", true), file(Some("2"), &["2"]), file(None, &["1"])], &["1"]);
        check(vec![lent("1", true), doomed("2"), file(None, &["1"])], &["1"]);
        check(vec![lent("1", true), file(Some("1"), &["1"]), file(None, &["1"])], &[]);
        // Nothing tells which of them it is.
        check(vec![doomed("1"), doomed("2")], &["1", "2"]);
        check(vec![file(Some("1"), &[]), file(Some("2"), &[])], &["1", "2"]);
    }
}
