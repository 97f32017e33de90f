//! Running a command's work: threads to wait on, and Ctrl-C.

use std::future::Future;

use forebay_core::{Error, Result};
use forebay_io::task::{Stop, end};
use tokio::runtime::Builder;

/// Runs `work` to its end.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = Builder::new_multi_thread()
        .enable_all()
        .thread_name("forebay")
        .build()
        .map_err(|error| Error::from(error).context("cannot start threads"))?;
    let done = runtime.block_on(work);
    // What a store or a disk still owes is of no use to a command that has ended.
    end(runtime);
    done
}

/// Runs `work`, which ends by itself once `stop` is given: by Ctrl-C. A second Ctrl-C ends the process.
pub(crate) async fn until_interrupted<T>(work: impl Future<Output = T>, stop: &Stop) -> T {
    let mut work = std::pin::pin!(work);
    tokio::select! {
        done = &mut work => return done,
        _ = tokio::signal::ctrl_c() => stop.cancel(),
    }
    tokio::select! {
        done = work => done,
        // 130 is what shells report for SIGINT.
        _ = tokio::signal::ctrl_c() => std::process::exit(130),
    }
}
