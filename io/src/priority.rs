//! Which processes go first when a processor is wanted by several.
//!
//! A process that works for another one beside it can give way: it then gets what nobody else wants, and of a core that
//! others want wholly about 1.5 %, so that it goes on. That is nice level 19 for its threads, and, where the kernel shares
//! the processor out by sessions first (sched(7), "autogroup"), for its session as well. Taking the level back needs
//! CAP_SYS_NICE or RLIMIT_NICE; a session's needs neither. Threads that could never hurry again, as in most containers,
//! keep a tenth of a core: nice level 10.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, getpid, getsid, setpriority_process};

use crate::rng::Rng;

/// The nice level of whoever gives way.
const LAST: i32 = 19;
/// That of threads that cannot take it back.
const MODEST: i32 = 10;
/// The session's level, where the kernel has one.
const SESSION: &str = "/proc/self/autogroup";

/// How long to wait before a session's level is written again: the kernel takes one write in this time from all without
/// CAP_SYS_ADMIN together.
const PAUSE: Duration = Duration::from_millis(100);

/// How urgent a process of its own session is: all threads but its first, which is there for whoever asks.
#[derive(Debug)]
pub struct Priority {
    state: Arc<Mutex<State>>,
    threads: Levels,
}

/// Whether all give way, and what was brought about of it.
#[derive(Debug, Default)]
struct State {
    gives_way: bool,
    session_gives_way: bool,
    /// A thread sees to the session.
    is_awaited: bool,
}

/// Nice levels.
#[derive(Debug)]
struct Levels {
    hurrying: i32,
    giving_way: i32,
}

impl Priority {
    /// That of this process, which gives way from now on. `None` where it shares its session: nobody else is held back.
    pub fn of_process() -> Option<Self> {
        let leads = getsid(None).is_ok_and(|session| session == getpid());
        let threads = if can_take_back() {
            Levels { hurrying: 0, giving_way: LAST }
        } else {
            Levels { hurrying: MODEST, giving_way: MODEST }
        };
        let priority = leads.then(|| Self { state: Arc::default(), threads })?;
        priority.set(true);
        Some(priority)
    }

    /// For a thread that begins: from now on it goes with the others.
    pub fn join(&self) {
        let state = self.state.lock();
        // It has the level of the thread that made it where this is refused, as for all others.
        let _ = setpriority_process(None, self.threads.of(state.gives_way));
    }

    /// Gives way, or no longer does, as far as the kernel lets it. The session's level may follow a little later.
    pub fn set(&self, gives_way: bool) {
        let mut state = self.state.lock();
        if state.gives_way == gives_way {
            return;
        }
        state.gives_way = gives_way;
        if let Err(error) = set_threads(self.threads.of(gives_way)) {
            tracing::debug!(%error, gives_way, "threads keep their level");
        }
        if state.follow() && !state.is_awaited {
            let (shared, level) = (self.state.clone(), self.threads.of(gives_way));
            let work = move || await_session(&shared, level);
            state.is_awaited = std::thread::Builder::new().name("priority".into()).spawn(work).is_ok();
        }
    }
}

impl State {
    /// Brings the session's level about; returns whether to ask again later.
    fn follow(&mut self) -> bool {
        if self.session_gives_way == self.gives_way {
            return false;
        }
        match set_session(self.gives_way) {
            Ok(()) => self.session_gives_way = self.gives_way,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Err(error) => tracing::debug!(%error, gives_way = self.gives_way, "the session keeps its level"),
        }
        false
    }
}

/// Asks until the session has its level: other processes of this host ask at the same time, as when all ranks end.
// The thread is there to sleep.
#[allow(clippy::disallowed_methods)]
fn await_session(state: &Mutex<State>, level: i32) {
    let _ = setpriority_process(None, level);
    let rng = Rng::system();
    loop {
        std::thread::sleep(PAUSE + PAUSE.mul_f64(rng.unit()));
        let mut state = state.lock();
        if !state.follow() {
            state.is_awaited = false;
            return;
        }
    }
}

impl Levels {
    fn of(&self, gives_way: bool) -> i32 {
        if gives_way { self.giving_way } else { self.hurrying }
    }
}

/// Whether a thread of this process may have its level back, which one of its own tries.
fn can_take_back() -> bool {
    let there_and_back =
        || setpriority_process(None, LAST).and_then(|()| setpriority_process(None, 0)).is_ok();
    std::thread::scope(|scope| scope.spawn(there_and_back).join().unwrap_or(false))
}

fn set_session(gives_way: bool) -> io::Result<()> {
    let level = if gives_way { LAST } else { 0 };
    match std::fs::write(SESSION, level.to_string()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Sets all threads but the first, and those that they start meanwhile.
fn set_threads(level: i32) -> io::Result<()> {
    let mut done = BTreeSet::from([getpid().as_raw_nonzero().get()]);
    loop {
        let mut is_done = true;
        for thread in std::fs::read_dir("/proc/self/task")? {
            let number = thread?.file_name().to_str().and_then(|name| name.parse().ok());
            let Some(thread) =
                number.and_then(Pid::from_raw).filter(|pid| done.insert(pid.as_raw_nonzero().get()))
            else {
                continue;
            };
            is_done = false;
            match setpriority_process(Some(thread), level) {
                // It ended meanwhile.
                Err(error) if error != rustix::io::Errno::SRCH => return Err(error.into()),
                _ => {}
            }
        }
        if is_done {
            return Ok(());
        }
    }
}
