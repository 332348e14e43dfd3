//! Plans that stand figures that are wrong: the optimum for exact figures lies where a limit binds, and breaks it
//! first (AGH, arXiv 2604.07472, compares exact optima with sturdier plans in this way).

use super::{Planned, Slicing};
use crate::cost::Evaluation;
use crate::cost::stress::stressed;
use crate::problem::model::Model;
use crate::problem::{Affine, CpuProfile, Layer, Problem};
use crate::search::COST_TIE;
use serde::Serialize;

/// By how much each term of a profile may be wrong.
const WRONG: f64 = 1.3;
/// By how much the arrival rate may be.
const MORE_REQUESTS: f64 = 2.0;
/// Plans that are compared, at most.
const MOST_COMPARED: usize = 48;

/// What wrong figures do to a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sturdiness {
    /// Problems with one figure wrong that the plan was tried on.
    pub tried: usize,
    /// Of those, the ones in which it breaks a limit.
    pub broken: usize,
    /// The largest share by which it costs more there than planned.
    pub worst_above: f64,
    /// The ones in which the cheapest plan breaks a limit.
    pub broken_of_cheapest: usize,
    /// Share by which the plan costs more than the cheapest one.
    pub above_cheapest: f64,
    /// Every one of those problems.
    pub cases: Vec<WrongCase>,
}

/// One figure that is wrong.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WrongCase {
    /// Which.
    pub figure: WrongFigure,
    /// The limits that the plan breaks then.
    pub broken: Vec<String>,
    /// Those that the cheapest plan breaks.
    pub broken_of_cheapest: Vec<String>,
    /// Share by which the plan costs more than planned.
    pub above: f64,
}

/// A figure that may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WrongFigure {
    /// Seconds of experts in the main function, and in remote ones without figures of their own: 30 % more.
    Experts,
    /// Seconds of experts in remote functions: 30 % more.
    RemoteExperts,
    /// Seconds of everything but routed experts: 30 % more.
    Rest,
    /// Calls take 30 % longer, and the way has that much less bandwidth.
    Transport,
    /// Remote experts are used more than predicted: as much as the prediction errs in 5 % of the cases where that is
    /// known, else routing is half way to uniform.
    Prediction,
    /// Twice as many requests come.
    ArrivalRate,
}

impl WrongFigure {
    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Experts => "experts 30 % slower",
            Self::RemoteExperts => "remote experts 30 % slower",
            Self::Rest => "everything but experts 30 % slower",
            Self::Transport => "calls 30 % slower",
            Self::Prediction => "remote experts used more than predicted",
            Self::ArrivalRate => "twice as many requests",
        }
    }
}

/// A plan on every wrong problem.
struct Tried {
    evaluations: Vec<Evaluation>,
    /// On how many of them it breaks a limit.
    broken: usize,
    /// What it costs at its worst.
    worst: f64,
}

impl Tried {
    fn new(evaluations: Vec<Evaluation>) -> Self {
        let broken = evaluations.iter().filter(|evaluation| !evaluation.violations.is_empty()).count();
        let worst = evaluations.iter().map(|evaluation| evaluation.total_cost).fold(0.0, f64::max);
        Self { evaluations, broken, worst }
    }
}

impl Slicing<'_, '_> {
    /// The plan within `share` of the cost of `best` that breaks limits in the fewest wrong problems; of equal
    /// ones the one that costs least at its worst.
    pub(crate) fn sturdier(&self, best: &Planned, share: f64) -> (Planned, Sturdiness) {
        let problem = self.model.problem;
        let wrong: Vec<(WrongFigure, Problem)> = wrong_problems(problem);
        let models: Vec<(WrongFigure, Model<'_>)> =
            wrong.iter().map(|(figure, wrong)| (*figure, Model::new(wrong))).collect();
        let on = |planned: &Planned, figure: WrongFigure, model: &Model<'_>| match problem
            .prediction_p95
            .as_ref()
            .filter(|_| figure == WrongFigure::Prediction)
        {
            Some(factors) => stressed(self.model, factors, &planned.plan).evaluate(&planned.plan),
            None => model.evaluate(&planned.plan),
        };
        let tried = |planned: &Planned| {
            Tried::new(models.iter().map(|(figure, model)| on(planned, *figure, model)).collect())
        };
        let of_cheapest = tried(best);
        let mut chosen = (best.clone(), tried(best));
        let dearest = best.cost() * (1.0 + share);
        // Two steps: a size more of two functions is what a limit often needs.
        let mut seen = 0;
        for _ in 0..2 {
            let from = chosen.0.clone();
            for plan in self.neighbours(&from.plan, MOST_COMPARED - seen) {
                seen += 1;
                let Some(planned) = self.judged(&from.candidate, plan, None) else { continue };
                if planned.cost() > dearest {
                    continue;
                }
                let (own, known) = (tried(&planned), &chosen.1);
                let cheaper = own.worst < known.worst * (1.0 - COST_TIE);
                if own.broken < known.broken || own.broken == known.broken && cheaper && own.broken > 0 {
                    chosen = (planned, own);
                }
            }
            if chosen.1.broken == 0 {
                break;
            }
        }
        let (planned, own) = chosen;
        let limits = |evaluation: &Evaluation| {
            evaluation.violations.iter().map(|violation| violation.limit.clone()).collect()
        };
        let pairs = own.evaluations.iter().zip(&of_cheapest.evaluations);
        let cases = pairs.zip(&models).map(|((own, cheapest), (figure, _))| WrongCase {
            figure: *figure,
            broken: limits(own),
            broken_of_cheapest: limits(cheapest),
            above: own.total_cost / planned.cost() - 1.0,
        });
        let sturdiness = Sturdiness {
            tried: models.len(),
            broken: own.broken,
            worst_above: own.worst / planned.cost() - 1.0,
            broken_of_cheapest: of_cheapest.broken,
            above_cheapest: planned.cost() / best.cost() - 1.0,
            cases: cases.collect(),
        };
        (planned, sturdiness)
    }
}

/// `problem` with one figure wrong at a time, each in the direction that hurts.
fn wrong_problems(problem: &Problem) -> Vec<(WrongFigure, Problem)> {
    let with = |change: &dyn Fn(&mut Problem)| {
        let mut wrong = problem.clone();
        change(&mut wrong);
        wrong
    };
    let layers = |change: &dyn Fn(&mut Layer)| with(&|wrong| wrong.layers.iter_mut().for_each(change));
    let mut all = vec![
        (WrongFigure::Experts, layers(&|layer| slower(&mut layer.expert_seconds))),
        (
            WrongFigure::RemoteExperts,
            layers(&|layer| match &mut layer.remote_expert_seconds {
                Some(profile) => slower(profile),
                None => {
                    let mut profile = layer.expert_seconds.clone();
                    slower(&mut profile);
                    layer.remote_expert_seconds = Some(profile);
                }
            }),
        ),
        (
            WrongFigure::Rest,
            layers(&|layer| {
                layer.nonexpert_decode_seconds *= WRONG;
                let Affine { base, per_token } = layer.nonexpert_prefill_seconds;
                layer.nonexpert_prefill_seconds = Affine { base: base * WRONG, per_token: per_token * WRONG };
                layer.cpu_nonexpert_seconds.iter_mut().for_each(slower);
            }),
        ),
        (
            WrongFigure::Transport,
            with(&|wrong| {
                wrong.transport.invoke_seconds *= WRONG;
                wrong.transport.send_seconds *= WRONG;
                wrong.transport.main_cpu_seconds *= WRONG;
                wrong.transport.function_cpu_seconds *= WRONG;
                wrong.transport.bytes_per_second /= WRONG;
            }),
        ),
        (
            WrongFigure::Prediction,
            with(&|wrong| wrong.prediction.iter_mut().flatten().for_each(|shares| flattened(shares))),
        ),
    ];
    if problem.arrivals.is_some() {
        let twice = with(&|wrong| {
            let Some(arrivals) = &mut wrong.arrivals else { return };
            arrivals.per_second *= MORE_REQUESTS;
            arrivals.recorded_seconds.iter_mut().flatten().for_each(|time| *time /= MORE_REQUESTS);
        });
        all.push((WrongFigure::ArrivalRate, twice));
    }
    all
}

fn slower(profile: &mut CpuProfile) {
    profile.seconds.iter_mut().flatten().for_each(|seconds| *seconds *= WRONG);
}

/// Routing that is more even than was predicted: half of it uniform. Rare experts are used more often then.
fn flattened(shares: &mut [f64]) {
    let even = 1.0 / shares.len() as f64;
    shares.iter_mut().for_each(|share| *share = f64::midpoint(*share, even));
}
