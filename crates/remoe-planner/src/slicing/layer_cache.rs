//! Cache of the times of single layers for a local search: a move of an expert, size or group changes few layers.

use super::{CandidatePlan, GroupSearch};
use remoe_plan::cost::running::{Detail, PhaseTimes, ServingFunctions};
use remoe_plan::model::Model;
use remoe_plan::plan::{Group, Plan};
use std::collections::HashMap;

/// Maximum number of cached layers. Beyond it the cache is cleared.
const MAX_LAYERS: usize = 40_000;

/// Times of layers, by everything that they depend on.
#[derive(Debug, Default)]
pub(super) struct LayerTimesCache {
    layers: HashMap<Vec<u32>, CachedLayer>,
    /// Buffer for the key of the current look-up.
    key: Vec<u32>,
    batches: Vec<f64>,
}

/// Times of one layer of a plan with groups, as in an evaluation.
#[derive(Debug)]
struct CachedLayer {
    prefill: f64,
    decode: f64,
    /// Decode step at each batch but the first.
    steps: Vec<f64>,
    /// Billed seconds of each group that hosts experts of the layer, in order. Empty under reserved billing.
    billed: Vec<BilledSeconds>,
}

/// Busy seconds of a group in a request, which are billed under invocation billing.
#[derive(Debug, Clone, Copy, Default)]
struct BilledSeconds {
    prefill: f64,
    step: f64,
}

impl GroupSearch<'_, '_> {
    /// Reports if `plan` may keep the latency limits and beat `other`. Returns false only if an evaluation would, too.
    pub(super) fn may_beat(&self, plan: &Plan, other: &CandidatePlan, cache: &mut LayerTimesCache) -> bool {
        if plan.groups.is_empty() {
            return true;
        }
        let running = cache.serving_functions(self.model, plan);
        let bill = self.model.bill(&running, Detail::Bound);
        // Sums in another order may differ in their last bits.
        bill.total() <= other.cost() * (1.0 + 1e-11) && !self.breaks_latency_limit(&bill)
    }
}

impl LayerTimesCache {
    /// Returns the serving functions of `plan`, without the time that CPU quotas add: a lower bound of the cost.
    fn serving_functions(&mut self, model: &Model<'_>, plan: &Plan) -> ServingFunctions {
        if self.batches.is_empty() {
            self.batches = model.batches();
        }
        if self.layers.len() > MAX_LAYERS {
            self.layers.clear();
        }
        model.add_work(3 * plan.layers.len());
        let mut times = PhaseTimes::none(self.batches.len());
        let mut billed = vec![BilledSeconds::default(); plan.groups.len()];
        for layer in 0..plan.layers.len() {
            self.write_key(model, layer, plan);
            if !self.layers.contains_key(&self.key) {
                let found = CachedLayer::new(model, layer, plan, &self.batches);
                self.layers.insert(self.key.clone(), found);
            }
            let Some(cached) = self.layers.get(&self.key) else { continue };
            times.add(cached.prefill, std::iter::once(cached.decode).chain(cached.steps.iter().copied()));
            let hosts = billed.iter_mut().zip(&plan.groups);
            let hosts = hosts.filter(|(_, group)| !group.experts[layer].is_empty());
            for ((sum, _), own) in hosts.zip(&cached.billed) {
                sum.prefill += own.prefill;
                sum.step += own.step;
            }
        }
        let rate = |group: &Group| model.remote_rate(group.memory_bytes, group.vcpus);
        let (mut remote_rate, mut remote_bill) = (0.0, 0.0);
        let mut sleepers = Vec::new();
        for (group, billed) in plan.groups.iter().zip(&billed) {
            let sleeper = model.sleeper(group, plan, rate(group) * f64::from(group.replicas));
            if let Some(sleeper) = sleeper {
                model.add_work(group.experts.iter().map(Vec::len).sum());
                sleepers.push(sleeper);
                continue;
            }
            match model.is_reserved() {
                true => remote_rate += rate(group) * f64::from(group.replicas),
                false => remote_bill += rate(group) * (billed.prefill + model.output * billed.step),
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

    /// Writes everything that the times of `layer` depend on into the key buffer.
    fn write_key(&mut self, model: &Model<'_>, layer: usize, plan: &Plan) {
        let key = &mut self.key;
        key.clear();
        let halves = |value: f64| [(value.to_bits() >> 32) as u32, value.to_bits() as u32];
        key.push(layer as u32);
        key.extend(halves(model.main_cpu_speed(plan).vcpus));
        for group in plan.groups.iter().filter(|group| !group.experts[layer].is_empty()) {
            key.extend(halves(model.group_cpu_speed(group).vcpus));
            key.extend([group.replicas, group.experts[layer].len() as u32]);
            key.extend(&group.experts[layer]);
        }
    }
}

impl CachedLayer {
    fn new(model: &Model<'_>, layer: usize, plan: &Plan, batches: &[f64]) -> Self {
        model.add_work(model.layers[layer].experts * (2 + batches.len() / 2) + 40);
        let evaluation = model.layer_in_groups(layer, plan);
        let hosts = plan.groups.iter().filter(|group| !group.experts[layer].is_empty());
        let prefill_slowdown = model.prefill_contention(layer, plan);
        let step_slowdown = model.step_contention(layer, 1.0, plan);
        let bill = |group: &Group| BilledSeconds {
            prefill: model.replicas(layer, group, prefill_slowdown).seconds.iter().sum(),
            step: model.group_step(layer, group, step_slowdown),
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

    /// Returns a plan whose first expert of every layer is local, and whose two groups share the others.
    fn plan(model: &Model<'_>) -> Plan {
        let group = |parity: usize| Group {
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
            (0..2).map(group).filter(|group| group.experts.iter().any(|ids| !ids.is_empty())).collect();
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
    fn cached_cost_equals_evaluated_cost() {
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
            let mut cache = LayerTimesCache::default();
            let mut plan = plan(&model);
            // Changes everything once that times depend on.
            for round in 0..5 {
                if plan.groups.is_empty() {
                    break;
                }
                compared += 1;
                let evaluation = model.evaluate(&plan);
                let bill = model.bill(&cache.serving_functions(&model, &plan), Detail::Search);
                let same = |found: f64, expected: f64| (found - expected).abs() <= 1e-12 * expected.abs();
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
