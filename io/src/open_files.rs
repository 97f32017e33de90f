//! How many files this process may have open: what shells and service managers allow at first (1,024) is meant for programs that
//! use select(2).

use forebay_core::{Error, ErrorKind, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// For whatever else opens some meanwhile.
const SPARE: u64 = 64;

/// Lets this process open so many files more, as `what`, where its limit is lower and can be raised that far.
///
/// # Errors
/// `Unavailable` where it cannot: told before any of them is open.
pub fn allow_more(count: u64, what: &str) -> Result<()> {
    let open = std::fs::read_dir("/proc/self/fd")?.count() as u64;
    let needed = open.saturating_add(count).saturating_add(SPARE);
    let limit = getrlimit(Resource::Nofile);
    // None is no limit.
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if limit.maximum.is_none_or(|maximum| maximum >= needed) {
        let raised = Rlimit { current: Some(needed), ..limit };
        return setrlimit(Resource::Nofile, raised).map_err(|errno| std::io::Error::from(errno).into());
    }
    let most = limit.maximum.unwrap_or(u64::MAX);
    let fact =
        format!("{count} open files are needed for {what}, beside {open}, and this process may have {most}");
    Err(Error::new(ErrorKind::Unavailable, fact)
        .with_hint("raise it: see `ulimit -Hn`, or LimitNOFILE= of systemd"))
}
