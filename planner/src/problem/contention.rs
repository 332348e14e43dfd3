//! How functions of one machine slow each other down.

use crate::plan::{Group, Plan};
use crate::problem::model::Model;
use serde::{Deserialize, Serialize};

/// How many times longer experts take while several functions of one machine compute theirs: cores share the memory that
/// weights are read from. At least 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Contention {
    /// Functions that computed at the same time when it was measured, two at least. Fewer slow each other down by their
    /// part of it, more by no more than it.
    pub functions: u32,
    /// In a decode step.
    pub step: f64,
    /// In a prefill.
    pub prefill: f64,
}

impl Contention {
    /// `measured` where so many functions compute at the same time.
    fn among(self, functions: f64, measured: f64) -> f64 {
        let others = f64::from(self.functions) - 1.0;
        1.0 + (measured - 1.0) * ((functions - 1.0) / others).clamp(0.0, 1.0)
    }
}

impl Model<'_> {
    /// What holds for groups here: that of the problem, where all functions run on one machine.
    fn contention(&self) -> Option<Contention> {
        self.problem.contention.filter(|_| self.problem.shared_cores.is_some())
    }

    /// How many times longer the experts of a layer take in a prefill that so many functions compute at the same time.
    pub(crate) fn slowed_prefill(&self, functions: impl FnOnce() -> usize) -> f64 {
        self.contention().map_or(1.0, |contention| contention.among(functions() as f64, contention.prefill))
    }

    /// The same of `layer` in `plan`, which has groups: functions are the main one with local experts and replicas with any.
    pub(crate) fn slowed_prefill_in(&self, layer: usize, plan: &Plan) -> f64 {
        self.slowed_prefill(|| {
            let hosting = plan.groups.iter().map(|group| hosting(group, layer)).sum::<usize>();
            hosting + usize::from(plan.layers[layer].remote.len() < self.layers[layer].experts)
        })
    }

    /// How many times longer the experts of `layer` take in a decode step of `rows` requests, whose groups and main function
    /// have these shares of the assignments: of them as many compute as are expected to be called.
    pub(crate) fn slowed_step<S: Iterator<Item = f64>>(
        &self,
        layer: usize,
        rows: f64,
        shares: impl FnOnce() -> S,
    ) -> f64 {
        self.contention().map_or(1.0, |contention| {
            let called = shares().map(|share| self.layers[layer].called(share, rows)).sum::<f64>();
            contention.among(called, contention.step)
        })
    }

    /// The same of `layer` in `plan`, which has groups.
    pub(crate) fn slowed_step_in(&self, layer: usize, rows: f64, plan: &Plan) -> f64 {
        self.slowed_step(layer, rows, || {
            let away = plan.groups.iter().map(move |group| self.share_of(layer, &group.experts[layer]));
            away.chain([(1.0 - self.share_of(layer, &plan.layers[layer].remote)).max(0.0)])
        })
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
