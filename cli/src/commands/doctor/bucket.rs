//! Checks of a bucket: can it be reached, what does it honour, and what follows.

use std::time::Duration;

use bytes::Bytes;
use forebay_core::{ErrorKind, ObjectKey, Result};
use forebay_io::clock::Clock;
use forebay_io::object::{Bucket, BucketUrl, Capabilities, Condition, Scheme, StoreSettings};

use super::Check;

/// Round trips measured.
const ROUND_TRIPS: usize = 5;
/// How far the store's clock may be off. S3 itself refuses signatures that are 15 minutes off.
const SKEW_MAX_SECONDS: u64 = 60;
const NAME: &str = "bucket";

/// Everything that Forebay needs of a bucket. The first failure ends them.
pub(super) async fn checks(source: &str, store: &StoreSettings, read_only: bool) -> Vec<Check> {
    let mut checks = Vec::new();
    let bucket = match open(source, store).await {
        Ok(bucket) => bucket,
        Err(error) => {
            let name = if error.kind() == ErrorKind::Denied { "credentials" } else { NAME };
            checks.push(Check::failed(name, &error));
            return checks;
        }
    };
    let without = if bucket.is_anonymous() { " without credentials" } else { "" };
    checks.push(Check::ok(NAME, format!("{} is there and can be listed{without}", bucket.url())));
    checks.push(match round_trip(&bucket).await {
        Ok(time) => {
            Check::ok("round trip", format!("{:.1} ms, median of {ROUND_TRIPS}", time.as_secs_f64() * 1e3))
        }
        Err(error) => Check::failed("round trip", &error),
    });
    if read_only {
        checks.push(Check::ok("tree", "on this host, for a read-only mount"));
        return checks;
    }
    match bucket.probe().await {
        Err(error) => checks.push(Check::failed("probe", &error)),
        Ok(found) if !found.writable => checks.push(Check::warn(
            "writing",
            "these credentials may not write",
            "mount it with --read-only, or give credentials that may put and delete objects",
        )),
        Ok(found) => {
            checks.extend(capabilities(&found));
            // The probe has written with it.
            let class = bucket.storage_class();
            checks.extend(
                class.map(|class| Check::ok("storage class", format!("{class}, of what is written"))),
            );
            checks.push(tree(bucket.url(), &found));
            checks.push(match skew(&bucket).await {
                Ok(seconds) => clock(seconds),
                Err(error) => Check::failed("clock", &error),
            });
        }
    }
    checks
}

async fn open(source: &str, store: &StoreSettings) -> Result<Bucket> {
    let url: BucketUrl = source.parse()?;
    Bucket::open(&url, store).await
}

async fn round_trip(bucket: &Bucket) -> Result<Duration> {
    let clock = Clock::system();
    let key = ObjectKey::new(".forebay/volume.json");
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let start = clock.now();
        bucket.head(&key).await?;
        times.push(clock.now().since(start));
    }
    times.sort_unstable();
    Ok(times[ROUND_TRIPS / 2])
}

/// Seconds by which the store's clock and this host's differ.
async fn skew(bucket: &Bucket) -> Result<u64> {
    let key = ObjectKey::new(format!(".forebay/probe/clock-{}", std::process::id()));
    let clock = Clock::system();
    bucket.put(&key, Bytes::from_static(b"x"), Condition::Always).await?;
    let ours = clock.wall().seconds;
    let theirs = bucket.head(&key).await;
    bucket.delete(&key).await?;
    Ok(theirs?.map_or(0, |info| info.modified.seconds.abs_diff(ours)))
}

fn clock(seconds: u64) -> Check {
    match seconds {
        // Stores tell whole seconds.
        0..=1 => Check::ok("clock", "the same as the store's"),
        2..=SKEW_MAX_SECONDS => Check::ok("clock", format!("{seconds} s off the store's")),
        _ => Check::warn(
            "clock",
            format!("{seconds} s off the store's"),
            "set this host's clock: stores refuse signatures of another time",
        ),
    }
}

/// One line for each capability, and what is missing without it.
fn capabilities(found: &Capabilities) -> Vec<Check> {
    let without = [
        (
            "conditional create",
            found.conditional_create,
            "two hosts may both create one object: mount on one host only",
        ),
        (
            "conditional update",
            found.conditional_update,
            "hosts may undo one another's writes: mount on one host only",
        ),
        (
            "conditional uploads",
            found.conditional_complete && found.conditional_complete_update,
            "an outsider's object that appears during an upload is replaced by it",
        ),
        (
            "part copy",
            found.part_copy && found.conditional_part_copy,
            "rewritten files are sealed by sending every byte again",
        ),
        (
            "parts of any size",
            found.unequal_parts,
            "uploads are cut into parts of one size; rewritten files are sent again where their pieces do not lie evenly",
        ),
        (
            "listing of uploads",
            found.list_uploads,
            "uploads that a crash left are not cleaned up: use a lifecycle rule",
        ),
        ("conditional reads", found.conditional_get, "an object replaced during a read may go unnoticed"),
        (
            "versions",
            found.etag_stable,
            "changes by others may go unnoticed, and cached data may be fetched again",
        ),
        ("names", found.exact_keys, "names with spaces, %, + or Unicode may be lost: use plain ones"),
    ];
    let mut checks = vec![Check::ok("writing", "objects can be put and deleted")];
    checks.push(match found.range_get {
        true => Check::ok("range reads", "exact"),
        false => {
            Check::fail("range reads", "other bytes than asked for", "use another store: data would be wrong")
        }
    });
    checks.extend(without.map(|(name, honoured, hint)| match honoured {
        true => Check::ok(name, "honoured"),
        false => Check::warn(name, "not honoured", hint),
    }));
    checks
}

/// Where a read-write mount would keep the tree.
fn tree(url: &BucketUrl, found: &Capabilities) -> Check {
    const NAME: &str = "tree";
    match url.scheme {
        Scheme::File => Check::ok(NAME, "LMDB in the directory, under .forebay/tree.lmdb"),
        _ if found.safe_for_many_writers() => Check::ok(NAME, "in the bucket, under .forebay/tree/"),
        _ => Check::warn(
            NAME,
            "on this host only: names, modes and links do not follow the bucket to another host",
            "use a store that honours conditional puts",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Verdict;

    fn all() -> Capabilities {
        Capabilities {
            writable: true,
            conditional_create: true,
            conditional_update: true,
            conditional_complete: true,
            conditional_complete_update: true,
            part_copy: true,
            conditional_part_copy: true,
            unequal_parts: true,
            list_uploads: true,
            range_get: true,
            conditional_get: true,
            etag_stable: true,
            exact_keys: true,
        }
    }

    #[test]
    fn what_a_store_lacks_is_a_warning_and_wrong_bytes_a_failure() {
        let verdicts =
            |found: &Capabilities| capabilities(found).iter().map(|check| check.verdict).collect::<Vec<_>>();
        assert!(verdicts(&all()).iter().all(|verdict| *verdict == Verdict::Ok));
        let lacks = Capabilities { conditional_update: false, part_copy: false, ..all() };
        assert_eq!(verdicts(&lacks).iter().filter(|verdict| **verdict == Verdict::Warn).count(), 2);
        assert!(verdicts(&Capabilities { range_get: false, ..all() }).contains(&Verdict::Fail));
    }

    #[test]
    fn the_tree_goes_where_a_mount_puts_it() {
        let s3: BucketUrl = "s3://b".parse().expect("URL");
        let file: BucketUrl = "file:///b".parse().expect("URL");
        let weak = Capabilities { conditional_create: false, ..all() };
        assert!(tree(&s3, &all()).fact.contains(".forebay/tree/"));
        assert!(tree(&file, &weak).fact.contains("LMDB"));
        assert_eq!(tree(&s3, &weak).verdict, Verdict::Warn);
    }

    #[test]
    fn a_clock_that_is_off_is_told() {
        assert_eq!(clock(0).verdict, Verdict::Ok);
        assert_eq!(clock(30).verdict, Verdict::Ok);
        assert_eq!(clock(900).verdict, Verdict::Warn);
    }
}
