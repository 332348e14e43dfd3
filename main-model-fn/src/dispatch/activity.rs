//! Usage of each expert and load of each function, for the admin pages. Prometheus would need a series per expert.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time constant after which past work counts less by a factor of e.
const TIME_CONSTANT: Duration = Duration::from_secs(5);

/// Usage of experts, and busy time of local kernels and remote functions.
#[derive(Default)]
pub(crate) struct Activity(Mutex<ActivityState>);

#[derive(Default)]
struct ActivityState {
    /// (token, expert) pairs by layer and expert, since the process started.
    pairs: BTreeMap<usize, Vec<u64>>,
    /// Busy time of this process's kernels.
    local: RecentBusyTime,
    /// Remote functions by address.
    remote: BTreeMap<String, RemoteActivity>,
}

/// Work of one remote function.
#[derive(Default)]
struct RemoteActivity {
    recent: RecentBusyTime,
    /// Compute time since the function was first named.
    total: Duration,
}

/// Busy time with exponential decay.
#[derive(Clone, Copy, Default)]
struct RecentBusyTime {
    seconds: f64,
    /// Time of the last update.
    updated: Option<Instant>,
}

impl RecentBusyTime {
    fn decayed_seconds(self, now: Instant) -> f64 {
        let age = self.updated.map_or(0.0, |updated| now.saturating_duration_since(updated).as_secs_f64());
        self.seconds * (-age / TIME_CONSTANT.as_secs_f64()).exp()
    }

    fn add(&mut self, took: Duration, now: Instant) {
        *self = Self { seconds: self.decayed_seconds(now) + took.as_secs_f64(), updated: Some(now) };
    }

    /// Returns the busy share of recent time, from 0 to 1.
    fn share(self, now: Instant) -> f64 {
        (self.decayed_seconds(now) / TIME_CONSTANT.as_secs_f64()).min(1.0)
    }
}

impl Activity {
    fn state(&self) -> MutexGuard<'_, ActivityState> {
        // Updates are single assignments, so a panic elsewhere leaves consistent numbers.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the pairs of one layer; `experts` has the expert of each pair.
    pub(super) fn count_pairs(&self, layer: usize, experts: impl Iterator<Item = u32>) {
        let mut state = self.state();
        let pairs = state.pairs.entry(layer).or_default();
        for expert in experts {
            let expert = expert as usize;
            if pairs.len() <= expert {
                pairs.resize(expert + 1, 0);
            }
            pairs[expert] += 1;
        }
    }

    /// Records `took` as compute time of this process's kernels.
    pub(super) fn record_local(&self, took: Duration) {
        self.state().local.add(took, Instant::now());
    }

    /// Records `took` as compute time of the remote function at `address`.
    pub(super) fn record_remote(&self, address: &str, took: Duration) {
        let mut state = self.state();
        let now = Instant::now();
        if !state.remote.contains_key(address) {
            state.remote.insert(address.to_owned(), RemoteActivity::default());
        }
        if let Some(function) = state.remote.get_mut(address) {
            function.recent.add(took, now);
            function.total += took;
        }
    }

    /// Drops all remote functions except those at `addresses`.
    pub(super) fn retain_addresses<'a>(&self, addresses: impl Iterator<Item = &'a str> + Clone) {
        self.state().remote.retain(|known, _| addresses.clone().any(|address| address == known));
    }

    /// Returns the pairs of `layer` by expert since the process started; shorter if the last experts were never used.
    pub(crate) fn pairs(&self, layer: usize) -> Vec<u64> {
        self.state().pairs.get(&layer).cloned().unwrap_or_default()
    }

    /// Returns the share of recent time in which the local kernels computed, from 0 to 1.
    pub(crate) fn local_busy_share(&self) -> f64 {
        self.state().local.share(Instant::now())
    }

    /// Returns the share of recent time in which the remote function at `address` computed, from 0 to 1.
    pub(crate) fn remote_busy_share(&self, address: &str) -> f64 {
        self.state().remote.get(address).map_or(0.0, |function| function.recent.share(Instant::now()))
    }

    /// Returns the compute time of each remote function since it was first named, by address.
    pub(crate) fn remote_compute_times(&self) -> Vec<(String, Duration)> {
        let state = self.state();
        state.remote.iter().map(|(address, function)| (address.clone(), function.total)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_by_expert() {
        let activity = Activity::default();
        activity.count_pairs(3, [0, 2, 2].into_iter());
        activity.count_pairs(3, [4].into_iter());
        assert_eq!(activity.pairs(3), [1, 0, 2, 0, 1]);
        assert!(activity.pairs(0).is_empty());
    }

    #[test]
    fn busy_share_decays_when_work_stops() {
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
    fn removed_functions_are_forgotten() {
        let activity = Activity::default();
        activity.record_remote("a:1", Duration::from_secs(1));
        activity.record_remote("b:1", Duration::from_secs(1));
        activity.retain_addresses(["b:1"].into_iter());
        assert_eq!(activity.remote_busy_share("a:1"), 0.0);
        assert!(activity.remote_busy_share("b:1") > 0.1);
        activity.record_remote("b:1", Duration::from_secs(2));
        assert_eq!(activity.remote_compute_times(), [("b:1".to_owned(), Duration::from_secs(3))]);
    }
}
