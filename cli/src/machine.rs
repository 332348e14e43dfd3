//! What this machine is.

use std::fs;

/// Now, as RFC 3339 in UTC, to the second.
pub(crate) fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}

/// Now, as functions stamp their log lines: RFC 3339 in UTC, to the microsecond.
pub(crate) fn now_micros() -> String {
    format!("{:.6}", jiff::Timestamp::now())
}

/// Its processor's model name; empty where the kernel does not say.
pub(crate) fn cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("model name"));
    named.map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned()).unwrap_or_default()
}

/// CPUs that this process may use.
pub(crate) fn cores() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u32::try_from(cores).unwrap_or(u32::MAX)
}

/// Main memory in bytes; 0 where the kernel does not say.
pub(crate) fn memory_bytes() -> u64 {
    kilobytes(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal:").unwrap_or(0) * 1024
}

/// Main memory that programs can still have, in bytes; 0 where the kernel does not say.
pub(crate) fn free_memory_bytes() -> u64 {
    kilobytes(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemAvailable:").unwrap_or(0) * 1024
}

/// The most memory that a process had resident so far, in bytes.
pub(crate) fn peak_bytes(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    kilobytes(&status, "VmHWM:").map(|count| (count * 1024) as f64)
}

/// CPU time of the threads that a process has, where the kernel counts it in nanoseconds.
pub(crate) fn cpu_seconds(pid: u32) -> Option<f64> {
    let mut seconds = 0.0;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let Ok(stat) = fs::read_to_string(thread.ok()?.path().join("schedstat")) else { continue };
        seconds += run_seconds(&stat)?;
    }
    Some(seconds)
}

/// CPU time of the thread that asks, where the kernel counts it in nanoseconds.
pub(crate) fn own_cpu_seconds() -> Option<f64> {
    run_seconds(&fs::read_to_string("/proc/thread-self/schedstat").ok()?)
}

/// The CPU time in a thread's `schedstat`.
fn run_seconds(stat: &str) -> Option<f64> {
    Some(stat.split_whitespace().next()?.parse::<u64>().ok()? as f64 / 1e9)
}

/// The number behind `name` in a file of the form `Name:  123 kB`.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// A process of this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessLine {
    pub(crate) pid: u32,
    pub(crate) parent: u32,
    pub(crate) resident_bytes: u64,
}

/// All processes that can be seen.
pub(crate) fn processes() -> Vec<ProcessLine> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let line = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
        // Kernel threads have none.
        let resident_bytes = kilobytes(&status, "VmRSS:").unwrap_or(0) * 1024;
        Some(ProcessLine { pid, parent, resident_bytes })
    };
    pids.filter_map(line).collect()
}
