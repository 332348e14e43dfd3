//! Ways to deal remote experts to groups, and what each costs at least.

use super::deal::Cut;
use super::{ArrangementFamily, Slicing};
use crate::search::selection::Candidate;
use remoe_plan::cost::running::{ServingFunctions, Times};

/// One arrangement, before anything about it is worked out.
pub(super) struct Arrangement<'c> {
    pub(super) candidate: &'c Candidate,
    pub(super) cut: Cut,
    pub(super) replicas: u32,
    /// Lower bound of its cost; infinite where it is too late.
    pub(super) bound: f64,
}

/// Lower bounds of a candidate's times and rates, whatever its arrangement.
pub(super) struct LowerBounds {
    /// Dollars per second of the smallest main function.
    main_rate: f64,
    /// Everything but routed experts.
    rest: Times,
    layers: Vec<LeastOfLayer>,
    /// Nothing is remote.
    is_local: bool,
}

struct LeastOfLayer {
    /// Prefill seconds of the local experts, and of the remote ones on one function.
    local: f64,
    away: f64,
    /// Seconds of a token's local experts in a decode step.
    local_step: f64,
    /// Experts of a token that are remote, and the seconds of each.
    away_share: f64,
    away_step: f64,
}

impl Slicing<'_, '_> {
    pub(super) fn cuts(&self, family: ArrangementFamily) -> Vec<Cut> {
        let layers = self.model.layers.len();
        let most = self.model.problem.limits.max_groups.unwrap_or(1) as usize;
        let single = Cut { blocks: layers, slices: 1 };
        if family == ArrangementFamily::PerLayer {
            return vec![single];
        }
        let powers = std::iter::successors(Some(1), |blocks| Some(blocks * 2));
        // Functions that are paid for what they work are cheaper the less they hold.
        let whole = powers.take_while(|blocks| *blocks < layers.max(2)).chain((layers > 1).then_some(layers));
        whole.flat_map(|blocks| numbers(most / blocks).map(move |slices| Cut { blocks, slices })).collect()
    }

    /// Returns the lower bounds of every layer of `candidate`, at the largest sizes.
    pub(super) fn least(&self, candidate: &Candidate) -> Option<LowerBounds> {
        let model = self.model;
        let mains = model.main_options(model.main_needed(&candidate.counts));
        let (main, most) = (mains.first()?, mains.last()?);
        let most_vcpus = model.pace(most.vcpus).vcpus;
        let remote_vcpus =
            model.pace(model.remote_sizings(0.0).last().map_or(1.0, |sizing| sizing.vcpus)).vcpus;
        let layers = model.layers.iter().zip(self.tables).zip(&candidate.counts);
        let layers = layers.map(|((layer, table), count)| {
            let (curve, remote_curve) = (&layer.curve, layer.remote_curve());
            let (here, there) = (curve.column(most_vcpus), remote_curve.column(remote_vcpus));
            let share = table.share[*count].min(1.0);
            let away = there.least_of(table.away_at(*count));
            LeastOfLayer {
                local: here.least_of(table.stay(*count)),
                away: away + table.token_sum[*count] * model.down,
                local_step: layer.per_token() * (1.0 - share) * curve.seconds(1.0, here),
                away_share: layer.per_token() * share,
                away_step: remote_curve.seconds(1.0, there) + model.down,
            }
        });
        model.add_work(model.layers.len());
        Some(LowerBounds {
            main_rate: model.gpu_rate + main.rate,
            rest: self.rest.times(most_vcpus, true),
            layers: layers.collect(),
            is_local: candidate.counts.iter().all(|count| *count == 0),
        })
    }

    /// Returns the cost that no plan of the arrangement undercuts: every time at the largest sizes with work that is
    /// spread evenly, every rate at the smallest ones. Infinite where it cannot keep the limits.
    pub(super) fn bound(&self, candidate: &Candidate, least: &LowerBounds, cut: Cut, replicas: u32) -> f64 {
        let model = self.model;
        let mut remote_rate = 0.0;
        if !least.is_local {
            let Some(groups) = self.groups(candidate, cut) else { return f64::INFINITY };
            let Some(rate) = self.least_remote_rate(candidate, groups as f64) else { return f64::INFINITY };
            if model.is_reserved() {
                remote_rate = rate * f64::from(replicas);
            }
        }
        let ways = (cut.slices * replicas as usize) as f64;
        let mut times = least.rest.clone();
        let (mut prefill, mut step) = (0.0, 0.0);
        for layer in &least.layers {
            prefill += layer.local.max(layer.away / ways);
            step += layer.local_step.max(layer.away_share / cut.slices as f64 * layer.away_step);
        }
        let batches = times.steps.len();
        times.add(prefill, std::iter::repeat(step));
        // Several of these are one of what else is counted.
        model.add_work((least.layers.len() + batches) / 4 + 1);
        let running = ServingFunctions { remote_rate, ..ServingFunctions::of_main(times, least.main_rate) };
        let bill = model.quick_bill(&running);
        if self.is_late(&bill) { f64::INFINITY } else { bill.total() }
    }

    /// How many groups have experts; none where another cut makes the same ones. Experts of a layer go to the groups
    /// that have least, so that groups may be more than the remote experts of any layer.
    fn groups(&self, candidate: &Candidate, cut: Cut) -> Option<usize> {
        let layers = candidate.counts.len();
        let mut of_blocks = vec![0; cut.blocks];
        for (layer, count) in candidate.counts.iter().enumerate() {
            of_blocks[cut.block(layer, layers)] += count;
        }
        of_blocks.iter_mut().for_each(|experts: &mut usize| *experts = (*experts).min(cut.slices));
        of_blocks.contains(&cut.slices).then(|| of_blocks.iter().sum())
    }

    /// Dollars per second of so many groups for all remote experts, one function each, at least.
    fn least_remote_rate(&self, candidate: &Candidate, groups: f64) -> Option<f64> {
        let model = self.model;
        let bytes = candidate
            .counts
            .iter()
            .zip(&model.layers)
            .map(|(count, layer)| *count as f64 * layer.expert_bytes);
        let bytes = bytes.sum::<f64>() + groups * model.problem.function_bytes;
        let least = model.remote_sizings(bytes / groups * (1.0 - 1e-12)).next()?;
        let smallest = model.remote_sizings(0.0).next().map_or(0.0, |sizing| sizing.rate);
        // Sizes cost in proportion to their bytes, beside the vCPUs.
        let per_byte = (model.remote_rate(2e9, least.stated) - model.remote_rate(1e9, least.stated)) / 1e9;
        let vcpus = model.remote_rate(0.0, least.stated);
        Some((groups * smallest).max(bytes * per_byte + groups * vcpus))
    }
}

/// Every number up to 16, then a quarter more each, up to `most`.
fn numbers(most: usize) -> impl Iterator<Item = usize> {
    let next = |number: &usize| Some(number + if *number < 16 { 1 } else { number / 4 });
    std::iter::successors(Some(1), next).take_while(move |number| *number <= most)
}
