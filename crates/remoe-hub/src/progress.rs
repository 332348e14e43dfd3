//! Progress lines of fetches, on standard error.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time between two progress lines.
pub(crate) const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Progress of one fetch.
#[derive(Debug)]
pub(crate) struct FetchProgress {
    location: String,
    /// Bytes that the fetch must bring into the cache.
    wanted_bytes: u64,
    /// Wanted bytes that are in the cache.
    cached_bytes: AtomicU64,
    /// Bytes that this process has received.
    received_bytes: AtomicU64,
    started: Instant,
}

impl FetchProgress {
    /// Starts the progress of a fetch of `wanted_bytes`, of which `cached_bytes` are in the cache.
    pub(crate) fn new(location: String, wanted_bytes: u64, cached_bytes: u64) -> Self {
        Self {
            location,
            wanted_bytes,
            cached_bytes: AtomicU64::new(cached_bytes),
            received_bytes: AtomicU64::new(0),
            started: Instant::now(),
        }
    }

    /// Adds bytes that this process received.
    pub(crate) fn add_received(&self, bytes: u64) {
        self.received_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.cached_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds bytes that another task or process brought into the cache.
    pub(crate) fn add_cached(&self, bytes: u64) {
        self.cached_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the cached bytes, by this process or another.
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.cached_bytes.load(Ordering::Relaxed)
    }

    /// Prints a progress line.
    pub(crate) fn print(&self) {
        let seconds = self.started.elapsed().as_secs_f64().max(1e-3);
        let bytes_per_second = self.received_bytes.load(Ordering::Relaxed) as f64 / seconds;
        let cached_bytes = self.cached_bytes().min(self.wanted_bytes);
        print_line(&line(&self.location, cached_bytes, self.wanted_bytes, bytes_per_second));
    }
}

/// Prints that all wanted bytes are in the cache.
pub(crate) fn print_cached(location: &str, bytes: u64) {
    print_line(&format!("fetch: all of {} in the cache, {location}", format_bytes(bytes)));
}

/// Prints a line on standard error.
pub(crate) fn print_line(text: &str) {
    // A closed standard error must not end the program.
    let _closed = writeln!(std::io::stderr().lock(), "{text}");
}

fn line(location: &str, cached_bytes: u64, wanted_bytes: u64, bytes_per_second: f64) -> String {
    let percent =
        if wanted_bytes == 0 { 100 } else { u128::from(cached_bytes) * 100 / u128::from(wanted_bytes) };
    let (unit, divisor) = unit(wanted_bytes);
    let in_unit = |bytes: u64| bytes as f64 / divisor;
    format!(
        "fetch: {:.1} of {:.1} {unit} ({percent} %), {}/s, {}{location}",
        in_unit(cached_bytes),
        in_unit(wanted_bytes),
        format_bytes(bytes_per_second as u64),
        time_left(wanted_bytes.saturating_sub(cached_bytes), bytes_per_second)
    )
}

/// Formats the time that `bytes` take at this rate. Empty if the rate is 0.
fn time_left(bytes: u64, bytes_per_second: f64) -> String {
    match bytes as f64 / bytes_per_second {
        seconds if bytes == 0 || !seconds.is_finite() => String::new(),
        seconds if seconds < 60.0 => format!("{:.0} s left, ", seconds.max(1.0)),
        seconds if seconds < 3600.0 => format!("{:.0} min left, ", seconds / 60.0),
        seconds => format!("{:.1} h left, ", seconds / 3600.0),
    }
}

/// Formats a number of bytes in kB, MB or GB.
pub(crate) fn format_bytes(bytes: u64) -> String {
    let (unit, divisor) = unit(bytes);
    let value = bytes as f64 / divisor;
    if value >= 99.95 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

/// Returns the decimal unit for a number of bytes, and its size in bytes.
fn unit(bytes: u64) -> (&'static str, f64) {
    match bytes {
        0..1_000_000 => ("kB", 1e3),
        1_000_000..1_000_000_000 => ("MB", 1e6),
        _ => ("GB", 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_line_shows_share_rate_and_time_left() {
        let text = line("hf://a/b@c", 1_204_000_000, 3_400_000_000, 210_400_000.0);
        assert_eq!(text, "fetch: 1.2 of 3.4 GB (35 %), 210 MB/s, 10 s left, hf://a/b@c");
        assert!(line("x", 0, 7_200_000_000, 1e6).contains("2.0 h left"));
        assert_eq!(line("x", 0, 0, 0.0), "fetch: 0.0 of 0.0 kB (100 %), 0.0 kB/s, x");
    }
}
