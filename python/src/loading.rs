//! Loading: listing steps, reading a manifest, filling memory with tensors.

use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use forebay_ckpt::catalog::{Start, StepInfo, StepKey, StepName, load_manifest, newest_number, pin, unpin};
use forebay_ckpt::convert::{Export, import};
use forebay_ckpt::dtype::Dtype;
use forebay_ckpt::local::{Local, as_damage};
use forebay_ckpt::manifest::{Manifest, SliceKind};
use forebay_ckpt::region::Region;
use forebay_ckpt::restore::{
    Shards, Spot, Target, Through, Wish, read_held, read_local, read_tensors, read_through,
};
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::clock::Clock;
use forebay_io::files::make_directory;
use forebay_io::object::{Bucket, BucketUrl, StoreSettings};
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::runtime::Runtime;

use crate::buffer;
use crate::errors::OrRaise;
use crate::held::{while_it_answers, with_disk};

/// A committed step: step, incarnation, attempt, when (seconds since 1970), superseded.
type Listed = (u64, u64, String, f64, bool);

/// A part of a tensor: offsets and lengths.
pub(crate) type Boxed = (Vec<u64>, Vec<u64>);

/// A tensor wanted: index, part (none for all of it), address, length.
pub(crate) type Wanted = (usize, Option<Boxed>, usize, usize);

/// Runs `work` on the bucket `url` on threads that end with it: nothing of ours survives into a forked child.
pub(crate) fn with_bucket<T: Send, F>(
    py: Python<'_>,
    url: &str,
    work: impl FnOnce(Bucket) -> F + Send,
) -> PyResult<T>
where
    F: Future<Output = Result<T>>,
{
    let run = || {
        let (runtime, bucket) = open(url)?;
        runtime.block_on(work(bucket))
    };
    py.detach(run).or_raise()
}

pub(crate) fn open(url: &str) -> Result<(Runtime, Bucket)> {
    let url: BucketUrl = url.parse()?;
    let runtime = runtime()?;
    let bucket = runtime.block_on(Bucket::open(&url, &StoreSettings::default()))?;
    Ok((runtime, bucket))
}

/// Threads that end with it.
pub(crate) fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Raises where a URL names no place.
#[pyfunction]
pub(crate) fn check_url(url: &str) -> PyResult<()> {
    url.parse::<BucketUrl>().map(drop).or_raise()
}

/// Every committed step, oldest first.
#[pyfunction]
pub(crate) fn list_steps(py: Python<'_>, url: &str) -> PyResult<Vec<Listed>> {
    with_bucket(py, url, |bucket| async move { forebay_ckpt::list_steps(&bucket).await.map(listed) })
}

fn listed(steps: Vec<StepInfo>) -> Vec<Listed> {
    let listed = steps.into_iter().map(|info| {
        let StepKey { step, incarnation, attempt } = info.key;
        let committed = info.committed.seconds as f64 + f64::from(info.committed.nanos) / 1e9;
        (step, incarnation, attempt, committed, info.superseded)
    });
    listed.collect()
}

/// The highest number that a start has, 0 where there was none, and every committed step, oldest first: asked side by side.
#[pyfunction]
pub(crate) fn find_steps(py: Python<'_>, url: &str) -> PyResult<(u64, Vec<Listed>)> {
    with_bucket(py, url, |bucket| async move {
        let (number, steps) = tokio::join!(newest_number(&bucket), forebay_ckpt::list_steps(&bucket));
        Ok((number?, listed(steps?)))
    })
}

/// What is wrong with a step, or with all: step, object, fact.
#[pyfunction]
pub(crate) fn verify(py: Python<'_>, url: &str, step: Option<u64>) -> PyResult<Vec<(u64, String, String)>> {
    with_bucket(py, url, |bucket| async move {
        let findings = forebay_ckpt::verify(&bucket, step.map(StepName::from), &|_| {}).await?;
        Ok(findings.into_iter().map(|finding| (finding.step, finding.object, finding.fact)).collect())
    })
}

/// Keeps a committed step from retention, as a start saved it where that is named, or leaves it to that again.
#[pyfunction]
pub(crate) fn set_pin(
    py: Python<'_>,
    url: &str,
    step: u64,
    start: Option<u64>,
    pinned: bool,
) -> PyResult<()> {
    let name = StepName { step, start };
    with_bucket(py, url, |bucket| async move {
        match pinned {
            true => pin(&bucket, name).await,
            false => unpin(&bucket, name).await,
        }
    })
}

/// Every pinned step, ascending: step, incarnation.
#[pyfunction]
pub(crate) fn list_pins(py: Python<'_>, url: &str) -> PyResult<Vec<(u64, u64)>> {
    with_bucket(py, url, |bucket| async move {
        let pins = forebay_ckpt::catalog::list_pins(&bucket).await?;
        let mut pins: Vec<_> = pins.into_iter().map(|key| (key.step, key.incarnation)).collect();
        pins.sort_unstable();
        Ok(pins)
    })
}

/// Reads the manifest of a step as `list_steps` names it.
#[pyfunction]
pub(crate) fn open_step(
    py: Python<'_>,
    url: String,
    step: u64,
    incarnation: u64,
    attempt: String,
) -> PyResult<Step> {
    let key = StepKey { incarnation, step, attempt: attempt.clone() };
    let manifest = with_bucket(py, &url, |bucket| async move {
        load_manifest(&bucket, &key).await.map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::corrupt(error.to_string()),
            _ => error,
        })
    })?;
    Ok(Step::new(Place::Store(url), attempt, manifest))
}

/// Saves the tensors of a Hugging Face directory, by its URL, as a step of a start of its own; gives what to warn of.
#[pyfunction]
pub(crate) fn import_model(
    py: Python<'_>,
    source: &str,
    target: &str,
    start: (String, String, u32, u64),
    step: u64,
    part: String,
) -> PyResult<Vec<String>> {
    let (nonce, host, pid, started_ms) = start;
    let start = Start { nonce, host, pid, started_ms };
    with_bucket(py, target, |to| async move {
        let from = Bucket::open(&source.parse()?, &StoreSettings::default()).await?.read_only();
        import(&from, &to, start, step, &part, &|_| {}).await.map(|imported| imported.warnings)
    })
}

/// Where a step's bytes are.
pub(crate) enum Place {
    Store(String),
    /// In memory that agents hold.
    Held(Memory),
    /// In a directory of local copies.
    Local(String),
}

/// A step in the memory of agents.
pub(crate) struct Memory {
    /// The shards, in the manifest's order, but for those of other hosts; none once it was let go of.
    shards: Mutex<Option<Vec<Option<Bytes>>>>,
    /// Of each rank that saved, one whose host has its part.
    pub(crate) beside: Vec<usize>,
}

/// A step whose manifest was read and found right.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Step {
    pub(crate) place: Place,
    /// The first digits of the nonce of the start that saved it.
    attempt: String,
    pub(crate) manifest: Manifest,
    bytes_read: AtomicU64,
    rdma_bytes: AtomicU64,
}

/// The shards of a step in memory.
pub(crate) fn here(memory: &Memory) -> Result<Vec<Option<Bytes>>> {
    memory.shards.lock().clone().ok_or_else(|| Error::bug("the step was let go of"))
}

impl Step {
    /// A step in memory: of each rank that saved, the part is on the host of the rank `beside` it.
    pub(crate) fn held(manifest: Manifest, shards: Vec<Option<Bytes>>, beside: Vec<usize>) -> Self {
        Self::near(Place::Held(Memory { shards: Mutex::new(Some(shards)), beside }), manifest)
    }

    /// A step on this host's disk.
    pub(crate) fn local(manifest: Manifest, directory: String) -> Self {
        Self::near(Place::Local(directory), manifest)
    }

    /// Such a step has its start's nonce for its run.
    fn near(place: Place, manifest: Manifest) -> Self {
        let attempt = manifest.run.get(..8).unwrap_or_default().to_owned();
        Self::new(place, attempt, manifest)
    }

    fn new(place: Place, attempt: String, manifest: Manifest) -> Self {
        let (bytes_read, rdma_bytes) = Default::default();
        Self { place, attempt, manifest, bytes_read, rdma_bytes }
    }

    /// What Python wants, as the engine has it.
    pub(crate) fn targets<'a>(&self, wanted: Vec<Wanted>) -> Vec<Target<'a>> {
        let target = |(tensor, part, address, length): Wanted| Target {
            tensor,
            region: self.region(tensor, part),
            bytes: buffer::bytes_mut((address, length)),
        };
        wanted.into_iter().map(target).collect()
    }

    /// A part of a tensor; none stands for all of it.
    pub(crate) fn region(&self, tensor: usize, part: Option<Boxed>) -> Region {
        let shape = self.manifest.tensors.get(tensor).map_or(&[][..], |tensor| &tensor.shape);
        let boxed = |(offsets, lengths)| Region { kind: SliceKind::Box, offsets, lengths };
        part.map_or_else(|| Region::whole(shape), boxed)
    }

    /// Parts of tensors, none for all of one, as wishes.
    pub(crate) fn wishes(&self, wanted: Vec<(usize, Option<Boxed>)>) -> Vec<Wish> {
        let wish = |(tensor, part)| Wish { tensor, region: self.region(tensor, part) };
        wanted.into_iter().map(wish).collect()
    }

    /// Has a function take what is given away; what it raises is kept.
    pub(crate) fn taken_by<'a>(
        &'a self,
        give: &'a Py<PyAny>,
        raised: &'a Mutex<Option<PyErr>>,
    ) -> impl FnMut(usize, &Spot, &[u8]) -> Result<()> + Send + 'a {
        move |number, spot, bytes| {
            self.bytes_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            let (at, part) = match spot {
                Spot::From(at) => (*at, None),
                Spot::Box(offsets, lengths) => (0, Some((offsets, lengths))),
            };
            let arguments = (number, at, part, bytes.as_ptr() as usize, bytes.len());
            Python::attach(|py| give.call1(py, arguments).map(drop)).map_err(|error| {
                *raised.lock() = Some(error);
                Error::bug("what was read is not taken")
            })
        }
    }

    /// Notes that network cards brought so many bytes.
    pub(crate) fn count_rdma(&self, bytes: u64) {
        self.rdma_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count(&self, wanted: &[Wanted]) {
        let size: usize = wanted.iter().map(|(_, _, _, length)| length).sum();
        self.bytes_read.fetch_add(size as u64, Ordering::Relaxed);
    }
}

#[pymethods]
impl Step {
    #[getter]
    fn step(&self) -> u64 {
        self.manifest.step
    }

    /// What no other commit has, of this step or another.
    #[getter]
    fn commit(&self) -> &str {
        &self.manifest.commit
    }

    /// Where its bytes are: `arena`, `local` or `store`.
    #[getter]
    fn tier(&self) -> &'static str {
        match self.place {
            Place::Store(_) => "store",
            Place::Held(_) => "arena",
            Place::Local(_) => "local",
        }
    }

    /// Bytes that were read into place so far.
    #[getter]
    fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Bytes that this host's network card read out of other hosts' memory so far.
    #[getter]
    fn rdma_bytes(&self) -> u64 {
        self.rdma_bytes.load(Ordering::Relaxed)
    }

    #[getter]
    fn attempt(&self) -> &str {
        &self.attempt
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.manifest.world_size
    }

    /// Name, element type, shape and bytes of each tensor.
    fn tensors(&self) -> Vec<(&str, &str, &[u64], u64)> {
        let tensors = self.manifest.tensors.iter().map(|tensor| {
            // A manifest that was read has known types and sizes that fit.
            let bytes = Dtype::named(&tensor.dtype).ok().and_then(|dtype| dtype.bytes_of(&tensor.shape));
            (tensor.name.as_str(), tensor.dtype.as_str(), tensor.shape.as_slice(), bytes.unwrap_or_default())
        });
        tensors.collect()
    }

    /// Whether two tensors, by their places in `tensors`, hold the same: by the checksums of their slices, and by their hashes
    /// where both have them.
    fn are_same(&self, one: usize, other: usize) -> bool {
        let tensors = &self.manifest.tensors;
        tensors.get(one).zip(tensors.get(other)).is_some_and(|(one, other)| one.holds_what(other))
    }

    /// Whether a tensor, by its place in `tensors`, lies in one slice.
    fn is_in_one(&self, tensor: usize) -> bool {
        self.manifest.tensors.get(tensor).is_some_and(|tensor| tensor.slices.len() == 1)
    }

    /// The JSON text of an extra, if the step has one of that name.
    fn extra(&self, name: &str) -> Option<&str> {
        self.manifest.extras.iter().find(|extra| extra.name == name).map(|extra| extra.data.as_str())
    }

    /// Lets go of the memory that it lies in, whoever still refers to the step: it is read no more.
    fn release(&self) {
        if let Place::Held(memory) = &self.place {
            memory.shards.lock().take();
        }
    }

    /// Writes a part of the state as a Hugging Face directory; gives the files' names, and the tensors of which ranks had
    /// others than those written.
    fn export(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        part: String,
        file_bytes: u64,
    ) -> PyResult<(Vec<String>, Vec<String>)> {
        let write = || {
            let Place::Store(url) = &self.place else {
                return Err(Error::invalid("a step in memory cannot be exported"));
            };
            let plan = Export::plan(&self.manifest, &part, file_bytes)?;
            make_directory(&folder)?;
            let (runtime, bucket) = open(url)?;
            let exported = plan.write((runtime.handle(), &bucket), &folder, None, &|_| {})?;
            Ok((exported.files, exported.differing))
        };
        py.detach(write).or_raise()
    }

    /// Fills memory, given as tensor index, box (offsets and lengths; none for all of it), address and length, with
    /// tensors that passed their checks.
    fn read(&self, py: Python<'_>, targets: Vec<Wanted>, threads: usize) -> PyResult<()> {
        self.count(&targets);
        let read = || {
            let targets = self.targets(targets);
            match &self.place {
                Place::Held(memory) => read_held(&here(memory)?, &self.manifest, targets, threads),
                Place::Store(url) => {
                    let (runtime, bucket) = open(url)?;
                    read_tensors(runtime.handle(), &bucket, &self.manifest, targets, threads)
                }
                Place::Local(directory) => with_disk(|runtime| {
                    let open = async { Local::open(directory).await.map_err(as_damage) };
                    let (local, clock) = (while_it_answers(runtime, open)?, Clock::system());
                    read_local((runtime, &local, &clock), &self.manifest, targets, threads)
                }),
            }
        };
        py.detach(read).or_raise()
    }

    /// Reads tensors, given as tensor index and box, through a buffer, given as address and length. `give` is called with
    /// the number of one of them, a byte of it or a box, and address and length of what it holds there, for it to copy.
    fn read_through(
        &self,
        py: Python<'_>,
        wanted: Vec<(usize, Option<Boxed>)>,
        buffer: (usize, usize),
        give: Py<PyAny>,
        threads: usize,
    ) -> PyResult<()> {
        let wishes = self.wishes(wanted);
        let raised = Mutex::new(None);
        let mut hand = self.taken_by(&give, &raised);
        let read = || {
            let through = Through { buffer: buffer::bytes_mut(buffer), give: &mut hand };
            let read = |shards: &Shards<'_>| read_through(shards, &self.manifest, &wishes, through, threads);
            match &self.place {
                Place::Held(memory) => read(&Shards::Held(&here(memory)?)),
                Place::Store(url) => {
                    let (runtime, bucket) = open(url)?;
                    read(&Shards::Store(runtime.handle(), &bucket))
                }
                Place::Local(directory) => with_disk(|runtime| {
                    let open = async { Local::open(directory).await.map_err(as_damage) };
                    let (local, clock) = (while_it_answers(runtime, open)?, Clock::system());
                    read(&Shards::Local(runtime, &local, &clock))
                }),
            }
        };
        let outcome = py.detach(read);
        drop(hand);
        raised.into_inner().map_or_else(|| outcome.or_raise(), Err)
    }
}
