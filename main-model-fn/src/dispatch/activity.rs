//! How much every expert is used, and how busy who computes experts is: for people who look, not for Prometheus,
//! which would have a series per expert.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Work counts less by a factor of e after so long.
const MEMORY: Duration = Duration::from_secs(5);

/// Work that experts and functions have done.
#[derive(Default)]
pub(crate) struct Activity(Mutex<ActivityState>);

#[derive(Default)]
struct ActivityState {
    /// (token, expert) pairs of each layer, by expert, since the process started.
    pairs: BTreeMap<usize, Vec<u64>>,
    /// The kernels beside the engine.
    here: RecentBusyTime,
    /// Remote functions by their addresses, with how long they have computed so far.
    remote: BTreeMap<String, (RecentBusyTime, Duration)>,
}

/// Time in which something worked, the latest most.
#[derive(Clone, Copy, Default)]
struct RecentBusyTime {
    seconds: f64,
    at: Option<Instant>,
}

impl RecentBusyTime {
    fn faded(self, now: Instant) -> f64 {
        let age = self.at.map_or(0.0, |at| now.saturating_duration_since(at).as_secs_f64());
        self.seconds * (-age / MEMORY.as_secs_f64()).exp()
    }

    fn add(&mut self, took: Duration, now: Instant) {
        *self = Self { seconds: self.faded(now) + took.as_secs_f64(), at: Some(now) };
    }

    /// The share of the latest time in which it worked, from 0 to 1.
    fn share(self, now: Instant) -> f64 {
        (self.faded(now) / MEMORY.as_secs_f64()).min(1.0)
    }
}

impl Activity {
    fn state(&self) -> MutexGuard<'_, ActivityState> {
        // Numbers that are right after every step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A layer was computed: `routed` has the expert of every pair.
    pub(super) fn routed(&self, layer: usize, routed: impl Iterator<Item = u32>) {
        let mut state = self.state();
        let pairs = state.pairs.entry(layer).or_default();
        for expert in routed {
            let expert = expert as usize;
            if pairs.len() <= expert {
                pairs.resize(expert + 1, 0);
            }
            pairs[expert] += 1;
        }
    }

    /// The local kernels have computed for so long.
    pub(super) fn computed_here(&self, took: Duration) {
        self.state().here.add(took, Instant::now());
    }

    /// The remote function at `address` has computed for so long.
    pub(super) fn answered(&self, address: &str, took: Duration) {
        let mut state = self.state();
        let now = Instant::now();
        if !state.remote.contains_key(address) {
            state.remote.insert(address.to_owned(), <(RecentBusyTime, Duration)>::default());
        }
        if let Some((load, computed)) = state.remote.get_mut(address) {
            load.add(took, now);
            *computed += took;
        }
    }

    /// Only these remote functions are left.
    pub(super) fn keep<'a>(&self, addresses: impl Iterator<Item = &'a str> + Clone) {
        self.state().remote.retain(|known, _| addresses.clone().any(|address| address == known));
    }

    /// Pairs of the layer since the process started, by expert; shorter where the last ones were never used.
    pub(crate) fn pairs(&self, layer: usize) -> Vec<u64> {
        self.state().pairs.get(&layer).cloned().unwrap_or_default()
    }

    /// The share of the last seconds in which the local kernels computed, from 0 to 1.
    pub(crate) fn busy_here(&self) -> f64 {
        self.state().here.share(Instant::now())
    }

    /// Returns the share of the last seconds in which the remote function at `address` computed, from 0 to 1.
    pub(crate) fn busy(&self, address: &str) -> f64 {
        self.state().remote.get(address).map_or(0.0, |(load, _)| load.share(Instant::now()))
    }

    /// How long remote functions have computed since they were first named, by their addresses.
    pub(crate) fn remote(&self) -> Vec<(String, Duration)> {
        let state = self.state();
        state.remote.iter().map(|(address, (_, computed))| (address.clone(), *computed)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_by_expert() {
        let activity = Activity::default();
        activity.routed(3, [0, 2, 2].into_iter());
        activity.routed(3, [4].into_iter());
        assert_eq!(activity.pairs(3), [1, 0, 2, 0, 1]);
        assert!(activity.pairs(0).is_empty());
    }

    #[test]
    fn what_works_all_the_time_is_busy_and_what_has_worked_is_not() {
        let start = Instant::now();
        let mut load = RecentBusyTime::default();
        assert_eq!(load.share(start), 0.0);
        let at = |tenths: u32| start + Duration::from_millis(100) * tenths;
        (1..=400).for_each(|tenths| load.add(Duration::from_millis(50), at(tenths)));
        let share = load.share(at(400));
        assert!((0.45..0.55).contains(&share), "half of the time: {share}");
        assert!(load.share(at(700)) < 0.01);
        load.add(Duration::from_secs(3600), at(701));
        assert_eq!(load.share(at(701)), 1.0);
    }

    #[test]
    fn functions_that_are_gone_are_forgotten() {
        let activity = Activity::default();
        activity.answered("a:1", Duration::from_secs(1));
        activity.answered("b:1", Duration::from_secs(1));
        activity.keep(["b:1"].into_iter());
        assert_eq!(activity.busy("a:1"), 0.0);
        assert!(activity.busy("b:1") > 0.1);
        activity.answered("b:1", Duration::from_secs(2));
        assert_eq!(activity.remote(), [("b:1".to_owned(), Duration::from_secs(3))]);
    }
}
