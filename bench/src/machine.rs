//! What the machine tells: CPU seconds, memory, load, and its page cache.

use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::time::{ClockId, clock_gettime};

/// Clock ticks a second in /proc: 100 on every Linux that Rust runs on.
const TICKS: f64 = 100.0;

/// CPU seconds of this process so far, to the nanosecond.
pub fn own_cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// CPU seconds of a process and its ended threads, to 10 ms.
pub fn cpu_of(pid: u32) -> Result<f64> {
    let fields = stat(&pid.to_string())?;
    Ok((fields[11] + fields[12]) / TICKS)
}

/// CPU seconds of this process and of the children it has waited for.
pub fn cpu_with_children() -> Result<f64> {
    let fields = stat("self")?;
    Ok(fields[11..15].iter().sum::<f64>() / TICKS)
}

/// The numbers of /proc/PID/stat after the command's name, from `ppid` as number 1 on.
fn stat(pid: &str) -> Result<Vec<f64>> {
    let text = read(&format!("/proc/{pid}/stat"))?;
    let Some((_, rest)) = text.rsplit_once(')') else { bail!("/proc/{pid}/stat: {text}") };
    Ok(rest.split_whitespace().map(|field| field.parse().unwrap_or(0.0)).collect())
}

/// CPU seconds that the whole machine was busy since it started.
pub fn busy() -> Result<f64> {
    let text = read("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let fields: Vec<f64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    let [user, nice, system, _idle, _wait, irq, softirq, steal, ..] = fields[..] else {
        bail!("/proc/stat: {line}")
    };
    Ok((user + nice + system + irq + softirq + steal) / TICKS)
}

/// Read system calls of a process. A FUSE daemon makes one for each request, and its sockets none.
pub fn reads_of(pid: u32) -> Result<f64> {
    field(&format!("/proc/{pid}/io"), "syscr:")
}

/// Load average of the last minute.
pub fn load() -> Result<f64> {
    let text = read("/proc/loadavg")?;
    text.split(' ').next().and_then(|first| first.parse().ok()).context("/proc/loadavg")
}

/// How many processors there are.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Writes back and drops the kernel's caches of files, names and inodes. Only root may: says whether it did.
pub fn drop_caches() -> bool {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

fn field(file: &str, name: &str) -> Result<f64> {
    let text = read(file)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|rest| rest.split_whitespace().next()).and_then(|value| value.parse().ok());
    value.with_context(|| format!("{file} has no {name}"))
}

fn read(file: &str) -> Result<String> {
    std::fs::read_to_string(Path::new(file)).with_context(|| format!("reading {file}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_answers() {
        let pid = std::process::id();
        let (own, busy_before) = (own_cpu(), busy().unwrap());
        let mut sum = 0_u64;
        while own_cpu() - own < 0.03 {
            sum = sum.wrapping_add(std::hint::black_box(1));
        }
        assert!(cpu_of(pid).unwrap() >= 0.02, "{sum}");
        assert!(cpu_with_children().unwrap() >= 0.02);
        assert!(busy().unwrap() >= busy_before);
        assert!(reads_of(pid).unwrap() > 0.0 && load().unwrap() >= 0.0);
    }
}
