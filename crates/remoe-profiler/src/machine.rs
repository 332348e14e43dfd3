//! Facts of this machine.

use std::fs;
use std::time::Instant;

/// Returns the current time as RFC 3339 in UTC, to the second.
pub fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}

/// Returns the current time in the format of functions' log lines: RFC 3339 in UTC, to the microsecond.
pub fn now_micros() -> String {
    format!("{:.6}", jiff::Timestamp::now())
}

/// Returns the processor's model name; empty if unknown.
pub fn cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("model name"));
    named.map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned()).unwrap_or_default()
}

/// Returns the number of CPUs that this process may use.
pub fn cores() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u32::try_from(cores).unwrap_or(u32::MAX)
}

/// Returns the main memory in bytes; 0 if unknown.
pub fn memory_bytes() -> u64 {
    kilobytes(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal:").unwrap_or(0) * 1024
}

/// Returns the bytes of memory still available to this program and its children; 0 if unknown.
pub fn free_memory_bytes() -> u64 {
    let of_machine = kilobytes(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemAvailable:")
        .unwrap_or(0)
        * 1024;
    // A container may have a lower limit.
    free_in_control_group().map_or(of_machine, |free| free.min(of_machine))
}

/// Returns the bytes left to the memory limit of this process's control group (version 2); absent without a limit.
fn free_in_control_group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{path}/{name}")).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    Some(limit.saturating_sub(used))
}

/// Returns the peak resident memory of a process in bytes.
pub fn peak_bytes(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    kilobytes(&status, "VmHWM:").map(|count| (count * 1024) as f64)
}

/// Returns the CPU time of a process's threads in seconds, if the kernel counts it in nanoseconds.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let mut seconds = 0.0;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let Ok(stat) = fs::read_to_string(thread.ok()?.path().join("schedstat")) else { continue };
        seconds += run_seconds(&stat)?;
    }
    Some(seconds)
}

/// Returns the CPU time of the calling thread in seconds, if the kernel counts it in nanoseconds.
pub fn own_cpu_seconds() -> Option<f64> {
    run_seconds(&fs::read_to_string("/proc/thread-self/schedstat").ok()?)
}

/// CPU seconds up to a moment: of the CPUs that this process may use, and of this process with its children.
#[derive(Debug, Clone, Copy)]
pub struct CpuTimes {
    all: f64,
    own: f64,
    at: Instant,
}

impl CpuTimes {
    /// Returns the CPU times up to now; absent if unknown.
    pub fn now() -> Option<Self> {
        let allowed = fs::read_to_string("/proc/self/status").ok()?;
        let allowed = allowed.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim();
        let allowed = parse_ranges(allowed)?;
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let busy = stat.lines().filter_map(|line| {
            // The first line, `cpu` without a number, is the sum.
            let of_one =
                line.strip_prefix("cpu").filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
            let mut words = of_one?.split_whitespace();
            let cpu: u32 = words.next()?.parse().ok()?;
            allowed.contains(&cpu).then(|| busy_ticks(words))?
        });
        let busy: u64 = busy.sum();
        let me = std::process::id();
        let children = processes().into_iter().filter(|process| process.parent == me);
        let own: u64 = own_ticks(me)? + children.filter_map(|child| own_ticks(child.pid)).sum::<u64>();
        let second = rustix::param::clock_ticks_per_second() as f64;
        Some(Self { all: busy as f64 / second, own: own as f64 / second, at: Instant::now() })
    }

    /// Returns the share of the CPUs that other programs have used since `before`.
    pub fn others_since(&self, before: &Self) -> f64 {
        let others = (self.all - before.all) - (self.own - before.own);
        let capacity = self.at.duration_since(before.at).as_secs_f64() * f64::from(cores());
        if capacity > 0.0 { (others / capacity).clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// Returns the clock ticks of a line of `/proc/stat` in which a CPU was neither idle nor waiting for a disk.
fn busy_ticks<'t>(words: impl Iterator<Item = &'t str>) -> Option<u64> {
    let ticks: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
    let [user, nice, system, _idle, _wait, interrupts, soft, stolen, ..] = ticks[..] else { return None };
    Some(user + nice + system + interrupts + soft + stolen)
}

/// Returns the clock ticks of the process `pid` and of its children that have ended.
fn own_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks: Vec<u64> =
        rest.split_whitespace().skip(11).take(4).map_while(|word| word.parse().ok()).collect();
    (ticks.len() == 4).then(|| ticks.iter().sum())
}

/// Parses a list such as `0-3,8`.
fn parse_ranges(list: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

/// Parses the CPU seconds in a thread's `schedstat`.
fn run_seconds(stat: &str) -> Option<f64> {
    Some(stat.split_whitespace().next()?.parse::<u64>().ok()? as f64 / 1e9)
}

/// Returns the number after `name` in a file of the form `Name:  123 kB`.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Process of this machine.
#[derive(Debug, Clone, Copy)]
pub struct ProcessLine {
    /// Process ID.
    pub pid: u32,
    /// Process ID of its parent.
    pub parent: u32,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
}

/// Returns all visible processes.
pub fn processes() -> Vec<ProcessLine> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let line = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
        // Kernel threads have no such line.
        let resident_bytes = kilobytes(&status, "VmRSS:").unwrap_or(0) * 1024;
        Some(ProcessLine { pid, parent, resident_bytes })
    };
    pids.filter_map(line).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(parse_ranges("0-2,8"), Some(vec![0, 1, 2, 8]));
        assert_eq!(parse_ranges("x"), None);
    }

    #[test]
    fn work_of_this_process_is_its_own() {
        let before = CpuTimes::now().unwrap();
        // Even on a busy machine, this gets some time.
        let mut after = before;
        while after.own - before.own < 0.1 && before.at.elapsed().as_secs() < 60 {
            after = CpuTimes::now().unwrap();
        }
        assert!(after.own - before.own >= 0.1, "{before:?} {after:?}");
        assert!((0.0..=1.0).contains(&after.others_since(&before)));
    }
}
