//! Checks of this host.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forebay_core::units::format_bytes;
use forebay_core::{Error, Result};
use forebay_fuse::MountPoint;
use forebay_io::disk::Ring;
use forebay_io::net::{Rdma, Wanted};
use rustix::process::{Resource, getrlimit};

use super::Check;

/// Below this many open files, a few training jobs with loaders of their own come to the end of them.
const OPEN_FILES_MIN: u64 = 4_096;

/// Everything that Forebay needs of a host.
pub(super) fn checks(state: &Path, cache: Option<&Path>, cache_bytes: u64) -> Vec<Check> {
    vec![
        device(),
        helper(),
        kernel(),
        passthrough(),
        fuse_over_uring(),
        uring(),
        open_files(),
        locked_memory(),
        network_cards(Path::new("/sys/class/infiniband")),
        state_directory(state),
        cache_directory(cache, cache_bytes),
        name_database(Path::new("/etc/updatedb.conf")),
    ]
}

fn device() -> Check {
    const NAME: &str = "/dev/fuse";
    match MountPoint::Directory("/".into()).check_device() {
        Ok(()) => Check::ok(NAME, "can be opened"),
        Err(error) => Check::failed(NAME, &error),
    }
}

fn helper() -> Check {
    const NAME: &str = "fusermount3";
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(NAME)).find(|file| file.is_file());
    match found {
        Some(file) => Check::ok(NAME, file.display().to_string()),
        None if rustix::process::geteuid().is_root() => Check::warn(
            NAME,
            "not found; root mounts without it",
            "install the package fuse3 for other users",
        ),
        None => Check::fail(NAME, "not found: only root can mount", "install the package fuse3"),
    }
}

fn kernel() -> Check {
    const NAME: &str = "kernel";
    let Some(release) = read("/proc/sys/kernel/osrelease") else {
        return Check::warn(NAME, "its version cannot be read", "mount /proc");
    };
    // 5.4 is the oldest that Forebay was written for: FUSE with 1 MiB requests came in 4.20.
    match version(&release) {
        Some(version) if version >= (5, 4) => Check::ok(NAME, release),
        _ => Check::warn(NAME, release, "use Linux 5.4 or newer"),
    }
}

/// The first two numbers of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Features of the kernel that mounts do without today, for the record.
fn passthrough() -> Check {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    // CONFIG_FUSE_PASSTHROUGH, on by default, came in 6.9.
    let fact = if version(&release) >= Some((6, 9)) { "the kernel knows it" } else { "needs Linux 6.9" };
    Check::ok("fuse passthrough", format!("{fact}; not needed"))
}

fn fuse_over_uring() -> Check {
    let fact = match read("/sys/module/fuse/parameters/enable_uring").as_deref() {
        Some("Y") => "enabled",
        Some(_) => "switched off",
        None => "the kernel does not know it",
    };
    Check::ok("fuse over io_uring", format!("{fact}; not needed"))
}

/// What the disk under the cache is read by.
fn uring() -> Check {
    const NAME: &str = "io_uring";
    match Ring::of_process() {
        Ok(_) => Check::ok(NAME, "can be used"),
        Err(error) => Check::warn(
            NAME,
            format!("cannot be used: {error}; threads wait for the disk of the cache"),
            "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile, and see sysctl \
             kernel.io_uring_disabled",
        ),
    }
}

fn open_files() -> Check {
    const NAME: &str = "open files";
    // A mount raises its own to that.
    match getrlimit(Resource::Nofile).maximum {
        Some(limit) if limit < OPEN_FILES_MIN => {
            let hint = format!("raise it to {OPEN_FILES_MIN} or more with `ulimit -Hn` or LimitNOFILE=");
            Check::warn(NAME, format!("at most {limit}"), hint)
        }
        limit => {
            Check::ok(NAME, limit.map_or_else(|| "no limit".to_owned(), |limit| format!("at most {limit}")))
        }
    }
}

fn locked_memory() -> Check {
    let limit = getrlimit(Resource::Memlock).current;
    Check::ok("locked memory", limit.map_or_else(|| "no limit".to_owned(), format_bytes))
}

/// What hosts of a job read each other's memory with, as they restore together; `devices` has a name for each.
fn network_cards(devices: &Path) -> Check {
    const NAME: &str = "network cards";
    let entries = fs::read_dir(devices).into_iter().flatten().flatten();
    let names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    if names.is_empty() {
        return Check::ok(NAME, "none for RDMA: hosts of a job send over TCP what they lack");
    }
    let wanted: Wanted = match std::env::var("FOREBAY_RDMA").unwrap_or_default().parse() {
        Ok(Wanted::None) => return Check::ok(NAME, "not used, as FOREBAY_RDMA says"),
        Ok(wanted) => wanted,
        Err(error) => return Check::failed(NAME, &error),
    };
    let without = |error: &Error| {
        let fact = format!("{}: hosts of a job send over TCP what they lack: {error}", names.join(", "));
        Check::warn(NAME, fact, error.hint().unwrap_or("see `rdma link`"))
    };
    match (Rdma::ports(&wanted), lend_to_card(&wanted)) {
        (Ok(ports), _) if ports.is_empty() => without(&Error::invalid("no port is up")),
        (Err(error), _) | (_, Err(error)) => without(&error),
        (Ok(ports), Ok(())) => Check::ok(NAME, ports.join(", ")),
    }
}

/// Whether a card reads as much memory as a rank lends it.
fn lend_to_card(wanted: &Wanted) -> Result<()> {
    let mut memory = vec![0; 64 << 20];
    match Rdma::open(wanted, 0)? {
        Some(rdma) => rdma.lend(&[&mut memory[..]]).map(drop),
        None => Ok(()),
    }
}

fn state_directory(state: &Path) -> Check {
    const NAME: &str = "state directory";
    let shown = state.display();
    match write_and_remove(state) {
        Ok(()) => Check::ok(NAME, format!("{shown} can be written")),
        Err(error) => Check::fail(
            NAME,
            format!("{shown} cannot be written: {error}"),
            "choose another one with --state-dir, here and at `forebay mount`",
        ),
    }
}

fn write_and_remove(directory: &Path) -> std::io::Result<()> {
    fs::create_dir_all(directory)?;
    let file = directory.join(format!(".doctor-{}", std::process::id()));
    fs::write(&file, "x")?;
    fs::remove_file(&file)
}

fn cache_directory(cache: Option<&Path>, wanted: u64) -> Check {
    const NAME: &str = "cache directory";
    let Some(cache) = cache else {
        return Check::ok(NAME, "none: --cache-dir names one on a fast local disk");
    };
    let shown = cache.display();
    if let Err(error) = write_and_remove(cache) {
        let fact = format!("{shown} cannot be written: {error}");
        return Check::fail(NAME, fact, "choose another one with --cache-dir, here and at `forebay mount`");
    }
    let space = match rustix::fs::statvfs(cache) {
        Ok(space) => space,
        Err(error) => {
            return Check::failed(NAME, &Error::from(std::io::Error::from(error)).context(shown));
        }
    };
    // What it holds already is part of what it may take.
    let held = bytes_below(cache);
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    let fact = match held {
        0 => format!("{shown}: {} free", format_bytes(free)),
        held => format!("{shown}: {} free, and {} cached", format_bytes(free), format_bytes(held)),
    };
    if free.saturating_add(held) < wanted {
        let hint = format!(
            "a cache takes up to {} unless --cache-size says less; --cache-dir names another disk",
            format_bytes(wanted)
        );
        return Check::warn(NAME, fact, hint);
    }
    Check::ok(NAME, fact)
}

/// Bytes that all files below take on disk, as far as they can be seen.
fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_below(&entry.path()),
        Ok(found) => found.blocks() * 512,
        Err(_) => 0,
    };
    entries.map(bytes).sum()
}

/// A small file of the kernel, without the line's end.
/// Whether the nightly scan of a host goes into its mounts, which lists whole buckets.
fn name_database(settings: &Path) -> Check {
    const NAME: &str = "updatedb";
    let Ok(text) = fs::read_to_string(settings) else {
        return Check::ok(NAME, "not installed, or without settings");
    };
    let pruned = text.lines().filter_map(|line| line.trim().strip_prefix("PRUNEFS")).any(|line| {
        line.split(|c: char| c.is_whitespace() || matches!(c, '=' | '"')).any(|word| word == "fuse.forebay")
    });
    match pruned {
        true => Check::ok(NAME, "passes mounts over"),
        false => Check::warn(
            NAME,
            "scans mounts that others may look into (allow_other), and lists their buckets, each night",
            format!("add fuse.forebay to PRUNEFS in {}", settings.display()),
        ),
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Verdict;

    #[test]
    fn kernels_are_compared_by_number() {
        for (release, expected) in [
            ("6.18.0-rc1", Some((6, 18))),
            ("5.4-cloud", Some((5, 4))),
            ("5.15.167.4-microsoft", Some((5, 15))),
            ("linux", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
    }

    #[test]
    fn a_state_directory_is_made_and_written_or_told() {
        let scratch = tempfile::tempdir().expect("scratch");
        assert_eq!(state_directory(&scratch.path().join("a/b")).verdict, Verdict::Ok);
        let file = scratch.path().join("file");
        fs::write(&file, "").expect("file");
        let check = state_directory(&file.join("below"));
        assert_eq!(check.verdict, Verdict::Fail);
        assert!(check.hint.expect("a hint").contains("--state-dir"));
    }

    #[test]
    fn a_scan_of_mounts_is_told() {
        let scratch = tempfile::tempdir().expect("scratch");
        let settings = scratch.path().join("updatedb.conf");
        assert_eq!(name_database(&settings).verdict, Verdict::Ok);
        let with = |text: &str| {
            fs::write(&settings, text).expect("settings");
            name_database(&settings).verdict
        };
        assert_eq!(with("PRUNEPATHS=\"/mnt\"\nPRUNEFS = \"nfs fuse fuse.sshfs\"\n"), Verdict::Warn);
        assert_eq!(with("# PRUNEFS = \"fuse.forebay\"\nPRUNEFS=\"nfs\"\n"), Verdict::Warn);
        assert_eq!(with("PRUNEFS=\"NFS fuse.forebay tmpfs\"\n"), Verdict::Ok);
    }

    /// What is told of cards that are there is seen in `tests/tests/rdma.rs`.
    #[test]
    fn cards_that_cannot_be_used_are_told() {
        let scratch = tempfile::tempdir().expect("scratch");
        assert_eq!(network_cards(&scratch.path().join("none")).verdict, Verdict::Ok);
        fs::create_dir(scratch.path().join("mlx5_9")).expect("folder");
        let check = network_cards(scratch.path());
        assert!(check.verdict == Verdict::Warn && check.fact.starts_with("mlx5_9: "), "{}", check.fact);
    }

    #[test]
    fn a_disk_smaller_than_the_cache_is_told() {
        let scratch = tempfile::tempdir().expect("scratch");
        assert_eq!(cache_directory(Some(&scratch.path().join("not/yet")), 0).verdict, Verdict::Ok);
        assert_eq!(cache_directory(Some(scratch.path()), u64::MAX).verdict, Verdict::Warn);
    }

    #[test]
    fn a_cache_directory_that_cannot_be_used_is_told_and_what_it_holds_counts() {
        let scratch = tempfile::tempdir().expect("scratch");
        let file = scratch.path().join("file");
        fs::write(&file, vec![1; 1 << 20]).expect("file");
        for cache in [file.clone(), file.join("below")] {
            let check = cache_directory(Some(&cache), 0);
            assert_eq!(check.verdict, Verdict::Fail);
            assert!(check.hint.expect("a hint").contains("--cache-dir"));
        }
        let check = cache_directory(Some(scratch.path()), 0);
        assert!(check.verdict == Verdict::Ok && check.fact.contains("and 1.00 MiB cached"), "{}", check.fact);
    }
}
