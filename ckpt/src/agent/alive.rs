//! That a save is under way, told for as long as it is: garbage collection and the job's other ranks go by that.

use std::convert::Infallible;
use std::time::Duration;

use forebay_io::clock::Clock;
use forebay_io::object::Bucket;

use crate::catalog::{StepKey, put_alive};

/// How often it is told: several times within what the others wait for, and many times before anything is garbage. Most
/// saves are done before the first time.
pub(super) const EVERY: Duration = Duration::from_secs(150);

/// Does `work` for a rank's part of `save`, and tells that it goes on; sets `is_told` once it did.
pub(super) async fn while_alive<T>(
    clock: &Clock,
    bucket: &Bucket,
    save: &StepKey,
    rank: u32,
    is_told: &mut bool,
    work: impl Future<Output = T>,
) -> T {
    let tell = async {
        loop {
            clock.sleep(EVERY).await;
            *is_told = true;
            if let Err(error) = put_alive(bucket, save.clone(), rank).await {
                tracing::warn!(step = save.step, %error, "others were not told that a save goes on");
            }
        }
    };
    tokio::select! {
        done = work => done,
        never = tell => { let never: Infallible = never; match never {} }
    }
}
