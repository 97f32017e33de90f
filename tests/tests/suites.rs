//! Suites and loads that others wrote, run on a mount: pjdfstest, fsx, fio, stress-ng, dbench.
//!
//! `make setup` installs them; where one is missing, its test says that it is skipped.

use std::collections::BTreeSet;
use std::path::Path;

use forebay_tests::settings::{skip, tool};
use forebay_tests::{
    DISK_CACHE, EARLY, EARLY_AND_SOON, Mounted, Seeded, is_long, require_fuse, scale, shell,
};
use rand::RngExt;

/// Whether `test` has the programs and rights that it needs.
fn ready(test: &str, program: &str, as_root: bool) -> Option<String> {
    let root = shell(Path::new("/"), "id -u").stdout.trim() == "0";
    if as_root && !root {
        skip(test, "only root can act as other users");
        return None;
    }
    let program = require_fuse(test).then(|| tool(program, test)).flatten()?;
    Some(program.display().to_string())
}

/// Users that every Debian has, and no waiting between changes: times count nanoseconds.
const PJDFSTEST: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.001
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

/// All that may be skipped: what needs mount(8) to make a mount read-only while it is used, which Forebay's is not
/// asked to do, and a limit of links, which there is none of.
const PJDFSTEST_SKIPS: [&str; 14] = [
    "chmod::erofs_named",
    "chown::erofs_named",
    "chown::lchown::erofs_named",
    "link::erofs_named",
    "link::link_count_max",
    "mkdir::erofs_new_file",
    "mkfifo::erofs_new_file",
    "open::erofs_named",
    "open::erofs_new_file",
    "rename::erofs_named",
    "rmdir::erofs_named",
    "symlink::erofs_new_file",
    "truncate::erofs_named",
    "unlink::erofs_named",
];

fn run_pjdfstest(program: &str, mounted: &Mounted) {
    let config = mounted.file("pjdfstest.toml", PJDFSTEST);
    let other = mounted.folder_beside("another-file-system");
    let outcome = mounted.run(&format!("NO_COLOR=1 {program} -c {config} -s {} -p .", other.display()));
    let ended = |word: &str| {
        let words = outcome.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let cases =
            words.filter(|words| words.len() == 2 && words[1] == word).map(|words| words[0].to_owned());
        cases.collect::<BTreeSet<_>>()
    };
    assert_eq!(outcome.code, Some(0), "{outcome}");
    assert_eq!(ended("skipped"), BTreeSet::from(PJDFSTEST_SKIPS.map(str::to_owned)), "{outcome}");
    assert_eq!((ended("FAILED").len(), ended("ok").len()), (0, 384), "{outcome}");
}

#[test]
fn pjdfstest_finds_no_failure() {
    if let Some(program) = ready("pjdfstest_finds_no_failure", "pjdfstest", true) {
        let mounted = Mounted::folder(&["--allow-other"]);
        run_pjdfstest(&program, &mounted);
        mounted.end();
    }
}

#[test]
fn pjdfstest_finds_no_failure_on_s3() {
    if let Some(program) = ready("pjdfstest_finds_no_failure_on_s3", "pjdfstest", true) {
        let mounted = Mounted::s3(&["--allow-other"]);
        run_pjdfstest(&program, &mounted);
        mounted.end();
    }
}

/// Nor while the store fails, delays, refuses and loses answers. It takes its time, so that only long runs do it.
#[test]
fn pjdfstest_finds_no_failure_over_a_troubled_store() {
    if !is_long() {
        return;
    }
    if let Some(program) = ready("pjdfstest_finds_no_failure_over_a_troubled_store", "pjdfstest", true) {
        let mut rng = Seeded::new();
        let mounted = Mounted::troubled(&["--allow-other"], &mut rng);
        run_pjdfstest(&program, &mounted);
        mounted.end();
    }
}

/// What the suite removes and replaces is kept, and nothing of that shows.
#[test]
fn pjdfstest_finds_no_failure_with_a_trash() {
    if let Some(program) = ready("pjdfstest_finds_no_failure_with_a_trash", "pjdfstest", true) {
        let mounted = Mounted::folder(&["--allow-other", "--trash", "1d"]);
        run_pjdfstest(&program, &mounted);
        assert!(mounted.end_with_trash() > 1000);
    }
}

#[test]
fn pjdfstest_finds_no_failure_in_what_is_written_back() {
    if let Some(program) = ready("pjdfstest_finds_no_failure_in_what_is_written_back", "pjdfstest", true) {
        let mounted = Mounted::folder(&["--allow-other", "--writeback"]);
        run_pjdfstest(&program, &mounted);
        mounted.end();
    }
}

/// Nor where another process has the tree.
#[test]
fn pjdfstest_finds_no_failure_on_a_mount_that_joined() {
    if let Some(program) = ready("pjdfstest_finds_no_failure_on_a_mount_that_joined", "pjdfstest", true) {
        let mounted = Mounted::joined(&["--allow-other"]);
        run_pjdfstest(&program, &mounted);
        mounted.end();
    }
}

/// Every operation that fsx has; `flen` and `max` are the longest file and the largest operation.
fn fsx_config(flen: u32, max: u32) -> String {
    format!(
        "flen = {flen}
[opsize]
max = {max}
[weights]
close_open = 1
read = 10
write = 10
mapread = 10
mapwrite = 10
invalidate = 1
truncate = 2
fsync = 1
fdatasync = 1
posix_fallocate = 1
punch_hole = 2
sendfile = 2
posix_fadvise = 1
copy_file_range = 2
"
    )
}

/// Runs of fsx for one of the gate. A long run has fewer than it has rounds of other suites: each is longer, too.
fn fsx_runs() -> usize {
    scale().div_ceil(4)
}

/// Each of `runs` has as many times the operations of the gate as the scale says, up to `longest`: what goes wrong late
/// in the life of a file is found by long runs only.
fn run_fsx(program: &str, mounted: &Mounted, rng: &mut Seeded, runs: usize, longest: usize) {
    let small = mounted.file("small.toml", &fsx_config(256 << 10, 64 << 10));
    // Larger than two blocks of the cache.
    let large = mounted.file("large.toml", &fsx_config(9 << 20, 1 << 20));
    let longer = scale().min(longest);
    for run in 0..runs {
        for (config, operations) in [(&small, 600 * longer), (&large, 60 * longer)] {
            let seed: u32 = rng.random();
            let artifacts = mounted.folder_beside("artifacts");
            let command = format!(
                "rm -f file; {program} -f {config} -S {seed} -N {operations} -P {} file",
                artifacts.display()
            );
            let outcome = mounted.run(&command);
            assert_eq!(outcome.code, Some(0), "run {run}, seed {seed}: {outcome}");
        }
    }
}

#[test]
fn fsx_finds_no_wrong_byte() {
    if let Some(program) = ready("fsx_finds_no_wrong_byte", "fsx", false) {
        let mounted = Mounted::folder(DISK_CACHE);
        run_fsx(&program, &mounted, &mut Seeded::new(), 3 * fsx_runs(), 10);
        mounted.end();
    }
}

#[test]
fn fsx_finds_no_wrong_byte_in_what_is_written_back() {
    if let Some(program) = ready("fsx_finds_no_wrong_byte_in_what_is_written_back", "fsx", false) {
        let mounted = Mounted::folder(&["--writeback", "--writeback-size", "16MiB"]);
        run_fsx(&program, &mounted, &mut Seeded::new(), fsx_runs(), 10);
        mounted.end();
    }
}

/// Nor where files leave for the store in the middle of what it does.
#[test]
fn fsx_finds_no_wrong_byte_in_what_leaves_early() {
    if let Some(program) = ready("fsx_finds_no_wrong_byte_in_what_leaves_early", "fsx", false) {
        for options in [
            &["--config", EARLY][..],
            &["--writeback", "--writeback-size", "1MiB", "--config", EARLY_AND_SOON],
        ] {
            let mounted = Mounted::folder(options);
            run_fsx(&program, &mounted, &mut Seeded::new(), fsx_runs(), 10);
            mounted.end();
        }
    }
}

#[test]
fn fsx_finds_no_wrong_byte_on_s3() {
    if let Some(program) = ready("fsx_finds_no_wrong_byte_on_s3", "fsx", false) {
        let mounted = Mounted::s3(&[]);
        run_fsx(&program, &mounted, &mut Seeded::new(), fsx_runs(), 3);
        mounted.end();
    }
}

#[test]
fn fsx_finds_no_wrong_byte_on_a_mount_that_joined() {
    if let Some(program) = ready("fsx_finds_no_wrong_byte_on_a_mount_that_joined", "fsx", false) {
        for options in [&[][..], &["--config", EARLY]] {
            let mounted = Mounted::joined(options);
            run_fsx(&program, &mounted, &mut Seeded::new(), fsx_runs(), 3);
            mounted.end();
        }
    }
}

/// Failures of the store cost time, and no byte.
#[test]
fn fsx_finds_no_wrong_byte_over_a_troubled_store() {
    if let Some(program) = ready("fsx_finds_no_wrong_byte_over_a_troubled_store", "fsx", false) {
        let mut rng = Seeded::new();
        let mounted = Mounted::troubled(&[], &mut rng);
        run_fsx(&program, &mounted, &mut rng, fsx_runs(), 3);
        mounted.end();
    }
}

/// Whatever becomes of a small file while its bytes share a segment, it is what POSIX says.
#[test]
fn pjdfstest_and_fsx_find_nothing_in_packed_directories() {
    let test = "pjdfstest_and_fsx_find_nothing_in_packed_directories";
    if let Some(program) = ready(test, "pjdfstest", true) {
        let mounted = Mounted::packed(&["--allow-other"]);
        run_pjdfstest(&program, &mounted);
        mounted.end();
    }
    if let Some(program) = ready(test, "fsx", false) {
        let mounted = Mounted::packed(&["--trash", "1d"]);
        run_fsx(&program, &mounted, &mut Seeded::new(), fsx_runs(), 10);
        assert_eq!(mounted.end_with_trash(), 2 * fsx_runs() - 1);
    }
}

/// Each run removes the file of the one before, which goes to the trash.
#[test]
fn fsx_finds_no_wrong_byte_with_a_trash() {
    if let Some(program) = ready("fsx_finds_no_wrong_byte_with_a_trash", "fsx", false) {
        let mounted = Mounted::s3(&["--trash", "1d"]);
        run_fsx(&program, &mounted, &mut Seeded::new(), fsx_runs(), 3);
        assert_eq!(mounted.end_with_trash(), 2 * fsx_runs() - 1);
    }
}

/// Writes are read back and compared with what fio knows it wrote, front to back and at random.
#[test]
fn fio_verifies_what_it_wrote() {
    let Some(program) = ready("fio_verifies_what_it_wrote", "fio", false) else { return };
    let (mounted, mut rng) = (Mounted::folder(DISK_CACHE), Seeded::new());
    let jobs = [
        ("write", "128k", 0),
        ("write", "128k", 1),
        ("randwrite", "4k", 0),
        ("randrw", "16k", 0),
        ("randwrite", "64k", 1),
    ];
    for round in 0..scale() {
        for (pattern, block, direct) in jobs {
            let name = format!("f{round}-{pattern}-{direct}");
            let job = format!("--rw={pattern} --bs={block} --direct={direct} --fsync=200");
            run_fio(&program, &mounted, &format!("--name={name} {job} --randseed={}", rng.random::<u32>()));
        }
    }
    mounted.end();
}

/// And once more on another machine, which has every byte from the store.
#[test]
fn fio_verifies_what_it_wrote_over_a_troubled_store() {
    let test = "fio_verifies_what_it_wrote_over_a_troubled_store";
    let Some(program) = ready(test, "fio", false) else { return };
    let mut rng = Seeded::new();
    let mut mounted = Mounted::troubled(&[], &mut rng);
    for round in 0..scale() {
        let jobs = [("write", "128k", 8), ("randwrite", "16k", 64)].map(|(pattern, block, fsync)| {
            let job = format!("--name=f{round}-{pattern} --rw={pattern} --bs={block} --fsync={fsync}");
            format!("{job} --randseed={}", rng.random::<u32>())
        });
        for job in &jobs {
            run_fio(&program, &mounted, job);
        }
        mounted.move_on();
        for job in &jobs {
            run_fio(&program, &mounted, &format!("{job} --verify_only=1"));
        }
    }
    mounted.end();
}

fn run_fio(program: &str, mounted: &Mounted, job: &str) {
    let outcome = mounted.run(&format!(
        "{program} {job} --size=8m --numjobs=2 --ioengine=psync --verify=crc32c --verify_fatal=1 \
         --verify_state_save=0 --output-format=terse"
    ));
    assert_eq!(outcome.code, Some(0), "{outcome}");
}

/// Calls of all kinds at once, whose results stress-ng checks. Left out of its class: what is not about a mount
/// (`binderfs`, `bind-mount`, `eventfd`, `procfs`), what the kernel passes to no FUSE file system and stress-ng therefore
/// skips (`fiemap`, `verity`), and what holds every mount of the machine open, those of the other tests, too (`fanotify`,
/// `io`).
const STRESSORS: [&str; 41] = [
    "access",
    "chattr",
    "chdir",
    "chmod",
    "chown",
    "copy-file",
    "dentry",
    "dir",
    "dirdeep",
    "dirmany",
    "dnotify",
    "dup",
    "fallocate",
    "fcntl",
    "file-ioctl",
    "filename",
    "flock",
    "fpunch",
    "fsize",
    "fstat",
    "getdent",
    "handle",
    "hdd",
    "inode-flags",
    "inotify",
    "iomix",
    "ioprio",
    "lease",
    "link",
    "locka",
    "lockf",
    "lockofd",
    "mknod",
    "open",
    "rename",
    "seek",
    "symlink",
    "sync-file",
    "touch",
    "utime",
    "xattr",
];

#[test]
fn stress_ng_finds_no_wrong_result() {
    let Some(program) = ready("stress_ng_finds_no_wrong_result", "stress-ng", false) else { return };
    let mounted = Mounted::folder(&[]);
    for _ in 0..scale() {
        run_stress_ng(&program, &mounted, &STRESSORS, 3);
    }
    mounted.end();
}

/// Nor while the store fails, delays, refuses and loses answers: of the gate's stressors some, by chance.
#[test]
fn stress_ng_finds_no_wrong_result_over_a_troubled_store() {
    let test = "stress_ng_finds_no_wrong_result_over_a_troubled_store";
    let Some(program) = ready(test, "stress-ng", false) else { return };
    let mut rng = Seeded::new();
    let mounted = Mounted::troubled(&[], &mut rng);
    mounted.play(scale(), || {
        let stressors: Vec<_> = STRESSORS.into_iter().filter(|_| rng.random_bool(0.3)).collect();
        run_stress_ng(&program, &mounted, &stressors, 2);
    });
    mounted.end();
}

/// Runs `stressors` at once for so many seconds.
fn run_stress_ng(program: &str, mounted: &Mounted, stressors: &[&str], seconds: u32) {
    let all: Vec<_> = stressors.iter().map(|name| format!("--{name} 1")).collect();
    let bytes = ["hdd", "fallocate", "iomix", "sync-file"].map(|name| format!("--{name}-bytes 4m"));
    // Few things to make first; the least that copy-file takes, of which it copies pieces of 2 MiB; and all bytes that
    // names may have, which filename else finds out first.
    let few =
        "--chdir-dirs 64 --dirdeep-inodes 200 --copy-file-bytes 128m --copy-file-ops 4 --filename-opts ext";
    let outcome = mounted.run(&format!(
        "{program} {} {} {few} --seek-size 4m --temp-path . --verify --timeout {seconds}",
        all.join(" "),
        bytes.join(" ")
    ));
    assert_eq!(outcome.code, Some(0), "{outcome}");
    assert!(outcome.stderr.contains("successful run completed"), "{outcome}");
}

/// The calls of a file server's clients.
#[test]
fn dbench_runs() {
    let Some(program) = ready("dbench_runs", "dbench", false) else { return };
    let mounted = Mounted::folder(&[]);
    mounted.play(scale(), || run_dbench(&program, &mounted));
    mounted.end();
}

/// The same while the store fails, delays, refuses and loses answers.
#[test]
fn dbench_runs_over_a_troubled_store() {
    let Some(program) = ready("dbench_runs_over_a_troubled_store", "dbench", false) else { return };
    let mut rng = Seeded::new();
    let mounted = Mounted::troubled(&[], &mut rng);
    mounted.play(scale(), || run_dbench(&program, &mounted));
    mounted.end();
}

fn run_dbench(program: &str, mounted: &Mounted) {
    // dbench takes the first semaphore of a machine, whose number is 0, for none, and goes on without.
    let has_failed = |line: &str| line.contains("failed") && !line.contains("barrier semaphore");
    let outcome = mounted.run(&format!("{program} -D . -t 2 4"));
    assert_eq!(outcome.code, Some(0), "{outcome}");
    assert!(outcome.stdout.contains("Throughput"), "{outcome}");
    assert!(!outcome.stdout.lines().any(has_failed), "{outcome}");
}
