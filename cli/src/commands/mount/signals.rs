//! The signals that end a process which serves.

use forebay_core::Result;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end a mount.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    /// From here on they do not end the process by themselves.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// The name of the next one. Cancel-safe.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hang_up.recv() => "SIGHUP",
        }
    }
}
