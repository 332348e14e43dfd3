//! Facts of this machine.

use std::fs;
use std::time::Instant;

/// Now, as RFC 3339 in UTC, to the second.
pub fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}

/// Now, as functions stamp their log lines: RFC 3339 in UTC, to the microsecond.
pub fn now_micros() -> String {
    format!("{:.6}", jiff::Timestamp::now())
}

/// Returns the processor's model name; empty if the kernel does not say.
pub fn cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("model name"));
    named.map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned()).unwrap_or_default()
}

/// CPUs that this process may use.
pub fn cores() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u32::try_from(cores).unwrap_or(u32::MAX)
}

/// Main memory in bytes; 0 where the kernel does not say.
pub fn memory_bytes() -> u64 {
    kilobytes(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal:").unwrap_or(0) * 1024
}

/// Main memory that this program and its children can still have, in bytes; 0 where the kernel does not say.
pub fn free_memory_bytes() -> u64 {
    let of_machine = kilobytes(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemAvailable:")
        .unwrap_or(0)
        * 1024;
    // A container or a slice may be limited to less.
    free_in_control_group().map_or(of_machine, |free| free.min(of_machine))
}

/// Bytes up to the memory limit of this process's control group (version 2); none where it has no limit of its own.
fn free_in_control_group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{path}/{name}")).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    Some(limit.saturating_sub(used))
}

/// The most memory that a process had resident so far, in bytes.
pub fn peak_bytes(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    kilobytes(&status, "VmHWM:").map(|count| (count * 1024) as f64)
}

/// CPU time of the threads that a process has, where the kernel counts it in nanoseconds.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let mut seconds = 0.0;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let Ok(stat) = fs::read_to_string(thread.ok()?.path().join("schedstat")) else { continue };
        seconds += run_seconds(&stat)?;
    }
    Some(seconds)
}

/// CPU time of the thread that asks, where the kernel counts it in nanoseconds.
pub fn own_cpu_seconds() -> Option<f64> {
    run_seconds(&fs::read_to_string("/proc/thread-self/schedstat").ok()?)
}

/// CPU time up to a moment, in seconds: of the CPUs that this process may use, and of this process with its children.
#[derive(Debug, Clone, Copy)]
pub struct CpuTimes {
    all: f64,
    own: f64,
    at: Instant,
}

impl CpuTimes {
    /// Up to now; none where the kernel does not say.
    pub fn now() -> Option<Self> {
        let allowed = fs::read_to_string("/proc/self/status").ok()?;
        let allowed = allowed.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim();
        let allowed = numbers(allowed)?;
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let busy = stat.lines().filter_map(|line| {
            // The first line, `cpu` alone, is of all of them.
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

    /// Share of the CPUs that other programs have used since `before`.
    pub fn others_since(&self, before: &Self) -> f64 {
        let others = (self.all - before.all) - (self.own - before.own);
        let capacity = self.at.duration_since(before.at).as_secs_f64() * f64::from(cores());
        if capacity > 0.0 { (others / capacity).clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// Clock ticks of a line of `/proc/stat` in which a CPU was neither idle nor waited for a disk.
fn busy_ticks<'t>(words: impl Iterator<Item = &'t str>) -> Option<u64> {
    let ticks: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
    let [user, nice, system, _idle, _wait, interrupts, soft, stolen, ..] = ticks[..] else { return None };
    Some(user + nice + system + interrupts + soft + stolen)
}

/// Clock ticks of the process `pid` and of its children that have ended.
fn own_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks: Vec<u64> =
        rest.split_whitespace().skip(11).take(4).map_while(|word| word.parse().ok()).collect();
    (ticks.len() == 4).then(|| ticks.iter().sum())
}

/// The numbers of a list such as `0-3,8`.
fn numbers(list: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(all)
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
pub struct ProcessLine {
    /// Process ID.
    pub pid: u32,
    /// Process ID of its parent.
    pub parent: u32,
    /// Memory that it has resident, in bytes.
    pub resident_bytes: u64,
}

/// All processes that can be seen.
pub fn processes() -> Vec<ProcessLine> {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(numbers("0-2,8"), Some(vec![0, 1, 2, 8]));
        assert_eq!(numbers("x"), None);
    }

    #[test]
    fn work_of_this_process_is_its_own() {
        let before = CpuTimes::now().unwrap();
        // However busy the machine is, this gets some time.
        let mut after = before;
        while after.own - before.own < 0.1 && before.at.elapsed().as_secs() < 60 {
            after = CpuTimes::now().unwrap();
        }
        assert!(after.own - before.own >= 0.1, "{before:?} {after:?}");
        assert!((0.0..=1.0).contains(&after.others_since(&before)));
    }
}
