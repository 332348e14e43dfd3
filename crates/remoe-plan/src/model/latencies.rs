//! Cache of simulated latencies, by the times that they follow from.

use crate::alive::Latency;
use std::collections::HashMap;

/// Maximum number of cached latencies. Beyond it the cache is cleared.
const MAX_CACHED: usize = 10_000;
/// Number of latest latencies that serve as bounds.
const MAX_BOUNDS: usize = 128;

/// Cache of simulated latencies.
#[derive(Debug, Default)]
pub struct Latencies {
    by_bits: HashMap<Vec<u64>, Option<Latency>>,
    /// Ring buffer of the latest latencies, which serve as bounds for slower or faster functions.
    latest: Vec<SimulatedLatency>,
    next: usize,
}

#[derive(Debug)]
struct SimulatedLatency {
    times: Vec<f64>,
    latency: Latency,
    /// Set if the latencies break a limit.
    is_late: bool,
}

impl Latencies {
    /// Returns the cached latency of `times`. The inner `None`: the simulation had no result.
    pub fn get(&self, times: &[f64]) -> Option<Option<Latency>> {
        self.by_bits.get(&bits(times)).copied()
    }

    /// Returns a latency that shows whether functions with `times` keep the limits.
    ///
    /// It is that of faster functions which break a limit, or of slower functions which keep all.
    pub fn bound(&self, times: &[f64]) -> Option<Latency> {
        let decides = |known: &&SimulatedLatency| {
            known.times.len() == times.len()
                && known.times.iter().zip(times).all(|(known_time, time)| match known.is_late {
                    true => known_time <= time,
                    false => known_time >= time,
                })
        };
        self.latest.iter().find(decides).map(|known| known.latency)
    }

    /// Caches the `latency` of `times`. `is_late`: set if it breaks a limit.
    pub fn insert(&mut self, times: Vec<f64>, latency: Option<Latency>, is_late: bool) {
        if self.by_bits.len() >= MAX_CACHED {
            self.by_bits.clear();
        }
        self.by_bits.insert(bits(&times), latency);
        let Some(latency) = latency else { return };
        let known = SimulatedLatency { times, latency, is_late };
        match self.latest.get_mut(self.next) {
            Some(oldest) => *oldest = known,
            None => self.latest.push(known),
        }
        self.next = (self.next + 1) % MAX_BOUNDS;
    }
}

fn bits(times: &[f64]) -> Vec<u64> {
    times.iter().map(|time| time.to_bits()).collect()
}
