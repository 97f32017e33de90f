//! A list of changes that an engine applies whole or not at all.

use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result};

use super::Limits;

/// Puts and deletes, applied in order and atomically; the last change of a key wins.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    changes: Vec<(Bytes, Option<Bytes>)>,
    bytes: usize,
}

impl Batch {
    /// Sets `key` to `value`, which may be empty.
    pub fn put(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        self.change(key.into(), Some(value.into()));
    }

    /// Removes `key`; one that is absent is no error.
    pub fn delete(&mut self, key: impl Into<Bytes>) {
        self.change(key.into(), None);
    }

    /// Puts `Some` value or deletes on `None`.
    pub fn change(&mut self, key: Bytes, value: Option<Bytes>) {
        self.bytes += key.len() + value.as_ref().map_or(0, Bytes::len);
        self.changes.push((key, value));
    }

    /// The changes in the order they were made.
    pub fn changes(&self) -> &[(Bytes, Option<Bytes>)] {
        &self.changes
    }

    /// Number of changes.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Refuses keys and values that an engine with these limits cannot hold.
    ///
    /// # Errors
    /// `Invalid` for an empty key, `TooLarge` for a key or value over the limit.
    pub fn check(&self, limits: &Limits) -> Result<()> {
        self.changes.iter().try_for_each(|(key, value)| limits.check(key, value.as_deref()))
    }
}

impl Limits {
    /// Refuses one change that does not fit, with the same errors as [`Batch::check`].
    pub fn check(&self, key: &[u8], value: Option<&[u8]>) -> Result<()> {
        let too_large = |what: &str, length: usize, most: usize| {
            let message = format!("a {what} of {length} bytes exceeds the engine's limit of {most}");
            Err(Error::new(ErrorKind::TooLarge, message))
        };
        let length = value.map_or(0, <[u8]>::len);
        match () {
            () if key.is_empty() => Err(Error::invalid("an empty key cannot be stored")),
            () if key.len() > self.max_key_bytes => too_large("key", key.len(), self.max_key_bytes),
            () if length > self.max_value_bytes => too_large("value", length, self.max_value_bytes),
            () => Ok(()),
        }
    }
}
