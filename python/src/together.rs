//! Reading one step by several ranks of a job, each slice once between them.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use forebay_ckpt::manifest::Shard;
use forebay_ckpt::restore::{
    self, Address, Filled, Lent, Links, Origin, Places, Reader, Shards, Through, Wishes,
};
use forebay_core::{Error, Result};
use forebay_io::codec;
use forebay_io::mem::{ReadMapping, SharedMemory, WriteMapping};
use forebay_io::net::{Rdma, Wanted as Cards};
use forebay_io::object::Bucket;
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::runtime::Runtime;

use crate::buffer;
use crate::errors::{OrRaise, exception, text};
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
    /// The network card that reads other hosts' memory, once there are ways.
    rdma: Mutex<Option<Arc<Rdma>>>,
    /// Why there is none that is wanted.
    no_rdma: Mutex<Option<Error>>,
    /// This rank's memory, and its buffers, where there is something to lend.
    memory: Option<SharedMemory>,
    own: Mutex<Vec<WriteMapping>>,
    /// The memory of all ranks of this host, as it came, and the buffers of each.
    came: Mutex<Vec<SharedMemory>>,
    lent: Mutex<Vec<Vec<ReadMapping>>>,
}

/// Where the buffers lie in a rank's memory.
fn buffers(plan: &restore::Together) -> impl Iterator<Item = Range<usize>> {
    let length = plan.buffer_bytes();
    (0..plan.buffers()).map(move |number| number * length..(number + 1) * length)
}

/// The longest wishes of a rank, in bytes before they are packed.
const MOST_WISHES: usize = 64 << 20;

/// What this rank wants, for [`Together`]: packed, for each rank hears that of all.
#[pyfunction]
pub(crate) fn wishes(step: &Step, targets: Vec<(usize, Option<Boxed>)>) -> PyResult<Cow<'static, [u8]>> {
    let packed = Wishes::of(&step.wishes(targets)).and_then(|wishes| {
        let text = serde_json::to_vec(&wishes).map_err(|error| Error::bug(format!("encode wishes: {error}")));
        Ok(Cow::Owned(codec::pack(&text?)?))
    });
    packed.or_raise()
}

fn unpack(wishes: &[u8]) -> Result<Wishes> {
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
            let wishes: Vec<Wishes> = wishes.iter().map(|packed| unpack(packed)).collect::<Result<_>>()?;
            let (store, origin) = match &found.place {
                Place::Store(url) => (Some(open(url)?), Origin::Store),
                Place::Held(memory) => {
                    let host = |shard: &Shard| {
                        let beside = memory.beside.get(shard.rank as usize)?;
                        hosts.get(*beside).copied()
                    };
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
                let bytes = plan.buffers() * plan.buffer_bytes();
                let lent = SharedMemory::create("forebay-restore", bytes)?;
                own = buffers(&plan).map(|buffer| lent.map_write(buffer)).collect::<Result<_>>()?;
                memory = Some(lent);
            }
            Ok((plan, store, memory, own))
        });
        let (plan, store, memory, own) = made.or_raise()?;
        let own = Mutex::new(own);
        let (links, rdma, no_rdma, came, lent) = Default::default();
        Ok(Self { step, plan, store, links, rdma, no_rdma, memory, own, came, lent })
    }

    /// How often the ranks of a host meet.
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

    /// Makes the ways to ranks of other hosts: by `addresses`, of each rank as JSON, and this one's `door`, through the network
    /// `cards` that are wanted, where those are there. Gives those to or from which there is none.
    fn connect(
        &self,
        py: Python<'_>,
        door: &Door,
        addresses: Vec<String>,
        cards: &str,
    ) -> PyResult<BTreeSet<usize>> {
        let connect = || -> Result<_> {
            let cards: Cards = cards.parse()?;
            let addresses: Vec<Address> = addresses.iter().map(|text| parse(text)).collect::<Result<_>>()?;
            let (rank, peers) = (self.plan.rank(), self.plan.peers());
            let rdma = Rdma::open(&cards, rank).unwrap_or_else(|error| {
                *self.no_rdma.lock() = Some(error);
                None
            });
            let links = Links::connect(&door.take()?, &addresses, rank, peers, rdma.clone())?;
            let missing = links.missing(peers);
            (*self.links.lock(), *self.rdma.lock()) = (links, rdma);
            Ok(missing)
        };
        py.detach(connect).or_raise()
    }

    /// Why cards did not bring what they were to bring, if there was anything.
    fn card_trouble(&self) -> Option<String> {
        let found = self.no_rdma.lock().as_ref().map(text);
        found.or_else(|| self.links.lock().trouble().as_ref().map(text))
    }

    /// Maps what was lent, once all ranks lent theirs.
    fn take_lent(&self) -> PyResult<()> {
        let map = |memory: SharedMemory| buffers(&self.plan).map(|buffer| memory.map_read(buffer)).collect();
        let came = std::mem::take(&mut *self.came.lock());
        *self.lent.lock() = came.into_iter().map(map).collect::<Result<_>>().or_raise()?;
        Ok(())
    }

    /// Fills memory, given as to `Step.read`, with what several ranks want, and calls `give`, as `Step.read_through` does, with
    /// what of that belongs into tensors that cannot be copied into; what `Together::read` gives. At each meeting of the ranks
    /// of this host it calls `meet` with whether all that this one fills is there, the ranks of which something did not come or came
    /// damaged, and what went wrong, which that raises; that gives whether all is there on each of them.
    fn read(
        &self,
        py: Python<'_>,
        targets: Vec<Wanted>,
        wanted: Vec<(usize, Option<Boxed>)>,
        callbacks: (Py<PyAny>, Py<PyAny>),
        threads: usize,
    ) -> PyResult<bool> {
        let (give, meet) = callbacks;
        let step = self.step.get();
        let wishes = step.wishes(wanted);
        let raised = Mutex::new(None);
        let mut hand = step.taken_by(&give, &raised);
        let mut meet = |filled: Result<Filled>| {
            let told = Python::attach(|py| {
                let (is_whole, lost, error) = match filled {
                    Ok(Filled { is_whole, lost }) => (is_whole, lost, None),
                    Err(error) => {
                        let error = raised.lock().take().unwrap_or_else(|| exception(&error));
                        (false, BTreeSet::new(), Some(error.into_value(py)))
                    }
                };
                meet.call1(py, (is_whole, lost, error)).and_then(|all| all.extract::<bool>(py))
            });
            told.map_err(|error| {
                *raised.lock() = Some(error);
                Error::bug("the ranks of this host do not meet")
            })
        };
        let read = |shards: &Shards<'_>| {
            let (mut own, links, lent) = (self.own.lock(), self.links.lock(), self.lent.lock());
            let own = own.iter_mut().map(|buffer| &mut buffer[..]).collect();
            let all = lent.iter().map(|buffers| buffers.iter().map(AsRef::as_ref).collect()).collect();
            let places = Places { targets: step.targets(targets), wishes: &wishes, give: &mut hand };
            self.plan.read((shards, &step.manifest), Lent { own, all }, &links, places, threads, &mut meet)
        };
        let outcome = py.detach(|| self.with_shards(read));
        step.count_rdma(self.rdma.lock().as_ref().map_or(0, |rdma| rdma.bytes_read()));
        let raised = raised.lock().take();
        raised.map_or_else(|| outcome.or_raise(), Err)
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
        let raised = Mutex::new(None);
        let mut hand = step.taken_by(&give, &raised);
        let through = Through { buffer: buffer::bytes_mut(buffer), give: &mut hand };
        let read = |shards: &Shards<'_>| {
            self.plan.read_rest_through((shards, &step.manifest), &wishes, through, threads)
        };
        let outcome = py.detach(|| self.with_shards(read));
        drop(hand);
        raised.into_inner().map_or_else(|| outcome.or_raise(), Err)
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
