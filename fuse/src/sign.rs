//! A sign of each mount that is served, for other processes of this host to see without touching the mount.
//!
//! To look a path up is to hold its mount for that time, and `umount`, by whoever it is, finds it busy. So a process that
//! serves a directory has an abstract socket (unix(7)), named by the device number of the mount, for as long as it does.
//! No sign tells nothing: it may be in another network namespace.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use tracing::debug;

/// Shown while it lives. Nothing is ever sent to it.
#[derive(Debug)]
pub(crate) struct Sign {
    _socket: UnixDatagram,
}

impl Sign {
    /// Shows that this process serves the mount of the device number `device`, as `major:minor`. `None` where that cannot
    /// be, as where another process has not noticed yet that its mount of that number is gone.
    pub(crate) fn show(device: &str) -> Option<Self> {
        match name(device).and_then(|name| UnixDatagram::bind_addr(&name)) {
            Ok(socket) => Some(Self { _socket: socket }),
            Err(error) => {
                debug!(device, %error, "other processes cannot see that this mount is served");
                None
            }
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

    #[test]
    fn a_sign_is_seen_while_it_is_shown() {
        let device = format!("test:{}", std::process::id());
        assert!(!is_shown(&device));
        let sign = Sign::show(&device).expect("nobody else has it");
        assert!(is_shown(&device) && is_shown(&device));
        assert!(Sign::show(&device).is_none());
        drop(sign);
        assert!(!is_shown(&device));
    }
}
