//! Start time of this process.

use std::time::{Duration, Instant};

/// Returns when this process was started, including the loading of shared libraries before `main`. The kernel counts
/// in clock ticks (10 ms). If its count cannot be read, returns the current time.
pub fn process_start() -> Instant {
    let now = Instant::now();
    process_age().and_then(|age| now.checked_sub(age)).unwrap_or(now)
}

fn process_age() -> Option<Duration> {
    let uptime: f64 = std::fs::read_to_string("/proc/uptime").ok()?.split(' ').next()?.parse().ok()?;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, the program's name, may contain anything but ends with the last parenthesis; the start time
    // is the 22nd field (proc(5)).
    let ticks: f64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let age = uptime - ticks / rustix::param::clock_ticks_per_second() as f64;
    // Both figures are rounded, so the age of a young process can be negative.
    Duration::try_from_secs_f64(age.max(0.0)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_lies_in_the_near_past() {
        let start = process_start();
        assert!(start <= Instant::now());
        assert!(start.elapsed() < Duration::from_secs(24 * 3600));
    }
}
