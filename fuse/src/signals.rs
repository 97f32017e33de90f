//! Whether a thread whose request waits was sent a signal.
//!
//! The kernel asks for a request to be interrupted by one of its own, FUSE_INTERRUPT, which the library (fuser 0.18) answers by itself:
//! with ENOSYS, whereupon the kernel has threads wait for their answers whatever they are sent. So whoever makes one wait for long, as for
//! a lock that another program has, looks for itself. Where this process does not see the thread, as in a container beside its own, a wait
//! cannot be interrupted.

use std::time::Duration;

use forebay_io::task::blocking;

/// How often a thread is looked at that waits.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Returns once a thread, by its number as this process sees it, was sent a signal that ends a wait; never for one that is not seen.
pub(crate) async fn sent(thread: u32) {
    if thread == 0 {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let path = format!("/proc/{thread}/status");
        // One that waits is there: what is not seen is not gone.
        let status = blocking(move || std::fs::read_to_string(path)).await;
        if status.is_ok_and(|status| status.is_ok_and(|status| ends_a_wait(&status))) {
            return;
        }
    }
}

/// Whether the kernel takes a thread of that `/proc/PID/status` to have a signal to handle. What was sent to its process is handled by
/// the first thread as a rule, and counts for that one alone: another one's wait would end with an errno that no program knows.
fn ends_a_wait(status: &str) -> bool {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim())
    };
    let set = |name: &str| field(name).and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0);
    let is_first = field("Pid").is_some() && field("Pid") == field("Tgid");
    let pending = set("SigPnd") | if is_first { set("ShdPnd") } else { 0 };
    let bit = |signal: i32| 1u64 << (signal - 1);
    let passed_over =
        [libc::SIGCHLD, libc::SIGCONT, libc::SIGURG, libc::SIGWINCH].map(bit).iter().sum::<u64>();
    let is_ignored = set("SigIgn") | (passed_over & !set("SigCgt"));
    pending & !set("SigBlk") & !is_ignored != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(ids: (u32, u32), [pending, shared, blocked, ignored, caught]: [u64; 5], expected: bool) {
        let (thread, process) = ids;
        let status = format!(
            "Name:\tpython3\nTgid:\t{process}\nNgid:\t0\nPid:\t{thread}\nThreads:\t2\nSigQ:\t1/513\nSigPnd:\t{pending:016x}\n\
             ShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        );
        assert_eq!(ends_a_wait(&status), expected, "{status}");
    }

    #[test]
    fn what_a_thread_would_handle_ends_its_wait() {
        let (kill, interrupt, child) = (1 << 8, 1 << 1, 1 << 16);
        let (first, second) = ((7, 7), (8, 7));
        for thread in [first, second] {
            check(thread, [0; 5], false);
            check(thread, [kill, 0, 0, 0, 0], true);
            check(thread, [interrupt, 0, interrupt, 0, interrupt], false);
            check(thread, [interrupt, 0, 0, interrupt, 0], false);
            check(thread, [child, 0, 0, 0, 0], false);
            check(thread, [child, 0, 0, 0, child], true);
        }
        check(first, [0, interrupt, 0, 0, interrupt], true);
        check(second, [0, interrupt, 0, 0, interrupt], false);
        assert!(!ends_a_wait("") && !ends_a_wait("SigPnd:\tno number\n"));
    }

    #[tokio::test]
    async fn who_was_sent_nothing_waits_on() {
        let own = std::process::id();
        for thread in [0, own, u32::MAX] {
            assert!(tokio::time::timeout(3 * LOOK_EVERY, sent(thread)).await.is_err(), "{thread}");
        }
    }
}
