//! Simulated latencies that a search has asked for, by the times that they follow from.

use crate::alive::Latency;
use std::collections::HashMap;

/// Latencies that are kept, at most, and those that stand for others.
const MOST_KEPT: usize = 10_000;
const MOST_COMPARED: usize = 128;

/// Latencies that are known.
#[derive(Debug, Default)]
pub struct Latencies {
    by_bits: HashMap<Vec<u64>, Option<Latency>>,
    /// The latest ones, which stand for slower or faster functions.
    latest: Vec<EvaluatedLatency>,
    next: usize,
}

#[derive(Debug)]
struct EvaluatedLatency {
    times: Vec<f64>,
    latency: Latency,
    /// Latencies break a limit.
    is_late: bool,
}

impl Latencies {
    /// The latency of `times`; none where they are not known.
    pub fn get(&self, times: &[f64]) -> Option<Option<Latency>> {
        self.by_bits.get(&bits(times)).copied()
    }

    /// A latency that tells whether functions with `times` keep their limits: that of faster ones which do not, or of
    /// slower ones which do.
    pub fn standing_for(&self, times: &[f64]) -> Option<Latency> {
        let stands = |known: &&EvaluatedLatency| {
            known.times.len() == times.len()
                && known.times.iter().zip(times).all(|(known_time, time)| match known.is_late {
                    true => known_time <= time,
                    false => known_time >= time,
                })
        };
        self.latest.iter().find(stands).map(|known| known.latency)
    }

    /// Keeps the `latency` of `times`, which breaks a limit where it `is_late`.
    pub fn keep(&mut self, times: Vec<f64>, latency: Option<Latency>, is_late: bool) {
        if self.by_bits.len() >= MOST_KEPT {
            self.by_bits.clear();
        }
        self.by_bits.insert(bits(&times), latency);
        let Some(latency) = latency else { return };
        let known = EvaluatedLatency { times, latency, is_late };
        match self.latest.get_mut(self.next) {
            Some(oldest) => *oldest = known,
            None => self.latest.push(known),
        }
        self.next = (self.next + 1) % MOST_COMPARED;
    }
}

fn bits(times: &[f64]) -> Vec<u64> {
    times.iter().map(|time| time.to_bits()).collect()
}
