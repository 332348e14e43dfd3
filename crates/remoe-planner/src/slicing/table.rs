//! The times of one arrangement of groups, for any pair of sizes.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use crate::slicing::rest::{RestOfLayers, SizeBound};
use crate::slicing::terms::{LayerTerms, PathTerms};
use remoe_plan::cost::contention::Slowed;
use remoe_plan::cost::lpt::longest_first;
use remoe_plan::cost::quota::{Computed, Pace};
use remoe_plan::cost::running::{ServingFunctions, Times};
use remoe_plan::cost::slowest::{Path, PathWork, Spread, expected_slowest, slowest_of};
use remoe_plan::model::sizing::Sizing;
use remoe_plan::model::{LayerModel, Model};
use remoe_plan::plan::Plan;

/// Up to this many experts per token a table of their spread is worth its memory.
const MOST_TABLED: usize = 16;

/// A function that has one core.
const WHOLE_CORE: Pace = Pace { vcpus: 1.0, stretch: 1.0 };

/// One arrangement: what is local, and which groups host the rest; all groups are of the same size.
pub(crate) struct Table<'m> {
    model: &'m Model<'m>,
    rest: &'m RestOfLayers,
    layers: Vec<Layer<'m>>,
    /// Functions of each group.
    replicas: u32,
    groups: usize,
    batches: Vec<f64>,
    start_seconds: f64,
}

struct Layer<'m> {
    model: &'m LayerModel,
    /// How many times longer experts take than alone; what else is here counts it.
    slowed: Slowed,
    /// Prefill seconds of the local experts at each vCPU column.
    local: Vec<f64>,
    /// One per function with tokens of the prefill.
    bins: Vec<Bin>,
    /// Per group with experts of this layer.
    shares: Vec<(usize, f64)>,
    spread: Option<Probabilities>,
    /// Groups that are called: in the prefill, and in one decode step at each batch.
    calls: (f64, Vec<f64>),
    /// Per batch but the first the local work, then that of every group.
    batches: Vec<Vec<BatchWork>>,
}

/// Part of a layer's prefill that one function computes.
struct Bin {
    group: usize,
    /// Seconds at each vCPU column.
    computing: Vec<f64>,
    /// Seconds on the way.
    way: f64,
}

/// The experts of one path in a step of several requests.
struct BatchWork {
    /// Mean seconds at each vCPU column, and the square root of the variance.
    mean: Vec<f64>,
    deviation: Vec<f64>,
    way: f64,
}

/// Probability that a token has at most so many local experts and no group more than so many.
struct Probabilities {
    side: usize,
    cells: Vec<f64>,
}

impl Probabilities {
    fn new(top_k: usize, local: f64, groups: &[f64]) -> Self {
        let side = top_k + 1;
        let mut cells = Vec::with_capacity(side * side);
        for most in 0..side {
            let spread = Spread::of(top_k, groups.iter().map(|share| (*share, most, 1)));
            cells.extend((0..side).map(|count| spread.with(local, count)));
        }
        Self { side, cells }
    }

    /// Expected seconds of the slowest path, with `local` per local expert, `remote` per remote one and
    /// `trip` for a group that is called.
    fn slowest(&self, local: f64, remote: f64, trip: f64) -> f64 {
        let (mut here, mut away) = (0, 0);
        // Nothing remote and one local expert more, or one remote expert more: whichever is there first.
        let (mut expected, mut before) = (0.0, self.cells[0]);
        while before < 1.0 - 1e-15 && (here + 1 < self.side || away + 1 < self.side) {
            let next_here = if here + 1 < self.side { (here + 1) as f64 * local } else { f64::INFINITY };
            let next_away =
                if away + 1 < self.side { (away + 1) as f64 * remote + trip } else { f64::INFINITY };
            let time = next_here.min(next_away);
            if next_here <= time {
                here += 1;
            }
            if next_away <= time {
                away += 1;
            }
            let within = self.cells[away * self.side + here];
            expected += time * (within - before);
            before = within;
        }
        expected
    }
}

impl<'m> Table<'m> {
    /// Builds the table of `plan`'s sets, whatever its sizes, with so many `replicas` of every group; none where the
    /// payload limit forbids it. Shares are those of `model`.
    /// `terms`: what is known of the experts, where it is kept.
    pub(crate) fn new(
        model: &'m Model<'m>,
        rest: &'m RestOfLayers,
        terms: Option<&[LayerTerms]>,
        plan: &Plan,
        replicas: u32,
    ) -> Option<Self> {
        let batches = model.batches();
        model.add_work(model.experts() * (2 + batches.len() / 2));
        let mut layers = Vec::with_capacity(model.layers.len());
        for layer in 0..model.layers.len() {
            layers.push(match terms {
                Some(terms) => Layer::new(model, &terms[layer], plan, layer, replicas, &batches)?,
                None => Layer::new(model, &LayerTerms::new(model, layer), plan, layer, replicas, &batches)?,
            });
        }
        let counts = plan.remote_counts();
        let hosted = plan.groups.iter().map(|group| model.weight_bytes(&group.experts));
        let main = model.nonexpert_bytes + model.local_expert_bytes(&counts);
        let start_seconds = model.start_seconds(main, hosted.fold(0.0, f64::max));
        Some(Self { model, rest, layers, replicas, groups: plan.groups.len(), batches, start_seconds })
    }

    /// Times with these sizes, at these rates: `quick` says how quick functions are, `cheap` what they cost. With
    /// `least` times are those that nothing as large or smaller undercuts, for where more vCPUs may take longer.
    pub(crate) fn running(
        &self,
        quick: &SizePair<'_>,
        cheap: &SizePair<'_>,
        least: bool,
    ) -> ServingFunctions {
        let model = self.model;
        model.add_work(self.layers.len() * (1 + self.batches.len()));
        let reserved = model.is_reserved();
        let mut billed = vec![0.0; if reserved { 0 } else { self.groups }];
        let (main, remote) = (model.pace(quick.main.vcpus), model.pace(quick.remote_vcpus()));
        let mut times = self.rest.times(main.vcpus, least);
        for layer in &self.layers {
            layer.add_times(model, &layer.places(main, remote, least), &mut times, &mut billed);
        }
        self.within_quotas(main, remote, least, &mut times);
        let (mut remote_rate, mut remote_bill) = (0.0, 0.0);
        if reserved {
            let rates: f64 = cheap.remote.iter().map(|sizing| sizing.rate).sum();
            remote_rate = rates * f64::from(self.replicas);
        } else {
            remote_bill =
                billed.iter().zip(cheap.remote).map(|(seconds, sizing)| seconds * sizing.rate).sum();
        }
        ServingFunctions {
            times,
            main_rate: model.gpu_rate + cheap.main.rate,
            remote_rate,
            remote_bill,
            start_seconds: self.start_seconds,
            sleepers: Vec::new(),
        }
    }

    /// `times`, no shorter than what the quota of any function allows.
    fn within_quotas(&self, main: Pace, remote: Pace, least: bool, times: &mut Times) {
        if main.stretch <= 1.0 && remote.stretch <= 1.0 {
            return;
        }
        let none = |pace, functions| Computed::none(self.batches.len(), pace, functions);
        let mut all = vec![none(main, 1)];
        all.resize(1 + self.groups, none(remote, self.replicas));
        let rest = self.rest.work(main.vcpus, least);
        all[0].add_prefill(std::iter::once((0.0, rest.prefill)));
        all[0].rest.add(0.0, rest.steps.into_iter());
        for layer in &self.layers {
            layer.add_computed(self.model, &layer.places(main, remote, least), &self.batches, &mut all);
        }
        self.model.throttled(&all, !least, times);
    }
}

/// Sizes of the main function and of every group; the groups' vCPUs are the same.
pub(crate) struct SizePair<'a> {
    pub(crate) main: Sizing,
    pub(crate) remote: &'a [Sizing],
}

impl SizePair<'_> {
    fn remote_vcpus(&self) -> f64 {
        self.remote.first().map_or(1.0, |sizing| sizing.vcpus)
    }
}

/// Where the main function and groups stand on a layer's curves.
struct CurvePositions {
    main: SizeBound,
    remote: SizeBound,
}

impl<'m> Layer<'m> {
    fn new(
        model: &'m Model<'m>,
        terms: &LayerTerms,
        plan: &Plan,
        layer: usize,
        replicas: u32,
        batches: &[f64],
    ) -> Option<Self> {
        let parts = &model.layers[layer];
        let remote = &plan.layers[layer].remote;
        let mut away = remote.iter().peekable();
        let local: Vec<u32> =
            (0..parts.experts as u32).filter(|expert| away.next_if_eq(&expert).is_none()).collect();
        let hosts = plan.groups.iter().enumerate().filter(|(_, group)| !group.experts[layer].is_empty());
        let hosts: Vec<(usize, &[u32])> =
            hosts.map(|(index, group)| (index, group.experts[layer].as_slice())).collect();
        let slowed = model.slowed(layer, plan);
        let mut bins = Vec::new();
        for (group, experts) in &hosts {
            bins.extend(bins_of(model, terms.away(), layer, *group, experts, replicas, slowed.prefill)?);
        }
        let shares_of: Vec<(usize, f64)> =
            hosts.iter().map(|(group, experts)| (*group, model.share_of(layer, experts))).collect();
        let away: Vec<f64> = shares_of.iter().map(|(_, share)| *share).collect();
        let here = (1.0 - away.iter().sum::<f64>()).max(0.0);
        let spread = (parts.top_k <= MOST_TABLED).then(|| Probabilities::new(parts.top_k, here, &away));
        let calls = |rows: &f64| away.iter().map(|share| parts.called(*share, *rows)).sum::<f64>();
        let work = |terms: &PathTerms, batch: usize, experts: &[u32], way: f64| {
            let slowed = slowed.steps[batch + 1];
            let (mean, variance) = &terms.batches[batch];
            let deviation = variance.sums(experts.iter().copied()).into_iter().map(f64::sqrt);
            BatchWork {
                mean: times(slowed, mean.sums(experts.iter().copied())),
                deviation: times(slowed, deviation.collect()),
                way,
            }
        };
        let batch = |(batch, rows): (usize, &f64)| {
            let mut works = vec![work(&terms.here, batch, &local, 0.0)];
            for ((_, experts), share) in hosts.iter().zip(&away) {
                let share = share.min(1.0);
                let travelling = rows * parts.called(share, 1.0);
                let way = rows * parts.per_token() * share * model.down
                    + travelling * model.up
                    + parts.called(share, *rows) * model.invoke;
                works.push(work(terms.away(), batch, experts, way));
            }
            works
        };
        let working: std::collections::BTreeSet<usize> = bins.iter().map(|bin| bin.group).collect();
        Some(Self {
            model: parts,
            local: times(slowed.prefill, terms.here.prefill.sums(local.iter().copied())),
            calls: (working.len() as f64, batches.iter().map(calls).collect()),
            batches: batches[1..].iter().enumerate().map(batch).collect(),
            bins,
            shares: shares_of,
            spread,
            slowed,
        })
    }

    /// Seconds of one local expert with one token.
    fn one_here(&self, main: SizeBound) -> f64 {
        self.slowed.steps[0] * main.of(self.model.curve.one())
    }

    /// Seconds of one remote expert with one token.
    fn one_away(&self, remote: SizeBound) -> f64 {
        self.slowed.steps[0] * remote.of(self.model.remote_curve().one())
    }

    fn places(&self, main: Pace, remote: Pace, least: bool) -> CurvePositions {
        let (curve, remote_curve) = (&self.model.curve, self.model.remote_curve());
        CurvePositions {
            main: SizeBound { column: curve.column(main.vcpus), least },
            remote: SizeBound { column: remote_curve.column(remote.vcpus), least },
        }
    }

    /// Adds how long the experts of the layer take to `times`, and what groups work to `billed`.
    fn add_times(&self, model: &Model<'_>, places: &CurvePositions, times: &mut Times, billed: &mut [f64]) {
        let CurvePositions { main, remote } = *places;
        let mut slowest = main.of(&self.local);
        for bin in &self.bins {
            let seconds = remote.of(&bin.computing) + bin.way;
            slowest = slowest.max(seconds);
            if let Some(billed) = billed.get_mut(bin.group) {
                *billed += seconds;
            }
        }
        let (here, away) = (self.one_here(main), self.one_away(remote) + model.down);
        let trip = model.round_trip();
        let bills = !billed.is_empty();
        for (group, share) in self.shares.iter().filter(|_| bills) {
            let share = share.min(1.0);
            let called = self.model.called(share, 1.0);
            billed[*group] += model.output * (self.model.per_token() * share * away + called * trip);
        }
        let one = match &self.spread {
            Some(spread) => spread.slowest(here, away, trip),
            None => {
                let mut paths: Vec<Path> = self
                    .shares
                    .iter()
                    .map(|(_, share)| Path { share: *share, seconds: away, trip, count: 1 })
                    .collect();
                let rest: f64 = paths.iter().map(|path| path.share).sum();
                paths.push(Path { share: (1.0 - rest).max(0.0), seconds: here, trip: 0.0, count: 1 });
                expected_slowest(self.model.top_k, &paths)
            }
        };
        let alone = || self.places(WHOLE_CORE, WHOLE_CORE, false);
        let shared = model.shared(self.shares.len(), || {
            let alone = alone();
            let away: f64 = self.bins.iter().map(|bin| alone.remote.of(&bin.computing)).sum();
            alone.main.of(&self.local) + away
        });
        times.prefill += self.calls.0 * model.send + slowest.max(shared);
        let shared = model.shared(self.shares.len(), || {
            let alone = alone();
            let away: f64 = self.shares.iter().map(|(_, share)| share).sum();
            let (here, there) = (self.one_here(alone.main), self.one_away(alone.remote));
            self.model.per_token() * ((1.0 - away).max(0.0) * here + away * there)
        });
        let calls = self.calls.1.iter().map(|calls| calls * model.send);
        let mut steps = times.steps.iter_mut().zip(calls);
        if let Some((step, sending)) = steps.next() {
            *step += sending + one.max(shared);
        }
        for (works, (step, sending)) in self.batches.iter().zip(steps) {
            let shared = model.shared(self.shares.len(), || {
                let alone = alone();
                let places = std::iter::once(alone.main).chain(std::iter::repeat(alone.remote));
                works.iter().zip(places).map(|(work, place)| place.of(&work.mean)).sum()
            });
            let places = std::iter::once(main).chain(std::iter::repeat(remote));
            let works = works.iter().zip(places).map(|(work, place)| PathWork {
                mean: place.of(&work.mean) + work.way,
                variance: place.of(&work.deviation).powi(2),
            });
            *step += sending + slowest_of(works).max(shared);
        }
    }

    /// Adds what the main function and every group compute of it to `all`, the main function first.
    fn add_computed(
        &self,
        model: &Model<'_>,
        places: &CurvePositions,
        batches: &[f64],
        all: &mut [Computed],
    ) {
        let CurvePositions { main, remote } = *places;
        let alone = |path: usize, place: SizeBound, one: f64| {
            let many = self.batches.iter().map(move |works| place.of(&works[path].mean));
            let steps = std::iter::once(one).chain(many).zip(&self.slowed.steps);
            steps.map(|(seconds, slowed)| seconds / slowed)
        };
        let share = (1.0 - self.shares.iter().map(|(_, share)| share).sum::<f64>()).max(0.0);
        let one = self.model.per_token() * share * self.one_here(main);
        all[0].experts.add(0.0, alone(0, main, one));
        let calls = self.calls.1.iter().map(|calls| calls * model.main_cpu);
        all[0].rest.add(0.0, calls);
        let sent = self.bins.len() as f64 * model.main_cpu;
        all[0].add_prefill(std::iter::once((main.of(&self.local) / self.slowed.prefill, sent)));
        for (index, (group, share)) in self.shares.iter().enumerate() {
            let bins = || self.bins.iter().filter(|bin| bin.group == *group);
            let one = self.model.per_token() * share * self.one_away(remote);
            let prefill = bins().map(|bin| remote.of(&bin.computing) / self.slowed.prefill);
            let computed = &mut all[1 + *group];
            computed.experts.add(0.0, alone(index + 1, remote, one));
            let calls = batches.iter().map(|rows| self.model.called(*share, *rows) * model.function_cpu);
            computed.rest.add(0.0, calls);
            computed.add_prefill(prefill.map(|seconds| (seconds, model.function_cpu)));
        }
    }
}

/// `values` times `factor`.
fn times(factor: f64, mut values: Vec<f64>) -> Vec<f64> {
    values.iter_mut().for_each(|value| *value *= factor);
    values
}

/// Returns the parts of a layer's prefill that the functions of `group` compute; none where the payload limit forbids
/// it.
fn bins_of(
    model: &Model<'_>,
    terms: &PathTerms,
    layer: usize,
    group: usize,
    experts: &[u32],
    replicas: u32,
    slowed: f64,
) -> Option<Vec<Bin>> {
    let parts = &model.layers[layer];
    let curve = parts.remote_curve();
    let tokens: Vec<f64> = experts
        .iter()
        .map(|expert| model.input * parts.per_token() * model.shares[layer][*expert as usize])
        .collect();
    let dealt: Vec<Vec<usize>> = if replicas == 1 {
        vec![(0..experts.len()).collect()]
    } else {
        let column = curve.column(1.0);
        let both_ways = model.up + model.down;
        let weights: Vec<f64> =
            tokens.iter().map(|tokens| curve.seconds(*tokens, column) + tokens * both_ways).collect();
        let dealt = longest_first(&weights, replicas as usize);
        dealt.into_iter().map(|replica| replica.items).collect()
    };
    let mut bins = Vec::new();
    for items in dealt {
        let rows: f64 = items.iter().map(|item| tokens[*item]).sum();
        let travelling = rows.min(model.input);
        let sent = travelling * model.problem.transport.token_bytes_up;
        if model.problem.limits.payload_bytes.is_some_and(|most| sent > most) {
            return None;
        }
        if travelling > 0.0 {
            let computing = times(slowed, terms.prefill.sums(items.iter().map(|item| experts[*item])));
            bins.push(Bin {
                group,
                computing,
                way: rows * model.down + travelling * model.up + model.invoke,
            });
        }
    }
    Some(bins)
}
