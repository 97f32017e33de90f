//! The one mapping from the engine's errors to Python's exceptions, which `forebay/_errors.py` defines.

use forebay_core::{Error, ErrorKind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// The exception for an error: its class says what the caller can do, its text names the cause and a way out.
pub(crate) fn exception(error: &Error) -> PyErr {
    let class = match error.kind() {
        ErrorKind::NotFound => "CheckpointNotFound",
        ErrorKind::Corrupt => "CheckpointCorrupt",
        ErrorKind::Unavailable => "CheckpointUnavailable",
        ErrorKind::Stale => "CheckpointSuperseded",
        ErrorKind::Exists | ErrorKind::Conflict => "CheckpointConflict",
        ErrorKind::Denied | ErrorKind::ReadOnly => "CheckpointDenied",
        ErrorKind::NoSpace | ErrorKind::OverQuota => "CheckpointNoSpace",
        ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::Refused | ErrorKind::TooLarge => {
            "CheckpointInvalid"
        }
        ErrorKind::NotDirectory | ErrorKind::IsDirectory | ErrorKind::NameTooLong => "CheckpointInvalid",
        ErrorKind::NotEmpty | ErrorKind::NoAttribute | ErrorKind::Bug => "CheckpointError",
    };
    let text = text(error);
    Python::attach(|py| {
        let made = py
            .import("forebay._errors")
            .and_then(|module| module.getattr(class))
            .and_then(|class| class.call1((text.as_str(),)));
        made.map(PyErr::from_value).unwrap_or_else(|_| PyRuntimeError::new_err(text))
    })
}

/// Its cause, and a way out.
pub(crate) fn text(error: &Error) -> String {
    match error.hint() {
        Some(hint) => format!("{error} (hint: {hint})"),
        None => error.to_string(),
    }
}

/// A result of the engine as one of Python's.
pub(crate) trait OrRaise<T> {
    /// Raises the error.
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for forebay_core::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(|error| exception(&error))
    }
}
