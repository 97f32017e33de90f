//! Copies out of the memory of CUDA devices, by the driver that the process uses already.
//!
//! The driver is opened at run time: nothing is linked, and a host without one is told so. The device's primary context
//! is used, as torch does; it is bound for the length of a call and never left behind. Copies have a stream of their
//! own, beside those that compute, and only what they are told to wait for comes before them.
#![allow(unsafe_code)]

mod driver;

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use forebay_core::{Error, Result};

use driver::{Driver, Handle};

/// The driver's file, as the loader finds it.
const LIBRARY: &str = "libcuda.so.1";
/// Bytes that are waited for together: a fraction of a millisecond of a fast link.
const GROUP_BYTES: usize = 32 << 20;

/// A device, as far as copies from it go.
#[derive(Debug)]
pub struct Device {
    driver: Driver,
    ordinal: u32,
    context: Handle,
    stream: Handle,
    /// A forked child must not speak to the driver.
    process: u32,
}

impl Device {
    /// Opens device `ordinal`, counted as `CUDA_VISIBLE_DEVICES` leaves them.
    ///
    /// # Errors
    /// `Unsupported` when there is no driver; what the driver says when there is no such device.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        Self::open_by(Path::new(LIBRARY), ordinal)
    }

    /// As [`Device::open`], by the driver in the file `library`.
    pub fn open_by(library: &Path, ordinal: u32) -> Result<Arc<Self>> {
        let driver = Driver::load(library)?;
        let context = driver.retain(ordinal)?;
        let mut device = Self { driver, ordinal, context, stream: Handle::NONE, process: std::process::id() };
        device.stream = device.bound(Driver::create_stream)?;
        Ok(Arc::new(device))
    }

    /// Which one it is.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Has all copies from now on wait for what was submitted to `stream` so far: a `CUstream` of this device, 0 for
    /// the default one.
    pub fn follow(self: &Arc<Self>, stream: usize) -> Result<()> {
        let event = self.event()?;
        self.bound(|driver| {
            driver.record(event.handle, Handle::of(stream))?;
            driver.stream_wait(self.stream, event.handle)
        })
    }

    /// Locks host memory, so that copies into it run by themselves and at the link's speed. To be dropped before the
    /// memory is unmapped.
    ///
    /// # Errors
    /// What the driver says, as where the process may not lock so much.
    pub fn pin(self: &Arc<Self>, memory: &mut [u8]) -> Result<Pinned> {
        let address = memory.as_mut_ptr() as usize;
        self.bound(|driver| driver.register(address, memory.len()))?;
        Ok(Pinned { device: self.clone(), address })
    }

    /// Runs `work` with the device's context bound to this thread.
    fn bound<T>(&self, work: impl FnOnce(&Driver) -> Result<T>) -> Result<T> {
        if self.process != std::process::id() {
            return Err(Error::invalid("a forked child cannot use its parent's CUDA device"));
        }
        self.driver.push(self.context)?;
        let outcome = work(&self.driver);
        let popped = self.driver.pop();
        outcome.and_then(|value| popped.map(|()| value))
    }

    /// An event that no stream has reached yet.
    fn event(self: &Arc<Self>) -> Result<Event> {
        let handle = self.bound(Driver::create_event)?;
        Ok(Event { device: self.clone(), handle, outcome: OnceLock::new() })
    }

    fn copy(&self, source: u64, target: &mut [u8]) -> Result<()> {
        let address = target.as_mut_ptr() as usize;
        self.bound(|driver| driver.copy_to_host(address, source, target.len(), self.stream))
    }

    fn settle(&self) -> Result<()> {
        self.bound(|driver| driver.stream_synchronize(self.stream))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        if self.stream != Handle::NONE {
            // The end of the process does it as well.
            let _ = self.bound(|driver| driver.destroy_stream(self.stream));
        }
        self.driver.release(self.ordinal);
    }
}

/// Host memory that the driver holds in place; let go of on drop.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    address: usize,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Err(error) = self.device.bound(|driver| driver.unregister(self.address)) {
            tracing::debug!(%error, "host memory stays locked");
        }
    }
}

/// A point in the stream of copies.
#[derive(Debug)]
struct Event {
    device: Arc<Device>,
    handle: Handle,
    outcome: OnceLock<Result<()>>,
}

impl Event {
    /// Whoever waits for it is told the same: the driver is asked once.
    fn wait(&self) -> Result<()> {
        let ask = || self.device.bound(|driver| driver.event_synchronize(self.handle));
        self.outcome.get_or_init(ask).as_ref().copied().map_err(Error::duplicate)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // The end of the process does it as well.
        let _ = self.device.bound(|driver| driver.destroy_event(self.handle));
    }
}

/// Bytes in a device's memory.
#[derive(Debug, Clone)]
pub struct DeviceBytes {
    device: Arc<Device>,
    address: u64,
    length: usize,
}

impl DeviceBytes {
    /// `length` bytes at `address` of the device's memory.
    ///
    /// # Safety
    /// They stay allocated until the copies of them have ended.
    pub unsafe fn new(device: Arc<Device>, address: u64, length: usize) -> Self {
        Self { device, address, length }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// A part of them.
    ///
    /// # Panics
    /// When `range` reaches past the end.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.length, "{range:?} of {} bytes", self.length);
        Self { device: self.device.clone(), address: self.address + range.start as u64, length: range.len() }
    }
}

/// A target whose bytes are on their way.
#[derive(Debug)]
pub struct Coming<'a> {
    target: &'a mut [u8],
    arrival: Arc<Event>,
}

impl<'a> Coming<'a> {
    /// How many bytes.
    pub fn len(&self) -> usize {
        self.target.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.target.is_empty()
    }

    /// When they are there, for who waits for that alone.
    pub fn arrival(&self) -> Arrival {
        Arrival(self.arrival.clone())
    }

    /// The bytes, once they are there.
    pub fn wait(self) -> Result<&'a mut [u8]> {
        self.arrival.wait()?;
        Ok(self.target)
    }
}

/// The moment at which copies have ended; several copies may have the same.
#[derive(Debug, Clone)]
pub struct Arrival(Arc<Event>);

impl Arrival {
    /// Waits for it; the sources are not read any more.
    pub fn wait(&self) -> Result<()> {
        self.0.wait()
    }
}

impl PartialEq for Arrival {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Starts to copy each source to its target, and runs `work` on what is on its way, in the same order. Everything has
/// arrived, or failed, when this returns.
///
/// # Errors
/// What the driver says. Copies that fail on their way are told by [`Coming::wait`].
///
/// # Panics
/// When a source is not as long as its target.
pub fn fetch<'a, T>(
    jobs: Vec<(DeviceBytes, &'a mut [u8])>,
    work: impl FnOnce(Vec<Coming<'a>>) -> T,
) -> Result<T> {
    let mut devices: Vec<Arc<Device>> = Vec::new();
    for (source, target) in &jobs {
        assert_eq!(source.len(), target.len(), "a copy fills its target");
        if !devices.iter().any(|device| Arc::ptr_eq(device, &source.device)) {
            devices.push(source.device.clone());
        }
    }
    // Whatever happens: nothing is written to the targets after this function.
    let _settled = Settled(devices);
    Ok(work(submit(jobs)?))
}

fn submit(jobs: Vec<(DeviceBytes, &mut [u8])>) -> Result<Vec<Coming<'_>>> {
    let mut coming = Vec::with_capacity(jobs.len());
    let mut group: Vec<&mut [u8]> = Vec::new();
    let mut jobs = jobs.into_iter().peekable();
    while let Some((DeviceBytes { device, address, .. }, target)) = jobs.next() {
        if !target.is_empty() {
            device.copy(address, target)?;
        }
        group.push(target);
        let goes_on = jobs.peek().is_some_and(|(next, _)| Arc::ptr_eq(&next.device, &device));
        if !goes_on || group.iter().map(|target| target.len()).sum::<usize>() >= GROUP_BYTES {
            let arrival = Arc::new(device.event()?);
            device.bound(|driver| driver.record(arrival.handle, device.stream))?;
            coming.extend(group.drain(..).map(|target| Coming { target, arrival: arrival.clone() }));
        }
    }
    Ok(coming)
}

/// Waits, when dropped, until nothing is under way from these devices.
struct Settled(Vec<Arc<Device>>);

impl Drop for Settled {
    fn drop(&mut self) {
        for device in &self.0 {
            if let Err(error) = device.settle() {
                tracing::warn!(%error, device = device.ordinal, "copies from a device failed");
            }
        }
    }
}

#[cfg(test)]
mod tests;
