//! ListObjectsV2 over a sorted map of keys.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use super::object::Object;

/// What a listing asks for.
#[derive(Debug, Clone, Default)]
pub(super) struct ListQuery {
    pub(super) prefix: String,
    pub(super) delimiter: String,
    /// List only keys after this one.
    pub(super) start_after: String,
    /// Where the previous page ended: the last key or common prefix that it gave.
    pub(super) token: Option<String>,
    /// Entries on a page.
    pub(super) limit: usize,
}

/// A page of a listing.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) objects: Vec<(String, Arc<Object>)>,
    pub(super) prefixes: Vec<String>,
    /// Where the next page starts, when there is one.
    pub(super) next: Option<String>,
}

/// One page of the keys in `objects`.
pub(super) fn page(objects: &BTreeMap<String, Arc<Object>>, query: &ListQuery) -> Page {
    let mut page = Page::default();
    let mut last = String::new();
    let mut cursor = first(query);
    while let Some((key, object)) = objects.range((cursor.clone(), Bound::Unbounded)).next() {
        let Some(rest) = key.strip_prefix(query.prefix.as_str()) else { break };
        if page.objects.len() + page.prefixes.len() == query.limit {
            page.next = Some(last);
            break;
        }
        let folded = match query.delimiter.as_str() {
            "" => None,
            delimiter => rest.find(delimiter).map(|at| &key[..query.prefix.len() + at + delimiter.len()]),
        };
        match folded {
            Some(common) => {
                last = common.to_owned();
                page.prefixes.push(last.clone());
                cursor = past(common);
            }
            None => {
                last = key.clone();
                page.objects.push((key.clone(), object.clone()));
                cursor = Bound::Excluded(last.clone());
            }
        }
    }
    page
}

/// Where the first key of a page may lie.
fn first(query: &ListQuery) -> Bound<String> {
    match query.token.as_deref() {
        Some(token) if is_common_prefix(token, query) => past(token),
        Some(token) => Bound::Excluded(token.to_owned()),
        None if query.start_after >= query.prefix && !query.start_after.is_empty() => {
            Bound::Excluded(query.start_after.clone())
        }
        None => Bound::Included(query.prefix.clone()),
    }
}

/// Whether a page ended with this common prefix; a key that ends with the delimiter is one only below the prefix.
fn is_common_prefix(token: &str, query: &ListQuery) -> bool {
    !query.delimiter.is_empty() && token.len() > query.prefix.len() && token.ends_with(&query.delimiter)
}

/// Past every key that starts with `common`.
fn past(common: &str) -> Bound<String> {
    Bound::Excluded(format!("{common}{}", char::MAX))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::HeaderMap;

    use super::*;

    /// Walks all pages of `limit` entries; objects and common prefixes in the order they came.
    fn check(query: ListQuery, wanted: &[&str]) {
        let keys = ["a", "a/", "a/b", "a/c/d", "a/c/e", "a-b", "b/x", "c", "é/z"];
        let object = Arc::new(Object::new(vec![Bytes::new()], "\"1\"".into(), HeaderMap::new()));
        let objects = keys.iter().map(|key| (key.to_string(), object.clone())).collect();
        for limit in [1, 2, 3, 1000] {
            let mut found: Vec<String> = Vec::new();
            let mut token = None;
            loop {
                let page = page(&objects, &ListQuery { limit, token, ..query.clone() });
                assert!(page.objects.len() + page.prefixes.len() <= limit);
                found.extend(page.objects.into_iter().map(|(key, _)| key));
                found.extend(page.prefixes);
                token = page.next;
                if token.is_none() {
                    break;
                }
            }
            found.sort();
            assert_eq!(found, wanted, "limit {limit}");
        }
    }

    #[test]
    fn pages_cover_every_key_once() {
        let query = |prefix: &str, delimiter: &str, start_after: &str| ListQuery {
            prefix: prefix.into(),
            delimiter: delimiter.into(),
            start_after: start_after.into(),
            ..Default::default()
        };
        check(query("", "", ""), &["a", "a-b", "a/", "a/b", "a/c/d", "a/c/e", "b/x", "c", "é/z"]);
        check(query("", "/", ""), &["a", "a-b", "a/", "b/", "c", "é/"]);
        check(query("a/", "/", ""), &["a/", "a/b", "a/c/"]);
        check(query("a/", "", ""), &["a/", "a/b", "a/c/d", "a/c/e"]);
        check(query("", "", "a/c/d"), &["a/c/e", "b/x", "c", "é/z"]);
        check(query("x", "", ""), &[]);
    }
}
