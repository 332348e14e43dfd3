//! Slowdown of the functions of one machine under a plan.

use crate::model::Model;
use crate::plan::{Group, Plan};
use crate::problem::Contention;

/// Factors by which the experts of one layer take longer than where no other function computes.
pub struct Slowed {
    /// Factor in a prefill.
    pub prefill: f64,
    /// At each of [`Model::batches`].
    pub steps: Vec<f64>,
}

impl Slowed {
    /// Not at all, at so many batches.
    pub fn not(batches: usize) -> Self {
        Self { prefill: 1.0, steps: vec![1.0; batches] }
    }
}

impl Model<'_> {
    /// Contention that holds for groups here: that of the problem, where all functions run on one machine.
    pub fn contention(&self) -> Option<Contention> {
        self.problem.contention.filter(|_| self.problem.shared_cores.is_some())
    }

    /// How many times longer the experts of `layer` in `plan`, which has groups, take in a prefill than alone: the main function
    /// with local experts and all replicas that have any compute at the same time.
    pub fn slowed_prefill(&self, layer: usize, plan: &Plan) -> f64 {
        self.contention().map_or(1.0, |contention| {
            let away: usize = plan.groups.iter().map(|group| hosting(group, layer)).sum();
            let here = usize::from(plan.layers[layer].remote.len() < self.layers[layer].experts);
            contention.among((away + here) as f64, contention.prefill)
        })
    }

    /// Factor in a decode step of `rows` requests: of main function and groups as many compute as are expected to be called.
    pub fn slowed_step(&self, layer: usize, rows: f64, plan: &Plan) -> f64 {
        self.contention().map_or(1.0, |contention| {
            let away = plan.groups.iter().map(|group| self.share_of(layer, &group.experts[layer]));
            let here = (1.0 - self.share_of(layer, &plan.layers[layer].remote)).max(0.0);
            let called = away.chain([here]).map(|share| self.layers[layer].called(share, rows));
            contention.among(called.sum(), contention.step)
        })
    }

    /// Both, for decode steps at each of [`Model::batches`].
    pub fn slowed(&self, layer: usize, plan: &Plan) -> Slowed {
        let step = |rows: f64| self.slowed_step(layer, rows, plan);
        Slowed {
            prefill: self.slowed_prefill(layer, plan),
            steps: self.batches().into_iter().map(step).collect(),
        }
    }
}

/// Functions of `group` that share a prefill of `layer`: no more than it hosts experts.
fn hosting(group: &Group, layer: usize) -> usize {
    group.experts[layer].len().min(group.replicas.max(1) as usize)
}
