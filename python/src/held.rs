//! What the agents of killed trainers hold.

use std::time::Duration;

use forebay_ckpt::arena::HeldStep;
use forebay_ckpt::catalog::newest_run;
use forebay_ckpt::restore::assemble;
use forebay_ckpt::session;
use forebay_core::{Error, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, BucketUrl, StoreSettings};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors::OrRaise;
use crate::loading::Step;

/// A sealed step: its start's nonce and its number.
pub(crate) type Named = (String, u64);

pub(crate) fn named(step: HeldStep) -> Named {
    (step.start, step.step)
}

pub(crate) fn step_named((start, step): Named) -> HeldStep {
    HeldStep { start, step }
}

/// An agent that lost its trainer.
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
    /// Visits the agent that is found at `place`; `None` when there is none, or its trainer lives.
    #[staticmethod]
    fn visit(py: Python<'_>, place: &str) -> PyResult<Option<Self>> {
        let found = py.detach(|| session::Predecessor::visit(place));
        Ok(found.or_raise()?.map(|found| Self(Mutex::new(Some(found)))))
    }

    /// The nonce of the start that it served.
    #[getter]
    fn start(&self) -> PyResult<String> {
        self.with(|found| Ok(found.start().to_owned())).or_raise()
    }

    /// The steps that it holds, newest first.
    fn held(&self) -> PyResult<Vec<Named>> {
        self.with(|found| Ok(found.held().into_iter().map(named).collect())).or_raise()
    }
}

/// The step that the ranks' agents hold, given in the order of ranks.
#[pyfunction]
pub(crate) fn open_held(py: Python<'_>, agents: Vec<Py<Predecessor>>, step: Named) -> PyResult<Step> {
    let agents: Vec<&Predecessor> = agents.iter().map(Py::get).collect();
    let step = step_named(step);
    let opened = py.detach(|| {
        let part = |agent: &&Predecessor| agent.with(|found| found.part(&step));
        assemble(agents.iter().map(part).collect::<Result<_>>()?)
    });
    opened.or_raise().map(|(manifest, shards)| Step::held(manifest, shards))
}

/// The nonce of the newest start of the run at `url`; `None` when there is none, or the store does not tell in time.
#[pyfunction]
pub(crate) fn newest_start(py: Python<'_>, url: &str, patience_s: f64) -> PyResult<Option<String>> {
    let patience = Duration::try_from_secs_f64(patience_s).unwrap_or_default();
    let ask = || -> Result<Option<String>> {
        let clock = Clock::system();
        let url: BucketUrl = url.parse()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let asked = runtime.block_on(async {
            let newest = async {
                let bucket = Bucket::open(&url, &StoreSettings::default()).await?;
                newest_run(&bucket).await
            };
            tokio::select! {
                found = newest => found.ok().flatten(),
                () = clock.sleep(patience) => None,
            }
        });
        runtime.shutdown_background();
        Ok(asked.map(|run| run.start.nonce))
    };
    py.detach(ask).or_raise()
}
