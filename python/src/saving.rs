//! Saving: the trainer's session, its snapshots and saves, and the agent's process.

use std::num::NonZeroU64;
use std::sync::Arc;

use forebay_ckpt::agent::{Hello, Linger, Member, Origin, Replication, serve};
use forebay_ckpt::arena::HeldStep;
use forebay_ckpt::catalog::{Keep, Round, Start};
use forebay_ckpt::dtype::{DTYPES, Dtype};
use forebay_ckpt::local::LocalTier;
use forebay_ckpt::manifest::{Encoding, Extra, SliceKind, TextLength};
use forebay_ckpt::region::Region;
use forebay_ckpt::restore::Address;
use forebay_ckpt::session::{self, Progress};
use forebay_ckpt::shard::TensorSpec;
use forebay_core::units::parse_bytes;
use forebay_core::{Error, Result};
use forebay_io::net::{InUse, Notice};
use forebay_io::priority::Priority;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::buffer;
use crate::device::Device;
use crate::errors::{OrRaise, exception};
use crate::held::{Named, OpenMemory, Predecessor, named, step_named};
use crate::ranks::{parse, patience};
use crate::snapshot::Snapshot;

/// Every element type: name and bytes of one element.
#[pyfunction]
pub(crate) fn dtypes() -> Vec<(&'static str, u64)> {
    DTYPES.iter().map(|dtype| (dtype.name, dtype.size)).collect()
}

/// Reads a number of bytes, with or without a unit.
#[pyfunction]
pub(crate) fn parse_size(text: &str) -> PyResult<u64> {
    parse_bytes(text).or_raise()
}

/// The whole life of an agent, at the other end of the socket `fd`.
#[pyfunction]
pub(crate) fn run_agent(py: Python<'_>, fd: i32) -> PyResult<()> {
    // One line of JSON for each event, to wherever standard error goes.
    tracing_subscriber::fmt().json().with_writer(std::io::stderr).try_init().ok();
    // Before any thread begins.
    let notice = Notice::take().or_raise()?;
    py.detach(|| serve(buffer::stream(fd), Priority::of_process(), Some(notice))).or_raise()
}

/// A part of a tensor: whether it is a flat range, offsets, lengths.
#[derive(FromPyObject, IntoPyObject)]
pub(crate) struct Part(bool, Vec<u64>, Vec<u64>);

impl From<Part> for Region {
    fn from(Part(is_flat, offsets, lengths): Part) -> Self {
        let kind = if is_flat { SliceKind::Flat } else { SliceKind::Box };
        Self { kind, offsets, lengths }
    }
}

impl From<Region> for Part {
    fn from(Region { kind, offsets, lengths }: Region) -> Self {
        Self(kind == SliceKind::Flat, offsets, lengths)
    }
}

/// What a manifest says: slices, and bytes of text.
pub(crate) type Text = (u64, u64);

/// Bytes of text that a value which is no tensor takes in a manifest.
#[pyfunction]
pub(crate) fn text_length(name: &str, data: &str) -> u64 {
    TextLength::of_extra(name, data).bytes
}

/// A tensor, or a part of one, to be saved: name, element type, shape, and the part, none for all of it.
pub(crate) type Described = (String, String, Vec<u64>, Option<Part>);

/// The engine's side of a tensor.
pub(crate) fn spec((name, dtype, shape, part): Described) -> Result<TensorSpec> {
    let region = part.map_or_else(|| Region::whole(&shape), Region::from);
    if !region.fits(&shape) {
        return Err(Error::invalid(format!("a part of tensor `{name}` lies outside of it")));
    }
    Ok(TensorSpec { name, dtype: Dtype::named(&dtype)?, shape, region })
}

/// A trainer's connection to its agent, and what a forked child must not keep open of it.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Session(Mutex<session::Session>, Arc<InUse>);

impl Session {
    /// Makes it the session of one rank of a job.
    pub(crate) fn join(&self, member: Member) {
        self.0.lock().join(member);
    }
}

#[pymethods]
impl Session {
    #[new]
    fn new(
        url: String,
        nonce: String,
        host: String,
        pid: u32,
        started_ms: u64,
        keep: Option<usize>,
        keep_every: Option<u64>,
    ) -> Self {
        let start = Start { nonce, host, pid, started_ms };
        let keep = Keep { newest: keep, every: keep_every };
        Self(Mutex::new(session::Session::new(Hello::new(url, start, keep))), Arc::default())
    }

    /// Has the agent hold sealed steps for so many seconds after this process was killed, to be found at `place`.
    fn set_linger(&self, py: Python<'_>, place: String, seconds: f64) {
        let for_ms = patience(seconds).as_millis().min(u128::from(u64::MAX)) as u64;
        py.detach(|| self.0.lock().set_linger(Some(Linger { place, for_ms })));
    }

    /// Has the agent send no more than so many bytes a second, given as a number with or without a unit.
    fn set_flush_rate(&self, py: Python<'_>, rate: &str) -> PyResult<()> {
        let bytes = parse_bytes(rate).and_then(|bytes| {
            NonZeroU64::new(bytes).ok_or_else(|| Error::invalid("a flush rate of 0 would send nothing"))
        });
        let bytes = bytes.map_err(|error| error.context("flush_rate")).or_raise()?;
        py.detach(|| self.0.lock().set_flush_rate(bytes));
        Ok(())
    }

    /// Keeps one snapshot in memory in the place of two.
    fn keep_one_snapshot(&self, py: Python<'_>) {
        py.detach(|| self.0.lock().keep_one_snapshot());
    }

    /// Has the agent keep copies of the `keep` newest steps in `directory`, all ranks together no more than `ceiling` bytes
    /// where that is given, as a number with or without a unit. `starts` are the nonces of this start and those
    /// before it that it goes on from, oldest first, with the highest number of a start that this one saw in the store; a step
    /// of these that the store may lack is brought there.
    fn set_local(
        &self,
        py: Python<'_>,
        directory: String,
        keep: usize,
        ceiling: Option<&str>,
        lineage: (Vec<String>, u64),
        resumes: Option<Named>,
    ) -> PyResult<()> {
        let ceiling = ceiling.map(parse_bytes).transpose();
        let ceiling = ceiling.map_err(|error| error.context("local_bytes")).or_raise()?;
        let (starts, seen) = lineage;
        let tier = LocalTier { directory, keep, ceiling, starts, seen, resumes: resumes.map(step_named) };
        py.detach(|| self.0.lock().set_local(tier));
        Ok(())
    }

    /// Has agents of different hosts hold so many steps of each other's ranks, through the network cards that are named.
    fn set_replication(&self, py: Python<'_>, steps: usize, cards: String) {
        py.detach(|| self.0.lock().set_replication(Replication { steps, cards }));
    }

    /// Where the agent takes copies for ranks of other hosts: a port of this host and what they are to say there, once it
    /// told; None where it does not for that long.
    fn keeps_at(&self, py: Python<'_>, patience_s: f64) -> PyResult<Option<(u16, String)>> {
        py.detach(|| self.0.lock().keeps_at(patience(patience_s))).or_raise()
    }

    /// Has the agent of another host, at an address given as JSON, hold what is sealed from now on.
    fn replicate_to(&self, py: Python<'_>, address: &str) -> PyResult<()> {
        let address: Address = parse(address).or_raise()?;
        py.detach(|| self.0.lock().replicate_to(address));
        Ok(())
    }

    /// Takes over what an agent holds that lost its trainer, before one of this session's own is greeted; its steps only
    /// where this start goes on from one of them.
    fn adopt(&self, py: Python<'_>, predecessor: &Predecessor, goes_on: bool) -> PyResult<()> {
        py.detach(|| self.0.lock().adopt(predecessor.take()?, goes_on)).or_raise()
    }

    /// Notes the ranks whose killed processes left no agent, of as many as there are now and of the start whose step was restored,
    /// and what agents have kept of their parts (rank, nonce of the start, step), before one of this session's own is greeted.
    fn set_lost(&self, py: Python<'_>, own: Vec<u32>, followed: Vec<u32>, kept: Vec<(u32, String, u64)>) {
        let kept = kept.into_iter().map(|(rank, start, step)| (rank, HeldStep { start, step })).collect();
        py.detach(|| self.0.lock().set_lost(own, followed, kept));
    }

    /// Has what is saved next refer to what did not change since a step, given by the start of its start's nonce.
    fn go_on_from(&self, py: Python<'_>, attempt: String, step: u64) {
        py.detach(|| self.0.lock().go_on_from(Origin { attempt, step }));
    }

    /// Goes on as another start (nonce, host, process, milliseconds since 1970), from a step that is given by the start of its
    /// start's nonce; what is newer than that, and not committed, is let go of. When the job went back, the store had starts up
    /// to the number `seen`, if it told.
    fn begin_anew(
        &self,
        py: Python<'_>,
        start: (String, String, u32, u64),
        seen: Option<u64>,
        origin: (String, u64),
    ) {
        let (nonce, host, pid, started_ms) = start;
        let start = Start { nonce, host, pid, started_ms };
        let (attempt, step) = origin;
        py.detach(|| self.0.lock().begin_anew(start, seen, Origin { attempt, step }));
    }

    /// Whether the agent has not let go yet of all that the job went back from.
    #[getter]
    fn is_letting_go(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.lock().is_letting_go())
    }

    /// Notes the highest number that a start had in the store when this one looked there, before an agent is greeted.
    fn set_seen(&self, py: Python<'_>, number: u64) {
        py.detach(|| self.0.lock().set_seen(number));
    }

    /// From now on slots are locked in memory, for `device` to copy into.
    fn pin_for(&self, py: Python<'_>, device: &Device) {
        py.detach(|| self.0.lock().pin_for(device.inner()));
    }

    /// The sealed steps that are in memory, newest first.
    fn held(&self, py: Python<'_>) -> Vec<Named> {
        py.detach(|| self.0.lock().held().into_iter().map(named).collect())
    }

    /// Shows what is in memory to whoever visits `place`, until that is closed.
    fn open_memory(&self, py: Python<'_>, place: &str) -> PyResult<OpenMemory> {
        let opened = py.detach(|| self.0.lock().open_memory(place)).or_raise()?;
        Ok(OpenMemory::new(opened))
    }

    /// From now on no save takes the slot of that step.
    fn keep(&self, py: Python<'_>, step: Option<Named>) {
        py.detach(|| self.0.lock().keep(step.map(step_named)));
    }

    /// Greets the agent behind the socket `fd`, which this call takes over.
    fn connect(&self, py: Python<'_>, fd: i32) -> PyResult<()> {
        py.detach(|| self.0.lock().connect(buffer::noted_stream(fd, self.1.clone()))).or_raise()
    }

    #[getter]
    fn is_connected(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.lock().is_connected())
    }

    #[getter]
    fn is_busy(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.lock().is_busy())
    }

    /// Steps that a dead agent left unsettled.
    fn lost(&self, py: Python<'_>) -> Vec<u64> {
        py.detach(|| self.0.lock().lost().map(|lost| lost.steps).unwrap_or_default())
    }

    /// Saves without a copy on this host's disk, which was to have one.
    #[getter]
    fn copies_missed(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.0.lock().copies_missed())
    }

    /// Saves of which no other host has a copy in its memory, where one was to.
    #[getter]
    fn replicas_missed(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.0.lock().replicas_missed())
    }

    fn take_warnings(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.0.lock().take_warnings())
    }

    /// Faults in memory for a state of `size` bytes.
    fn prepare(&self, py: Python<'_>, size: u64, threads: usize) -> PyResult<()> {
        py.detach(|| self.0.lock().prepare(size, threads)).or_raise()
    }

    /// Whether a snapshot can be begun, if need be after waiting for that long.
    fn has_room(&self, py: Python<'_>, patience_s: f64) -> PyResult<bool> {
        py.detach(|| self.0.lock().has_room(patience(patience_s))).or_raise()
    }

    /// A snapshot with place for tensors of these names, types, shapes and parts (none for all of it); `None` when no
    /// slot is free. `beside` is what the manifest says beside these, as far as it is known.
    #[pyo3(signature = (tensors, threads, patience_s, beside=(0, 0)))]
    fn begin(
        &self,
        py: Python<'_>,
        tensors: Vec<Described>,
        threads: usize,
        patience_s: f64,
        beside: Text,
    ) -> PyResult<Option<Snapshot>> {
        let begun = py.detach(|| {
            let specs = tensors.into_iter().map(spec).collect::<Result<_>>()?;
            let beside = TextLength { slices: beside.0, bytes: beside.1 };
            self.0.lock().begin(specs, beside, threads, patience(patience_s))
        });
        Ok(begun.or_raise()?.map(Snapshot::new))
    }

    /// Gives a filled snapshot to the agent, in the round of the step that all ranks know by that number, if they know one;
    /// asked again, it gives the same save.
    /// `extras` are pairs of a name and JSON text.
    fn seal(
        &self,
        py: Python<'_>,
        snapshot: &Snapshot,
        step: u64,
        round: Option<u64>,
        created_ms: u64,
        extras: Vec<(String, String)>,
    ) -> PyResult<Save> {
        let sealed = py.detach(|| {
            if let Some(save) = snapshot.sealed() {
                return Ok(save);
            }
            let extra = |(name, data)| Extra { name, encoding: Encoding::Json, data };
            let extras = extras.into_iter().map(extra).collect();
            let save =
                self.0.lock().seal(*snapshot.take()?, step, round.map(Round::new), created_ms, extras)?;
            snapshot.set_sealed(save.clone());
            Ok(save)
        });
        sealed.map(Save).or_raise()
    }

    /// Gives a snapshot up.
    fn abandon(&self, py: Python<'_>, snapshot: &Snapshot) {
        py.detach(|| {
            // Where a copy behind the training failed, which nobody need hear of any more, it is there the second time.
            if let Ok(snapshot) = snapshot.take().or_else(|_| snapshot.take()) {
                self.0.lock().abandon(*snapshot);
            }
        });
    }

    /// Tells the job's other ranks that this one will not save a step in that round.
    fn give_up(&self, py: Python<'_>, step: u64, round: Option<u64>, reason: String) {
        py.detach(|| self.0.lock().give_up(step, round.map(Round::new), reason));
    }

    /// Takes what the agent said, waiting for a first word for that long; other threads can use the session meanwhile.
    fn take_replies(&self, py: Python<'_>, patience_s: f64) -> PyResult<()> {
        let listen = || -> Result<()> {
            let patience = patience(patience_s);
            let connection = self.0.lock().take_or_await(patience)?;
            if let Some(connection) = connection {
                connection.readable(patience)?;
                self.0.lock().hear()?;
            }
            Ok(())
        };
        py.detach(listen).or_raise()
    }

    /// Leaves the agent for good, and all memory with it: nobody will come for what is there.
    fn dismiss(&self, py: Python<'_>) {
        py.detach(|| self.0.lock().dismiss());
    }

    /// Leaves the agent, which then waits for a successor, and all memory to it.
    fn leave(&self, py: Python<'_>) {
        py.detach(|| self.0.lock().leave());
    }

    /// For a forked child: lets go of everything without a word to the agent.
    fn forget(&self, py: Python<'_>) {
        // Where the parent's other thread held the lock at the fork, nothing else can be let go.
        py.detach(|| {
            self.1.leave_in_child();
            if let Some(mut session) = self.0.try_lock() {
                session.forget();
            }
        });
    }
}

/// One save and what became of it.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Save(Arc<session::Save>);

#[pymethods]
impl Save {
    #[getter]
    fn step(&self) -> u64 {
        self.0.step
    }

    /// `sent`, `sealed`, `durable` or `failed`.
    #[getter]
    fn progress(&self) -> &'static str {
        match self.0.progress() {
            Progress::Sent => "sent",
            Progress::Sealed => "sealed",
            Progress::Durable => "durable",
            Progress::Failed(_) => "failed",
        }
    }

    /// When the agent had it sealed, on the local disk, in another host's memory, stored and committed, in seconds since this
    /// machine started, as far as it has.
    #[getter]
    fn times(&self) -> [Option<f64>; 5] {
        let session::Times { sealed, local, replicated, stored, durable } = self.0.times();
        let seconds = |at_us: Option<u64>| at_us.map(|at_us| at_us as f64 / 1e6);
        [sealed, local, replicated, stored, durable].map(seconds)
    }

    /// Raises what made the save fail, if it failed.
    fn raise_if_failed(&self) -> PyResult<()> {
        match self.0.progress() {
            Progress::Failed(error) => Err(exception(&error)),
            _ => Ok(()),
        }
    }
}
