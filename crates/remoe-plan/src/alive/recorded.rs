//! Replay of recorded arrivals.
//!
//! The recording repeats after its last request and a mean gap. One repetition warms up, so that counting begins in the
//! state in which it ends. All requests are equal. Those of one main function share it and finish in order. A replay takes
//! time proportional to the number of requests, and to the number of main functions for each long gap.

use super::TimeShares;
use super::load::MainFunctions;
use std::collections::VecDeque;

/// Returns the seconds from the first request to its repetition; 0 if it is unknown.
fn period(times: &[f64]) -> f64 {
    match times {
        [first, .., last] if last > first => (last - first) * times.len() as f64 / (times.len() as f64 - 1.0),
        _ => 0.0,
    }
}

/// Returns the mean requests per second; 0 if it is unknown.
pub(super) fn per_second(times: &[f64]) -> f64 {
    let period = period(times);
    if period > 0.0 { times.len() as f64 / period } else { 0.0 }
}

/// Replays arrivals at `times`, ascending, which must be fewer than the main functions can serve.
pub(super) fn replay(
    times: &[f64],
    idle_seconds: Option<f64>,
    start_seconds: f64,
    mains: &MainFunctions<'_>,
) -> TimeShares {
    let period = period(times);
    let first = times.first().copied().unwrap_or(0.0);
    let mut deployment = RecordedDeployment {
        mains,
        idle_seconds: idle_seconds.unwrap_or(f64::INFINITY),
        start_seconds,
        // Without an idle window it is alive from the beginning.
        awake_since: idle_seconds.is_none().then_some(0.0),
        ready: 0.0,
        last_arrival: 0.0,
        // Main functions beyond the number of requests would have none.
        each: vec![RecordedMain::default(); times.len().min(mains.count as usize)],
        counted: TimeShares::default(),
    };
    for begin in [0.0, period] {
        deployment.reset_counters();
        for (index, time) in times.iter().enumerate() {
            deployment.arrive(begin + (time - first), index);
        }
        deployment.advance_mains(begin + period);
    }
    let time = deployment.counted;
    let each =
        |sum: fn(&RecordedMain) -> f64| deployment.each.iter().map(sum).sum::<f64>() / period / mains.count;
    TimeShares {
        alive: time.alive / period,
        wakes: time.wakes / period,
        cold: time.cold / period,
        awaiting_start: time.awaiting_start / period,
        served: each(|main| main.served),
        // In a replay requests of one main function finish in order.
        held_up: 0.0,
        before: 0.0,
        queued: each(|main| main.queued),
    }
}

struct RecordedDeployment<'a, 'b> {
    mains: &'a MainFunctions<'b>,
    idle_seconds: f64,
    start_seconds: f64,
    /// Time since which it is alive and not counted yet; `None` at zero.
    awake_since: Option<f64>,
    /// End of the last start.
    ready: f64,
    last_arrival: f64,
    each: Vec<RecordedMain>,
    /// Sums over time; those of main functions are in `each`.
    counted: TimeShares,
}

impl RecordedDeployment<'_, '_> {
    /// Resets the counters.
    fn reset_counters(&mut self) {
        self.counted = TimeShares::default();
        for main in &mut self.each {
            (main.served, main.queued) = (0.0, 0.0);
        }
    }

    fn arrive(&mut self, now: f64, index: usize) {
        let chosen = hash(index as u64) as usize % self.each.len().max(1);
        // The deployment can have scaled to zero only after a gap of at least the idle window.
        if now - self.last_arrival >= self.idle_seconds {
            self.advance_mains(now);
        }
        self.last_arrival = now;
        if self.awake_since.is_none() {
            self.counted.wakes += 1.0;
            self.awake_since = Some(now);
            self.ready = now + self.start_seconds;
            for main in &mut self.each {
                main.now = self.ready;
            }
        }
        if now < self.ready {
            self.counted.cold += 1.0;
            self.counted.awaiting_start += self.ready - now;
        }
        if let Some(main) = self.each.get_mut(chosen) {
            main.advance(now, self.mains);
            main.arrive(self.mains);
        }
    }

    /// Simulates and counts until `now`.
    fn advance_mains(&mut self, now: f64) {
        for main in &mut self.each {
            main.advance(now, self.mains);
        }
        let Some(since) = self.awake_since else { return };
        let busy = self.each.iter().any(|main| !main.serving.is_empty());
        let last_done = self.each.iter().map(|main| main.last_done).fold(f64::NEG_INFINITY, f64::max);
        let asleep = last_done + self.idle_seconds;
        if !busy && asleep <= now {
            self.counted.alive += asleep - since;
            self.awake_since = None;
        } else {
            self.counted.alive += now - since;
            self.awake_since = Some(now);
        }
    }
}

/// Returns a pseudo-random number for `index`, the same on every run (SplitMix64).
pub(super) fn hash(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One main function and its requests.
#[derive(Clone, Default)]
struct RecordedMain {
    /// Time up to which it is simulated; during a start, its end.
    now: f64,
    last_done: f64,
    /// Progress, in requests, of a request that would have been served all the time.
    progress: f64,
    /// Progress at which each served request is done.
    serving: VecDeque<f64>,
    /// Number of requests without a slot.
    waiting: usize,
    /// Served requests times seconds.
    served: f64,
    /// Waiting requests times seconds.
    queued: f64,
}

impl RecordedMain {
    fn arrive(&mut self, mains: &MainFunctions<'_>) {
        if (self.serving.len() as f64) < mains.slots {
            self.serving.push_back(self.progress + 1.0);
        } else {
            self.waiting += 1;
        }
    }

    /// Simulates until `end`.
    fn advance(&mut self, end: f64, mains: &MainFunctions<'_>) {
        while self.now < end {
            let Some(&done) = self.serving.front() else {
                self.now = end;
                return;
            };
            let present = self.serving.len() as f64;
            let seconds = mains.seconds(present);
            let then = self.now + (done - self.progress).max(0.0) * seconds;
            let passed = then.min(end) - self.now;
            self.served += passed * present;
            self.queued += passed * self.waiting as f64;
            if then > end {
                self.progress += passed / seconds;
                self.now = end;
                return;
            }
            (self.now, self.last_done, self.progress) = (then, then, done);
            self.serving.pop_front();
            if self.waiting > 0 {
                self.waiting -= 1;
                self.serving.push_back(self.progress + 1.0);
            }
        }
    }
}
