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

/// The most memory that a process had resident so far, in bytes.
pub(crate) fn peak_bytes(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    kilobytes(&status, "VmHWM:").map(|count| (count * 1024) as f64)
}

/// The number behind `name` in a file of the form `Name:  123 kB`.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}
