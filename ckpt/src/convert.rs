//! Steps from and to directories as Hugging Face's libraries have them: `model.safetensors`, or several files and
//! `model.safetensors.index.json`, which says what lies in which.
//!
//! Tensors pass through memory a few at a time. Nothing is read that is not checked, but what a file system shares
//! instead of copying, which is not read at all.

mod tree;
mod header;
mod export;
mod writer;
mod import;

pub use export::{Export, Exported};
pub use import::{Imported, import};
pub use writer::{Piece, StepWriter};

/// The file of a model that is one file.
const WHOLE: &str = "model.safetensors";
/// The list of a model's files, written last.
const INDEX: &str = "model.safetensors.index.json";

#[cfg(test)]
mod tests;
