//! How functions of one machine slow each other down.

use crate::plan::{Group, Plan};
use crate::problem::model::Model;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Neither more functions at the same time nor a larger factor is measured.
const LARGEST: f64 = 1e3;

/// Slowdown of experts while several functions of one machine compute theirs. Cores share the memory that weights are
/// read from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// Number of functions that computed at the same time when it was measured. Fewer slow each other down by their
    /// part of it, more by no more than it.
    #[schemars(range(min = 2.0, max = LARGEST))]
    pub functions: u32,
    /// Factor of an expert's seconds in a decode step.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub step: f64,
    /// Factor of an expert's seconds in a prefill.
    #[schemars(range(min = 1.0, max = LARGEST))]
    pub prefill: f64,
}

/// How many times longer the experts of one layer take than where no other function computes.
pub(crate) struct Slowed {
    pub(crate) prefill: f64,
    /// At each of [`Model::batches`].
    pub(crate) steps: Vec<f64>,
}

impl Slowed {
    /// Not at all, at so many batches.
    pub(crate) fn not(batches: usize) -> Self {
        Self { prefill: 1.0, steps: vec![1.0; batches] }
    }
}

impl Contention {
    /// Every figure by name, with its least and largest value and its unit.
    #[must_use]
    pub fn figures(&self) -> [(&'static str, f64, f64, f64, &'static str); 3] {
        [
            ("functions", f64::from(self.functions), 2.0, LARGEST, "functions"),
            ("step", self.step, 1.0, LARGEST, "a factor"),
            ("prefill", self.prefill, 1.0, LARGEST, "a factor"),
        ]
    }

    /// `measured` where so many functions compute at the same time.
    pub(crate) fn among(self, functions: f64, measured: f64) -> f64 {
        let others = f64::from(self.functions) - 1.0;
        1.0 + (measured - 1.0) * ((functions - 1.0) / others).clamp(0.0, 1.0)
    }
}

impl Model<'_> {
    /// What holds for groups here: that of the problem, where all functions run on one machine.
    pub(crate) fn contention(&self) -> Option<Contention> {
        self.problem.contention.filter(|_| self.problem.shared_cores.is_some())
    }

    /// How many times longer the experts of `layer` in `plan`, which has groups, take in a prefill than alone: the main function
    /// with local experts and all replicas that have any compute at the same time.
    pub(crate) fn slowed_prefill(&self, layer: usize, plan: &Plan) -> f64 {
        self.contention().map_or(1.0, |contention| {
            let away: usize = plan.groups.iter().map(|group| hosting(group, layer)).sum();
            let here = usize::from(plan.layers[layer].remote.len() < self.layers[layer].experts);
            contention.among((away + here) as f64, contention.prefill)
        })
    }

    /// The same in a decode step of `rows` requests: of main function and groups as many compute as are expected to be called.
    pub(crate) fn slowed_step(&self, layer: usize, rows: f64, plan: &Plan) -> f64 {
        self.contention().map_or(1.0, |contention| {
            let away = plan.groups.iter().map(|group| self.share_of(layer, &group.experts[layer]));
            let here = (1.0 - self.share_of(layer, &plan.layers[layer].remote)).max(0.0);
            let called = away.chain([here]).map(|share| self.layers[layer].called(share, rows));
            contention.among(called.sum(), contention.step)
        })
    }

    /// Both, for decode steps at each of [`Model::batches`].
    pub(crate) fn slowed(&self, layer: usize, plan: &Plan) -> Slowed {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_slow_each_other_down_up_to_as_many_as_were_measured() {
        let contention = Contention { functions: 4, step: 1.6, prefill: 1.0 };
        let step = |functions| (10.0 * contention.among(functions, contention.step)).round();
        assert_eq!([0.2, 1.0, 2.0, 3.0, 4.0, 9.0].map(step), [10.0, 10.0, 12.0, 14.0, 16.0, 16.0]);
        assert_eq!(contention.among(4.0, contention.prefill), 1.0);
    }
}
