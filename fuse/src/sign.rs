//! A sign of each mount that is served, for other processes of this host to see without touching the mount.
//!
//! To look a path up is to hold its mount for that time, and `umount`, by whoever it is, finds it busy. So a process that
//! serves a directory has an abstract socket (unix(7)), named by the device number of the mount, for as long as it does.
//! No sign tells nothing: it may be in another network namespace.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay_io::clock::Clock;
use forebay_io::task::TaskGroup;
use tracing::debug;

/// How often a number is tried that another process shows.
const PAUSE: Duration = Duration::from_millis(100);

/// Shown while it lives. Nothing is ever sent to it.
#[derive(Debug, Default)]
pub(crate) struct Sign {
    socket: Arc<OnceLock<UnixDatagram>>,
}

impl Sign {
    /// Shows that this process serves the mount of the device number `device`, as `major:minor`. The kernel gives a number to the
    /// next mount at once: where another process has not noticed yet that its mount of that number is gone, one of `tasks` waits
    /// until it has.
    pub(crate) fn show(device: &str, clock: &Clock, tasks: &TaskGroup) -> Self {
        let sign = Self::default();
        if has_shown(&sign.socket, device) {
            return sign;
        }
        let (waiting, device, clock) = (Arc::downgrade(&sign.socket), device.to_owned(), clock.clone());
        tasks.spawn("sign", async move {
            // Over once the sign is taken down.
            while waiting.upgrade().is_some_and(|socket| !has_shown(&socket, &device)) {
                clock.sleep(PAUSE).await;
            }
        });
        sign
    }
}

/// Shows the sign in `socket`, unless another process shows that of this number. True when there is nothing left to do.
fn has_shown(socket: &OnceLock<UnixDatagram>, device: &str) -> bool {
    match name(device).and_then(|name| UnixDatagram::bind_addr(&name)) {
        Ok(bound) => {
            let _ = socket.set(bound);
            true
        }
        Err(error) => {
            debug!(device, %error, "other processes cannot see that this mount is served");
            error.kind() != io::ErrorKind::AddrInUse
        }
    }
}

/// Whether a process of this network namespace serves the mount of the device number `device`.
pub(crate) fn is_shown(device: &str) -> bool {
    // Of datagrams, a connection is nothing that the other side sees.
    name(device).and_then(|name| UnixDatagram::unbound()?.connect_addr(&name)).is_ok()
}

fn name(device: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("forebay-mount-{device}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_sign_is_seen_while_it_is_shown() {
        let (device, tasks) = (format!("test:{}", std::process::id()), TaskGroup::new("signs"));
        assert!(!is_shown(&device));
        let sign = Sign::show(&device, &Clock::system(), &tasks);
        assert!(is_shown(&device) && is_shown(&device));
        assert!(tasks.running().is_empty());
        drop(sign);
        assert!(!is_shown(&device));
    }

    /// One whose number was another's when it was to be shown was not shown at all: whoever asked for the mounts of the host touched
    /// its mount.
    #[tokio::test]
    async fn a_sign_is_shown_once_its_number_is_free() {
        let (device, tasks) = (format!("test-again:{}", std::process::id()), TaskGroup::new("signs"));
        let [first, second, third] = [(); 3].map(|()| Sign::show(&device, &Clock::system(), &tasks));
        assert!(first.socket.get().is_some() && second.socket.get().is_none());
        // Nobody shows the sign of a mount that is gone.
        drop(second);
        drop(first);
        while third.socket.get().is_none() {
            tokio::task::yield_now().await;
        }
        assert!(is_shown(&device));
        drop(third);
        while !tasks.running().is_empty() {
            tokio::task::yield_now().await;
        }
        assert!(!is_shown(&device));
    }
}
