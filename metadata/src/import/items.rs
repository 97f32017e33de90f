//! From a listing to names. Pure.

use bytes::Bytes;
use forebay_core::InodeId;
use forebay_io::object::{Listing, ObjectInfo, Skipped};

use crate::records::{check_name, is_reserved, prefix_with_slash};

/// What a listing has under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Item {
    /// An object.
    File(ObjectInfo),
    /// Keys below.
    Directory,
}

/// A listing by names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Items {
    /// In name order, each name once.
    pub(super) items: Vec<(Bytes, Item)>,
    /// Objects and prefixes that cannot be shown.
    pub(super) skipped: Skipped,
}

/// What follows the name of an object that lies beside keys below it: the directory has the name itself.
pub(super) const OBJECT_SUFFIX: &[u8] = b".object";

impl Items {
    /// Names what was listed for `directory` from `prefix`.
    pub(super) fn of(directory: InodeId, prefix: &str, listing: Listing) -> Self {
        let prefix = prefix_with_slash(prefix);
        let mut skipped = listing.skipped;
        let mut items: Vec<(Bytes, Item)> =
            Vec::with_capacity(listing.objects.len() + listing.directories.len());
        items.extend(listing.directories.into_iter().map(|name| (name.into(), Item::Directory)));
        items.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        let directories = items.len();
        for info in listing.objects {
            let name = info.key.as_str().strip_prefix(&prefix).unwrap_or_default();
            let mut name = Bytes::copy_from_slice(name.as_bytes());
            let is_free = !is_reserved(directory, &name);
            if is_free && items[..directories].binary_search_by(|item| item.0.cmp(&name)).is_ok() {
                name = beside(&name);
            }
            items.push((name, Item::File(info)));
        }
        let mut skip = |(name, item): &(Bytes, Item)| {
            skipped.note(Some(match item {
                Item::File(info) => info.key.as_str().to_owned(),
                Item::Directory => format!("{prefix}{}/", String::from_utf8_lossy(name)),
            }));
            false
        };
        items.retain(|(name, _)| !is_reserved(directory, name));
        items.retain(|item| check_name(&item.0).is_ok() || skip(item));
        items.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(rank(a).cmp(&rank(b))));
        items.dedup_by(|later, first| later.0 == first.0 && !skip(later));
        Self { items, skipped }
    }

    /// What was listed under `name`.
    pub(super) fn get(&self, name: &[u8]) -> Option<&Item> {
        let position = self.items.binary_search_by(|item| item.0[..].cmp(name)).ok()?;
        Some(&self.items[position].1)
    }

    /// Whether the object `name` was listed, be it under that name or beside a directory of that name.
    pub(super) fn has_object(&self, name: &[u8]) -> bool {
        let is_file = |item: Option<&Item>| matches!(item, Some(Item::File(_)));
        match self.get(name) {
            Some(Item::Directory) => is_file(self.get(&beside(name))),
            other => is_file(other),
        }
    }
}

/// Who gets a name that several want: a directory, the object whose key spells it, one beside a directory.
fn rank((name, item): &(Bytes, Item)) -> u8 {
    match item {
        Item::Directory => 0,
        Item::File(info) => 1 + u8::from(!info.key.as_str().as_bytes().ends_with(name)),
    }
}

/// `a` as `a.object`.
pub(super) fn beside(name: &[u8]) -> Bytes {
    [name, OBJECT_SUFFIX].concat().into()
}

#[cfg(test)]
mod tests {
    use forebay_core::{ObjectKey, Timestamp, Version};

    use super::*;

    fn object(key: &str) -> ObjectInfo {
        let (key, version) = (ObjectKey::new(key), Version::new("1"));
        ObjectInfo { key, version, size: 1, modified: Timestamp::default() }
    }

    /// Names and, for objects, keys; then the number of things left out.
    fn check(
        directory: u64,
        prefix: &str,
        objects: &[&str],
        directories: &[&str],
        expected: &[&str],
        skipped: u64,
    ) {
        let objects = objects.iter().map(|key| object(key)).collect();
        let directories = directories.iter().map(|name| (*name).to_owned()).collect();
        let listing = Listing { objects, directories, ..Listing::default() };
        let items = Items::of(InodeId(directory), prefix, listing);
        let shown: Vec<String> = items
            .items
            .iter()
            .map(|(name, item)| {
                let name = String::from_utf8_lossy(name);
                match item {
                    Item::File(info) => format!("{name}={}", info.key),
                    Item::Directory => format!("{name}/"),
                }
            })
            .collect();
        assert_eq!(shown, expected);
        assert_eq!(items.skipped.keys, skipped);
    }

    #[test]
    fn a_listing_becomes_names() {
        check(1, "", &["b", "a"], &["c"], &["a=a", "b=b", "c/"], 0);
        check(2, "x/y", &["x/y/b"], &[], &["b=x/y/b"], 0);
        check(1, "", &["a"], &["a"], &["a/", "a.object=a"], 0);
        check(1, "", &["a", "a.object"], &["a"], &["a/", "a.object=a.object"], 1);
        check(1, "", &["a"], &["a", "a.object"], &["a/", "a.object/"], 1);
        check(1, "", &[".forebay"], &[".forebay", "b"], &["b/"], 0);
        let long = "n".repeat(256);
        check(1, "", &[&long, "..", "ok", ""], &["."], &["ok=ok"], 4);
        check(2, "p", &["p/.forebay"], &[".forebayx"], &[".forebay=p/.forebay", ".forebayx/"], 0);
    }

    #[test]
    fn the_first_that_cannot_be_shown_is_named() {
        let first = |objects: &[&str], directories: &[&str], skipped: Option<&str>| {
            let skipped = Skipped { keys: 0, first: skipped.map(str::to_owned) };
            let objects = objects.iter().map(|key| object(key)).collect();
            let directories = directories.iter().map(|name| (*name).to_owned()).collect();
            let listing = Listing { objects, directories, skipped, ..Listing::default() };
            Items::of(InodeId(2), "p", listing).skipped.first
        };
        let long = "n".repeat(256);
        assert_eq!(first(&["p/a"], &["b"], None), None);
        assert_eq!(first(&["p/a", &format!("p/{long}")], &[], None), Some(format!("p/{long}")));
        assert_eq!(first(&[], &[&long], None), Some(format!("p/{long}/")));
        assert_eq!(first(&["p/a", "p/a.object"], &["a"], None).as_deref(), Some("p/a"));
        assert_eq!(first(&["p/.."], &[], Some("p//")).as_deref(), Some("p//"), "that of the listing");
    }

    #[test]
    fn an_object_beside_a_directory_is_found_by_its_key() {
        let listing = Listing {
            objects: vec![object("a"), object("b")],
            directories: vec!["a".into(), "c".into()],
            ..Listing::default()
        };
        let items = Items::of(InodeId::ROOT, "", listing);
        assert!(items.has_object(b"a") && items.has_object(b"b"));
        assert!(!items.has_object(b"c") && !items.has_object(b"d"));
        assert_eq!(items.get(b"a"), Some(&Item::Directory));
    }
}
