//! The home directory of who runs this.
//!
//! Services of systemd and mount(8) start programs without `HOME`, by which the libraries that log in to clouds find their
//! profiles: a role, an SSO login or a program of root's own was not found, which a shell finds.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Starts this program anew, in its own place, with a `HOME` as the user database has it, where it has none. Goes on without
/// where that is not known either.
pub(crate) fn ensure() {
    if env::var_os("HOME").is_some_and(|home| !home.is_empty()) {
        return;
    }
    let Some(home) = env::home_dir().filter(|home| home.is_absolute()) else { return };
    let mut words = env::args_os();
    let name = words.next().unwrap_or_else(|| "forebay".into());
    // Returns only where it failed.
    let _ = Command::new("/proc/self/exe").arg0(name).args(words).env("HOME", home).exec();
}
