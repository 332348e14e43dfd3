//! Changes that would turn the verdict, found by planning for the changed problem.
//!
//! That remote experts pay at a step is shown by one plan: evaluated in full, it keeps every limit and costs less
//! than every way without them, which are known exactly. That they do not is shown by the search of an answer, where
//! the work that is left allows it. Work is counted in terms that are summed, never in time, so that plans are the
//! same on every machine.

use crate::infeasible::device_too_small;
use crate::plans::{Effort, Inputs, Plans};
use crate::plans::{candidates, violations_of};
use crate::preallocation::walk;
use crate::search::selection::Candidate;
use crate::search::tables::LayerTable;
use crate::slicing::{ArrangementFamily, FeasiblePlan, LayerTerms};
use crate::verdict::{FlipFigure, VerdictFlip, VerdictFlips, best, rivals};
use crate::ways::ways;
use crate::words::{rounded_up, seconds};
use remoe_plan::cost::Evaluation;
use remoe_plan::cost::baselines::{AllLocalTimes, WithoutRemote};
use remoe_plan::model::Model;
use remoe_plan::plan::Plan;
use remoe_plan::problem::{CpuProfile, Device, Problem};
use remoe_plan::way::Way;
use std::cell::OnceCell;
use std::rc::Rc;

/// No figure is changed by more than this power of 2.
const DOUBLINGS: u32 = 6;
/// Halvings of the factor's logarithm: to 2 %.
const HALVINGS: usize = 5;
/// Terms that may be summed to find all turns of a verdict.
const MOST_WORK: usize = 9_000_000;
/// How many times the work of the answer's search one at other figures may be.
const SEARCHES: usize = 3;
/// Share of a coarse search's cost that plans are taken to cost at least.
const COARSE_SHARE: f64 = 0.9;
/// Plans that are tried at a step before anything is searched, at most.
const MOST_CARRIED: usize = 3;

/// More work than is left.
struct WorkLimitReached;

/// The question what turns a verdict, with everything that is the same at every step.
pub(crate) struct FlipSearch<'a, 'm> {
    inputs: &'a Inputs<'a, 'm>,
    unsplit: &'a AllLocalTimes,
    pays: bool,
    /// Choices of remote experts that steps search.
    choices: Vec<Candidate>,
    /// Plans with remote experts that were the cheapest somewhere, the latest first.
    carried: Vec<(ArrangementFamily, FeasiblePlan)>,
    /// Dollars of the cheapest plan with remote experts as things are; infinite where there is none.
    least: f64,
    /// Dollars at the end of each direction that makes such plans cheaper, as far as it was asked for.
    ends: Vec<(FlipFigure, f64)>,
    /// Work of the answer's search.
    search: usize,
    work: usize,
}

impl<'a, 'm> FlipSearch<'a, 'm> {
    /// Begins with the problem of `inputs`, where `plans` are the cheapest and remote experts pay or not.
    pub(crate) fn new(
        inputs: &'a Inputs<'a, 'm>,
        unsplit: &'a AllLocalTimes,
        plans: &Plans<'_>,
        pays: bool,
    ) -> Self {
        let known =
            [(ArrangementFamily::Sliced, &plans.sliced), (ArrangementFamily::PerLayer, &plans.per_layer)];
        let known = known.into_iter().filter_map(|(family, plan)| Some((family, plan.clone()?)));
        let mut carried: Vec<(ArrangementFamily, FeasiblePlan)> =
            known.filter(|(_, planned)| planned.plan.replicas() > 0).collect();
        carried.sort_by(|a, b| a.1.cost().total_cmp(&b.1.cost()));
        Self {
            inputs,
            unsplit,
            pays,
            choices: inputs.coarse_choices(),
            least: carried.first().map_or(f64::INFINITY, |(_, planned)| planned.cost()),
            ends: Vec::new(),
            carried,
            search: inputs.model.work_done(),
            work: 0,
        }
    }

    /// The nearest change of each figure by itself that turns the verdict, and how much work that was.
    pub(crate) fn turns(mut self) -> (VerdictFlips, usize) {
        let mut turns = VerdictFlips::default();
        let all = [FlipFigure::ArrivalRate, FlipFigure::Tpot, FlipFigure::ModelSize, FlipFigure::GpuPrice];
        for (index, cause) in all.into_iter().enumerate() {
            // Work that others leave is shared out again.
            let share = (MOST_WORK.saturating_sub(self.work)) / (all.len() - index);
            match self.turn(cause, self.work + share) {
                Ok(turn) => turns.found.extend(turn),
                Err(WorkLimitReached) => turns.undecided.push(cause),
            }
        }
        (turns, self.work)
    }

    fn turn(&mut self, cause: FlipFigure, most: usize) -> Result<Option<VerdictFlip>, WorkLimitReached> {
        let factor = |up: bool, logarithm: f64| if up { logarithm.exp2() } else { (-logarithm).exp2() };
        // The answer may turn and turn back: doublings first, then between the last that stays and the first
        // that turns.
        let mut first = Vec::new();
        for power in 1..=DOUBLINGS {
            for up in [true, false] {
                if let Some(way) = self.turned(cause, factor(up, f64::from(power)), most)? {
                    first.push((up, f64::from(power), way));
                }
            }
            if !first.is_empty() {
                break;
            }
        }
        let mut nearest: Option<(bool, f64, Way)> = None;
        for (up, power, way) in first {
            let (mut here, mut there, mut best) = (power - 1.0, power, way);
            for _ in 0..HALVINGS {
                let middle = f64::midpoint(here, there);
                match self.turned(cause, factor(up, middle), most) {
                    Ok(Some(way)) => (best, there) = (way, middle),
                    Ok(None) => here = middle,
                    // What turns it is known, only not to the last percent.
                    Err(WorkLimitReached) => break,
                }
            }
            if nearest.is_none_or(|(_, known, _)| there < known) {
                nearest = Some((up, there, best));
            }
        }
        let Some((up, logarithm, best)) = nearest else { return Ok(None) };
        let factor = factor(up, logarithm);
        let best = self.confirmed(cause, factor, best)?;
        let (at, words) = cause.words(self.inputs.model.problem, factor);
        Ok(Some(VerdictFlip { cause, factor, at, best, words }))
    }

    /// The cheapest way with the figure `factor` times as large, where the verdict is another one then.
    fn turned(
        &mut self,
        cause: FlipFigure,
        factor: f64,
        most: usize,
    ) -> Result<Option<Way>, WorkLimitReached> {
        let Some(changed) = cause.changed(self.inputs.model.problem, factor) else { return Ok(None) };
        if self.work >= most || self.inputs.model.ends() {
            return Err(WorkLimitReached);
        }
        let best = self.cheapest(cause, factor, &changed);
        if self.inputs.model.ends() {
            return Err(WorkLimitReached);
        }
        Ok(best.filter(|way| way.has_remote_experts() != self.pays))
    }

    /// The way that is the cheapest with the figure `factor` times as large, where the last word is that of the
    /// search which the answer came from, if there is work left for it; else `found`, if a plan shows it.
    fn confirmed(&mut self, cause: FlipFigure, factor: f64, found: Way) -> Result<Way, WorkLimitReached> {
        if self.work + SEARCHES * self.search > MOST_WORK {
            return if self.pays { Err(WorkLimitReached) } else { Ok(found) };
        }
        let Some(changed) = cause.changed(self.inputs.model.problem, factor) else {
            return Err(WorkLimitReached);
        };
        let robust = self.inputs.factors.is_some();
        let meter = &self.inputs.model.meter;
        let Ok((rivals, work)) = ways(&changed, self.inputs.remote, robust, Effort::Full, meter) else {
            return Err(WorkLimitReached);
        };
        self.work += work;
        if meter.ends() {
            return Err(WorkLimitReached);
        }
        let way = best(&rivals).map(|(way, _)| way);
        way.filter(|way| way.has_remote_experts() != self.pays).ok_or(WorkLimitReached)
    }

    /// The cheapest way to serve `changed`, of those with remote experts as far as few arrangements have it.
    fn cheapest(&mut self, cause: FlipFigure, factor: f64, changed: &Problem) -> Option<Way> {
        if self.inputs.model.ends() {
            return None;
        }
        changed.check().ok()?;
        let model = self.inputs.model.beside(changed).with_used(Rc::clone(self.inputs.model.used()));
        if device_too_small(&model).is_some() {
            return None;
        }
        let own_unsplit = cause.is_of_experts().then(|| AllLocalTimes::new(&model));
        let unsplit = own_unsplit.as_ref().unwrap_or(self.unsplit);
        let without = best(&rivals(&model, &WithoutRemote::new(&model, unsplit), &Plans::none()));
        let cutoff = without.map_or(f64::INFINITY, |(_, cost)| cost);
        // Where they do not pay, what they cost at least may say that they do not here either.
        let found = match self.pays || cutoff > self.floor(cause, factor) {
            true => self.below(cause, &model, cutoff),
            false => None,
        };
        self.count(&model);
        found.map(ArrangementFamily::way).or(without.map(|(way, _)| way))
    }

    /// Counts what was done with `model`, and what its problem takes to be read.
    fn count(&mut self, model: &Model<'_>) {
        self.work += model.work_done() + model.experts();
    }

    /// Least dollars that plans with remote experts are taken to cost with the figure `factor` times as large.
    fn floor(&mut self, cause: FlipFigure, factor: f64) -> f64 {
        match (cause, factor > 1.0) {
            // An hour is never cheaper where more requests come.
            (FlipFigure::ArrivalRate, true) => self.least / factor,
            (FlipFigure::ArrivalRate, false) => self.end(cause) * (-f64::from(DOUBLINGS)).exp2() / factor,
            // Plans get dearer, or fewer.
            (FlipFigure::Tpot, false) | (FlipFigure::ModelSize | FlipFigure::GpuPrice, true) => self.least,
            // They never get cheaper than at the end. A price is only a part of what they cost.
            (FlipFigure::Tpot, true) | (FlipFigure::ModelSize, false) => self.end(cause),
            (FlipFigure::GpuPrice, false) => self.end(cause).max(self.least * factor),
        }
    }

    /// Least dollars of plans with remote experts at the end of the direction of `cause` that makes them cheaper.
    fn end(&mut self, cause: FlipFigure) -> f64 {
        if let Some((_, known)) = self.ends.iter().find(|(known, _)| *known == cause) {
            return *known;
        }
        let power = f64::from(DOUBLINGS);
        let factor = if cause == FlipFigure::Tpot { power.exp2() } else { (-power).exp2() };
        let found =
            cause.changed(self.inputs.model.problem, factor).filter(|changed| changed.check().is_ok());
        let least = found.map_or(0.0, |changed| {
            let model = self.inputs.model.beside(&changed).with_used(Rc::clone(self.inputs.model.used()));
            let found = self.searched(cause, &model, f64::INFINITY);
            self.count(&model);
            found.map_or(f64::INFINITY, |(_, planned)| planned.cost() * COARSE_SHARE)
        });
        self.ends.push((cause, least));
        least
    }

    /// How a plan with remote experts that costs less than `cutoff` is formed, where one is found.
    fn below(&mut self, cause: FlipFigure, model: &Model<'_>, cutoff: f64) -> Option<ArrangementFamily> {
        let factors = self.inputs.factors;
        let violations =
            |plan: &Plan, evaluation: &Evaluation| violations_of(model, factors, plan, evaluation);
        let inputs = Inputs { model, violations: &violations, ..*self.inputs };
        let mut carried = self.carried.iter();
        let known = carried
            .find(|(_, planned)| inputs.carried(planned).is_some_and(|planned| planned.cost() < cutoff))
            .map(|(family, _)| *family);
        known.or_else(|| {
            let (family, planned) = self.searched(cause, model, cutoff)?;
            self.carried.insert(0, (family, planned));
            self.carried.truncate(MOST_CARRIED);
            Some(family)
        })
    }

    /// The cheapest plan with remote experts below `cutoff` of those that a coarse search finds.
    fn searched(
        &self,
        cause: FlipFigure,
        model: &Model<'_>,
        cutoff: f64,
    ) -> Option<(ArrangementFamily, FeasiblePlan)> {
        let is_own = cause.is_of_experts();
        let factors = self.inputs.factors;
        let violations =
            |plan: &Plan, evaluation: &Evaluation| violations_of(model, factors, plan, evaluation);
        let own_terms = OnceCell::new();
        let terms: &OnceCell<Option<Vec<LayerTerms>>> = if is_own { &own_terms } else { self.inputs.terms };
        let own_tables: Option<Vec<LayerTable>> = is_own.then(|| {
            model.add_work(model.experts());
            (0..model.layers.len()).map(|layer| LayerTable::new(model, layer)).collect()
        });
        let tables = own_tables.as_deref().unwrap_or(self.inputs.tables);
        let inputs = Inputs { model, tables, terms, violations: &violations, ..*self.inputs };
        let in_layers = if inputs.has_rival_layers() {
            model.add_work(model.most_experts() * model.layers.len());
            candidates(model, inputs.remote, &walk(model))
        } else {
            Vec::new()
        };
        Inputs { candidates: &in_layers, ..inputs }.below(cutoff, &self.choices)
    }
}

impl ArrangementFamily {
    fn way(self) -> Way {
        match self {
            Self::Sliced => Way::Sliced,
            Self::PerLayer => Way::Layers,
        }
    }
}

impl FlipFigure {
    /// `problem` with the figure `factor` times as large; none where it has no such figure.
    fn changed(self, problem: &Problem, factor: f64) -> Option<Problem> {
        let mut changed = problem.clone();
        match self {
            Self::ArrivalRate => {
                let arrivals = changed.arrivals.as_mut()?;
                arrivals.per_second *= factor;
                if let Some(times) = &mut arrivals.recorded_seconds {
                    times.iter_mut().for_each(|time| *time /= factor);
                }
            }
            Self::GpuPrice if problem.device == Device::Cpu && !problem.pricing.has_gpu() => return None,
            Self::GpuPrice => {
                let pricing = &mut changed.pricing;
                let prices = [&mut pricing.gpu_per_gb_second, &mut pricing.gpu_per_second_each];
                prices.into_iter().flatten().for_each(|price| *price *= factor);
                if !problem.pricing.has_gpu() {
                    return None;
                }
            }
            Self::ModelSize => {
                for layer in &mut changed.layers {
                    layer.expert_bytes *= factor;
                    scale(&mut layer.expert_seconds, factor);
                    layer.remote_expert_seconds.iter_mut().for_each(|profile| scale(profile, factor));
                    let on_gpu = layer.gpu_expert_seconds.iter_mut();
                    on_gpu.flat_map(|profile| &mut profile.seconds).for_each(|seconds| *seconds *= factor);
                }
            }
            Self::Tpot if problem.request.output_tokens == 0.0 => return None,
            Self::Tpot => changed.slo.tpot_seconds *= factor,
        }
        Some(changed)
    }

    /// Reports if the times of experts are changed: nothing about them holds then.
    fn is_of_experts(self) -> bool {
        self == Self::ModelSize
    }

    /// Changed figure, in words.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ArrivalRate => "request rate",
            Self::GpuPrice => "GPU price",
            Self::ModelSize => "expert size",
            Self::Tpot => "TPOT limit",
        }
    }

    fn words(self, problem: &Problem, factor: f64) -> (f64, String) {
        match self {
            Self::ArrivalRate => {
                let rate = problem.arrivals.as_ref().map_or(0.0, remoe_plan::alive::mean_per_second) * factor;
                let hourly = rounded_up(rate * 3600.0);
                (rate * 3600.0, format!("{hourly} requests per hour"))
            }
            Self::GpuPrice => (factor, format!("a GPU that costs {factor:.2} times as much")),
            Self::ModelSize => (factor, format!("experts that are {factor:.2} times as large")),
            Self::Tpot => {
                let at = problem.slo.tpot_seconds * factor;
                (at, format!("a TPOT limit of {}", seconds(at)))
            }
        }
    }
}

fn scale(profile: &mut CpuProfile, factor: f64) {
    profile.seconds.iter_mut().flatten().for_each(|seconds| *seconds *= factor);
}
