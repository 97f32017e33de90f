//! What went over the wire: requests, failures and body bytes by kind of operation.
//!
//! Every attempt counts, retries included, so that tests can assert how many requests a piece of work costs. The
//! counts are of one bucket handle and of all handles derived from it.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// The kinds of requests that a store knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OperationKind {
    /// What the store says about one object.
    Head,
    /// A body, whole or a range.
    Get,
    /// A whole object in one request.
    Put,
    /// The start of an upload in parts.
    Create,
    /// One part.
    Part,
    /// One part copied from an object inside the store.
    CopyPart,
    /// The end of an upload: the object becomes visible.
    Complete,
    /// An upload given up.
    Abort,
    /// One page of keys.
    List,
    /// One page of unfinished uploads, or of the parts of one.
    ListUploads,
    /// An object copied inside the store.
    Copy,
    /// One or more objects deleted in one request.
    Delete,
}

impl OperationKind {
    /// Every kind.
    pub const ALL: [Self; 12] = [
        Self::Head,
        Self::Get,
        Self::Put,
        Self::Create,
        Self::Part,
        Self::CopyPart,
        Self::Complete,
        Self::Abort,
        Self::List,
        Self::ListUploads,
        Self::Copy,
        Self::Delete,
    ];
}

/// What happened to one kind of operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// Requests sent.
    pub requests: u64,
    /// Requests that ended in an error, refusals such as 404 and 412 included.
    pub failures: u64,
    /// Body bytes that were sent or received, without headers.
    pub bytes: u64,
}

/// A snapshot of everything that was counted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// By kind, in the order of [`OperationKind::ALL`].
    pub operations: Vec<(OperationKind, Count)>,
    /// Requests that were sent again after an error worth it, resumed bodies included.
    pub retries: u64,
    /// Keys that listings met and left out because Forebay cannot address them.
    pub skipped_keys: u64,
}

impl Counters {
    /// The count of one kind.
    pub fn of(&self, kind: OperationKind) -> Count {
        self.operations.iter().find(|(k, _)| *k == kind).map(|(_, count)| *count).unwrap_or_default()
    }

    /// Requests of all kinds.
    pub fn requests(&self) -> u64 {
        self.operations.iter().map(|(_, count)| count.requests).sum()
    }

    /// Failures of all kinds.
    pub fn failures(&self) -> u64 {
        self.operations.iter().map(|(_, count)| count.failures).sum()
    }

    /// What was counted between `earlier` and this snapshot.
    pub fn since(&self, earlier: &Self) -> Self {
        let less = |kind| {
            let (now, then) = (self.of(kind), earlier.of(kind));
            Count {
                requests: now.requests - then.requests,
                failures: now.failures - then.failures,
                bytes: now.bytes - then.bytes,
            }
        };
        Self {
            operations: OperationKind::ALL.iter().map(|kind| (*kind, less(*kind))).collect(),
            retries: self.retries - earlier.retries,
            skipped_keys: self.skipped_keys - earlier.skipped_keys,
        }
    }
}

/// The live counts.
#[derive(Debug, Default)]
pub(super) struct Meter {
    requests: [AtomicU64; OperationKind::ALL.len()],
    failures: [AtomicU64; OperationKind::ALL.len()],
    bytes: [AtomicU64; OperationKind::ALL.len()],
    retries: AtomicU64,
    skipped_keys: AtomicU64,
}

impl Meter {
    pub(super) fn request(&self, kind: OperationKind) {
        self.requests[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn failure(&self, kind: OperationKind) {
        self.failures[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self, kind: OperationKind, bytes: u64) {
        self.bytes[kind as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether these are the first.
    pub(super) fn skipped(&self, keys: u64) -> bool {
        keys > 0 && self.skipped_keys.fetch_add(keys, Ordering::Relaxed) == 0
    }

    pub(super) fn snapshot(&self) -> Counters {
        let read = |counts: &[AtomicU64], kind: OperationKind| counts[kind as usize].load(Ordering::Relaxed);
        let count = |kind| Count {
            requests: read(&self.requests, kind),
            failures: read(&self.failures, kind),
            bytes: read(&self.bytes, kind),
        };
        Counters {
            operations: OperationKind::ALL.iter().map(|kind| (*kind, count(*kind))).collect(),
            retries: self.retries.load(Ordering::Relaxed),
            skipped_keys: self.skipped_keys.load(Ordering::Relaxed),
        }
    }
}
