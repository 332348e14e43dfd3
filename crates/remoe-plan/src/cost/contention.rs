//! Contention: how much longer experts take when several functions of one machine compute at the same time.

use crate::model::Model;
use crate::plan::{Group, Plan};
use crate::problem::Contention;

/// Factors by which the experts of one layer take longer than they do when no other function computes.
pub struct ContentionFactors {
    /// Factor in a prefill.
    pub prefill: f64,
    /// Factors in a decode step, one for each of [`Model::batches`].
    pub steps: Vec<f64>,
}

impl ContentionFactors {
    /// Returns factors of 1: no contention. `batches`: number of [`Model::batches`].
    pub fn none(batches: usize) -> Self {
        Self { prefill: 1.0, steps: vec![1.0; batches] }
    }
}

impl Model<'_> {
    /// Returns the problem's contention if all functions run on one machine, else `None`.
    pub fn contention(&self) -> Option<Contention> {
        self.problem.contention.filter(|_| self.problem.shared_cores.is_some())
    }

    /// Returns the contention factor of a prefill of `layer`. `plan` must have groups.
    ///
    /// All replicas that host experts of the layer compute at the same time, and the main function does if any expert is
    /// local.
    pub fn prefill_contention(&self, layer: usize, plan: &Plan) -> f64 {
        self.contention().map_or(1.0, |contention| {
            let remote: usize = plan.groups.iter().map(|group| prefill_functions(group, layer)).sum();
            let local = usize::from(plan.layers[layer].remote.len() < self.layers[layer].experts);
            contention.factor_among((remote + local) as f64, contention.prefill)
        })
    }

    /// Returns the contention factor of a decode step of `rows` requests: as many functions compute as are expected to be called.
    pub fn step_contention(&self, layer: usize, rows: f64, plan: &Plan) -> f64 {
        self.contention().map_or(1.0, |contention| {
            let remote = plan.groups.iter().map(|group| self.share_of(layer, &group.experts[layer]));
            let local = (1.0 - self.share_of(layer, &plan.layers[layer].remote)).max(0.0);
            let called = remote.chain([local]).map(|share| self.layers[layer].call_probability(share, rows));
            contention.factor_among(called.sum(), contention.step)
        })
    }

    /// Returns the contention factors of a prefill and of decode steps at each of [`Model::batches`].
    pub fn contention_factors(&self, layer: usize, plan: &Plan) -> ContentionFactors {
        let step = |rows: f64| self.step_contention(layer, rows, plan);
        ContentionFactors {
            prefill: self.prefill_contention(layer, plan),
            steps: self.batches().into_iter().map(step).collect(),
        }
    }
}

/// Returns how many functions of `group` share a prefill of `layer`: at most one per expert that the group hosts.
fn prefill_functions(group: &Group, layer: usize) -> usize {
    group.experts[layer].len().min(group.replicas.max(1) as usize)
}
