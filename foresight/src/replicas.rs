//! How many replicas each group of remote functions is to have, by the load of each. Pure.
//!
//! As `MoEless` balances experts: one more replica for the group with the most work per replica, as long as groups differ much and
//! memory is left. How much work there is comes from two windows, as Knative's autoscaler looks at requests: the
//! mean of a long one in quiet times; that of a short one in a burst, in which nothing is taken away.

use std::collections::VecDeque;

/// What replicas are chosen by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplicaRules {
    /// Ticks of the long window.
    pub stable: usize,
    /// Ticks of the short one.
    pub panic: usize,
    /// A burst begins where the short window has so many times the work that there is room for.
    pub burst: f64,
    /// The part of a replica's time that is to be used.
    pub utilisation: f64,
    /// The coefficient of variation of the work per replica that is put up with.
    pub variation: f64,
    /// Memory of all replicas, in bytes. One replica of each group is there whatever they take.
    pub most_bytes: u64,
    /// Replicas of a group, at most.
    pub most_replicas: u32,
}

impl Default for ReplicaRules {
    /// 60 and 6 ticks, as Knative has seconds; bursts from twice the room on; 70 % use; a variation of 0.2, as `MoEless`.
    fn default() -> Self {
        Self {
            stable: 60,
            panic: 6,
            burst: 2.0,
            utilisation: 0.7,
            variation: 0.2,
            most_bytes: u64::MAX,
            most_replicas: 64,
        }
    }
}

/// Follows the load of some groups.
#[derive(Debug, Clone)]
pub struct ReplicaScaler {
    rules: ReplicaRules,
    /// Bytes of a replica of each group.
    bytes: Vec<u64>,
    /// Work of each tick, of every group; the latest last.
    ticks: VecDeque<Vec<f64>>,
    /// Ticks until the burst is over.
    burst: usize,
    replicas: Vec<u32>,
}

impl ReplicaScaler {
    /// Groups with one replica each, which take so many `bytes`.
    #[must_use]
    pub fn new(rules: ReplicaRules, bytes: Vec<u64>) -> Self {
        let replicas = vec![1; bytes.len()];
        Self { rules, bytes, ticks: VecDeque::new(), burst: 0, replicas }
    }

    /// A tick is over in which each group was given so much `work`, in ticks of one replica's time, predicted or
    /// observed. The replicas that each is to have.
    pub fn tick(&mut self, work: &[f64]) -> &[u32] {
        let mut work: Vec<f64> =
            work.iter().map(|work| if work.is_finite() { work.max(0.0) } else { 0.0 }).collect();
        work.resize(self.bytes.len(), 0.0);
        self.ticks.push_back(work);
        while self.ticks.len() > self.rules.stable.max(self.rules.panic).max(1) {
            self.ticks.pop_front();
        }
        let (stable, panic) = (self.mean(self.rules.stable), self.mean(self.rules.panic));
        let mut rooms = panic.iter().zip(&self.replicas);
        let bursts = rooms
            .any(|(work, replicas)| *work > self.rules.burst * f64::from(*replicas) * self.rules.utilisation);
        self.burst = if bursts { self.rules.stable } else { self.burst.saturating_sub(1) };
        let load = if self.burst > 0 { panic } else { stable };
        let least = if self.burst > 0 { self.replicas.clone() } else { vec![1; load.len()] };
        self.replicas = self.spread(&load, least);
        &self.replicas
    }

    /// Mean work of the latest `ticks`, by group.
    fn mean(&self, ticks: usize) -> Vec<f64> {
        let latest = self.ticks.iter().rev().take(ticks.max(1));
        let count = latest.len().max(1) as f64;
        let mut sums = vec![0.0; self.bytes.len()];
        for work in latest {
            sums.iter_mut().zip(work).for_each(|(sum, work)| *sum += work / count);
        }
        sums
    }

    /// From `replicas` on, one more for the group with the most work per replica while it lacks room, or groups
    /// differ too much, and memory allows.
    fn spread(&self, load: &[f64], mut replicas: Vec<u32>) -> Vec<u32> {
        let pairs = replicas.iter().zip(&self.bytes);
        let mut taken =
            pairs.fold(0, |sum: u64, (count, bytes)| sum.saturating_add(u64::from(*count) * bytes));
        loop {
            let each = |group: usize| load[group] / f64::from(replicas[group]);
            let fits = |group: &usize| {
                replicas[*group] < self.rules.most_replicas
                    && taken.saturating_add(self.bytes[*group]) <= self.rules.most_bytes
            };
            // Whose turn it is has the most work: others may have room, and would not help.
            let most = (0..load.len()).max_by(|a, b| each(*a).total_cmp(&each(*b)).then(b.cmp(a)));
            let Some(group) = most.filter(fits) else { return replicas };
            let lacks = each(group) > self.rules.utilisation;
            // More than half idle, a second one helps nobody.
            let differs = each(group) > self.rules.utilisation / 2.0
                && variation(load, &replicas) > self.rules.variation;
            if !lacks && !differs {
                return replicas;
            }
            replicas[group] += 1;
            taken += self.bytes[group];
        }
    }
}

/// The coefficient of variation of the work per replica.
fn variation(load: &[f64], replicas: &[u32]) -> f64 {
    let each: Vec<f64> = load.iter().zip(replicas).map(|(load, count)| load / f64::from(*count)).collect();
    let mean = each.iter().sum::<f64>() / each.len().max(1) as f64;
    let squares = each.iter().map(|each| (each - mean).powi(2)).sum::<f64>() / each.len().max(1) as f64;
    if mean > 0.0 { squares.sqrt() / mean } else { 0.0 }
}
