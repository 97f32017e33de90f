//! Which processes go first when a processor is wanted by several.
//!
//! A process that works for another one beside it can give way: it then gets what nobody else wants, and of a core that
//! others want wholly about 1.5 %, so that it goes on. That is nice level 19 for its threads, and, where the kernel shares
//! the processor out by sessions first (sched(7), "autogroup"), for its session as well. Taking the level back needs
//! CAP_SYS_NICE or RLIMIT_NICE; a session's needs neither. Threads that could never hurry again, as in most containers,
//! keep a tenth of a core: nice level 10.

use std::collections::BTreeSet;
use std::io;

use parking_lot::Mutex;
use rustix::process::{Pid, getpid, getsid, setpriority_process};

/// The nice level of whoever gives way.
const LAST: i32 = 19;
/// That of threads that cannot take it back.
const MODEST: i32 = 10;
/// The session's level, where the kernel has one; it is written without rights up to ten times a second.
const SESSION: &str = "/proc/self/autogroup";

/// How urgent a process of its own session is: all threads but its first, which is there for whoever asks.
#[derive(Debug)]
pub struct Priority {
    gives_way: Mutex<bool>,
    threads: Levels,
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
        let priority = leads.then(|| Self { gives_way: Mutex::new(false), threads })?;
        priority.set(true);
        Some(priority)
    }

    /// For a thread that begins: from now on it goes with the others.
    pub fn join(&self) {
        let gives_way = self.gives_way.lock();
        // It has the level of the thread that made it where this is refused, as for all others.
        let _ = setpriority_process(None, self.threads.of(*gives_way));
    }

    /// Gives way, or no longer does, as far as the kernel lets it; asked again, a session's level is tried again.
    pub fn set(&self, gives_way: bool) {
        let mut current = self.gives_way.lock();
        if *current == gives_way {
            return;
        }
        let refused = |error| tracing::debug!(%error, gives_way, "a priority stays as it is");
        set_threads(self.threads.of(gives_way)).unwrap_or_else(refused);
        match set_session(gives_way) {
            Ok(()) => *current = gives_way,
            Err(error) => refused(error),
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
