//! The state tree, as far as an export needs it: where the tensors of a part are, and what they are called.

use forebay_core::{Error, Result};
use serde_json::{Value, json};

/// The tags of dicts of every kind, whose `v` are pairs of a key and a value.
const KEYED: [&str; 4] = ["dict", "odict", "counter", "defaultdict"];

/// A tensor that the tree names, and how it lies in it if it is a view: shape, stride and offset, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    /// Where it is in the part, with dots.
    pub(super) path: String,
    /// What the step calls it.
    pub(super) tensor: String,
    pub(super) view: Option<View>,
}

/// Shape, strides and the first element.
pub(super) type View = (Vec<u64>, Vec<u64>, u64);

/// The tensors of the part of a state that `part` names, keys with dots between them; empty for all of it.
///
/// # Errors
/// `Invalid` when there is no such part, or it holds none.
pub(super) fn tensors(tree: &Value, part: &str) -> Result<Vec<Named>> {
    let mut node = tree;
    for key in part.split('.').filter(|key| !key.is_empty()) {
        let entries = entries(node)?.unwrap_or_default();
        let Some((_, found)) = entries.iter().find(|(name, _)| name == key) else {
            let there: Vec<_> = entries.iter().map(|(name, _)| format!("`{name}`")).collect();
            let there = if there.is_empty() { "nothing".to_owned() } else { there.join(", ") };
            let message = format!("the state has no part `{part}`: `{key}` is not among {there}");
            return Err(Error::invalid(message).with_hint("--part says which, '' for all of the state"));
        };
        node = found;
    }
    let mut found = Vec::new();
    collect(node, "", &mut found)?;
    if found.is_empty() {
        let message = format!("part `{part}` of the state holds no tensors");
        return Err(Error::invalid(message).with_hint("--part says which, '' for all of the state"));
    }
    Ok(found)
}

/// The tree of a state that is a dict of tensors below `part`; `tensors` are pairs of a key and the tensor's name.
pub(super) fn state<'a>(part: &str, tensors: impl Iterator<Item = (&'a str, &'a str)>) -> Value {
    let items: Vec<Value> = tensors.map(|(key, name)| json!([key, {"t": "tensor", "n": name}])).collect();
    let keys = part.split('.').filter(|key| !key.is_empty());
    keys.rev().fold(json!({"t": "dict", "v": items}), |node, key| json!({"t": "dict", "v": [[key, node]]}))
}

fn collect(node: &Value, path: &str, found: &mut Vec<Named>) -> Result<()> {
    let node = state_of(node);
    for (key, value) in entries(node)?.unwrap_or_default() {
        let below = if path.is_empty() { key } else { format!("{path}.{key}") };
        collect(value, &below, found)?;
    }
    if node["t"] == "tensor" {
        let tensor = node["n"].as_str().ok_or_else(odd)?.to_owned();
        let view = node.get("view").map(|view| serde_json::from_value(view.clone()).map_err(|_| odd()));
        found.push(Named { path: path.to_owned(), tensor, view: view.transpose()? });
    }
    Ok(())
}

/// What a container holds, by its keys as text; `None` for anything else. An object stands for its state.
fn entries(node: &Value) -> Result<Option<Vec<(String, &Value)>>> {
    let node = state_of(node);
    let numbered = |parts: &'_ [Value]| (0..parts.len()).map(|index| index.to_string()).collect::<Vec<_>>();
    if let Value::Array(parts) = node {
        return Ok(Some(numbered(parts).into_iter().zip(parts).collect()));
    }
    let parts = match node["v"].as_array() {
        Some(parts) if node["t"] == "tuple" => {
            return Ok(Some(numbered(parts).into_iter().zip(parts).collect()));
        }
        Some(parts) if KEYED.iter().any(|tag| node["t"] == *tag) => parts,
        _ => return Ok(None),
    };
    let mut entries = Vec::with_capacity(parts.len());
    for part in parts {
        let pair = part.as_array().filter(|pair| pair.len() == 2).ok_or_else(odd)?;
        entries.push((text_of(&pair[0]), &pair[1]));
    }
    Ok(Some(entries))
}

/// What an object's state is, which may be another object.
fn state_of(mut node: &Value) -> &Value {
    while node["t"] == "object" {
        node = &node["v"];
    }
    node
}

/// A key as Python's `str` has it, as far as keys are that names can be made of.
fn text_of(key: &Value) -> String {
    match key {
        Value::String(text) => text.clone(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Null => "None".into(),
        other => other.to_string(),
    }
}

fn odd() -> Error {
    Error::corrupt("the state's tree is not as the format has it")
}
