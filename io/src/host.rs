//! What this machine is called.

use crate::task::blocking;

/// The host's name, for people: records say by it who holds something.
pub async fn name() -> String {
    let name = blocking(|| std::fs::read_to_string("/proc/sys/kernel/hostname")).await;
    name.ok().and_then(Result::ok).map_or_else(|| "unknown".to_owned(), |name| name.trim().to_owned())
}
