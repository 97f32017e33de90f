//! Reading one step by several ranks of a job, each slice once between them.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::AsFd;

use forebay_ckpt::manifest::Shard;
use forebay_ckpt::restore::{self, Address, Links, Origin, Reader, Shards, Through, Wish};
use forebay_core::{Error, Result};
use forebay_io::codec;
use forebay_io::mem::{ReadMapping, SharedMemory, WriteMapping};
use forebay_io::object::Bucket;
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::runtime::Runtime;

use crate::buffer;
use crate::errors::OrRaise;
use crate::loading::{Boxed, Place, Step, Wanted, here, open};
use crate::ranks::{Door, Group, parse, patience};

/// What each rank reads of a step for the others, and the memory that they lend each other.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Together {
    step: Py<Step>,
    plan: restore::Together,
    /// What the store is asked by; none where the step lies in memory.
    store: Option<(Runtime, Bucket)>,
    links: Mutex<Links>,
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

/// The longest wishes of a rank, in bytes before they are packed.
const MOST_WISHES: usize = 256 << 20;

/// What this rank wants, for [`Together`]: packed, for each rank hears that of all.
#[pyfunction]
pub(crate) fn wishes(step: &Step, targets: Vec<(usize, Option<Boxed>)>) -> PyResult<Cow<'static, [u8]>> {
    let wishes = step.wishes(targets);
    let text = serde_json::to_vec(&wishes).map_err(|error| Error::bug(format!("encode wishes: {error}")));
    text.and_then(|text| Ok(Cow::Owned(codec::pack(&text)?))).or_raise()
}

fn unpack(wishes: &[u8]) -> Result<Vec<Wish>> {
    let text = codec::unpack(wishes, MOST_WISHES)?;
    parse(&String::from_utf8_lossy(&text))
}

#[pymethods]
impl Together {
    /// The plan, from what [`wishes`] gave on each rank and the numbers of their hosts, and the memory that it takes.
    #[new]
    fn new(
        py: Python<'_>,
        step: Py<Step>,
        wishes: Vec<Vec<u8>>,
        rank: usize,
        hosts: Vec<usize>,
    ) -> PyResult<Self> {
        let found = step.get();
        let made = py.detach(|| -> Result<_> {
            let wishes: Vec<Vec<Wish>> = wishes.iter().map(|packed| unpack(packed)).collect::<Result<_>>()?;
            let (store, origin) = match &found.place {
                Place::Store(url) => (Some(open(url)?), Origin::Store),
                Place::Held(_) => {
                    // Each rank's part lies where that rank is.
                    let host = |shard: &Shard| hosts.get(shard.rank as usize).copied();
                    let at = found.manifest.shards.iter().map(host).collect::<Option<_>>();
                    (None, Origin::Hosts(at.ok_or_else(|| Error::bug("a part that no rank has"))?))
                }
                Place::Local(_) => {
                    return Err(Error::bug("ranks read together what lies on a host's disk"));
                }
            };
            let plan =
                restore::Together::new(&found.manifest, &wishes, Reader { rank, hosts: &hosts, origin })?;
            let (mut memory, mut own) = (None, Vec::new());
            if plan.rounds() > 0 {
                let lent = SharedMemory::create("forebay-restore", 2 * plan.half_bytes())?;
                for half in halves(&plan) {
                    own.push(lent.map_write(half)?);
                }
                memory = Some(lent);
            }
            Ok((plan, store, memory, own))
        });
        let (plan, store, memory, own) = made.or_raise()?;
        let (own, links) = (Mutex::new(own), Mutex::default());
        Ok(Self { step, plan, store, links, memory, own, came: Mutex::default(), lent: Mutex::default() })
    }

    /// How often the ranks meet.
    #[getter]
    fn rounds(&self) -> usize {
        self.plan.rounds()
    }

    /// Lends this rank's memory to all of its host, given as a group, and is lent theirs; all do so before the first round. One
    /// that is there alone has no group.
    fn lend(&self, py: Python<'_>, group: Option<&Group>, patience_s: f64) -> PyResult<()> {
        let memory = self.memory.as_ref().ok_or_else(|| Error::bug("nothing is read together")).or_raise()?;
        let Some(group) = group else {
            let own = memory.as_fd().try_clone_to_owned().map_err(Error::from);
            *self.came.lock() = vec![own.and_then(SharedMemory::from_fd).or_raise()?];
            return Ok(());
        };
        group.wait(py, |group, goes_on| {
            *self.came.lock() = group.exchange(memory, patience(patience_s), goes_on)?;
            Ok(())
        })
    }

    /// Makes the ways to ranks of other hosts: by `addresses`, of each rank as JSON, and this one's `door`. Gives those to or from
    /// which there is none.
    fn connect(&self, py: Python<'_>, door: &Door, addresses: Vec<String>) -> PyResult<BTreeSet<usize>> {
        let connect = || -> Result<_> {
            let addresses: Vec<Address> = addresses.iter().map(|text| parse(text)).collect::<Result<_>>()?;
            let links = Links::connect(&door.take()?, &addresses, self.plan.rank(), self.plan.peers())?;
            let missing = links.missing(self.plan.peers());
            *self.links.lock() = links;
            Ok(missing)
        };
        py.detach(connect).or_raise()
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

    /// Fills memory, given as to `Step.read`, with what no other rank wants, or is in this host's memory.
    fn read_rest(&self, py: Python<'_>, targets: Vec<Wanted>, threads: usize) -> PyResult<()> {
        let step = self.step.get();
        step.count(&targets);
        let read = |shards: &Shards<'_>| {
            self.plan.read_rest((shards, &step.manifest), step.targets(targets), threads)
        };
        py.detach(|| self.with_shards(read)).or_raise()
    }

    /// The same, as `Step.read_through`.
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
        let through = Through { buffer: buffer::bytes_mut(buffer), give: &mut hand };
        let read = |shards: &Shards<'_>| {
            self.plan.read_rest_through((shards, &step.manifest), &wishes, through, threads)
        };
        let outcome = py.detach(|| self.with_shards(read));
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

    /// Reads this rank's part of a round for all, and has the rest come from other hosts; gives whether all is there, and the ranks
    /// of which something is not, or came damaged.
    fn read(&self, py: Python<'_>, round: usize, threads: usize) -> PyResult<(bool, BTreeSet<usize>)> {
        let manifest = &self.step.get().manifest;
        let read = |shards: &Shards<'_>| {
            let (mut own, links) = (self.own.lock(), self.links.lock());
            let half = own.get_mut(round % 2).ok_or_else(|| Error::bug("no memory was lent"))?;
            self.plan.read((shards, manifest), round, half, threads, &links)
        };
        let filled = py.detach(|| self.with_shards(read)).or_raise()?;
        Ok((filled.is_whole, filled.lost))
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

impl Together {
    /// Has what reads the step know where it is.
    fn with_shards<T>(&self, work: impl FnOnce(&Shards<'_>) -> Result<T>) -> Result<T> {
        match (&self.store, &self.step.get().place) {
            (Some((runtime, bucket)), _) => work(&Shards::Store(runtime.handle(), bucket)),
            (None, Place::Held(shards)) => work(&Shards::Held(&here(shards)?)),
            (None, _) => Err(Error::bug("a step that is neither in memory nor in a store")),
        }
    }
}
