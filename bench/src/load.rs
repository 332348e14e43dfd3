//! How much of the machine others used while something was measured.

use crate::machine::{cores, load_average, read};
use rustix::param::clock_ticks_per_second;
use serde::Serialize;
use std::fmt;
use std::time::Instant;

/// Above these shares of the cores' time, figures say more about the others than about us.
const OTHERS_LIMIT: f64 = 0.05;
const STOLEN_LIMIT: f64 = 0.02;

/// Load of the machine beside a measurement.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct MachineLoad {
    seconds: f64,
    /// Share of the cores' time that went to processes which are neither this one nor its descendants, and to the
    /// kernel on no process's behalf.
    others: f64,
    /// Share of the cores' time that the hypervisor gave to other machines.
    stolen: f64,
    load_average_before: String,
}

impl MachineLoad {
    /// Reports if the figures can be held against a bar.
    pub(crate) fn is_quiet(&self) -> bool {
        self.others <= OTHERS_LIMIT && self.stolen <= STOLEN_LIMIT
    }
}

impl fmt::Display for MachineLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, others, stolen, load_average_before } = self;
        write!(
            f,
            "{seconds:.0} s; load {load_average_before} before; {:.1} % of the cores used by others, {:.1} % stolen.",
            others * 100.0,
            stolen * 100.0
        )?;
        if self.is_quiet() { Ok(()) } else { write!(f, " **Machine too busy: bars not judged.**") }
    }
}

/// Watches the machine from now on.
#[derive(Debug)]
pub(crate) struct LoadMonitor {
    started: Instant,
    ticks: Ticks,
    load_average: String,
}

impl LoadMonitor {
    pub(crate) fn start() -> Self {
        Self { started: Instant::now(), ticks: Ticks::now(), load_average: load_average() }
    }

    /// To be called when the processes under measurement have ended.
    pub(crate) fn stop(self) -> MachineLoad {
        let (before, after) = (self.ticks, Ticks::now());
        let seconds = self.started.elapsed().as_secs_f64();
        let all = seconds * clock_ticks_per_second() as f64 * cores() as f64;
        let share = |before: u64, after: u64| after.saturating_sub(before) as f64 / all;
        let busy = share(before.busy, after.busy);
        MachineLoad {
            seconds,
            others: (busy - share(before.own, after.own)).max(0.0),
            stolen: share(before.stolen, after.stolen),
            load_average_before: self.load_average,
        }
    }
}

/// Time of all cores, in the kernel's ticks.
#[derive(Debug, Clone, Copy)]
struct Ticks {
    busy: u64,
    stolen: u64,
    /// Ticks of this process and the descendants that were waited for.
    own: u64,
}

impl Ticks {
    fn now() -> Self {
        let (stat, own) = (read("/proc/stat"), read("/proc/self/stat"));
        let numbers = |text: &str, first: usize, count: usize| -> Vec<u64> {
            let fields = text.split_whitespace().skip(first).take(count);
            fields.map(|field| field.parse().unwrap_or(0)).collect()
        };
        // user nice system idle iowait irq softirq steal; guest times are contained in user's.
        let cores = numbers(stat.lines().next().unwrap_or_default(), 1, 8);
        let [user, nice, system, _idle, _iowait, irq, softirq, stolen] = cores[..] else {
            return Self { busy: 0, stolen: 0, own: 0 };
        };
        // utime stime cutime cstime, the 14th field on; the second may contain anything (proc(5)).
        let own = own.rsplit_once(") ").map_or("", |(_, rest)| rest);
        let own = numbers(own, 11, 4).iter().sum();
        Self { busy: user + nice + system + irq + softirq, stolen, own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_not_called_quiet() {
        let load =
            |others, stolen| MachineLoad { seconds: 1.0, others, stolen, load_average_before: String::new() };
        assert!(load(0.01, 0.0).is_quiet());
        assert!(!load(0.3, 0.0).is_quiet());
        assert!(!load(0.01, 0.1).is_quiet());
        assert!(load(0.3, 0.0).to_string().contains("Machine too busy"));
    }
}
