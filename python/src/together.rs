//! Reading one step by several ranks of a job, each slice once between them.

use forebay_ckpt::restore::{self, Through, Wish};
use forebay_core::{Error, Result};
use forebay_io::mem::{ReadMapping, SharedMemory, WriteMapping};
use forebay_io::object::Bucket;
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::runtime::Runtime;

use crate::buffer;
use crate::errors::OrRaise;
use crate::loading::{Boxed, Place, Step, Wanted, open};
use crate::ranks::{Group, parse, patience};

/// What each rank reads of a step for the others, and the memory that they lend each other.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Together {
    step: Py<Step>,
    plan: restore::Together,
    place: (Runtime, Bucket),
    /// Both halves of this rank's memory.
    own: Mutex<Vec<WriteMapping>>,
    /// All ranks' memory, both halves each.
    lent: Mutex<Vec<[ReadMapping; 2]>>,
}

/// What this rank wants, for [`Together`].
#[pyfunction]
pub(crate) fn wishes(step: &Step, targets: Vec<(usize, Option<Boxed>)>) -> PyResult<String> {
    let wishes = step.wishes(targets);
    serde_json::to_string(&wishes).map_err(|error| Error::bug(format!("encode wishes: {error}"))).or_raise()
}

#[pymethods]
impl Together {
    /// The plan, from what [`wishes`] gave on each rank.
    #[new]
    fn new(py: Python<'_>, step: Py<Step>, wishes: Vec<String>, rank: usize) -> PyResult<Self> {
        let found = step.get();
        let made = py.detach(|| {
            let Place::Store(url) = &found.place else {
                return Err(Error::bug("ranks read together what lies in the store"));
            };
            let wishes: Vec<Vec<Wish>> = wishes.iter().map(|text| parse(text)).collect::<Result<_>>()?;
            Ok((restore::Together::new(&found.manifest, &wishes, rank)?, open(url)?))
        });
        let (plan, place) = made.or_raise()?;
        Ok(Self { step, plan, place, own: Mutex::default(), lent: Mutex::default() })
    }

    /// How often the ranks meet.
    #[getter]
    fn rounds(&self) -> usize {
        self.plan.rounds()
    }

    /// Lends this rank's memory to all and takes theirs; all ranks do so before the first round.
    fn lend(&self, py: Python<'_>, group: &Group, patience_s: f64) -> PyResult<()> {
        let half = self.plan.half_bytes();
        let halves = [0..half, half..2 * half];
        group.wait(py, |group, goes_on| {
            let memory = SharedMemory::create("forebay-restore", 2 * half)?;
            let lent = group.exchange(&memory, patience(patience_s), goes_on)?;
            let both = |memory: SharedMemory| -> Result<[ReadMapping; 2]> {
                let [first, second] = halves.clone();
                Ok([memory.map_read(first)?, memory.map_read(second)?])
            };
            *self.lent.lock() = lent.into_iter().map(both).collect::<Result<_>>()?;
            let own = halves.iter().map(|half| memory.map_write(half.clone()));
            *self.own.lock() = own.collect::<Result<_>>()?;
            Ok(())
        })
    }

    /// Fills memory, given as to `Step.read`, with what no other rank wants.
    fn read_rest(&self, py: Python<'_>, targets: Vec<Wanted>, threads: usize) -> PyResult<()> {
        let step = self.step.get();
        step.count(&targets);
        let (runtime, bucket) = &self.place;
        let place = (runtime.handle(), bucket, &step.manifest);
        py.detach(|| self.plan.read_rest(place, step.targets(targets), threads)).or_raise()
    }

    /// As `Step.read_through`, what no other rank wants.
    fn read_rest_through(
        &self,
        py: Python<'_>,
        wanted: Vec<(usize, Option<Boxed>)>,
        buffer: (usize, usize),
        give: Py<PyAny>,
        threads: usize,
    ) -> PyResult<()> {
        let step = self.step.get();
        let wishes = step.wishes(wanted);
        let mut raised = None;
        let mut hand = step.taken_by(&give, &mut raised);
        let (runtime, bucket) = &self.place;
        let place = (runtime.handle(), bucket, &step.manifest);
        let through = Through { buffer: buffer::bytes_mut(buffer), give: &mut hand };
        let outcome = py.detach(|| self.plan.read_rest_through(place, &wishes, through, threads));
        drop(hand);
        raised.map_or_else(|| outcome.or_raise(), Err)
    }

    /// Calls `give`, as `Step.read_through` does, with what of a round belongs into tensors that cannot be copied into.
    fn give(
        &self,
        py: Python<'_>,
        round: usize,
        wanted: Vec<(usize, Option<Boxed>)>,
        give: Py<PyAny>,
    ) -> PyResult<()> {
        let step = self.step.get();
        let wishes = step.wishes(wanted);
        let mut raised = None;
        let mut hand = step.taken_by(&give, &mut raised);
        let work = || {
            let lent = self.lent.lock();
            let halves: Vec<&[u8]> = lent.iter().map(|halves| halves[round % 2].as_ref()).collect();
            self.plan.give(&step.manifest, round, &halves, &wishes, &mut hand)
        };
        let outcome = py.detach(work);
        drop(hand);
        raised.map_or_else(|| outcome.or_raise(), Err)
    }

    /// Reads this rank's part of a round for all.
    fn read(&self, py: Python<'_>, round: usize, threads: usize) -> PyResult<()> {
        let step = self.step.get();
        let (runtime, bucket) = &self.place;
        let place = (runtime.handle(), bucket, &step.manifest);
        let read = || {
            let mut own = self.own.lock();
            let half = own.get_mut(round % 2).ok_or_else(|| Error::bug("no memory was lent"))?;
            self.plan.read(place, round, half, threads)
        };
        py.detach(read).or_raise()
    }

    /// Copies what this rank wants of a round into place, once all ranks read their parts.
    fn copy(&self, py: Python<'_>, round: usize, targets: Vec<Wanted>, threads: usize) -> PyResult<()> {
        let step = self.step.get();
        let copy = || {
            let lent = self.lent.lock();
            let halves: Vec<&[u8]> = lent.iter().map(|halves| halves[round % 2].as_ref()).collect();
            self.plan.copy(&step.manifest, round, &halves, step.targets(targets), threads)
        };
        py.detach(copy).or_raise()
    }
}
