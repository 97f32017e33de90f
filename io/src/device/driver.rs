//! The functions of the CUDA driver that copying to the host needs, looked up by name.
//!
//! Names, signatures and constants are those of the driver's C interface
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/>), which keeps them from version to version.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};
use libloading::Library;

/// `CU_STREAM_NON_BLOCKING`: does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: who waits sleeps.
const PLAIN_EVENT: c_uint = 1 | 2;
/// `CU_MEMHOSTREGISTER_PORTABLE`: locked for all contexts.
const PORTABLE: c_uint = 1;

/// A context, stream or event of the driver's.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(*mut c_void);

// SAFETY: the driver lets every thread use its handles.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// None, or the default stream.
    pub(super) const NONE: Self = Self(std::ptr::null_mut());

    /// One that another part of this process made.
    pub(super) fn of(address: usize) -> Self {
        Self(address as *mut c_void)
    }
}

macro_rules! calls {
    ($($field:ident = $name:literal($($kind:ty),*);)*) => {
        /// One pointer a function.
        #[derive(Debug)]
        struct Calls {
            $($field: unsafe extern "C" fn($($kind),*) -> c_int,)*
        }

        impl Calls {
            fn find(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the interface gives each name this signature.
                Ok(Self { $($field: *unsafe { library.get($name) }?,)* })
            }
        }
    };
}

calls! {
    init = b"cuInit\0"(c_uint);
    error_name = b"cuGetErrorName\0"(c_int, *mut *const c_char);
    device = b"cuDeviceGet\0"(*mut c_int, c_int);
    retain = b"cuDevicePrimaryCtxRetain\0"(*mut Handle, c_int);
    release = b"cuDevicePrimaryCtxRelease_v2\0"(c_int);
    push = b"cuCtxPushCurrent_v2\0"(Handle);
    pop = b"cuCtxPopCurrent_v2\0"(*mut Handle);
    register = b"cuMemHostRegister_v2\0"(*mut c_void, usize, c_uint);
    unregister = b"cuMemHostUnregister\0"(*mut c_void);
    create_stream = b"cuStreamCreate\0"(*mut Handle, c_uint);
    destroy_stream = b"cuStreamDestroy_v2\0"(Handle);
    stream_wait = b"cuStreamWaitEvent\0"(Handle, Handle, c_uint);
    stream_synchronize = b"cuStreamSynchronize\0"(Handle);
    create_event = b"cuEventCreate\0"(*mut Handle, c_uint);
    destroy_event = b"cuEventDestroy_v2\0"(Handle);
    record = b"cuEventRecord\0"(Handle, Handle);
    event_synchronize = b"cuEventSynchronize\0"(Handle);
    copy_to_host = b"cuMemcpyDtoHAsync_v2\0"(*mut c_void, u64, usize, Handle);
}

/// The driver, opened. All but opening wants a context bound to the calling thread.
#[derive(Debug)]
pub(super) struct Driver {
    calls: Calls,
    /// Keeps the functions there.
    _library: Library,
}

impl Driver {
    /// Opens the driver in the file `library`, or the one that this process has open under that name.
    pub(super) fn load(library: &Path) -> Result<Self> {
        let absent = |error: libloading::Error| {
            Error::new(ErrorKind::Unsupported, format!("no CUDA driver is at hand: {error}"))
        };
        // SAFETY: loading the driver runs its initialisers, as it does in every program that uses it.
        let library = unsafe { Library::new(library) }.map_err(absent)?;
        let calls = Calls::find(&library).map_err(absent)?;
        let driver = Self { calls, _library: library };
        // SAFETY: takes no memory of ours; may be called again and again.
        driver.check("cuInit", unsafe { (driver.calls.init)(0) })?;
        Ok(driver)
    }

    /// The primary context of device `ordinal`, until [`Driver::release`].
    pub(super) fn retain(&self, ordinal: u32) -> Result<Handle> {
        let device = self.device(ordinal)?;
        let mut context = Handle::NONE;
        // SAFETY: writes one handle to a place that lives across the call.
        self.check("cuDevicePrimaryCtxRetain", unsafe { (self.calls.retain)(&mut context, device) })?;
        Ok(context)
    }

    pub(super) fn release(&self, ordinal: u32) {
        if let Ok(device) = self.device(ordinal) {
            // SAFETY: takes no memory of ours. A failure leaves the context to the end of the process.
            unsafe { (self.calls.release)(device) };
        }
    }

    fn device(&self, ordinal: u32) -> Result<c_int> {
        let mut device = 0;
        let number =
            c_int::try_from(ordinal).map_err(|_| Error::invalid(format!("CUDA device {ordinal}")))?;
        // SAFETY: writes one integer to a place that lives across the call.
        self.check("cuDeviceGet", unsafe { (self.calls.device)(&mut device, number) })?;
        Ok(device)
    }

    pub(super) fn push(&self, context: Handle) -> Result<()> {
        // SAFETY: the context was retained by us.
        self.check("cuCtxPushCurrent", unsafe { (self.calls.push)(context) })
    }

    pub(super) fn pop(&self) -> Result<()> {
        let mut context = Handle::NONE;
        // SAFETY: writes one handle to a place that lives across the call.
        self.check("cuCtxPopCurrent", unsafe { (self.calls.pop)(&mut context) })
    }

    pub(super) fn register(&self, address: usize, length: usize) -> Result<()> {
        let memory = address as *mut c_void;
        // SAFETY: the driver checks that the range is mapped; locking changes no byte.
        self.check("cuMemHostRegister", unsafe { (self.calls.register)(memory, length, PORTABLE) })
    }

    pub(super) fn unregister(&self, address: usize) -> Result<()> {
        // SAFETY: the driver knows what it registered.
        self.check("cuMemHostUnregister", unsafe { (self.calls.unregister)(address as *mut c_void) })
    }

    pub(super) fn create_stream(&self) -> Result<Handle> {
        let mut stream = Handle::NONE;
        // SAFETY: writes one handle to a place that lives across the call.
        self.check("cuStreamCreate", unsafe { (self.calls.create_stream)(&mut stream, NON_BLOCKING) })?;
        Ok(stream)
    }

    pub(super) fn destroy_stream(&self, stream: Handle) -> Result<()> {
        // SAFETY: a stream that we made, destroyed once.
        self.check("cuStreamDestroy", unsafe { (self.calls.destroy_stream)(stream) })
    }

    pub(super) fn stream_wait(&self, stream: Handle, event: Handle) -> Result<()> {
        // SAFETY: both live across the call.
        self.check("cuStreamWaitEvent", unsafe { (self.calls.stream_wait)(stream, event, 0) })
    }

    pub(super) fn stream_synchronize(&self, stream: Handle) -> Result<()> {
        // SAFETY: the stream lives across the call.
        self.check("cuStreamSynchronize", unsafe { (self.calls.stream_synchronize)(stream) })
    }

    pub(super) fn create_event(&self) -> Result<Handle> {
        let mut event = Handle::NONE;
        // SAFETY: writes one handle to a place that lives across the call.
        self.check("cuEventCreate", unsafe { (self.calls.create_event)(&mut event, PLAIN_EVENT) })?;
        Ok(event)
    }

    pub(super) fn destroy_event(&self, event: Handle) -> Result<()> {
        // SAFETY: an event that we made, destroyed once; the driver waits for those under way.
        self.check("cuEventDestroy", unsafe { (self.calls.destroy_event)(event) })
    }

    pub(super) fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        // SAFETY: both live across the call.
        self.check("cuEventRecord", unsafe { (self.calls.record)(event, stream) })
    }

    pub(super) fn event_synchronize(&self, event: Handle) -> Result<()> {
        // SAFETY: the event lives across the call.
        self.check("cuEventSynchronize", unsafe { (self.calls.event_synchronize)(event) })
    }

    /// Starts a copy. Who calls this keeps both sides until the stream has got past it.
    pub(super) fn copy_to_host(
        &self,
        target: usize,
        source: u64,
        length: usize,
        stream: Handle,
    ) -> Result<()> {
        let target = target as *mut c_void;
        // SAFETY: as the caller keeps to; the driver checks the device's side.
        self.check("cuMemcpyDtoHAsync", unsafe { (self.calls.copy_to_host)(target, source, length, stream) })
    }

    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: writes one pointer to a place that lives across the call, to a text that lives as long as the driver.
        let known = unsafe { (self.calls.error_name)(code, &mut name) } == 0 && !name.is_null();
        let text = match known {
            // SAFETY: the driver's texts end in a NUL.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy(),
            false => "unknown".into(),
        };
        Err(Error::new(ErrorKind::Unavailable, format!("{call} failed: {text} ({code})")))
    }
}
