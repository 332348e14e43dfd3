//! Times of one arrangement of groups, as a function of the sizes of the main function and of the groups.
//!
//! Everything that does not depend on sizes is computed once, so that a pair of sizes takes one pass over the layers.
//! The formulas are those of `remoe_plan::cost`; a test compares both.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use crate::slicing::expert_times::{LayerExpertTimes, PathExpertTimes};
use crate::slicing::nonexpert_times::{CurvePosition, NonExpertTimes};
use remoe_plan::cost::contention::ContentionFactors;
use remoe_plan::cost::cpu_quota::{CpuSeconds, CpuSpeed, CpuWork};
use remoe_plan::cost::lpt::longest_first;
use remoe_plan::cost::running::{PhaseTimes, ServingFunctions};
use remoe_plan::cost::slowest::{Path, PathWork, Spread, expected_slowest, slowest_of};
use remoe_plan::model::sizing::Sizing;
use remoe_plan::model::{LayerModel, Model};
use remoe_plan::plan::Plan;

/// Largest top-k for which the probabilities of expert counts are tabulated.
const MAX_TABULATED_TOP_K: usize = 16;

/// A function with one whole core.
const WHOLE_CORE: CpuSpeed = CpuSpeed { vcpus: 1.0, throttle_factor: 1.0 };

/// Times of one arrangement: which experts are local, and which group hosts each of the others.
pub(crate) struct ArrangementTimes<'m> {
    model: &'m Model<'m>,
    nonexpert: &'m NonExpertTimes,
    layers: Vec<LayerTimes<'m>>,
    /// Replicas of each group.
    replicas: u32,
    groups: usize,
    /// [`Model::batches`].
    batches: Vec<f64>,
    /// Seconds of a cold start.
    start_seconds: f64,
}

/// Times of the experts of one layer. Contention is included.
struct LayerTimes<'m> {
    model: &'m LayerModel,
    contention: ContentionFactors,
    /// Prefill seconds of the local experts at each vCPU column.
    local_prefill: Vec<f64>,
    /// Prefill work of every replica that receives tokens.
    replica_prefills: Vec<ReplicaPrefill>,
    /// Groups that host experts of this layer.
    hosting_groups: Vec<GroupShare>,
    /// Absent if top-k exceeds [`MAX_TABULATED_TOP_K`].
    count_probabilities: Option<CountProbabilities>,
    /// Groups that receive tokens in the prefill.
    prefill_calls: f64,
    /// Expected number of groups that are called in one decode step, for each batch.
    step_calls: Vec<f64>,
    /// For each batch but the first: the work of the main function, then of every hosting group.
    batch_work: Vec<Vec<PathDecodeWork>>,
}

/// A group and its share of a layer's assignments.
#[derive(Clone, Copy)]
struct GroupShare {
    group: usize,
    share: f64,
}

/// Part of a layer's prefill that one replica computes.
struct ReplicaPrefill {
    group: usize,
    /// CPU seconds at each vCPU column.
    cpu_seconds: Vec<f64>,
    /// Seconds of transfer and invocation.
    transfer_seconds: f64,
}

/// Experts of the main function or of one group in a decode step of several requests.
struct PathDecodeWork {
    /// Mean CPU seconds at each vCPU column.
    mean: Vec<f64>,
    /// Standard deviation of the CPU seconds at each vCPU column.
    deviation: Vec<f64>,
    /// Mean seconds of transfer and invocation.
    transfer_seconds: f64,
}

/// Joint distribution of a token's expert counts: of local experts, and of the most experts that any group has.
struct CountProbabilities {
    /// Counts from 0 to top-k.
    counts: usize,
    /// `[remote][local]`: probability of at most `local` local experts and at most `remote` experts in every group.
    cumulative: Vec<f64>,
}

impl CountProbabilities {
    /// `local`: share of the local experts. `groups`: share of each group.
    fn new(top_k: usize, local: f64, groups: &[f64]) -> Self {
        let counts = top_k + 1;
        let mut cumulative = Vec::with_capacity(counts * counts);
        for most in 0..counts {
            let spread = Spread::of(top_k, groups.iter().map(|share| (*share, most, 1)));
            cumulative.extend((0..counts).map(|count| spread.with(local, count)));
        }
        Self { counts, cumulative }
    }

    /// Returns the expected seconds of the slowest path of a token: the sum of t (P(slowest <= t) - P(slowest < t)).
    ///
    /// `local`: seconds of a local expert. `remote`: seconds of a remote expert. `trip`: seconds of a call.
    fn expected_slowest(&self, local: f64, remote: f64, trip: f64) -> f64 {
        let (mut local_count, mut remote_count) = (0, 0);
        let (mut expected, mut before) = (0.0, self.cumulative[0]);
        // Visits the possible times in ascending order: each is the time of one more local or one more remote expert.
        while before < 1.0 - 1e-15 && (local_count + 1 < self.counts || remote_count + 1 < self.counts) {
            let next_local = match local_count + 1 {
                count if count < self.counts => count as f64 * local,
                _ => f64::INFINITY,
            };
            let next_remote = match remote_count + 1 {
                count if count < self.counts => count as f64 * remote + trip,
                _ => f64::INFINITY,
            };
            let time = next_local.min(next_remote);
            if next_local <= time {
                local_count += 1;
            }
            if next_remote <= time {
                remote_count += 1;
            }
            let within = self.cumulative[remote_count * self.counts + local_count];
            expected += time * (within - before);
            before = within;
        }
        expected
    }
}

impl<'m> ArrangementTimes<'m> {
    /// Prepares the times of the expert sets of `plan`, with `replicas` of every group. Sizes in `plan` are ignored.
    ///
    /// `expert_times`: computed on the fly if absent. Returns `None` if a call exceeds the payload limit.
    pub(crate) fn new(
        model: &'m Model<'m>,
        nonexpert: &'m NonExpertTimes,
        expert_times: Option<&[LayerExpertTimes]>,
        plan: &Plan,
        replicas: u32,
    ) -> Option<Self> {
        let batches = model.batches();
        model.add_work(model.experts() * (2 + batches.len() / 2));
        let mut layers = Vec::with_capacity(model.layers.len());
        for layer in 0..model.layers.len() {
            let own;
            let times = match expert_times {
                Some(times) => &times[layer],
                None => {
                    own = LayerExpertTimes::new(model, layer);
                    &own
                }
            };
            layers.push(LayerTimes::new(model, times, plan, layer, replicas, &batches)?);
        }
        let counts = plan.remote_counts();
        let group_bytes = plan.groups.iter().map(|group| model.weight_bytes(&group.experts));
        let main_bytes = model.nonexpert_bytes + model.local_expert_bytes(&counts);
        let start_seconds = model.start_seconds(main_bytes, group_bytes.fold(0.0, f64::max));
        Some(Self { model, nonexpert, layers, replicas, groups: plan.groups.len(), batches, start_seconds })
    }

    /// Returns the serving functions with the speed of `speed_sizes` and the prices of `price_sizes`.
    ///
    /// Different pairs give a lower bound of the cost of all sizes between them. If `lower_bound`, times are the least of
    /// all sizes up to `speed_sizes`: measured times may grow with vCPUs.
    pub(crate) fn serving_functions(
        &self,
        speed_sizes: &SizePair<'_>,
        price_sizes: &SizePair<'_>,
        lower_bound: bool,
    ) -> ServingFunctions {
        let model = self.model;
        model.add_work(self.layers.len() * (1 + self.batches.len()));
        let reserved = model.is_reserved();
        let mut billed = vec![0.0; if reserved { 0 } else { self.groups }];
        let main = model.cpu_speed(speed_sizes.main.vcpus);
        let remote = model.cpu_speed(speed_sizes.remote_vcpus());
        let mut times = self.nonexpert.times(main.vcpus, lower_bound);
        for layer in &self.layers {
            let positions = layer.curve_positions(main, remote, lower_bound);
            layer.add_times(model, &positions, &mut times, &mut billed);
        }
        self.apply_quotas(main, remote, lower_bound, &mut times);
        let (mut remote_rate, mut remote_bill) = (0.0, 0.0);
        if reserved {
            let rates: f64 = price_sizes.remote.iter().map(|sizing| sizing.rate).sum();
            remote_rate = rates * f64::from(self.replicas);
        } else {
            remote_bill =
                billed.iter().zip(price_sizes.remote).map(|(seconds, sizing)| seconds * sizing.rate).sum();
        }
        ServingFunctions {
            times,
            main_rate: model.gpu_rate + price_sizes.main.rate,
            remote_rate,
            remote_bill,
            start_seconds: self.start_seconds,
            sleepers: Vec::new(),
        }
    }

    /// Lengthens `times` to what the CPU quota of the slowest function allows.
    fn apply_quotas(&self, main: CpuSpeed, remote: CpuSpeed, lower_bound: bool, times: &mut PhaseTimes) {
        if main.throttle_factor <= 1.0 && remote.throttle_factor <= 1.0 {
            return;
        }
        let none = |speed, functions| CpuWork::none(self.batches.len(), speed, functions);
        let mut work = vec![none(main, 1)];
        work.resize(1 + self.groups, none(remote, self.replicas));
        let nonexpert = self.nonexpert.cpu_times(main.vcpus, lower_bound);
        let prefill = CpuSeconds { experts: 0.0, non_expert: nonexpert.prefill };
        work[0].add_prefill(std::iter::once(prefill));
        work[0].non_expert.add(0.0, nonexpert.steps.into_iter());
        for layer in &self.layers {
            let positions = layer.curve_positions(main, remote, lower_bound);
            layer.add_cpu_work(self.model, &positions, &self.batches, &mut work);
        }
        self.model.throttle(&work, !lower_bound, times);
    }
}

/// Sizes of the main function and of every group. All groups have the same vCPUs.
pub(crate) struct SizePair<'a> {
    pub(crate) main: Sizing,
    pub(crate) remote: &'a [Sizing],
}

impl SizePair<'_> {
    fn remote_vcpus(&self) -> f64 {
        self.remote.first().map_or(1.0, |sizing| sizing.vcpus)
    }
}

/// Positions of the main function and of the groups on a layer's measured curves.
struct CurvePositions {
    main: CurvePosition,
    remote: CurvePosition,
}

impl<'m> LayerTimes<'m> {
    fn new(
        model: &'m Model<'m>,
        expert_times: &LayerExpertTimes,
        plan: &Plan,
        layer: usize,
        replicas: u32,
        batches: &[f64],
    ) -> Option<Self> {
        let layer_model = &model.layers[layer];
        let remote = &plan.layers[layer].remote;
        let mut next_remote = remote.iter().peekable();
        let local: Vec<u32> = (0..layer_model.experts as u32)
            .filter(|expert| next_remote.next_if_eq(&expert).is_none())
            .collect();
        let hosts = plan.groups.iter().enumerate().filter(|(_, group)| !group.experts[layer].is_empty());
        let hosts: Vec<(usize, &[u32])> =
            hosts.map(|(index, group)| (index, group.experts[layer].as_slice())).collect();
        let contention = model.contention_factors(layer, plan);
        let mut replica_prefills = Vec::new();
        for (group, experts) in &hosts {
            replica_prefills.extend(group_prefill(
                model,
                expert_times.remote(),
                layer,
                *group,
                experts,
                replicas,
                contention.prefill,
            )?);
        }
        let hosting_groups: Vec<GroupShare> = hosts
            .iter()
            .map(|(group, experts)| GroupShare { group: *group, share: model.share_of(layer, experts) })
            .collect();
        let remote_shares: Vec<f64> = hosting_groups.iter().map(|host| host.share).collect();
        let local_share = (1.0 - remote_shares.iter().sum::<f64>()).max(0.0);
        let count_probabilities = (layer_model.top_k <= MAX_TABULATED_TOP_K)
            .then(|| CountProbabilities::new(layer_model.top_k, local_share, &remote_shares));
        let calls = |rows: &f64| {
            remote_shares.iter().map(|share| layer_model.call_probability(*share, *rows)).sum::<f64>()
        };
        let path_work = |times: &PathExpertTimes, batch: usize, experts: &[u32], transfer_seconds: f64| {
            let slowdown = contention.steps[batch + 1];
            let step = &times.steps[batch];
            let deviation = step.variance.sums(experts.iter().copied()).into_iter().map(f64::sqrt);
            PathDecodeWork {
                mean: scaled(slowdown, step.mean.sums(experts.iter().copied())),
                deviation: scaled(slowdown, deviation.collect()),
                transfer_seconds,
            }
        };
        let batch_work = |(batch, rows): (usize, &f64)| {
            let mut work = vec![path_work(&expert_times.local, batch, &local, 0.0)];
            for ((_, experts), share) in hosts.iter().zip(&remote_shares) {
                let share = share.min(1.0);
                let sent_tokens = rows * layer_model.call_probability(share, 1.0);
                let transfer_seconds = rows * layer_model.per_token() * share * model.down
                    + sent_tokens * model.up
                    + layer_model.call_probability(share, *rows) * model.invoke;
                work.push(path_work(expert_times.remote(), batch, experts, transfer_seconds));
            }
            work
        };
        let called: std::collections::BTreeSet<usize> =
            replica_prefills.iter().map(|replica| replica.group).collect();
        Some(Self {
            model: layer_model,
            local_prefill: scaled(contention.prefill, expert_times.local.prefill.sums(local.iter().copied())),
            prefill_calls: called.len() as f64,
            step_calls: batches.iter().map(calls).collect(),
            batch_work: batches[1..].iter().enumerate().map(batch_work).collect(),
            replica_prefills,
            hosting_groups,
            count_probabilities,
            contention,
        })
    }

    /// Returns the seconds of one local expert with one token.
    fn local_token_seconds(&self, main: CurvePosition) -> f64 {
        self.contention.steps[0] * main.value(self.model.curve.one())
    }

    /// Returns the CPU seconds of one remote expert with one token.
    fn remote_token_seconds(&self, remote: CurvePosition) -> f64 {
        self.contention.steps[0] * remote.value(self.model.remote_curve().one())
    }

    fn curve_positions(&self, main: CpuSpeed, remote: CpuSpeed, lower_bound: bool) -> CurvePositions {
        let (curve, remote_curve) = (&self.model.curve, self.model.remote_curve());
        CurvePositions {
            main: CurvePosition { column: curve.column(main.vcpus), lower_bound },
            remote: CurvePosition { column: remote_curve.column(remote.vcpus), lower_bound },
        }
    }

    /// Adds the seconds of the layer's experts to `times`, and the busy seconds of each group to `billed`.
    ///
    /// `billed` is empty if functions are not billed by busy time.
    fn add_times(
        &self,
        model: &Model<'_>,
        positions: &CurvePositions,
        times: &mut PhaseTimes,
        billed: &mut [f64],
    ) {
        let CurvePositions { main, remote } = *positions;
        let mut slowest = main.value(&self.local_prefill);
        for replica in &self.replica_prefills {
            let seconds = remote.value(&replica.cpu_seconds) + replica.transfer_seconds;
            slowest = slowest.max(seconds);
            if let Some(billed) = billed.get_mut(replica.group) {
                *billed += seconds;
            }
        }
        let local_expert = self.local_token_seconds(main);
        let remote_expert = self.remote_token_seconds(remote) + model.down;
        let trip = model.round_trip();
        let is_billed_by_use = !billed.is_empty();
        for host in self.hosting_groups.iter().filter(|_| is_billed_by_use) {
            let share = host.share.min(1.0);
            let called = self.model.call_probability(share, 1.0);
            billed[host.group] +=
                model.output * (self.model.per_token() * share * remote_expert + called * trip);
        }
        let single_step = match &self.count_probabilities {
            Some(probabilities) => probabilities.expected_slowest(local_expert, remote_expert, trip),
            None => {
                let mut paths: Vec<Path> = self
                    .hosting_groups
                    .iter()
                    .map(|host| Path { share: host.share, seconds: remote_expert, trip, count: 1 })
                    .collect();
                let remote_share: f64 = paths.iter().map(|path| path.share).sum();
                paths.push(Path {
                    share: (1.0 - remote_share).max(0.0),
                    seconds: local_expert,
                    trip: 0.0,
                    count: 1,
                });
                expected_slowest(self.model.top_k, &paths)
            }
        };
        let whole_core = || self.curve_positions(WHOLE_CORE, WHOLE_CORE, false);
        let shared = model.shared_core_bound(self.hosting_groups.len(), || {
            let core = whole_core();
            let remote: f64 =
                self.replica_prefills.iter().map(|replica| core.remote.value(&replica.cpu_seconds)).sum();
            core.main.value(&self.local_prefill) + remote
        });
        times.prefill += self.prefill_calls * model.send + slowest.max(shared);
        let shared = model.shared_core_bound(self.hosting_groups.len(), || {
            let core = whole_core();
            let remote_share: f64 = self.hosting_groups.iter().map(|host| host.share).sum();
            let local = self.local_token_seconds(core.main);
            let remote = self.remote_token_seconds(core.remote);
            self.model.per_token() * ((1.0 - remote_share).max(0.0) * local + remote_share * remote)
        });
        let sending = self.step_calls.iter().map(|calls| calls * model.send);
        let mut steps = times.steps.iter_mut().zip(sending);
        if let Some((step, sending)) = steps.next() {
            *step += sending + single_step.max(shared);
        }
        for (paths, (step, sending)) in self.batch_work.iter().zip(steps) {
            let shared = model.shared_core_bound(self.hosting_groups.len(), || {
                let core = whole_core();
                let positions = std::iter::once(core.main).chain(std::iter::repeat(core.remote));
                paths.iter().zip(positions).map(|(path, position)| position.value(&path.mean)).sum()
            });
            let positions = std::iter::once(main).chain(std::iter::repeat(remote));
            let work = paths.iter().zip(positions).map(|(path, position)| PathWork {
                mean: position.value(&path.mean) + path.transfer_seconds,
                variance: position.value(&path.deviation).powi(2),
            });
            *step += sending + slowest_of(work).max(shared);
        }
    }

    /// Adds the layer's CPU work without contention to `work`: of the main function first, then of every group.
    fn add_cpu_work(
        &self,
        model: &Model<'_>,
        positions: &CurvePositions,
        batches: &[f64],
        work: &mut [CpuWork],
    ) {
        let CurvePositions { main, remote } = *positions;
        // The steps of one path at every batch; `path` is an index into `batch_work`.
        let uncontended = |path: usize, position: CurvePosition, single_step: f64| {
            let many = self.batch_work.iter().map(move |paths| position.value(&paths[path].mean));
            let steps = std::iter::once(single_step).chain(many).zip(&self.contention.steps);
            steps.map(|(seconds, slowdown)| seconds / slowdown)
        };
        let remote_share = self.hosting_groups.iter().map(|host| host.share).sum::<f64>();
        let local_share = (1.0 - remote_share).max(0.0);
        let single_step = self.model.per_token() * local_share * self.local_token_seconds(main);
        work[0].experts.add(0.0, uncontended(0, main, single_step));
        let calls = self.step_calls.iter().map(|calls| calls * model.main_cpu);
        work[0].non_expert.add(0.0, calls);
        work[0].add_prefill(std::iter::once(CpuSeconds {
            experts: main.value(&self.local_prefill) / self.contention.prefill,
            non_expert: self.replica_prefills.len() as f64 * model.main_cpu,
        }));
        for (index, host) in self.hosting_groups.iter().enumerate() {
            let single_step = self.model.per_token() * host.share * self.remote_token_seconds(remote);
            let replicas = self.replica_prefills.iter().filter(|replica| replica.group == host.group);
            let prefill = replicas.map(|replica| CpuSeconds {
                experts: remote.value(&replica.cpu_seconds) / self.contention.prefill,
                non_expert: model.function_cpu,
            });
            let own = &mut work[1 + host.group];
            own.experts.add(0.0, uncontended(index + 1, remote, single_step));
            let calls = batches
                .iter()
                .map(|rows| self.model.call_probability(host.share, *rows) * model.function_cpu);
            own.non_expert.add(0.0, calls);
            own.add_prefill(prefill);
        }
    }
}

fn scaled(factor: f64, mut values: Vec<f64>) -> Vec<f64> {
    values.iter_mut().for_each(|value| *value *= factor);
    values
}

/// Returns the prefill work of the replicas of `group` in one layer, or `None` if a call exceeds the payload limit.
///
/// `slowdown`: contention factor of the prefill.
fn group_prefill(
    model: &Model<'_>,
    expert_times: &PathExpertTimes,
    layer: usize,
    group: usize,
    experts: &[u32],
    replicas: u32,
    slowdown: f64,
) -> Option<Vec<ReplicaPrefill>> {
    let layer_model = &model.layers[layer];
    let curve = layer_model.remote_curve();
    let tokens: Vec<f64> = experts
        .iter()
        .map(|expert| model.input * layer_model.per_token() * model.shares[layer][*expert as usize])
        .collect();
    let assigned: Vec<Vec<usize>> = if replicas == 1 {
        vec![(0..experts.len()).collect()]
    } else {
        // The assignment must not depend on sizes: it uses the times of one vCPU.
        let column = curve.column(1.0);
        let both_ways = model.up + model.down;
        let weights: Vec<f64> =
            tokens.iter().map(|tokens| curve.seconds(*tokens, column) + tokens * both_ways).collect();
        longest_first(&weights, replicas as usize).into_iter().map(|replica| replica.items).collect()
    };
    let mut prefills = Vec::new();
    for items in assigned {
        let rows: f64 = items.iter().map(|item| tokens[*item]).sum();
        // A token's hidden state is sent to a replica once, however many of the replica's experts it uses.
        let sent_tokens = rows.min(model.input);
        let sent_bytes = sent_tokens * model.problem.transport.token_bytes_up;
        if model.problem.limits.payload_bytes.is_some_and(|most| sent_bytes > most) {
            return None;
        }
        if sent_tokens > 0.0 {
            let seconds = expert_times.prefill.sums(items.iter().map(|item| experts[*item]));
            prefills.push(ReplicaPrefill {
                group,
                cpu_seconds: scaled(slowdown, seconds),
                transfer_seconds: rows * model.down + sent_tokens * model.up + model.invoke,
            });
        }
    }
    Some(prefills)
}
