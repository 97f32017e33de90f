//! Starting programs one at a time, and knowing when one has begun.
//!
//! Until it begins, a program has copies of all files that this process has open, those of other tests' mounts among them,
//! which are busy then. `Command::spawn` returns earlier: the kernel wakes who called `vfork` as soon as the memory is the
//! new program's (`exec_mmap` in `begin_new_exec`), closes what is not to be inherited after that (`do_close_on_exec`), and
//! lets go of what was closed in one go, from the first or from the last on, when the program first runs. So two pipes are
//! among what it closes, one below all else and one above: once both have ended, so has everything between.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::io::{DupFlags, dup3, fcntl_dupfd_cloexec};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Resource, getrlimit};

/// A number above those of all files that tests have open, where the limit of open files is no less.
const ABOVE_ALL: u64 = 4095;

/// Held while a program is started; the lowest number that a file could have, taken before a test opens any.
static STARTING: LazyLock<Mutex<OwnedFd>> =
    LazyLock::new(|| Mutex::new(nothing().expect("there is a /dev/null")));

/// Takes what tells that programs have begun. To be called before a file of a mount is opened.
pub(crate) fn prepare() {
    LazyLock::force(&STARTING);
}

/// Starts a program; returns when it has begun.
#[expect(clippy::disallowed_methods, reason = "the one place that starts programs")]
pub fn start(command: &mut Command) -> io::Result<Child> {
    let mut lowest = turn();
    let (low_end, low) = pipe_with(PipeFlags::CLOEXEC)?;
    let (high_end, high) = pipe_with(PipeFlags::CLOEXEC)?;
    let above_all = getrlimit(Resource::Nofile).current.map_or(ABOVE_ALL, |limit| ABOVE_ALL.min(limit - 1));
    let high = fcntl_dupfd_cloexec(high, i32::try_from(above_all).expect("it is small"))?;
    dup3(low, &mut lowest, DupFlags::CLOEXEC)?;
    let child = command.spawn();
    dup3(nothing()?, &mut lowest, DupFlags::CLOEXEC)?;
    drop(high);
    for end in [low_end, high_end] {
        File::from(end).read_to_end(&mut Vec::new())?;
    }
    child
}

/// Does `work`, such as unmounting what this process had files open of, while no program is being started.
pub fn apart<T>(work: impl FnOnce() -> T) -> T {
    let _turn = turn();
    work()
}

fn turn() -> MutexGuard<'static, OwnedFd> {
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nothing() -> io::Result<OwnedFd> {
    File::open("/dev/null").map(OwnedFd::from)
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use rustix::io::{Errno, read};

    use super::*;

    #[test]
    fn a_program_that_was_started_has_closed_what_it_is_not_to_have() {
        prepare();
        for _ in 0..500 {
            let (end, other) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("there are pipes");
            let mut program = start(Command::new("cat").stdin(Stdio::piped())).expect("it starts");
            drop(other);
            let had = read(&end, &mut [0; 1]);
            drop(program.stdin.take());
            program.wait().expect("it ends");
            assert_ne!(had, Err(Errno::AGAIN), "it still has the other end");
            assert_eq!(had, Ok(0));
        }
    }
}
