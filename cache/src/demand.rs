//! Whether somebody waits for a block.

use std::sync::Arc;

use tokio::sync::watch;

/// Whether somebody waits for a block that is being brought in, or nobody does yet, as of what is warmed or read ahead. Said
/// once, and known to all who bring it: clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Demand(Option<Arc<watch::Sender<bool>>>);

impl Demand {
    /// Somebody waits.
    pub(crate) fn now() -> Self {
        Self(None)
    }

    /// Nobody waits, until it is [raised](Self::raise).
    pub(crate) fn later() -> Self {
        Self(Some(Arc::new(watch::Sender::new(false))))
    }

    /// Somebody waits from now on.
    pub(crate) fn raise(&self) {
        if let Some(raised) = &self.0 {
            raised.send_replace(true);
        }
    }

    /// Returns once somebody waits. Cancel-safe.
    pub(crate) async fn raised(&self) {
        if let Some(raised) = &self.0 {
            raised.subscribe().wait_for(|raised| *raised).await.expect("its sender is held here");
        }
    }
}
