//! Options that are on or off.

/// Whether an option is on, as object_store reads it.
pub(super) fn is_on(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "on" | "yes" | "y")
}
