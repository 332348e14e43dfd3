//! Cost of this process itself: the gateway, and whatever else runs in it.

use crate::cost_accounting::CostAccounting;
use remoe_billing::{Carry, Rate, SIGN_OF_LIFE};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Gives the ledger signs of life, with what this process has cost since the last one: its CPU time by the price of
/// cores, and its memory by that of memory.
pub struct Overhead {
    cost_accounting: Arc<CostAccounting>,
    core: Rate,
    gigabyte: f64,
    carries: (Carry, Carry),
    cpu: Duration,
    since: Instant,
}

impl Overhead {
    /// From now on, with a core at `core_hour` dollars an hour and 1 GB (1e9 bytes) of memory at `gigabyte_hour`.
    #[must_use]
    pub fn new(cost_accounting: Arc<CostAccounting>, core_hour: f64, gigabyte_hour: f64) -> Self {
        Self {
            cost_accounting,
            core: Rate::per_second(core_hour / 3600.0),
            gigabyte: gigabyte_hour / 3600.0,
            carries: Default::default(),
            cpu: cpu_time().unwrap_or_default(),
            since: Instant::now(),
        }
    }

    /// Until it is dropped.
    pub async fn keep(mut self) {
        loop {
            tokio::time::sleep(SIGN_OF_LIFE).await;
            self.note();
        }
    }

    fn note(&mut self) {
        let nanoseconds = |time: Duration| time.as_nanos() as u64;
        let (cpu, now) = (cpu_time().unwrap_or(self.cpu), Instant::now());
        let memory = Rate::per_second(self.gigabyte * resident_bytes().unwrap_or(0.0) / 1e9);
        let (cores, bytes) = &mut self.carries;
        let overhead = cores.charge(self.core, nanoseconds(cpu.saturating_sub(self.cpu)))
            + bytes.charge(memory, nanoseconds(now - self.since));
        (self.cpu, self.since) = (cpu, now);
        self.cost_accounting.alive(overhead);
    }
}

impl Drop for Overhead {
    fn drop(&mut self) {
        self.note();
    }
}

/// Memory that this process has resident, in bytes.
fn resident_bytes() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let rest = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = rest.split_whitespace().next()?.parse().ok()?;
    Some((kibibytes * 1024) as f64)
}

/// Returns the CPU time of all threads of this process so far.
fn cpu_time() -> Option<Duration> {
    // Clock ticks of 10 ms, whatever the kernel counts in.
    const TICK: u64 = 10;
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The program's name, in parentheses, may have spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11).map(|field| field.parse::<u64>());
    let (user, system) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some(Duration::from_millis((user + system) * TICK))
}
