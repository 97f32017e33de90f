//! Reading one step by several ranks of a job, each slice once between them.

use std::ops::Range;

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
    /// This rank's memory, and both halves of it, where there is something to lend.
    memory: Option<SharedMemory>,
    own: Mutex<Vec<WriteMapping>>,
    /// All ranks' memory, as it came, and both halves each.
    came: Mutex<Vec<SharedMemory>>,
    lent: Mutex<Vec<[ReadMapping; 2]>>,
}

/// The bytes of either half of a rank's memory.
fn halves(plan: &restore::Together) -> [Range<usize>; 2] {
    let half = plan.half_bytes();
    [0..half, half..2 * half]
}

/// What this rank wants, for [`Together`].
#[pyfunction]
pub(crate) fn wishes(step: &Step, targets: Vec<(usize, Option<Boxed>)>) -> PyResult<String> {
    let wishes = step.wishes(targets);
    serde_json::to_string(&wishes).map_err(|error| Error::bug(format!("encode wishes: {error}"))).or_raise()
}

#[pymethods]
impl Together {
    /// The plan, from what [`wishes`] gave on each rank, and the memory that it takes.
    #[new]
    fn new(py: Python<'_>, step: Py<Step>, wishes: Vec<String>, rank: usize) -> PyResult<Self> {
        let found = step.get();
        let made = py.detach(|| -> Result<_> {
            let Place::Store(url) = &found.place else {
                return Err(Error::bug("ranks read together what lies in the store"));
            };
            let wishes: Vec<Vec<Wish>> = wishes.iter().map(|text| parse(text)).collect::<Result<_>>()?;
            let plan = restore::Together::new(&found.manifest, &wishes, rank)?;
            let (mut memory, mut own) = (None, Vec::new());
            if plan.rounds() > 0 {
                let lent = SharedMemory::create("forebay-restore", 2 * plan.half_bytes())?;
                for half in halves(&plan) {
                    own.push(lent.map_write(half)?);
                }
                memory = Some(lent);
            }
            Ok((plan, open(url)?, memory, own))
        });
        let (plan, place, memory, own) = made.or_raise()?;
        let own = Mutex::new(own);
        Ok(Self { step, plan, place, memory, own, came: Mutex::default(), lent: Mutex::default() })
    }

    /// How often the ranks meet.
    #[getter]
    fn rounds(&self) -> usize {
        self.plan.rounds()
    }

    /// Lends this rank's memory to all and is lent theirs; all ranks do so before the first round.
    fn lend(&self, py: Python<'_>, group: &Group, patience_s: f64) -> PyResult<()> {
        group.wait(py, |group, goes_on| {
            let memory = self.memory.as_ref().ok_or_else(|| Error::bug("nothing is read together"))?;
            *self.came.lock() = group.exchange(memory, patience(patience_s), goes_on)?;
            Ok(())
        })
    }

    /// Maps what was lent, once all ranks lent theirs.
    fn take_lent(&self) -> PyResult<()> {
        let both = |memory: SharedMemory| -> Result<[ReadMapping; 2]> {
            let [first, second] = halves(&self.plan);
            Ok([memory.map_read(first)?, memory.map_read(second)?])
        };
        let came = std::mem::take(&mut *self.came.lock());
        *self.lent.lock() = came.into_iter().map(both).collect::<Result<_>>().or_raise()?;
        Ok(())
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
