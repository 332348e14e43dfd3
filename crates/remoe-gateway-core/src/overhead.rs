//! Overhead: the cost of this process itself, the gateway and, in `remoe up`, the launcher.

use crate::cost_accounting::CostAccounting;
use remoe_billing::{Carry, Rate, SIGN_OF_LIFE};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Writes signs of life to the ledger. Each has the cost of this process since the last one: its CPU time and its
/// resident memory at their prices.
pub struct Overhead {
    cost_accounting: Arc<CostAccounting>,
    core_rate: Rate,
    /// Dollars per second of 1e9 bytes of memory.
    gigabyte_second_dollars: f64,
    cpu_carry: Carry,
    memory_carry: Carry,
    /// CPU time and time at the last sign of life.
    charged_cpu_time: Duration,
    charged_until: Instant,
}

impl Overhead {
    /// Counts from now on, with a core at `core_hour` dollars per hour and 1e9 bytes of memory at `gigabyte_hour`
    /// dollars per hour.
    #[must_use]
    pub fn new(cost_accounting: Arc<CostAccounting>, core_hour: f64, gigabyte_hour: f64) -> Self {
        Self {
            cost_accounting,
            core_rate: Rate::per_second(core_hour / 3600.0),
            gigabyte_second_dollars: gigabyte_hour / 3600.0,
            cpu_carry: Carry::default(),
            memory_carry: Carry::default(),
            charged_cpu_time: cpu_time().unwrap_or_default(),
            charged_until: Instant::now(),
        }
    }

    /// Writes a sign of life after each [`SIGN_OF_LIFE`]. Never returns; dropping the future writes the last one.
    pub async fn keep(mut self) {
        loop {
            tokio::time::sleep(SIGN_OF_LIFE).await;
            self.write_sign_of_life();
        }
    }

    fn write_sign_of_life(&mut self) {
        let nanoseconds = |time: Duration| time.as_nanos() as u64;
        let (cpu_time, now) = (cpu_time().unwrap_or(self.charged_cpu_time), Instant::now());
        let memory_rate =
            Rate::per_second(self.gigabyte_second_dollars * resident_bytes().unwrap_or(0.0) / 1e9);
        let used_cpu_time = nanoseconds(cpu_time.saturating_sub(self.charged_cpu_time));
        let overhead = self.cpu_carry.charge(self.core_rate, used_cpu_time)
            + self.memory_carry.charge(memory_rate, nanoseconds(now - self.charged_until));
        (self.charged_cpu_time, self.charged_until) = (cpu_time, now);
        self.cost_accounting.record_alive(overhead);
    }
}

impl Drop for Overhead {
    fn drop(&mut self) {
        self.write_sign_of_life();
    }
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = value.split_whitespace().next()?.parse().ok()?;
    Some((kibibytes * 1024) as f64)
}

/// Returns the CPU time of all threads of this process so far.
fn cpu_time() -> Option<Duration> {
    // Linux reports USER_HZ ticks of 10 ms to programs, independent of the kernel's own tick.
    const TICK: u64 = 10;
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, the program's name in parentheses, may have spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11).map(|field| field.parse::<u64>());
    let (user, system) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some(Duration::from_millis((user + system) * TICK))
}
