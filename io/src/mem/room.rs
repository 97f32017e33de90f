//! How much memory there is left to take: on the host, and in the control groups (cgroups) that this process is in.

use std::fs;
use std::path::{Path, PathBuf};

/// What tells of the host.
const HOST: &str = "/proc/meminfo";

/// One kind of control groups: where they are, and how their files are called.
struct Kind {
    /// Where its hierarchy may be mounted.
    mounts: &'static [&'static str],
    /// What its line of /proc/self/cgroup has between the colons.
    controller: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Fields of `memory.stat`, of the group and all below it: what of the usage is the page cache of files.
    files: [&'static str; 2],
}

/// Those of Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
const KINDS: [Kind; 2] = [
    Kind {
        mounts: &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
        controller: "",
        limit: "memory.max",
        usage: "memory.current",
        files: ["inactive_file", "active_file"],
    },
    Kind {
        mounts: &["/sys/fs/cgroup/memory"],
        controller: "memory",
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        files: ["total_inactive_file", "total_active_file"],
    },
];

/// Bytes that this process can take before the kernel ends some process for want of memory, with all swap space and without
/// the page cache, which gives way; `None` where nothing tells. It is an estimate: others take memory meanwhile.
pub fn available() -> Option<u64> {
    let host = fs::read_to_string(HOST).ok()?;
    let (left, _) = tightest(&host, &groups_of("self"))?;
    Some(left.saturating_add(kibibytes(&host, "SwapFree")?))
}

/// Whether memory that the process `pid` lets go of is memory that this one can take: not where a limit of this one's is what it
/// lacks, and the other one is not under it.
pub fn counts_here(pid: u32) -> bool {
    let tightest = fs::read_to_string(HOST).ok().and_then(|host| tightest(&host, &groups_of("self")));
    match tightest {
        Some((_, Some((kind, group)))) => {
            let theirs = kind.group_in(&groups_of(&pid.to_string())).map(PathBuf::from);
            theirs.is_some_and(|theirs| theirs.starts_with(group))
        }
        Some((_, None)) | None => true,
    }
}

/// The lines of /proc/PID/cgroup.
fn groups_of(process: &str) -> String {
    fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default()
}

/// What the host, or the tightest limit of `groups`, has left, and which limit that is.
fn tightest(host: &str, groups: &str) -> Option<(u64, Option<(&'static Kind, PathBuf)>)> {
    let limits = KINDS
        .iter()
        .flat_map(|kind| kind.left(groups).into_iter().map(move |(left, group)| (left, Some((kind, group)))));
    limits.chain([(kibibytes(host, "MemAvailable")?, None)]).min_by_key(|(left, _)| *left)
}

/// A line of /proc/meminfo, in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

impl Kind {
    /// The group of this kind that `groups` names.
    fn group_in<'a>(&self, groups: &'a str) -> Option<&'a str> {
        groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            fields.next()?.split(',').any(|name| name == self.controller).then(|| fields.next())?
        })
    }

    /// Bytes left of each limit that a process of these `groups` is under, and the group whose limit it is.
    fn left(&self, groups: &str) -> Vec<(u64, PathBuf)> {
        let Some(group) = self.group_in(groups) else { return Vec::new() };
        // A container may see only some of them.
        let all = self.mounts.iter().flat_map(|mount| {
            Path::new(group).ancestors().filter_map(|group| {
                let below = group.strip_prefix("/").unwrap_or(group);
                Some((self.left_in(&Path::new(mount).join(below))?, group.to_owned()))
            })
        });
        all.collect()
    }

    fn left_in(&self, folder: &Path) -> Option<u64> {
        // "max" is no number: there is no limit.
        let limit: u64 = number(&folder.join(self.limit))?;
        let usage = number(&folder.join(self.usage))?;
        let stat = fs::read_to_string(folder.join("memory.stat")).ok()?;
        let field = |name| {
            stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok())
        };
        let files: u64 = self.files.iter().filter_map(field).sum();
        Some(limit.saturating_sub(usage.saturating_sub(files)))
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_memory_left() {
        assert!(counts_here(std::process::id()), "it is under all its own limits");
        let left = available().expect("Linux tells");
        let all = kibibytes(&fs::read_to_string(HOST).expect("read"), "MemTotal").expect("told");
        let swap = kibibytes(&fs::read_to_string(HOST).expect("read"), "SwapTotal").expect("told");
        assert!(left > 0 && left <= all + swap, "{left} of {all} and {swap}");
    }

    #[test]
    fn lines_of_meminfo_are_in_bytes() {
        let text = "MemTotal:       24689764 kB\nMemAvailable:   19924 kB\nHugePages_Total:       0\n";
        let told = ["MemAvailable", "Mem", "HugePages_Total", "SwapFree"].map(|name| kibibytes(text, name));
        assert_eq!(told, [Some(19924 << 10), None, None, None]);
    }

    /// Files of the page cache give way; the tightest of a group and those above it counts.
    #[test]
    fn a_group_and_those_above_it_limit_what_is_left() {
        let mount = tempfile::tempdir().expect("folder");
        let put = |group: &str, name: &str, text: &str| {
            let folder = mount.path().join(group);
            fs::create_dir_all(&folder).expect("make");
            fs::write(folder.join(name), text).expect("write");
        };
        let group = |group: &str, limit: &str, usage: &str| {
            put(group, "memory.max", limit);
            put(group, "memory.current", usage);
            put(group, "memory.stat", "anon 5\ninactive_file 70\nactive_file 30\nfile 900\n");
        };
        group("pods/one", "max\n", "500\n");
        group("pods", "1000\n", "600\n");
        let path: &'static str = Box::leak(mount.path().to_str().expect("text").to_owned().into_boxed_str());
        let mounts: &'static [&'static str] = Box::leak(vec![path].into_boxed_slice());
        let [second, first] = KINDS;
        let (second, first) = (Kind { mounts, ..second }, Kind { mounts, ..first });
        let groups = "4:cpu,memory:/v1\n0::/pods/one\n";
        let bytes_left = |kind: &Kind, groups: &str| -> Vec<u64> {
            kind.left(groups).into_iter().map(|(left, _)| left).collect()
        };
        assert_eq!(second.left(groups), [(500, PathBuf::from("/pods"))]);
        group("pods/one", "450\n", "500\n");
        assert_eq!(bytes_left(&second, groups), [50, 500]);
        // More than all is used while the limit is lowered.
        group("pods/one", "300\n", "500\n");
        assert_eq!(bytes_left(&second, groups), [0, 500]);
        // In a container, which sees its own group alone, as the mount itself.
        assert!(bytes_left(&second, "0::/../elsewhere\n").is_empty());
        group("", "2000\n", "600\n");
        assert_eq!(bytes_left(&second, "0::/elsewhere\n"), [1500]);
        put("v1", "memory.limit_in_bytes", "800\n");
        put("v1", "memory.usage_in_bytes", "300\n");
        put("v1", "memory.stat", "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n");
        assert_eq!(bytes_left(&first, groups), [650]);
        assert!(bytes_left(&first, "0::/pods/one\n").is_empty());
    }
}
