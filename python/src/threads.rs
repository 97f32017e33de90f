//! What the interpreter's other threads are doing.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Whether the thread `ident` is inside of a function of the module named `module`.
///
/// One look that no thread of Python interrupts. In Python itself, the thread that is looked at runs on between two steps of
/// the look: whatever called a generator that has yielded since is not found. And where CPython 3.11 makes a frame's object
/// it may collect garbage, whose finalizers let that thread run, so that the object stands for memory of another frame's.
#[pyfunction]
pub(crate) fn is_inside(py: Python<'_>, ident: u64, module: &str) -> PyResult<bool> {
    let (frames_of, collector) = (py.import("sys")?.getattr("_current_frames")?, py.import("gc")?);
    let collects = collector.call_method0("isenabled")?.is_truthy()?;
    collector.call_method0("disable")?;
    let found = frames_of.call0().and_then(|frames| has_frame_of(&frames, ident, module));
    if collects {
        collector.call_method0("enable")?;
    }
    found
}

fn has_frame_of(frames: &Bound<'_, PyAny>, ident: u64, module: &str) -> PyResult<bool> {
    let py = frames.py();
    let mut next = frames.cast::<PyDict>()?.get_item(ident)?;
    while let Some(frame) = next.filter(|frame| !frame.is_none()) {
        let globals = frame.getattr(intern!(py, "f_globals"))?;
        let name = globals.cast::<PyDict>()?.get_item(intern!(py, "__name__"))?;
        if name.is_some_and(|name| name.extract::<&str>().is_ok_and(|name| name == module)) {
            return Ok(true);
        }
        next = Some(frame.getattr(intern!(py, "f_back"))?);
    }
    Ok(false)
}
