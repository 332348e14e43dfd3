//! The times of one arrangement of groups, for any pair of sizes.

use crate::cost::quota::Pace;
use crate::cost::running::{Running, Times};
use crate::cost::slowest::{Path, Spread, Work, expected_slowest, slowest_of};
use crate::plan::Plan;
use crate::problem::curve::Column;
use crate::problem::model::{LayerModel, Model, Sizing};
use crate::slicing::terms::{LayerTerms, PathTerms};

/// Up to this many experts per token a table of their spread is worth its memory.
const MOST_TABLED: usize = 16;

/// One arrangement: what is local, and which groups host the rest; all groups are of the same size.
pub(crate) struct Table<'m> {
    model: &'m Model<'m>,
    layers: Vec<Layer<'m>>,
    /// Functions of each group.
    replicas: u32,
    groups: usize,
    batches: Vec<f64>,
    start_seconds: f64,
}

struct Layer<'m> {
    model: &'m LayerModel,
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

/// What one function computes of a layer's prefill.
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
    /// Of `plan`'s sets, whatever its sizes, with so many `replicas` of every group; none where the payload
    /// limit forbids it. Shares are those of `model`.
    /// `terms`: what is known of the experts, where it is kept.
    pub(crate) fn new(
        model: &'m Model<'m>,
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
        Some(Self { model, layers, replicas, groups: plan.groups.len(), batches, start_seconds })
    }

    /// Times with these sizes, at these rates: `quick` says how quick functions are, `cheap` what they cost.
    pub(crate) fn running(&self, quick: &Pair<'_>, cheap: &Pair<'_>) -> Running {
        let model = self.model;
        model.add_work(self.layers.len() * (1 + self.batches.len()));
        let mut running = Running {
            times: Times::none(self.batches.len()),
            main_rate: model.gpu_rate + cheap.main.rate,
            remote_rate: 0.0,
            remote_bill: 0.0,
            start_seconds: self.start_seconds,
        };
        let reserved = model.is_reserved();
        let mut billed = vec![0.0; if reserved { 0 } else { self.groups }];
        let (main, remote) = (model.pace(quick.main.vcpus), model.pace(quick.remote_vcpus()));
        for layer in &self.layers {
            let times = layer.times(model, (main, remote), &self.batches, &mut billed);
            running.times.add(times.prefill, times.steps.into_iter());
        }
        self.within_quotas(main, remote, &mut running.times);
        if reserved {
            let rates: f64 = cheap.remote.iter().map(|sizing| sizing.rate).sum();
            running.remote_rate = rates * f64::from(self.replicas);
        } else {
            running.remote_bill =
                billed.iter().zip(cheap.remote).map(|(seconds, sizing)| seconds * sizing.rate).sum();
        }
        running
    }

    /// `times`, no shorter than what the quota of any function allows.
    fn within_quotas(&self, main: Pace, remote: Pace, times: &mut Times) {
        if main.stretch > 1.0 {
            let mut work = Times::none(self.batches.len());
            for layer in &self.layers {
                let own = layer.work_of_main(self.model, main, &self.batches);
                work.add(own.prefill, own.steps.into_iter());
            }
            times.at_least(&work, main.stretch);
        }
        if remote.stretch > 1.0 {
            let mut works = vec![Times::none(self.batches.len()); self.groups];
            for layer in &self.layers {
                for (group, own) in layer.work_of_groups(self.model, remote, &self.batches) {
                    works[group].add(own.prefill, own.steps.into_iter());
                }
            }
            for work in works {
                times.at_least(&work, remote.stretch / f64::from(self.replicas));
            }
        }
    }
}

/// Sizes of the main function and of every group; the groups' vCPUs are the same.
pub(crate) struct Pair<'a> {
    pub(crate) main: Sizing,
    pub(crate) remote: &'a [Sizing],
}

impl Pair<'_> {
    fn remote_vcpus(&self) -> f64 {
        self.remote.first().map_or(1.0, |sizing| sizing.vcpus)
    }
}

fn at(column: Column, of: &[f64]) -> f64 {
    column.of(ndarray::ArrayView1::from(of))
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
        let local: Vec<u32> =
            (0..parts.experts as u32).filter(|expert| remote.binary_search(expert).is_err()).collect();
        let hosts = plan.groups.iter().enumerate().filter(|(_, group)| !group.experts[layer].is_empty());
        let hosts: Vec<(usize, &[u32])> =
            hosts.map(|(index, group)| (index, group.experts[layer].as_slice())).collect();
        let mut bins = Vec::new();
        for (group, experts) in &hosts {
            bins.extend(bins_of(model, terms.away(), layer, *group, experts, replicas)?);
        }
        let shares_of: Vec<(usize, f64)> =
            hosts.iter().map(|(group, experts)| (*group, model.share_of(layer, experts))).collect();
        let away: Vec<f64> = shares_of.iter().map(|(_, share)| *share).collect();
        let here = (1.0 - away.iter().sum::<f64>()).max(0.0);
        let spread = (parts.top_k <= MOST_TABLED).then(|| Probabilities::new(parts.top_k, here, &away));
        let calls = |rows: &f64| away.iter().map(|share| parts.called(*share, *rows)).sum::<f64>();
        let work = |terms: &PathTerms, batch: usize, experts: &[u32], way: f64| {
            let (mean, variance) = &terms.batches[batch];
            BatchWork {
                mean: mean.sums(experts.iter().copied()),
                deviation: variance.sums(experts.iter().copied()).into_iter().map(f64::sqrt).collect(),
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
            local: terms.here.prefill.sums(local.iter().copied()),
            calls: (working.len() as f64, batches.iter().map(calls).collect()),
            batches: batches[1..].iter().enumerate().map(batch).collect(),
            bins,
            shares: shares_of,
            spread,
        })
    }

    /// How long the layer takes when main function and groups compute so; what groups work is added to `billed`.
    fn times(
        &self,
        model: &Model<'_>,
        (main, remote): (Pace, Pace),
        batches: &[f64],
        billed: &mut [f64],
    ) -> Times {
        let vcpus = main.vcpus;
        let (curve, remote_curve) = (&self.model.curve, self.model.remote_curve());
        let (main, remote) = (curve.column(vcpus), remote_curve.column(remote.vcpus));
        let mut slowest = at(main, &self.local);
        for bin in &self.bins {
            let seconds = at(remote, &bin.computing) + bin.way;
            slowest = slowest.max(seconds);
            if let Some(billed) = billed.get_mut(bin.group) {
                *billed += seconds;
            }
        }
        let (here, away) = (curve.seconds(1.0, main), remote_curve.seconds(1.0, remote) + model.down);
        let trip = model.round_trip();
        let bills = !billed.is_empty();
        for (group, share) in self.shares.iter().filter(|_| bills) {
            let share = share.min(1.0);
            let called = self.model.called(share, 1.0);
            billed[*group] += model.output * (self.model.per_token() * share * away + called * trip);
        }
        let fixed = self.model.fixed(vcpus);
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
        let alone = || (curve.column(1.0), remote_curve.column(1.0));
        let shared = model.shared(self.shares.len(), || {
            let (alone, remote_alone) = alone();
            let away: f64 = self.bins.iter().map(|bin| at(remote_alone, &bin.computing)).sum();
            at(alone, &self.local) + away
        });
        let slowest = slowest.max(shared);
        let shared = model.shared(self.shares.len(), || {
            let (alone, remote_alone) = alone();
            let away: f64 = self.shares.iter().map(|(_, share)| share).sum();
            let (here, there) = (curve.seconds(1.0, alone), remote_curve.seconds(1.0, remote_alone));
            self.model.per_token() * ((1.0 - away).max(0.0) * here + away * there)
        });
        let mut steps = vec![fixed.step + self.calls.1[0] * model.send + one.max(shared)];
        for (index, works) in self.batches.iter().enumerate() {
            let shared = model.shared(self.shares.len(), || {
                let (alone, remote_alone) = alone();
                let columns = std::iter::once(alone).chain(std::iter::repeat(remote_alone));
                works.iter().zip(columns).map(|(work, column)| at(column, &work.mean)).sum()
            });
            let columns = std::iter::once(main).chain(std::iter::repeat(remote));
            let works = works.iter().zip(columns).map(|(work, column)| Work {
                mean: at(column, &work.mean) + work.way,
                variance: at(column, &work.deviation).powi(2),
            });
            let fixed = self.model.fixed_step(vcpus, batches[index + 1]);
            steps.push(fixed + self.calls.1[index + 1] * model.send + slowest_of(works).max(shared));
        }
        Times { prefill: fixed.prefill + self.calls.0 * model.send + slowest, steps }
    }

    /// What the main function computes of it.
    fn work_of_main(&self, model: &Model<'_>, pace: Pace, batches: &[f64]) -> Times {
        let column = self.model.curve.column(pace.vcpus);
        let rest = |rows: f64| self.model.computing(pace.vcpus, rows);
        let share = (1.0 - self.shares.iter().map(|(_, share)| share).sum::<f64>()).max(0.0);
        let one = self.model.per_token() * share * self.model.curve.seconds(1.0, column);
        let many = self.batches.iter().map(|works| at(column, &works[0].mean));
        let experts = std::iter::once(one).chain(many);
        let calls = self.calls.1.iter().map(|calls| calls * model.main_cpu);
        let steps =
            experts.zip(calls).zip(batches).map(|((experts, calls), rows)| experts + calls + rest(*rows));
        let prefill = at(column, &self.local) + self.bins.len() as f64 * model.main_cpu + rest(model.input);
        Times { prefill, steps: steps.collect() }
    }

    /// What all functions of every group that it calls compute of it, by the groups' numbers.
    fn work_of_groups(
        &self,
        model: &Model<'_>,
        pace: Pace,
        batches: &[f64],
    ) -> impl Iterator<Item = (usize, Times)> {
        let curve = self.model.remote_curve();
        let column = curve.column(pace.vcpus);
        let expert = curve.seconds(1.0, column);
        self.shares.iter().enumerate().map(move |(index, (group, share))| {
            let bins = self.bins.iter().filter(|bin| bin.group == *group);
            let many = self.batches.iter().map(|works| at(column, &works[index + 1].mean));
            let steps = std::iter::once(self.model.per_token() * share * expert).chain(many);
            let calls = |rows: &f64| self.model.called(*share, *rows) * model.function_cpu;
            let steps = steps.zip(batches).map(|(experts, rows)| experts + calls(rows));
            let prefill = bins.map(|bin| at(column, &bin.computing) + model.function_cpu).sum();
            (*group, Times { prefill, steps: steps.collect() })
        })
    }
}

/// What the functions of `group` compute of a layer's prefill; none where the payload limit forbids it.
fn bins_of(
    model: &Model<'_>,
    terms: &PathTerms,
    layer: usize,
    group: usize,
    experts: &[u32],
    replicas: u32,
) -> Option<Vec<Bin>> {
    let parts = &model.layers[layer];
    let curve = parts.remote_curve();
    let tokens: Vec<f64> = experts
        .iter()
        .map(|expert| model.input * parts.per_token() * model.shares[layer][*expert as usize])
        .collect();
    let column = curve.column(1.0);
    let both_ways = model.up + model.down;
    let weights: Vec<f64> =
        tokens.iter().map(|tokens| curve.seconds(*tokens, column) + tokens * both_ways).collect();
    let mut bins = Vec::new();
    for replica in crate::cost::lpt::longest_first(&weights, replicas as usize) {
        let rows: f64 = replica.items.iter().map(|item| tokens[*item]).sum();
        let travelling = rows.min(model.input);
        let sent = travelling * model.problem.transport.token_bytes_up;
        if model.problem.limits.payload_bytes.is_some_and(|most| sent > most) {
            return None;
        }
        if travelling > 0.0 {
            let computing = terms.prefill.sums(replica.items.iter().map(|item| experts[*item]));
            bins.push(Bin {
                group,
                computing,
                way: rows * model.down + travelling * model.up + model.invoke,
            });
        }
    }
    Some(bins)
}
