//! Several ranks: their group, the job's start, and who writes what.

use std::time::Duration;

use forebay_ckpt::agent::Member;
use forebay_ckpt::catalog::{self, Run, Start, begin_run, find_run};
use forebay_ckpt::group;
use forebay_ckpt::plan::{Descriptor, Share, plan, text_beside};
use forebay_core::{Error, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;
use serde::de::DeserializeOwned;

use crate::buffer;
use crate::errors::OrRaise;
use crate::loading::with_bucket;
use crate::saving::{Part, Session, Text};

/// A rank's way to the others.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Group(pub(crate) Mutex<group::Group>);

#[pymethods]
impl Group {
    /// Joins the ranks that meet at `name`.
    #[new]
    fn new(py: Python<'_>, name: String, rank: usize, world_size: usize, patience_s: f64) -> PyResult<Self> {
        let joined = py.detach(|| group::Group::join(&name, rank, world_size, patience(patience_s)));
        joined.map(|group| Self(Mutex::new(group))).or_raise()
    }

    /// What each rank says, in their order.
    fn gather(&self, py: Python<'_>, text: &str, patience_s: f64) -> PyResult<Vec<String>> {
        py.detach(|| self.0.lock().gather(text, patience(patience_s))).or_raise()
    }

    /// For a forked child: lets go without a word.
    fn forget(&self, py: Python<'_>) {
        py.detach(|| {
            if let Some(mut group) = self.0.try_lock() {
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

/// What `rank` writes, from all ranks' descriptors as JSON: for each part the number of the tensor there, its name in
/// the manifest, and the part's kind, offsets and lengths. With it goes what the manifest says of the other ranks' tensors:
/// slices, and bytes of text.
#[pyfunction]
pub(crate) fn plan_shares(
    py: Python<'_>,
    descriptors: Vec<String>,
    rank: usize,
) -> PyResult<(Vec<Planned>, Text)> {
    let planned = py.detach(|| {
        let ranks: Vec<Vec<Descriptor>> =
            descriptors.iter().map(|text| parse(text)).collect::<Result<_>>()?;
        let mut shares = plan(&ranks)?;
        if rank >= shares.len() {
            return Err(Error::invalid(format!("rank {rank} of {}", shares.len())));
        }
        let beside = text_beside(&ranks, &shares, rank)?;
        Ok((shares.swap_remove(rank), beside))
    });
    let (shares, beside) = planned.or_raise()?;
    let share = |Share { tensor, name, region }| (tensor, name, Part::from(region));
    Ok((shares.into_iter().map(share).collect(), (beside.slices, beside.bytes)))
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
