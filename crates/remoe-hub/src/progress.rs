//! Lines about what is fetched, on standard error.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time between two lines.
pub(crate) const EVERY: Duration = Duration::from_secs(2);

/// Progress of the fetch of the wanted bytes.
#[derive(Debug)]
pub(crate) struct FetchProgress {
    place: String,
    wanted: u64,
    there: AtomicU64,
    fetched: AtomicU64,
    started: Instant,
}

impl FetchProgress {
    /// `there` of the `wanted` bytes of `place` are in the cache.
    pub(crate) fn new(place: String, wanted: u64, there: u64) -> Self {
        Self {
            place,
            wanted,
            there: AtomicU64::new(there),
            fetched: AtomicU64::new(0),
            started: Instant::now(),
        }
    }

    /// Bytes that this process received.
    pub(crate) fn fetched(&self, bytes: u64) {
        self.fetched.fetch_add(bytes, Ordering::Relaxed);
        self.there.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that another process received.
    pub(crate) fn found(&self, bytes: u64) {
        self.there.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns a value that grows with every byte, received by this process or by another.
    pub(crate) fn there(&self) -> u64 {
        self.there.load(Ordering::Relaxed)
    }

    /// Prints where things stand.
    pub(crate) fn print(&self) {
        let seconds = self.started.elapsed().as_secs_f64().max(1e-3);
        let rate = self.fetched.load(Ordering::Relaxed) as f64 / seconds;
        print_line(&line(&self.place, self.there().min(self.wanted), self.wanted, rate));
    }
}

/// Prints that nothing needs to be fetched.
pub(crate) fn print_cached(place: &str, bytes: u64) {
    print_line(&format!("fetch: all of {} in the cache, {place}", size(bytes)));
}

/// Prints a remark.
pub(crate) fn print_line(text: &str) {
    // A closed standard error must not end what runs.
    let _closed = writeln!(std::io::stderr().lock(), "{text}");
}

fn line(place: &str, there: u64, wanted: u64, rate: f64) -> String {
    let percent = if wanted == 0 { 100 } else { u128::from(there) * 100 / u128::from(wanted) };
    let (unit, divisor) = unit(wanted);
    let shown = |bytes: u64| bytes as f64 / divisor;
    format!(
        "fetch: {:.1} of {:.1} {unit} ({percent} %), {}/s, {}{place}",
        shown(there),
        shown(wanted),
        size(rate as u64),
        left(wanted.saturating_sub(there), rate)
    )
}

/// How long the rest takes at this rate; nothing where that is not known.
fn left(bytes: u64, rate: f64) -> String {
    match bytes as f64 / rate {
        seconds if bytes == 0 || !seconds.is_finite() => String::new(),
        seconds if seconds < 60.0 => format!("{:.0} s left, ", seconds.max(1.0)),
        seconds if seconds < 3600.0 => format!("{:.0} min left, ", seconds / 60.0),
        seconds => format!("{:.1} h left, ", seconds / 3600.0),
    }
}

pub(crate) fn size(bytes: u64) -> String {
    let (unit, divisor) = unit(bytes);
    let value = bytes as f64 / divisor;
    if value >= 99.95 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

/// Decimal units, as disks and networks are sold.
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
    fn lines_say_how_far_and_how_fast() {
        let text = line("hf://a/b@c", 1_204_000_000, 3_400_000_000, 210_400_000.0);
        assert_eq!(text, "fetch: 1.2 of 3.4 GB (35 %), 210 MB/s, 10 s left, hf://a/b@c");
        assert!(line("x", 0, 7_200_000_000, 1e6).contains("2.0 h left"));
        assert_eq!(line("x", 0, 0, 0.0), "fetch: 0.0 of 0.0 kB (100 %), 0.0 kB/s, x");
    }
}
