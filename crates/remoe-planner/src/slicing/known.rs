//! Times of layers that are kept while single experts, sizes and groups are moved: a move changes few layers.

use super::{FeasiblePlan, Slicing};
use remoe_plan::cost::running::{Detail, ServingFunctions, Times};
use remoe_plan::model::Model;
use remoe_plan::plan::{Group, Plan};
use std::collections::HashMap;

/// Layers that are kept, at most; beyond, all are dropped.
const MOST_KEPT: usize = 40_000;

/// Times of layers by what they depend on.
#[derive(Debug, Default)]
pub(super) struct KnownLayers {
    of: HashMap<Vec<u32>, KnownLayer>,
    /// The key that is asked for.
    key: Vec<u32>,
    batches: Vec<f64>,
}

/// One layer of a plan with groups, as an evaluation has it.
#[derive(Debug)]
struct KnownLayer {
    prefill: f64,
    decode: f64,
    /// Decode step at each batch but the first.
    steps: Vec<f64>,
    /// Per group with experts of the layer, in order: seconds that are billed in the prefill and in a decode step,
    /// where groups are paid for what they work.
    billed: Vec<(f64, f64)>,
}

impl Slicing<'_, '_> {
    /// Reports if `plan` may keep the times and beat `other`: false only where its evaluation would say so too.
    pub(super) fn may_beat(&self, plan: &Plan, other: &FeasiblePlan, known: &mut KnownLayers) -> bool {
        if plan.groups.is_empty() {
            return true;
        }
        let running = known.running(self.model, plan);
        let bill = self.model.bill(&running, Detail::Bound);
        // Sums in another order may differ in their last bits.
        bill.total() <= other.cost() * (1.0 + 1e-11) && !self.is_late(&bill)
    }
}

impl KnownLayers {
    /// Returns the figures that the cost of `plan` follows from, without what quotas add to its times: more time
    /// never costs less.
    fn running(&mut self, model: &Model<'_>, plan: &Plan) -> ServingFunctions {
        if self.batches.is_empty() {
            self.batches = model.batches();
        }
        if self.of.len() > MOST_KEPT {
            self.of.clear();
        }
        model.add_work(3 * plan.layers.len());
        let mut times = Times::none(self.batches.len());
        let mut billed = vec![(0.0, 0.0); plan.groups.len()];
        for layer in 0..plan.layers.len() {
            self.write_key(model, layer, plan);
            if !self.of.contains_key(&self.key) {
                let found = KnownLayer::new(model, layer, plan, &self.batches);
                self.of.insert(self.key.clone(), found);
            }
            let Some(known) = self.of.get(&self.key) else { continue };
            times.add(known.prefill, std::iter::once(known.decode).chain(known.steps.iter().copied()));
            let hosts = billed.iter_mut().zip(&plan.groups);
            let hosts = hosts.filter(|(_, group)| !group.experts[layer].is_empty());
            for ((sums, _), own) in hosts.zip(&known.billed) {
                (sums.0, sums.1) = (sums.0 + own.0, sums.1 + own.1);
            }
        }
        let rate = |group: &Group| model.remote_rate(group.memory_bytes, group.vcpus);
        let (mut remote_rate, mut remote_bill) = (0.0, 0.0);
        let mut sleepers = Vec::new();
        for (group, (prefill, step)) in plan.groups.iter().zip(&billed) {
            let sleeper = model.sleeper(group, plan, rate(group) * f64::from(group.replicas));
            if let Some(sleeper) = sleeper {
                model.add_work(group.experts.iter().map(Vec::len).sum());
                sleepers.push(sleeper);
                continue;
            }
            match model.is_reserved() {
                true => remote_rate += rate(group) * f64::from(group.replicas),
                false => remote_bill += rate(group) * (prefill + model.output * step),
            }
        }
        let largest = plan.groups.iter().map(|group| model.weight_bytes(&group.experts)).fold(0.0, f64::max);
        let main = model.nonexpert_bytes + model.local_expert_bytes(&plan.remote_counts());
        ServingFunctions {
            times,
            main_rate: model.main_rate(plan),
            remote_rate,
            remote_bill,
            start_seconds: model.start_seconds(main, largest),
            sleepers,
        }
    }

    /// Writes everything that the times of `layer` depend on.
    fn write_key(&mut self, model: &Model<'_>, layer: usize, plan: &Plan) {
        let key = &mut self.key;
        key.clear();
        let halves = |value: f64| [(value.to_bits() >> 32) as u32, value.to_bits() as u32];
        key.push(layer as u32);
        key.extend(halves(model.main_pace(plan).vcpus));
        for group in plan.groups.iter().filter(|group| !group.experts[layer].is_empty()) {
            key.extend(halves(model.group_pace(group).vcpus));
            key.extend([group.replicas, group.experts[layer].len() as u32]);
            key.extend(&group.experts[layer]);
        }
    }
}

impl KnownLayer {
    fn new(model: &Model<'_>, layer: usize, plan: &Plan, batches: &[f64]) -> Self {
        model.add_work(model.layers[layer].experts * (2 + batches.len() / 2) + 40);
        let evaluation = model.layer_in_groups(layer, plan);
        let hosts = plan.groups.iter().filter(|group| !group.experts[layer].is_empty());
        let prefill = model.slowed_prefill(layer, plan);
        let step = model.slowed_step(layer, 1.0, plan);
        let bill = |group: &Group| {
            let prefill = model.replicas(layer, group, prefill).seconds.iter().sum();
            (prefill, model.group_step(layer, group, step))
        };
        Self {
            prefill: evaluation.prefill,
            decode: evaluation.decode,
            steps: batches[1..].iter().map(|rows| model.batch_step_of(layer, plan, *rows)).collect(),
            billed: if model.is_reserved() { Vec::new() } else { hosts.map(bill).collect() },
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::generate::{BEYOND, beyond, small_problem};
    use remoe_plan::plan::LayerPlan;
    use remoe_plan::problem::{Billing, Contention};

    /// Two groups that hold every other expert each, but for the first of every layer.
    fn plan(model: &Model<'_>) -> Plan {
        let of = |parity: usize| Group {
            experts: model
                .layers
                .iter()
                .map(|layer| (1..layer.experts as u32).filter(|id| *id as usize % 2 == parity).collect())
                .collect(),
            memory_bytes: model.remote_sizes[model.remote_sizes.len() / 2],
            vcpus: model.problem.specs.remote_vcpus.map(|range| range.min),
            replicas: 1 + parity as u32,
            idle_seconds: None,
        };
        let groups: Vec<Group> =
            (0..2).map(of).filter(|group| group.experts.iter().any(|ids| !ids.is_empty())).collect();
        let layers = model
            .layers
            .iter()
            .map(|layer| LayerPlan { remote: (1..layer.experts as u32).collect(), ..LayerPlan::default() });
        Plan {
            main_bytes: *model.main_sizes.last().unwrap(),
            main_vcpus: model.problem.specs.main_vcpus.map(|range| range.largest()),
            layers: layers.collect(),
            groups,
        }
    }

    #[test]
    fn they_cost_what_an_evaluation_says() {
        let mut compared = 0;
        for seed in 0..200 {
            let (_, form) = BEYOND[seed as usize % BEYOND.len()];
            let mut problem = beyond(&small_problem(seed, 1 + seed as usize % 3), form);
            problem.limits.max_groups = Some(2);
            if seed % 2 == 0 {
                problem.pricing.billing = Billing::Invocation;
            }
            if seed % 3 == 0 {
                problem.shared_cores = Some(4.0);
                problem.contention = Some(Contention { functions: 5, step: 1.6, prefill: 1.3 });
            }
            let model = Model::new(&problem);
            let mut known = KnownLayers::default();
            let mut plan = plan(&model);
            // As it is, then with everything changed once that times depend on.
            for round in 0..5 {
                if plan.groups.is_empty() {
                    break;
                }
                compared += 1;
                let evaluation = model.evaluate(&plan);
                let bill = model.bill(&known.running(&model, &plan), Detail::Search);
                let same = |one: f64, other: f64| (one - other).abs() <= 1e-12 * other.abs();
                assert!(same(bill.total(), evaluation.total_cost), "{seed}: {bill:?} {evaluation:?}");
                assert!(same(bill.ttft_seconds, evaluation.ttft_seconds), "{seed}");
                assert!(same(bill.tpot_seconds, evaluation.tpot_seconds), "{seed}");
                let vcpus = |vcpus: Option<f64>| vcpus.map(|vcpus| vcpus + 1.0);
                match round {
                    0 => {
                        (plan.main_bytes, plan.main_vcpus) =
                            (model.main_sizes[0], plan.main_vcpus.map(|_| 2.0))
                    }
                    1 => {
                        let first = &mut plan.groups[0];
                        (first.memory_bytes, first.vcpus) = (model.remote_sizes[0], vcpus(first.vcpus));
                    }
                    2 => plan.groups[0].replicas += 2,
                    _ => {
                        let Some(home) = plan.layers[0].remote.pop() else { break };
                        plan.groups.iter_mut().for_each(|group| group.experts[0].retain(|id| *id != home));
                        plan.groups.retain(|group| group.experts.iter().any(|ids| !ids.is_empty()));
                    }
                }
            }
        }
        assert!(compared >= 600, "{compared}");
    }
}
