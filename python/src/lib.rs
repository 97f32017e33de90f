//! `forebay._native`: the checkpoint engine for the Python package.
//!
//! Glue only: it turns Python's values into the engine's, lets the GIL go around every call that copies, waits or
//! does I/O, and maps errors to exceptions in one place. What a state is made of is the Python side's business.

mod errors;
mod buffer;
mod device;
mod loading;
mod held;
mod snapshot;
mod saving;
mod writing;
mod ranks;
mod together;
mod threads;
mod workers;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::device::Device;
    #[pymodule_export]
    use super::held::{OpenMemory, Predecessor, begin_local, look_local, open_held, open_local, survey};
    #[pymodule_export]
    use super::loading::{
        Step, check_url, find_steps, import_model, list_pins, list_steps, open_step, set_pin, verify,
    };
    #[pymodule_export]
    use super::ranks::{Arrival, Door, Group, Roster, begin_job, hash_bytes, join_job, refuse_if_superseded};
    #[pymodule_export]
    use super::saving::{Save, Session, dtypes, parse_size, run_agent, text_length};
    #[pymodule_export]
    use super::snapshot::Snapshot;
    #[pymodule_export]
    use super::threads::is_inside;
    #[pymodule_export]
    use super::together::{Together, wishes};
    #[pymodule_export]
    use super::workers::heed_parent;
    #[pymodule_export]
    use super::writing::StepWriter;
    #[pymodule_export]
    const PLACES: &str = forebay_ckpt::session::PLACES;
    #[pymodule_export]
    const MOST_TEXT: u64 = forebay_ckpt::manifest::TextLength::MOST;
}
