//! Writing a step from front to back, tensor by tensor: for what is larger than memory, and is not saved again.

use bytes::Bytes;
use forebay_ckpt::catalog::Start;
use forebay_ckpt::convert::{self, Piece};
use forebay_ckpt::manifest::{Encoding, Extra};
use forebay_ckpt::shard::TensorSpec;
use forebay_core::{Error, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::runtime::Runtime;

use crate::buffer;
use crate::errors::OrRaise;
use crate::loading::open;
use crate::saving::{Described, spec};

/// A step on its way to the store; its threads end with it.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct StepWriter {
    pieces: Vec<Piece>,
    open: Mutex<Option<(convert::StepWriter, Runtime)>>,
}

impl StepWriter {
    fn take(&self) -> Result<(convert::StepWriter, Runtime)> {
        self.open.lock().take().ok_or_else(gone)
    }
}

fn gone() -> Error {
    Error::bug("the step was committed or given up already")
}

#[pymethods]
impl StepWriter {
    /// Begins a step of a start of its own.
    #[new]
    fn new(
        py: Python<'_>,
        url: &str,
        start: (String, String, u32, u64),
        step: u64,
        tensors: Vec<Described>,
    ) -> PyResult<Self> {
        let (nonce, host, pid, started_ms) = start;
        let start = Start { nonce, host, pid, started_ms };
        let begin = || {
            let specs: Vec<TensorSpec> = tensors.into_iter().map(spec).collect::<Result<_>>()?;
            let (runtime, bucket) = open(url)?;
            let writer = runtime.block_on(convert::StepWriter::begin(&bucket, start, step, &specs))?;
            let pieces = writer.pieces().collect();
            Ok(Self { pieces, open: Mutex::new(Some((writer, runtime))) })
        };
        py.detach(begin).or_raise()
    }

    /// The tensors' numbers, in the order in which they are to be written.
    #[getter]
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = self.pieces.iter().map(|piece| piece.tensor).collect();
        order.dedup();
        order
    }

    /// Writes the next tensor, whose bytes are at an address; they are not needed any more afterwards.
    fn write(&self, py: Python<'_>, tensor: usize, address: usize, length: usize) -> PyResult<()> {
        let write = || {
            let bytes = buffer::bytes((address, length));
            let mut open = self.open.lock();
            let (writer, runtime) = open.as_mut().ok_or_else(gone)?;
            let next: Vec<Piece> = writer.pieces().take_while(|piece| piece.tensor == tensor).collect();
            if next.iter().map(|piece| piece.length).sum::<u64>() != length as u64 || next.is_empty() {
                return Err(Error::bug(format!("{length} bytes of tensor {tensor}, which is not the next")));
            }
            next.into_iter().try_for_each(|piece| {
                let (start, end) = (piece.start as usize, (piece.start + piece.length) as usize);
                runtime.block_on(writer.write(Bytes::copy_from_slice(&bytes[start..end])))
            })
        };
        py.detach(write).or_raise()
    }

    /// Makes the step exist. `extras` are pairs of a name and JSON text.
    fn commit(&self, py: Python<'_>, extras: Vec<(String, String)>) -> PyResult<()> {
        let commit = || {
            let (writer, runtime) = self.take()?;
            let extra = |(name, data)| Extra { name, encoding: Encoding::Json, data };
            runtime.block_on(writer.commit(extras.into_iter().map(extra).collect()))
        };
        py.detach(commit).or_raise()
    }

    /// Gives the step up, unless it was committed.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| {
            if let Ok((writer, runtime)) = self.take() {
                runtime.block_on(writer.abort());
            }
        });
    }
}
