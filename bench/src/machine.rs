//! The machine that figures come from.

use jiff::Timestamp;
use serde::Serialize;
use std::fmt;
use std::process::Command;

/// Instruction sets that the figures depend on, as the kernel names them.
const FLAGS: [&str; 8] =
    ["avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "hypervisor"];

/// The machine at the start of a run.
#[derive(Debug, Serialize)]
pub(crate) struct BenchMachine {
    date: String,
    /// The revision that was measured; `+` behind it: with changes.
    revision: Option<String>,
    cpu: String,
    cores: usize,
    flags: Vec<&'static str>,
    kernel: String,
    memory_bytes: u64,
    available_bytes: u64,
    transparent_huge_pages: String,
    /// Runnable tasks on average over 1, 5 and 15 minutes.
    load_average: String,
}

impl BenchMachine {
    pub(crate) fn now() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.split(':').next().map(str::trim) == Some(name));
            line.and_then(|line| line.split_once(": ")).map_or("", |(_, value)| value)
        };
        let flags: Vec<&str> = field("flags").split(' ').collect();
        Self {
            date: Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            revision: revision(),
            cpu: field("model name").to_owned(),
            cores: cores(),
            flags: FLAGS.into_iter().filter(|flag| flags.contains(flag)).collect(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            memory_bytes: memory("MemTotal:"),
            available_bytes: available_memory(),
            transparent_huge_pages: chosen(&read("/sys/kernel/mm/transparent_hugepage/enabled")).to_owned(),
            load_average: load_average(),
        }
    }
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Reports if the processor is Intel's.
pub(crate) fn is_intel() -> bool {
    read("/proc/cpuinfo").contains("GenuineIntel")
}

/// Bytes that can be had without swapping.
pub(crate) fn available_memory() -> u64 {
    memory("MemAvailable:")
}

impl fmt::Display for BenchMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        write!(
            f,
            "{}, {} cores ({}), {:.0} GB ({:.0} GB free), Linux {}, huge pages {}, load {} at the start; {}",
            self.cpu,
            self.cores,
            self.flags.join(" "),
            gigabytes(self.memory_bytes),
            gigabytes(self.available_bytes),
            self.kernel,
            self.transparent_huge_pages,
            self.load_average,
            self.date,
        )?;
        self.revision.iter().try_for_each(|revision| write!(f, ", revision {revision}"))
    }
}

pub(crate) fn read(path: &str) -> String {
    // What cannot be read is left out: a report without it is still a report.
    std::fs::read_to_string(path).unwrap_or_default()
}

pub(crate) fn load_average() -> String {
    read("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" ")
}

fn memory(field: &str) -> u64 {
    let info = read("/proc/meminfo");
    let line = info.lines().find(|line| line.starts_with(field)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}

/// The alternative in brackets.
fn chosen(alternatives: &str) -> &str {
    alternatives.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(chosen, _)| chosen)
}

fn revision() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok().filter(|out| out.status.success())?;
        String::from_utf8(output.stdout).ok()
    };
    let revision = git(&["rev-parse", "--short", "HEAD"])?;
    let changed = git(&["status", "--porcelain"]).is_some_and(|changes| !changes.is_empty());
    Some(format!("{}{}", revision.trim(), if changed { "+" } else { "" }))
}
