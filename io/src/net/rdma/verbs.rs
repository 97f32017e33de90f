//! The functions of libibverbs that are needed here, looked up by name: hosts without it have none, and build without it.
//!
//! Names, signatures, structures and constants are those of `infiniband/verbs.h` (rdma-core), whose binary interface has been the same
//! since version 1.1 of the library's symbols. What its header has inline is called as there: through the table that each context begins with.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;

use forebay_core::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_NOW};

/// The library's file, by its binary interface.
const LIBRARY: &str = "libibverbs.so.1";

/// `IBV_PORT_ACTIVE`.
pub(super) const ACTIVE: c_uint = 4;
/// `IBV_LINK_LAYER_ETHERNET`.
pub(super) const ETHERNET: u8 = 2;
/// `IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ`.
pub(super) const LENT: c_int = 1 | 4;
/// `IBV_QPT_RC`: connected, and nothing is lost.
const RELIABLE: c_uint = 2;
/// `IBV_WR_RDMA_READ`.
const READ: c_uint = 4;
/// `IBV_SEND_SIGNALED`.
const SIGNALED: c_uint = 2;

/// States of a queue pair (`ibv_qp_state`).
pub(super) mod state {
    use super::c_uint;

    pub(in super::super) const INIT: c_uint = 1;
    pub(in super::super) const READY_TO_RECEIVE: c_uint = 2;
    pub(in super::super) const READY_TO_SEND: c_uint = 3;
}

/// What of [`PairAttributes`] is set (`ibv_qp_attr_mask`).
pub(super) mod set {
    use super::c_int;

    pub(in super::super) const STATE: c_int = 1;
    pub(in super::super) const ACCESS: c_int = 1 << 3;
    pub(in super::super) const PARTITION: c_int = 1 << 4;
    pub(in super::super) const PORT: c_int = 1 << 5;
    pub(in super::super) const PATH: c_int = 1 << 7;
    pub(in super::super) const MTU: c_int = 1 << 8;
    pub(in super::super) const TIMEOUT: c_int = 1 << 9;
    pub(in super::super) const RETRIES: c_int = 1 << 10;
    pub(in super::super) const RETRIES_NOT_READY: c_int = 1 << 11;
    pub(in super::super) const FIRST_HEARD: c_int = 1 << 12;
    pub(in super::super) const READS: c_int = 1 << 13;
    pub(in super::super) const NOT_READY_TIMER: c_int = 1 << 15;
    pub(in super::super) const FIRST_SAID: c_int = 1 << 16;
    pub(in super::super) const READS_OF_OTHER: c_int = 1 << 17;
    pub(in super::super) const OTHER: c_int = 1 << 20;
}

/// `ibv_device`, of which nothing is looked at.
#[repr(C)]
pub(super) struct Device([u8; 0]);

/// `ibv_pd`, of which nothing is looked at.
#[repr(C)]
pub(super) struct Domain([u8; 0]);

/// The beginning of `ibv_context`: the device, and its `ibv_context_ops` as far as they are called.
#[repr(C)]
pub(super) struct Context {
    _device: *mut Device,
    _before: [*const c_void; 11],
    poll: unsafe extern "C" fn(*mut Queue, c_int, *mut Completion) -> c_int,
    request_notice: unsafe extern "C" fn(*mut Queue, c_int) -> c_int,
    _between: [*const c_void; 12],
    post_send: unsafe extern "C" fn(*mut Pair, *mut Request, *mut *mut Request) -> c_int,
}

/// The beginning of `ibv_comp_channel`.
#[repr(C)]
pub(super) struct Channel {
    _context: *mut Context,
    pub(super) fd: c_int,
}

/// The beginning of `ibv_cq`.
#[repr(C)]
pub(super) struct Queue {
    context: *mut Context,
}

/// The beginning of `ibv_qp`.
#[repr(C)]
pub(super) struct Pair {
    context: *mut Context,
    _of_others: [*const c_void; 5],
    _handle: u32,
    pub(super) number: u32,
}

/// `ibv_mr`.
#[repr(C)]
pub(super) struct Region {
    _of_others: [*const c_void; 2],
    _address: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(super) local_key: u32,
    pub(super) remote_key: u32,
}

/// `ibv_gid`.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Gid(pub(super) [u8; 16]);

/// `ibv_port_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PortAttributes {
    pub(super) state: c_uint,
    _max_mtu: c_uint,
    pub(super) mtu: c_uint,
    pub(super) gids: c_int,
    _numbers: [u32; 4],
    _partitions: u16,
    pub(super) lid: u16,
    _manager: u16,
    _bytes: [u8; 8],
    pub(super) link_layer: u8,
    _flags: u8,
    _capabilities: u16,
    _speed: u32,
}

/// `ibv_qp_cap`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Capacity {
    pub(super) requests: u32,
    pub(super) receptions: u32,
    pub(super) places_of_request: u32,
    pub(super) places_of_reception: u32,
    pub(super) inline: u32,
}

/// `ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct PairKind {
    pub(super) context: *mut c_void,
    pub(super) said: *mut Queue,
    pub(super) heard: *mut Queue,
    pub(super) shared: *mut c_void,
    pub(super) capacity: Capacity,
    pub(super) kind: c_uint,
    pub(super) all_signaled: c_int,
}

/// `ibv_ah_attr`, its `ibv_global_route` first.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Path {
    pub(super) gid: Gid,
    pub(super) flow: u32,
    pub(super) own_gid: u8,
    pub(super) hops: u8,
    pub(super) class: u8,
    pub(super) _after: u8,
    pub(super) lid: u16,
    pub(super) service: u8,
    pub(super) source_bits: u8,
    pub(super) rate: u8,
    pub(super) is_global: u8,
    pub(super) port: u8,
}

/// `ibv_qp_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PairAttributes {
    pub(super) state: c_uint,
    pub(super) _state_before: c_uint,
    pub(super) mtu: c_uint,
    pub(super) _migration: c_uint,
    pub(super) _key: u32,
    pub(super) first_heard: u32,
    pub(super) first_said: u32,
    pub(super) other: u32,
    pub(super) access: c_uint,
    pub(super) _capacity: Capacity,
    pub(super) path: Path,
    pub(super) _other_path: Path,
    pub(super) partition: u16,
    pub(super) _other_partition: u16,
    pub(super) _draining: [u8; 2],
    pub(super) reads: u8,
    pub(super) reads_of_other: u8,
    pub(super) not_ready_timer: u8,
    pub(super) port: u8,
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) retries_not_ready: u8,
    pub(super) _other_port: [u8; 2],
    pub(super) _rate: u32,
}

/// `ibv_sge`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) length: u32,
    pub(super) key: u32,
}

/// `ibv_send_wr` as of a read or write of another one's memory.
#[repr(C)]
struct Request {
    id: u64,
    next: *mut Request,
    places: *mut Place,
    count: c_int,
    what: c_uint,
    flags: c_uint,
    immediate: u32,
    remote: u64,
    remote_key: u32,
    rest: [u32; 19],
}

/// `ibv_wc`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Completion {
    pub(super) id: u64,
    pub(super) status: c_uint,
    _what: c_uint,
    _error: u32,
    pub(super) bytes: u32,
    _numbers: [u32; 4],
    _after: [u16; 4],
}

const _: () = {
    assert!(size_of::<PortAttributes>() == 56 && size_of::<PairKind>() == 64 && size_of::<Path>() == 32);
    assert!(
        size_of::<PairAttributes>() == 144 && size_of::<Request>() == 128 && size_of::<Completion>() == 48
    );
    assert!(size_of::<Region>() == 48);
};

macro_rules! calls {
    ($($field:ident = $name:literal($($kind:ty),*) -> $gives:ty;)*) => {
        /// One pointer a function.
        #[derive(Debug)]
        struct Calls {
            $($field: unsafe extern "C" fn($($kind),*) -> $gives,)*
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
    fork_init = b"ibv_fork_init\0"() -> c_int;
    devices = b"ibv_get_device_list\0"(*mut c_int) -> *mut *mut Device;
    free_devices = b"ibv_free_device_list\0"(*mut *mut Device) -> ();
    device_name = b"ibv_get_device_name\0"(*mut Device) -> *const c_char;
    open = b"ibv_open_device\0"(*mut Device) -> *mut Context;
    close = b"ibv_close_device\0"(*mut Context) -> c_int;
    query_port = b"ibv_query_port\0"(*mut Context, u8, *mut PortAttributes) -> c_int;
    query_gid = b"ibv_query_gid\0"(*mut Context, u8, c_int, *mut Gid) -> c_int;
    make_domain = b"ibv_alloc_pd\0"(*mut Context) -> *mut Domain;
    end_domain = b"ibv_dealloc_pd\0"(*mut Domain) -> c_int;
    register = b"ibv_reg_mr\0"(*mut Domain, *mut c_void, usize, c_int) -> *mut Region;
    deregister = b"ibv_dereg_mr\0"(*mut Region) -> c_int;
    make_channel = b"ibv_create_comp_channel\0"(*mut Context) -> *mut Channel;
    end_channel = b"ibv_destroy_comp_channel\0"(*mut Channel) -> c_int;
    make_queue = b"ibv_create_cq\0"(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Queue;
    end_queue = b"ibv_destroy_cq\0"(*mut Queue) -> c_int;
    take_notice = b"ibv_get_cq_event\0"(*mut Channel, *mut *mut Queue, *mut *mut c_void) -> c_int;
    acknowledge = b"ibv_ack_cq_events\0"(*mut Queue, c_uint) -> ();
    make_pair = b"ibv_create_qp\0"(*mut Domain, *mut PairKind) -> *mut Pair;
    change_pair = b"ibv_modify_qp\0"(*mut Pair, *mut PairAttributes, c_int) -> c_int;
    end_pair = b"ibv_destroy_qp\0"(*mut Pair) -> c_int;
    status_name = b"ibv_wc_status_str\0"(c_uint) -> *const c_char;
}

/// Something of the library's that ends when it is dropped; what it was made of ends after it.
pub(super) struct Owned<T> {
    it: *mut T,
    end: unsafe extern "C" fn(*mut T) -> c_int,
}

// SAFETY: the library lets every thread use what it made.
unsafe impl<T> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Owned<T> {}

impl<T> Owned<T> {
    fn new(what: &str, it: *mut T, end: unsafe extern "C" fn(*mut T) -> c_int) -> Result<Self> {
        match it.is_null() {
            true => Err(failed(what, &std::io::Error::last_os_error())),
            false => Ok(Self { it, end }),
        }
    }
}

impl<T> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Pointer::fmt(&self.it, f)
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: it was made by the library, is ended once, and all that was made of it was ended before. What is not ended stays
        // until the end of the process.
        unsafe { (self.end)(self.it) };
    }
}

fn failed(what: &str, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{what}: {error}"))
}

/// The library, opened.
#[derive(Debug)]
pub(super) struct Verbs {
    calls: Calls,
    /// Keeps the functions there.
    _library: Library,
}

impl Verbs {
    /// Opens the library of this host.
    ///
    /// # Errors
    /// `Unsupported` where there is none.
    pub(super) fn load() -> Result<Self> {
        let absent = |error: libloading::Error| {
            Error::new(ErrorKind::Unsupported, format!("no {LIBRARY} is at hand: {error}"))
        };
        // SAFETY: loading the library runs its initialisers, as it does in every program that uses it. It stays, as what it loads
        // itself does.
        let library =
            unsafe { Library::open(Some(LIBRARY), RTLD_NOW | libc::RTLD_NODELETE) }.map_err(absent)?;
        let calls = Calls::find(&library).map_err(absent)?;
        // SAFETY: takes no memory of ours. Where it fails, a process that forks has to leave its child's memory alone, as all do
        // that start programs.
        unsafe { (calls.fork_init)() };
        Ok(Self { calls, _library: library })
    }

    /// The host's devices that can be opened, by name.
    pub(super) fn open_all(&self) -> Vec<(String, Owned<Context>)> {
        let mut count = 0;
        // SAFETY: writes one integer to a place that lives across the call.
        let list = unsafe { (self.calls.devices)(&mut count) };
        if list.is_null() {
            return Vec::new();
        }
        let opened = (0..usize::try_from(count).unwrap_or(0)).filter_map(|number| {
            // SAFETY: the list has so many devices, which live until it is freed, and whose names end with a NUL.
            let (device, name) = unsafe {
                let device = *list.add(number);
                (device, CStr::from_ptr((self.calls.device_name)(device)))
            };
            // SAFETY: as above; a context outlives the list.
            let context = unsafe { (self.calls.open)(device) };
            let context = Owned::new("open it", context, self.calls.close).ok()?;
            Some((name.to_string_lossy().into_owned(), context))
        });
        let opened = opened.collect();
        // SAFETY: it was given by the call above, and nothing of it is used any more.
        unsafe { (self.calls.free_devices)(list) };
        opened
    }

    /// What a port is like; none where the device has none of that number, from 1.
    pub(super) fn port(&self, context: &Owned<Context>, port: u8) -> Option<PortAttributes> {
        let mut attributes = PortAttributes::default();
        // SAFETY: the context is open; older libraries write fewer fields of the structure, none more.
        let outcome = unsafe { (self.calls.query_port)(context.it, port, &mut attributes) };
        (outcome == 0).then_some(attributes)
    }

    /// An address of a port.
    pub(super) fn gid(&self, context: &Owned<Context>, port: u8, index: c_int) -> Option<Gid> {
        let mut gid = Gid::default();
        // SAFETY: the context is open; writes one address to a place that lives across the call.
        let outcome = unsafe { (self.calls.query_gid)(context.it, port, index, &mut gid) };
        (outcome == 0 && gid != Gid::default()).then_some(gid)
    }

    pub(super) fn make_domain(&self, context: &Owned<Context>) -> Result<Owned<Domain>> {
        // SAFETY: the context is open.
        let domain = unsafe { (self.calls.make_domain)(context.it) };
        Owned::new("make a protection domain", domain, self.calls.end_domain)
    }

    /// Has others read `length` bytes from `address` on, and this process have read into them.
    ///
    /// # Safety
    /// The memory is there until what this gives is dropped. What is read into it is agreed with its owner.
    pub(super) unsafe fn register(
        &self,
        domain: &Owned<Domain>,
        address: usize,
        length: usize,
    ) -> Result<Owned<Region>> {
        // SAFETY: the library checks that the range is mapped; the caller that it stays.
        let region = unsafe { (self.calls.register)(domain.it, address as *mut c_void, length, LENT) };
        Owned::new("register memory", region, self.calls.deregister)
    }

    pub(super) fn make_channel(&self, context: &Owned<Context>) -> Result<Owned<Channel>> {
        // SAFETY: the context is open.
        let channel = unsafe { (self.calls.make_channel)(context.it) };
        Owned::new("make a completion channel", channel, self.calls.end_channel)
    }

    pub(super) fn make_queue(
        &self,
        context: &Owned<Context>,
        channel: &Owned<Channel>,
        entries: c_int,
    ) -> Result<Owned<Queue>> {
        // SAFETY: the context is open, and the channel was made of it.
        let queue =
            unsafe { (self.calls.make_queue)(context.it, entries, std::ptr::null_mut(), channel.it, 0) };
        Owned::new("make a completion queue", queue, self.calls.end_queue)
    }

    pub(super) fn make_pair(&self, domain: &Owned<Domain>, queue: &Owned<Queue>) -> Result<Owned<Pair>> {
        let capacity =
            Capacity { requests: 4, receptions: 1, places_of_request: 1, places_of_reception: 1, inline: 0 };
        let mut kind = PairKind {
            context: std::ptr::null_mut(),
            said: queue.it,
            heard: queue.it,
            shared: std::ptr::null_mut(),
            capacity,
            kind: RELIABLE,
            all_signaled: 0,
        };
        // SAFETY: domain and queue are of one open context; the structure lives across the call.
        let pair = unsafe { (self.calls.make_pair)(domain.it, &mut kind) };
        Owned::new("make a queue pair", pair, self.calls.end_pair)
    }

    pub(super) fn change_pair(
        &self,
        what: &str,
        pair: &Owned<Pair>,
        mut attributes: PairAttributes,
        set: c_int,
    ) -> Result<()> {
        // SAFETY: the pair is there; the structure lives across the call.
        match unsafe { (self.calls.change_pair)(pair.it, &mut attributes, set) } {
            0 => Ok(()),
            error => Err(failed(what, &std::io::Error::from_raw_os_error(error.abs()))),
        }
    }

    /// Begins to read what lies at `address` of the other end, under its `key`, into a place here.
    ///
    /// # Safety
    /// The memory of that place is there, and nobody looks at it, until its completion, or the pair's end.
    pub(super) unsafe fn read(
        &self,
        pair: &Owned<Pair>,
        mut into: Place,
        address: u64,
        key: u32,
    ) -> Result<()> {
        let mut request = Request {
            id: 0,
            next: std::ptr::null_mut(),
            places: &mut into,
            count: 1,
            what: READ,
            flags: SIGNALED,
            immediate: 0,
            remote: address,
            remote_key: key,
            rest: [0; 19],
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the pair and its context are there; the request and its place are copied by the call.
        let outcome = unsafe { ((*(*pair.it).context).post_send)(pair.it, &mut request, &mut bad) };
        match outcome {
            0 => Ok(()),
            error => Err(failed("begin a read", &std::io::Error::from_raw_os_error(error.abs()))),
        }
    }

    /// What was completed, if anything was.
    pub(super) fn poll(&self, queue: &Owned<Queue>) -> Result<Option<Completion>> {
        let mut completion = Completion::default();
        // SAFETY: the queue and its context are there; writes one completion to a place that lives across the call.
        match unsafe { ((*(*queue.it).context).poll)(queue.it, 1, &mut completion) } {
            0 => Ok(None),
            1 => Ok(Some(completion)),
            _ => Err(Error::new(ErrorKind::Unavailable, "a completion queue that is broken")),
        }
    }

    /// Has the channel be readable at the next completion.
    pub(super) fn request_notice(&self, queue: &Owned<Queue>) -> Result<()> {
        // SAFETY: the queue and its context are there.
        match unsafe { ((*(*queue.it).context).request_notice)(queue.it, 0) } {
            0 => Ok(()),
            error => Err(failed("ask for a notice", &std::io::Error::from_raw_os_error(error.abs()))),
        }
    }

    /// Takes the notice of a channel that is readable.
    pub(super) fn take_notice(&self, channel: &Owned<Channel>) -> Result<()> {
        let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is there; writes two pointers to places that live across the call.
        if unsafe { (self.calls.take_notice)(channel.it, &mut queue, &mut context) } != 0 {
            return Err(failed("take a notice", &std::io::Error::last_os_error()));
        }
        // SAFETY: the queue that it was of, which outlives the channel's notices.
        unsafe { (self.calls.acknowledge)(queue, 1) };
        Ok(())
    }

    /// What went wrong, as the library calls it.
    pub(super) fn status(&self, completion: &Completion) -> String {
        // SAFETY: gives a text of the library's own, for any number.
        let name = unsafe { CStr::from_ptr((self.calls.status_name)(completion.status)) };
        name.to_string_lossy().into_owned()
    }
}

impl Owned<Region> {
    /// What this host's own requests, and those of others, name it by.
    pub(super) fn keys(&self) -> (u32, u32) {
        // SAFETY: it is there, and its keys never change.
        unsafe { ((*self.it).local_key, (*self.it).remote_key) }
    }
}

impl Owned<Channel> {
    pub(super) fn fd(&self) -> c_int {
        // SAFETY: it is there, and its descriptor never changes.
        unsafe { (*self.it).fd }
    }
}

impl Owned<Pair> {
    pub(super) fn number(&self) -> u32 {
        // SAFETY: it is there, and its number never changes.
        unsafe { (*self.it).number }
    }
}
