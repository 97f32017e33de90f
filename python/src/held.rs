//! What is nearer than the store: what is held in memory, by this job or the agents of killed trainers, and the copies on
//! this host's disk.

use std::future::Future;
use std::time::Duration;

use forebay_ckpt::arena::HeldStep;
use forebay_ckpt::catalog::{Start, list_steps, newest_number, newest_run};
use forebay_ckpt::local::{Local, PATIENCE, as_damage};
use forebay_ckpt::restore::assemble;
use forebay_ckpt::session::{self, Part};
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, BucketUrl, StoreSettings};
use forebay_io::task::end;
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::errors::OrRaise;
use crate::loading::{Step, runtime};

/// A sealed step: its start's nonce and its number.
pub(crate) type Named = (String, u64);

pub(crate) fn named(step: HeldStep) -> Named {
    (step.start, step.step)
}

pub(crate) fn step_named((start, step): Named) -> HeldStep {
    HeldStep { start, step }
}

/// An agent that lost its trainer, or memory that a rank of this job opened.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Predecessor(Mutex<Option<session::Predecessor>>);

impl Predecessor {
    /// Takes it out, for a session to adopt.
    pub(crate) fn take(&self) -> Result<session::Predecessor> {
        self.0.lock().take().ok_or_else(gone)
    }

    fn with<T>(&self, work: impl FnOnce(&session::Predecessor) -> Result<T>) -> Result<T> {
        self.0.lock().as_ref().ok_or_else(gone).and_then(work)
    }
}

fn gone() -> Error {
    Error::bug("what was held was taken over already")
}

#[pymethods]
impl Predecessor {
    /// Visits who is found at `place`; `None` when there is none, or it is an agent whose trainer lives.
    #[staticmethod]
    fn visit(py: Python<'_>, place: &str) -> PyResult<Option<Self>> {
        let found = py.detach(|| session::Predecessor::visit(place));
        Ok(found.or_raise()?.map(|found| Self(Mutex::new(Some(found)))))
    }

    /// The nonce of the start whose memory it is.
    #[getter]
    fn start(&self) -> PyResult<String> {
        self.with(|found| Ok(found.start().to_owned())).or_raise()
    }

    /// When that start began, in milliseconds since 1970 by its own clock; 0 where the agent does not say.
    #[getter]
    fn started_ms(&self) -> PyResult<u64> {
        self.with(|found| Ok(found.started_ms())).or_raise()
    }

    /// The starts that it came after, as far as it knows, by the first eight characters of their nonces.
    fn after(&self) -> PyResult<Vec<String>> {
        self.with(|found| Ok(found.after().to_vec())).or_raise()
    }

    /// The steps that it holds, newest first.
    fn held(&self) -> PyResult<Vec<Named>> {
        self.with(|found| Ok(found.held().into_iter().map(named).collect())).or_raise()
    }

    /// The steps that it keeps for ranks of other hosts, with each one's rank, newest first.
    fn kept(&self) -> PyResult<Vec<(u32, Named)>> {
        let kept = |(rank, step)| (rank, named(step));
        self.with(|found| Ok(found.kept().into_iter().map(kept).collect())).or_raise()
    }

    /// What it says of a rank's part of a step, for ranks of other hosts.
    fn told(&self, step: Named, rank: u32) -> PyResult<String> {
        self.with(|found| found.told(&step_named(step), rank).map(str::to_owned)).or_raise()
    }

    /// Lets go of its memory at once, whatever refers to this.
    fn release(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.lock().take()));
    }

    /// Those of them that were committed.
    fn durable(&self) -> PyResult<Vec<Named>> {
        self.with(|found| Ok(found.durable().iter().cloned().map(named).collect())).or_raise()
    }
}

/// What a session's memory holds, at a place where other ranks find it.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct OpenMemory(Mutex<Option<session::OpenMemory>>);

impl OpenMemory {
    pub(crate) fn new(opened: session::OpenMemory) -> Self {
        Self(Mutex::new(Some(opened)))
    }
}

#[pymethods]
impl OpenMemory {
    /// Nobody finds it any more; those who came keep what they saw.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.lock().take()));
    }
}

/// Who holds a rank's part of a step: an agent of this host, or one elsewhere, by what it tells of it.
#[derive(FromPyObject)]
pub(crate) enum Holder {
    Here(Py<Predecessor>),
    Elsewhere(String),
}

/// The step that is held in memory for each rank that saved, given in their order, on the host of a rank `beside` it.
#[pyfunction]
pub(crate) fn open_held(
    py: Python<'_>,
    holders: Vec<Holder>,
    beside: Vec<usize>,
    step: Named,
) -> PyResult<Step> {
    let step = step_named(step);
    let opened = py.detach(|| {
        let part = |(rank, holder): (u32, &Holder)| match holder {
            Holder::Here(agent) => agent.get().with(|found| found.part(&step, rank)),
            Holder::Elsewhere(told) => Part::elsewhere(&step, told),
        };
        assemble((0..).zip(&holders).map(part).collect::<Result<_>>()?)
    });
    opened.or_raise().map(|(manifest, shards)| Step::held(manifest, shards, beside))
}

/// What the store has: the nonce of the run's newest start, if there was one, empty where its record is damaged, that start's
/// number, else 0, every committed step, newest first, as the first eight digits of its start's nonce and its number, and the
/// host and the time (milliseconds since 1970) of that start, as it says.
type Survey = (Option<String>, u64, Vec<(String, u64)>, Option<(String, u64)>);

/// Asks the store at `url` what it has.
///
/// # Errors
/// `Unavailable` when it does not tell in time.
#[pyfunction]
pub(crate) fn survey(py: Python<'_>, url: &str, patience_s: f64) -> PyResult<Survey> {
    let patience = Duration::try_from_secs_f64(patience_s).unwrap_or_default();
    let ask = || -> Result<Survey> {
        let clock = Clock::system();
        let url: BucketUrl = url.parse()?;
        let runtime = runtime()?;
        let asked = runtime.block_on(async {
            let look = async {
                let bucket = Bucket::open(&url, &StoreSettings::default()).await?;
                let (start, number, began) = match newest_run(&bucket).await {
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        (Some(String::new()), newest_number(&bucket).await?, None)
                    }
                    run => run?.map_or((None, 0, None), |run| {
                        let Start { nonce, host, started_ms, .. } = run.start;
                        (Some(nonce), run.incarnation, Some((host, started_ms)))
                    }),
                };
                let steps = list_steps(&bucket).await?.into_iter().rev();
                let steps = steps.map(|info| (info.key.attempt, info.key.step));
                Ok::<Survey, Error>((start, number, steps.collect(), began))
            };
            tokio::select! {
                found = look => found,
                () = clock.sleep(patience) => {
                    let late = format!("{url} did not answer for {patience_s} s");
                    Err(Error::new(ErrorKind::Unavailable, late))
                }
            }
        });
        end(runtime);
        asked
    };
    py.detach(ask).or_raise()
}

/// Threads for what waits for this host's disk; those that hang there are left to themselves.
pub(crate) fn with_disk<T>(work: impl FnOnce(&Handle) -> Result<T>) -> Result<T> {
    let runtime = runtime()?;
    let done = work(runtime.handle());
    end(runtime);
    done
}

/// Waits for little work on this host's disk.
///
/// # Errors
/// `Unavailable` where it hangs.
pub(crate) fn while_it_answers<T>(runtime: &Handle, work: impl Future<Output = Result<T>>) -> Result<T> {
    let clock = Clock::system();
    let hangs = format!("the local disk did not answer for {} s", PATIENCE.as_secs());
    runtime.block_on(async {
        tokio::select! {
            done = work => done,
            () = clock.sleep(PATIENCE) => Err(Error::new(ErrorKind::Unavailable, hangs)),
        }
    })
}

/// Does little work on this host's disk, unless that hangs.
fn on_disk<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    with_disk(|runtime| while_it_answers(runtime, work))
}

/// Begins the copies of a start in `directory`: they go on from those of the `starts` before it, which is the last. It saw
/// starts in the store up to a number.
#[pyfunction]
pub(crate) fn begin_local(py: Python<'_>, directory: &str, starts: Vec<String>, seen: u64) -> PyResult<()> {
    let begin = || on_disk(async { Local::open(directory).await?.begin(&starts, seen).await });
    py.detach(begin).or_raise()
}

/// The starts that went on from one another on this host's disk, oldest first, up to which number the last of them saw starts
/// in the store, and their whole steps, newest first, each with whether it is in the store as well.
type Copies = (Vec<String>, u64, Vec<(Named, bool)>);

/// What is in `directory`.
#[pyfunction]
pub(crate) fn look_local(py: Python<'_>, directory: &str) -> PyResult<Copies> {
    let look = || on_disk(async { Local::open(directory).await?.look().await });
    let found = py.detach(look).or_raise()?;
    let steps = found.steps.into_iter().map(|step| (named(step.name), step.is_durable));
    Ok((found.starts, found.seen, steps.collect()))
}

/// The copy of a step in `directory`.
#[pyfunction]
pub(crate) fn open_local(py: Python<'_>, directory: &str, step: Named) -> PyResult<Step> {
    let open = || {
        let read = async { Local::open(directory).await?.manifest(&step_named(step)).await };
        on_disk(async { read.await.map_err(as_damage) })
    };
    Ok(Step::local(py.detach(open).or_raise()?, directory.to_owned()))
}
