//! A CUDA device's memory, as torch tells of it by number.
//!
//! The Python side keeps tensors alive until the copy that was given their addresses has ended, as in
//! [`crate::buffer`].
#![allow(unsafe_code)]

use std::sync::Arc;

use forebay_io::device::{self, DeviceBytes};
use pyo3::prelude::*;

use crate::errors::OrRaise;

/// A device that tensors are copied from.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Device(Arc<device::Device>);

impl Device {
    pub(crate) fn inner(&self) -> Arc<device::Device> {
        self.0.clone()
    }

    /// The bytes of a live tensor there.
    pub(crate) fn bytes(&self, address: u64, length: usize) -> DeviceBytes {
        // SAFETY: the Python side keeps them allocated, as stated at the top.
        unsafe { DeviceBytes::new(self.0.clone(), address, length) }
    }
}

#[pymethods]
impl Device {
    /// Opens device `ordinal` through the driver that this process has loaded.
    #[new]
    fn new(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        py.detach(|| device::Device::open(ordinal)).map(Self).or_raise()
    }

    /// Has copies from now on wait for what was submitted to that stream so far.
    fn follow(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        py.detach(|| self.0.follow(stream)).or_raise()
    }
}
