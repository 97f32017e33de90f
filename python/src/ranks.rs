//! Several ranks: their group, the job's start, and who writes what.

use std::cell::RefCell;
use std::collections::HashSet;
use std::time::Duration;

use forebay_ckpt::agent::Member;
use forebay_ckpt::catalog::{self, Run, Start, begin_run, find_run};
use forebay_ckpt::group::{self, GoesOn, Way};
use forebay_ckpt::plan::{self, Share};
use forebay_ckpt::roster;
use forebay_core::{Error, Result};
use forebay_io::net::{self, FdStream};
use parking_lot::{Mutex, ReentrantMutex};
use pyo3::prelude::*;
use serde::de::DeserializeOwned;

use crate::buffer;
use crate::errors::OrRaise;
use crate::loading::with_bucket;
use crate::saving::{Part, Session, Text};

/// A rank's way to the others. One thread at a time uses it; what Python does there on a signal meanwhile does not.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Group(ReentrantMutex<RefCell<group::Group>>);

impl Group {
    /// Waits for others with `work`, which gets what looks at signals meanwhile. Gives what a signal's handler raised.
    pub(crate) fn wait<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut group::Group, GoesOn<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        heeding_signals(py, |goes_on| {
            let group = self.0.lock();
            let mut group = group.try_borrow_mut().map_err(|_| {
                Error::invalid("this rank waits for the others already")
                    .with_hint("a signal's handler cannot save or restore together with other ranks")
            })?;
            work(&mut group, goes_on)
        })
    }
}

/// Does `work` without the interpreter; what looks at signals for it is true until one's handler raises.
fn heeding_signals<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(GoesOn<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    let (outcome, raised) = py.detach(|| {
        let mut raised = None;
        let mut goes_on = || {
            raised = Python::attach(|py| py.check_signals()).err();
            raised.is_none()
        };
        let outcome = work(&mut goes_on);
        (outcome, raised)
    });
    raised.map_or_else(|| outcome.or_raise(), Err)
}

/// A port of rank 0's, through which ranks of other hosts come to its group.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Door(Mutex<Option<net::Door>>);

impl Door {
    /// Takes it out, for who welcomes others there.
    pub(crate) fn take(&self) -> Result<net::Door> {
        self.0.lock().take().ok_or_else(|| Error::bug("the door is given away"))
    }
}

#[pymethods]
impl Door {
    /// Opens one for who knows the secret.
    #[new]
    fn new(secret: String) -> PyResult<Self> {
        net::Door::open(secret).map(|door| Self(Mutex::new(Some(door)))).or_raise()
    }

    /// Its port.
    #[getter]
    fn port(&self) -> PyResult<u16> {
        self.0
            .lock()
            .as_ref()
            .ok_or_else(|| Error::bug("the door is given away"))
            .and_then(net::Door::port)
            .or_raise()
    }
}

/// A rank's way through the door of another host.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Arrival(Mutex<Option<FdStream>>);

#[pymethods]
impl Arrival {
    /// Comes to the door at that port, at the first of the addresses where it is; None where it is at none.
    #[staticmethod]
    fn at(py: Python<'_>, addresses: Vec<String>, port: u16, secret: &str, patience_s: f64) -> Option<Self> {
        let came = py.detach(|| net::come(&addresses, port, secret, patience(patience_s)));
        came.map(|stream| Self(Mutex::new(Some(stream))))
    }
}

#[pymethods]
impl Group {
    /// Joins the ranks that meet at `name`, from that host; `place` is this rank and how many there are. Rank 0 may have a
    /// door, and who came through it is in no other place.
    #[new]
    #[pyo3(signature = (name, place, host, patience_s, door=None, arrival=None))]
    fn new(
        py: Python<'_>,
        name: String,
        place: (usize, usize),
        host: String,
        patience_s: f64,
        door: Option<&Door>,
        arrival: Option<&Arrival>,
    ) -> PyResult<Self> {
        let (rank, world_size) = place;
        let (door, came) =
            (door.and_then(|door| door.0.lock().take()), arrival.and_then(|way| way.0.lock().take()));
        let way = match (came, door) {
            (Some(stream), _) => Way::Came(stream),
            (None, Some(door)) => Way::Open(&name, door),
            (None, None) => Way::Name(&name),
        };
        let joined = heeding_signals(py, |goes_on| {
            group::Group::join(way, rank, world_size, &host, patience(patience_s), goes_on)
        });
        joined.map(|group| Self(ReentrantMutex::new(RefCell::new(group))))
    }

    /// Where each rank is, in their order.
    fn hosts(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.wait(py, |group, _| Ok(group.hosts().to_vec()))
    }

    /// What each rank says, in their order. What a signal's handler raises meanwhile ends the group.
    fn gather(&self, py: Python<'_>, text: &str, patience_s: f64) -> PyResult<Vec<String>> {
        self.wait(py, |group, goes_on| group.gather(text, patience(patience_s), goes_on))
    }

    /// For a forked child: lets go without a word.
    fn forget(&self, py: Python<'_>) {
        py.detach(|| {
            if let Some(Ok(mut group)) = self.0.try_lock().as_ref().map(|group| group.try_borrow_mut()) {
                group.forget();
            }
        });
    }
}

/// Takes an incarnation for all ranks of a job; gives its record for [`join`].
#[pyfunction]
pub(crate) fn begin_job(
    py: Python<'_>,
    url: &str,
    nonce: String,
    host: String,
    pid: u32,
    started_ms: u64,
) -> PyResult<String> {
    let start = Start { nonce, host, pid, started_ms };
    let run = with_bucket(py, url, |bucket| async move { begin_run(&bucket, start).await })?;
    serde_json::to_string(&run).map_err(|error| Error::bug(format!("encode a run: {error}"))).or_raise()
}

/// Raises where a later start than the one with that nonce took over.
#[pyfunction]
pub(crate) fn refuse_if_superseded(py: Python<'_>, url: &str, nonce: String) -> PyResult<()> {
    with_bucket(py, url, |bucket| async move {
        match find_run(&bucket, &nonce).await? {
            Some(run) => catalog::refuse_if_superseded(&bucket, &run).await,
            // It came to nothing before it was recorded.
            None => Ok(()),
        }
    })
}

/// Makes `session` that of one rank of the job that `begin_job` began.
#[pyfunction]
pub(crate) fn join_job(session: &Session, run: &str, rank: u32, world_size: u32) -> PyResult<()> {
    let joined = parse::<Run>(run).map(|run| session.join(Member { run, rank, world_size }));
    joined.or_raise()
}

/// A share: number of the tensor, name in the manifest, part.
type Planned = (usize, String, Part);

/// What all ranks of a job have.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Roster(roster::Roster);

#[pymethods]
impl Roster {
    /// From what ranks said: outlines as JSON, and of each rank which of these it has, where its parts lie, and bytes of tensors
    /// that it has for itself.
    #[new]
    fn new(py: Python<'_>, outlines: Vec<String>, ranks: Vec<(usize, String, String)>) -> PyResult<Self> {
        let word = |(outline, parts, bytes)| roster::Word { outline, parts, bytes };
        let words: Vec<_> = ranks.into_iter().map(word).collect();
        py.detach(|| roster::Roster::read(&outlines, &words)).map(Self).or_raise()
    }

    /// Names of tensors that ranks hold together and of which some rank has anything.
    fn held_together(&self, py: Python<'_>) -> HashSet<&str> {
        py.detach(|| self.0.held_together())
    }

    /// Which ranks hold parts alike, but for those of tensors that are named `again`, and which of this rank's they are: in an
    /// order that is the same on all ranks.
    fn alike(
        &self,
        py: Python<'_>,
        again: HashSet<String>,
        rank: usize,
    ) -> PyResult<Vec<(Vec<usize>, Vec<usize>)>> {
        let sets = py.detach(|| plan::alike(&self.0, &again, rank)).or_raise()?;
        Ok(sets.into_iter().map(|plan::Alike { ranks, tensors }| (ranks, tensors)).collect())
    }

    /// What a rank writes, from what all have and what they told that it hashes to, each as a JSON list of pairs: for each part the
    /// number of the tensor there, its name in the manifest, and the part's kind, offsets and lengths. With it goes what the
    /// manifest says of the other ranks' tensors: slices, and bytes of text.
    fn plan(
        &self,
        py: Python<'_>,
        again: HashSet<String>,
        hashes: Vec<String>,
        rank: usize,
    ) -> PyResult<(Vec<Planned>, Text)> {
        let planned = py.detach(|| {
            let told = |text: &String| Ok(parse::<Vec<(usize, String)>>(text)?.into_iter().collect());
            let hashes: Vec<plan::Hashes> = hashes.iter().map(told).collect::<Result<_>>()?;
            plan::plan(&self.0, &again, &hashes, rank)
        });
        let plan::Planned { shares, beside } = planned.or_raise()?;
        let share = |Share { tensor, name, region }| (tensor, name, Part::from(region));
        Ok((shares.into_iter().map(share).collect(), (beside.slices, beside.bytes)))
    }
}

/// What the bytes at an address hash to, to be compared between ranks.
#[pyfunction]
pub(crate) fn hash_bytes(py: Python<'_>, address: usize, length: usize) -> String {
    py.detach(|| forebay_ckpt::plan::hash(buffer::bytes((address, length))))
}

pub(crate) fn patience(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text)
        .map_err(|error| Error::invalid(format!("what a rank said does not parse: {error}")))
}
