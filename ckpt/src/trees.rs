//! Which tensors the trees of a step name that the step lacks: a restore of one that has any is refused, so that none is
//! committed, and whoever reads a step as a sceptic is told.
//!
//! Looks at the text of a tree, of which it keeps a name at a time and those that were not found, however long and deep the
//! text is. What tags it does not know are made of, and whether a tree is otherwise as the format has it, is for its readers.

use std::borrow::Cow;
use std::collections::HashSet;

use forebay_core::{Error, Result};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::manifest::Manifest;
use crate::plan::local_name;

/// Names that are told of one tree; of more than that, how many.
const MAX_TOLD: usize = 1000;
/// Lists and objects of JSON within each other. The format allows 200 of the tree's, and a dict is three of JSON's.
const MAX_DEPTH: usize = 1000;
/// Tags whose `n` names a tensor.
const NAMING: [&str; 5] = ["tensor", "array", "bytes", "bytearray", "pickle"];

/// What is wrong with the names in a step's trees, as text that follows on whatever is at fault; none where all are there.
pub(crate) fn faults(manifest: &Manifest) -> Vec<String> {
    let known: HashSet<&str> = manifest.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut faults = Vec::new();
    for extra in &manifest.extras {
        let Some((tree, rank)) = tree_of(&extra.name) else { continue };
        let readers = match (tree, rank) {
            ("state", 0) => readers_of_first(manifest),
            _ => vec![rank],
        };
        let (mut missed, mut count) = (HashSet::new(), 0);
        let looked = each_name(&extra.data, |name| {
            // Of many names most are of tensors that all ranks have: nothing is kept of them.
            if known.contains(&*name) || missed.contains(&name) {
                return;
            }
            let has_own = |rank: &&u32| known.contains(local_name(&name, **rank as usize).as_str());
            if let Some(rank) = readers.iter().find(|rank| !has_own(rank)) {
                count += 1;
                if count <= MAX_TOLD {
                    faults.push(format!("lacks tensor `{name}`, which the `{tree}` of rank {rank} names"));
                }
            }
            missed.insert(name);
        });
        if count > MAX_TOLD {
            let more = count - MAX_TOLD;
            faults.push(format!("lacks {more} more tensors that the `{tree}` of rank {} names", readers[0]));
        }
        if let Err(why) = looked {
            faults.push(format!("has a `{}` that is no tree: {why}", extra.name));
        }
    }
    faults
}

/// Refuses a step that no rank could restore.
///
/// # Errors
/// `Invalid` with the first of its faults.
pub(crate) fn check(manifest: &Manifest) -> Result<()> {
    let Some(fault) = faults(manifest).into_iter().next() else { return Ok(()) };
    let message = format!("step {}: what the ranks stored is no checkpoint: it {fault}", manifest.step);
    Err(Error::invalid(message))
}

/// Which tree an extra is, and of which rank; `None` where it is none.
fn tree_of(name: &str) -> Option<(&str, u32)> {
    let (tree, rank) = match name.split_once('@') {
        None => (name, 0),
        Some((tree, digits)) => {
            let rank: u32 = digits.parse().ok()?;
            (rank > 0 && rank.to_string() == digits).then_some((tree, rank))?
        }
    };
    matches!(tree, "state" | "rng").then_some((tree, rank))
}

/// The ranks that read the state of the first one: those that have none of their own, one more of them at most than there are
/// tensors. Of any name that many cannot all have a tensor of their own.
fn readers_of_first(manifest: &Manifest) -> Vec<u32> {
    let trees = manifest.extras.iter().filter_map(|extra| tree_of(&extra.name));
    let own: HashSet<u32> = trees.filter(|(tree, _)| *tree == "state").map(|(_, rank)| rank).collect();
    let others = (1..manifest.world_size).filter(|rank| !own.contains(rank));
    std::iter::once(0).chain(others).take(manifest.tensors.len() + 1).collect()
}

/// A tree, as deep as the format allows one.
///
/// # Errors
/// What makes it none.
pub(crate) fn tree(text: &str) -> std::result::Result<Value, String> {
    each_name(text, |_| {})?;
    let mut json = serde_json::Deserializer::from_str(text);
    json.disable_recursion_limit();
    Value::deserialize(&mut json).map_err(|error| error.to_string())
}

/// An object of JSON, as far as it was read. Texts are as they stand there, with their quotes.
#[derive(Default)]
struct Object<'a> {
    key: &'a str,
    is_value: bool,
    tag: Option<&'a str>,
    name: Option<&'a str>,
}

impl<'a> Object<'a> {
    /// Takes a text that lies in it, and in nothing else that does.
    fn take(&mut self, text: &'a str) {
        match (self.is_value, &*decoded(self.key)) {
            (false, _) => self.key = text,
            (true, "t") => self.tag = Some(text),
            (true, "n") => self.name = Some(text),
            (true, _) => {}
        }
    }

    /// The tensor that it names.
    fn named(self) -> Option<Cow<'a, str>> {
        let tag = decoded(self.tag?);
        NAMING.contains(&&*tag).then_some(decoded(self.name?))
    }
}

/// Gives the name of each tensor that a tree names, as often as it does.
///
/// # Errors
/// What makes it none.
fn each_name<'a>(text: &'a str, mut give: impl FnMut(Cow<'a, str>)) -> std::result::Result<(), String> {
    // Of what is ignored, however deep, the parser keeps a byte for each level.
    serde_json::from_str::<IgnoredAny>(text).map_err(|error| error.to_string())?;
    let bytes = text.as_bytes();
    // Lists are there for what lies in them: no part of the object around them.
    let mut open: Vec<Option<Object<'a>>> = Vec::new();
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let start = at;
        at += 1;
        match byte {
            b'"' => {
                at = end_of_text(bytes, at);
                if let Some(Some(object)) = open.last_mut() {
                    object.take(&text[start..at]);
                }
            }
            b'{' | b'[' if open.len() >= MAX_DEPTH => return Err("it is nested without end".into()),
            b'{' => open.push(Some(Object::default())),
            b'[' => open.push(None),
            b'}' | b']' => {
                if let Some(name) = open.pop().flatten().and_then(Object::named) {
                    give(name);
                }
            }
            b':' | b',' => {
                if let Some(Some(object)) = open.last_mut() {
                    object.is_value = *byte == b':';
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Behind the quote that ends a text of whole JSON, of which `at` is the first character.
fn end_of_text(bytes: &[u8], mut at: usize) -> usize {
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// What a text of JSON says; itself where that is no Unicode.
fn decoded(text: &str) -> Cow<'_, str> {
    let within = text.get(1..text.len().saturating_sub(1)).unwrap_or_default();
    match within.contains('\\') {
        false => Cow::Borrowed(within),
        true => Cow::Owned(serde_json::from_str(text).unwrap_or_else(|_| within.to_owned())),
    }
}

#[cfg(test)]
mod tests;
