//! One step on its way into memory, filled by the caller's thread or behind the training.

use std::sync::Arc;
use std::thread::JoinHandle;

use forebay_ckpt::arena::{self, CopyWatch, Source};
use forebay_ckpt::session;
use forebay_core::{Error, Result};
use forebay_io::device::DeviceBytes;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::buffer::{self, Span};
use crate::device::Device;
use crate::errors::OrRaise;

type Filled = Result<Box<arena::Snapshot>>;
/// A snapshot that a thread of ours fills, which lets go of it before it ends: what stops that thread costs no slot.
type Shared = Arc<Mutex<Option<Box<arena::Snapshot>>>>;

/// Who has the snapshot.
enum Stage {
    Idle(Box<arena::Snapshot>),
    Copying(Copying),
    /// The agent has it, of which a signal's exception may have kept the caller from hearing.
    Sealed(Arc<session::Save>),
    Gone,
}

/// A copy behind the training.
struct Copying {
    worker: JoinHandle<Result<()>>,
    shared: Shared,
    watch: Arc<CopyWatch>,
    /// Whose thread it is: a forked child has none of it.
    process: u32,
    /// What the addresses that it reads belong to. Let go of after the thread's end, and by nobody's collector before.
    _sources: Py<PyAny>,
}

impl Copying {
    /// Waits for its end. What it failed with is told with the snapshot, which stays.
    fn join(self) -> Result<(Box<arena::Snapshot>, Result<()>)> {
        let copied = self.worker.join().unwrap_or_else(|_| Err(Error::bug("the copying thread panicked")));
        let snapshot = self.shared.lock().take();
        let lost = || Error::bug("a snapshot was lost while it was filled");
        Ok((snapshot.ok_or_else(lost)?, copied))
    }
}

/// Tells that a copy has ended, however that came.
struct EndOfCopy(Arc<CopyWatch>);

impl Drop for EndOfCopy {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// One step in a slot, being filled.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Snapshot(Mutex<Stage>);

impl Drop for Snapshot {
    /// Nobody waited for the copy: the memory that it reads is freed no earlier than it ends.
    fn drop(&mut self) {
        let stage = std::mem::replace(self.0.get_mut(), Stage::Gone);
        let Stage::Copying(copying) = stage else { return };
        if copying.process != std::process::id() {
            return;
        }
        let mut copying = Some(copying);
        let mut end = || drop(copying.take().map(Copying::join));
        // Other threads go on meanwhile, unless the interpreter is about to end. The copy needs nothing of it.
        if Python::try_attach(|py| py.detach(&mut end)).is_none() {
            end();
        }
    }
}

impl Snapshot {
    /// One that nothing is in.
    pub(crate) fn new(snapshot: arena::Snapshot) -> Self {
        Self(Mutex::new(Stage::Idle(Box::new(snapshot))))
    }

    /// The save that it became, once the agent has it.
    pub(crate) fn sealed(&self) -> Option<Arc<session::Save>> {
        match &*self.0.lock() {
            Stage::Sealed(save) => Some(save.clone()),
            Stage::Idle(_) | Stage::Copying(..) | Stage::Gone => None,
        }
    }

    /// Notes that.
    pub(crate) fn set_sealed(&self, save: Arc<session::Save>) {
        *self.0.lock() = Stage::Sealed(save);
    }

    /// Takes the snapshot out, after the background copy, if there is one. What that one failed with is told once, and the
    /// snapshot stays, to be given up.
    pub(crate) fn take(&self) -> Filled {
        // Bound first, so that the lock is not held while the copy is waited for.
        let stage = std::mem::replace(&mut *self.0.lock(), Stage::Gone);
        match stage {
            Stage::Idle(snapshot) => Ok(snapshot),
            Stage::Copying(copying) => {
                let (snapshot, copied) = copying.join()?;
                if let Err(error) = copied {
                    *self.0.lock() = Stage::Idle(snapshot);
                    return Err(error);
                }
                Ok(snapshot)
            }
            gone => {
                *self.0.lock() = gone;
                Err(Error::bug("the snapshot was sealed or given up already"))
            }
        }
    }

    /// Of the background copy, while there is one.
    fn watch(&self) -> Option<Arc<CopyWatch>> {
        match &*self.0.lock() {
            Stage::Copying(copying) => Some(copying.watch.clone()),
            Stage::Idle(_) | Stage::Sealed(_) | Stage::Gone => None,
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut arena::Snapshot) -> Result<T>) -> Result<T> {
        let mut snapshot = self.take()?;
        let outcome = work(&mut snapshot);
        *self.0.lock() = Stage::Idle(snapshot);
        outcome
    }
}

#[pymethods]
impl Snapshot {
    /// Where tensor `index` belongs: address and length, good until the snapshot is sealed or given up.
    fn place(&self, py: Python<'_>, index: usize) -> PyResult<Span> {
        let place = |snapshot: &mut arena::Snapshot| {
            let bytes = snapshot.tensor_mut(index);
            Ok((bytes.as_mut_ptr() as usize, bytes.len()))
        };
        py.detach(|| self.with(place)).or_raise()
    }

    /// Copies tensors, given as index, address and length, and those in a device's memory, given with the device before
    /// their address.
    fn copy(
        &self,
        py: Python<'_>,
        sources: Vec<(usize, usize, usize)>,
        fetches: Vec<Fetch<'_>>,
        threads: usize,
    ) -> PyResult<()> {
        let fetches = away(fetches);
        py.detach(|| self.with(|snapshot| snapshot.copy(all(&sources, &fetches), threads, None))).or_raise()
    }

    /// Checksums tensors that were filled at their places.
    fn checksum(&self, py: Python<'_>, indexes: Vec<usize>, threads: usize) -> PyResult<()> {
        let in_place = indexes.into_iter().map(|index| (index, Source::InPlace)).collect();
        py.detach(|| self.with(|snapshot| snapshot.copy(in_place, threads, None))).or_raise()
    }

    /// As `copy`, on threads of our own; the sources stay as they are until `await_sources` or `join` returned. `owners` is
    /// what they are the memory of, which is held until `join` did.
    fn copy_in_background(
        &self,
        py: Python<'_>,
        sources: Vec<(usize, usize, usize)>,
        fetches: Vec<Fetch<'_>>,
        threads: usize,
        owners: Py<PyAny>,
    ) -> PyResult<()> {
        let fetches = away(fetches);
        let started = py.detach(|| {
            let shared: Shared = Arc::new(Mutex::new(Some(self.take()?)));
            let watch = Arc::new(CopyWatch::default());
            let (of_worker, told) = (shared.clone(), EndOfCopy(watch.clone()));
            let copy = move || {
                let told = told;
                match of_worker.lock().as_mut() {
                    Some(snapshot) => snapshot.copy(all(&sources, &fetches), threads, Some(&told.0)),
                    None => Ok(()),
                }
            };
            let started = std::thread::Builder::new().name("forebay-stage".into()).spawn(copy);
            let (stage, outcome) = match started {
                Ok(worker) => {
                    let process = std::process::id();
                    (Stage::Copying(Copying { worker, shared, watch, process, _sources: owners }), Ok(()))
                }
                // There is no thread that has it.
                Err(error) => (shared.lock().take().map_or(Stage::Gone, Stage::Idle), Err(error.into())),
            };
            *self.0.lock() = stage;
            outcome
        });
        started.or_raise()
    }

    /// Whether the background copy has ended, if there was one.
    #[getter]
    fn is_copied(&self) -> bool {
        !matches!(&*self.0.lock(), Stage::Copying(copying) if !copying.worker.is_finished())
    }

    /// Waits until the background copy has read its sources, which may change then. False where it ended before: `join` tells
    /// why.
    fn await_sources(&self, py: Python<'_>) -> bool {
        self.watch().is_none_or(|watch| py.detach(|| watch.await_sources()))
    }

    /// Waits until the background copy has ended, well or not, and leaves it to `join`.
    fn await_end(&self, py: Python<'_>) {
        if let Some(watch) = self.watch() {
            py.detach(|| watch.await_end());
        }
    }

    /// Waits for the background copy.
    fn join(&self, py: Python<'_>) -> PyResult<()> {
        match &*self.0.lock() {
            Stage::Sealed(_) => return Ok(()),
            Stage::Idle(_) | Stage::Copying(..) | Stage::Gone => {}
        }
        py.detach(|| self.with(|_| Ok(()))).or_raise()
    }
}

/// A tensor in a device's memory: index, device, address and length.
type Fetch<'py> = (usize, PyRef<'py, Device>, u64, usize);

/// Those tensors, apart from what Python owns.
fn away(fetches: Vec<Fetch<'_>>) -> Vec<(usize, DeviceBytes)> {
    let bytes = |(index, device, address, length): Fetch<'_>| (index, device.bytes(address, length));
    fetches.into_iter().map(bytes).collect()
}

fn all<'a>(sources: &[(usize, usize, usize)], fetches: &[(usize, DeviceBytes)]) -> Vec<(usize, Source<'a>)> {
    let near = sources
        .iter()
        .map(|(index, address, length)| (*index, Source::Host(buffer::bytes((*address, *length)))));
    near.chain(fetches.iter().map(|(index, bytes)| (*index, Source::Device(bytes.clone())))).collect()
}
