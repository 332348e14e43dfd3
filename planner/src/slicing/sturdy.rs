//! Plans that stand figures that are wrong: the optimum for exact figures lies where a limit binds, and breaks it
//! first (AGH, arXiv 2604.07472, compares exact optima with sturdier plans in this way).

use super::{Planned, Slicing};
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sturdiness {
    /// Problems with one figure wrong that the plan was tried on.
    pub tried: usize,
    /// Of those, the ones in which it breaks a limit.
    pub broken: usize,
    /// The largest share by which it costs more there than planned.
    pub worst_above: f64,
    /// The same two of the cheapest plan.
    pub broken_of_cheapest: usize,
    /// Share by which the plan costs more than the cheapest one.
    pub above_cheapest: f64,
}

impl Slicing<'_, '_> {
    /// The plan within `share` of the cost of `best` that breaks limits in the fewest wrong problems; of equal
    /// ones the one that costs least at its worst.
    pub(crate) fn sturdier(&self, best: &Planned, share: f64) -> (Planned, Sturdiness) {
        let wrong: Vec<Problem> = wrong_problems(self.model.problem);
        let models: Vec<Model<'_>> = wrong.iter().map(Model::new).collect();
        let tried = |planned: &Planned| {
            let mut broken = 0;
            let mut worst = 0.0_f64;
            for model in &models {
                let evaluation = model.evaluate(&planned.plan);
                broken += usize::from(!evaluation.violations.is_empty());
                worst = worst.max(evaluation.total_cost);
            }
            (broken, worst)
        };
        let mut chosen = (best.clone(), tried(best));
        let (broken_of_cheapest, _) = chosen.1;
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
                let (broken, worst) = tried(&planned);
                let (least, least_worst) = chosen.1;
                if broken < least || broken == least && worst < least_worst * (1.0 - COST_TIE) && broken > 0 {
                    chosen = (planned, (broken, worst));
                }
            }
            if chosen.1.0 == 0 {
                break;
            }
        }
        let (planned, (broken, worst)) = chosen;
        let sturdiness = Sturdiness {
            tried: models.len(),
            broken,
            worst_above: worst / planned.cost() - 1.0,
            broken_of_cheapest,
            above_cheapest: planned.cost() / best.cost() - 1.0,
        };
        (planned, sturdiness)
    }
}

/// `problem` with one figure wrong at a time, each in the direction that hurts.
fn wrong_problems(problem: &Problem) -> Vec<Problem> {
    let with = |change: &dyn Fn(&mut Problem)| {
        let mut wrong = problem.clone();
        change(&mut wrong);
        wrong
    };
    let layers = |change: &dyn Fn(&mut Layer)| with(&|wrong| wrong.layers.iter_mut().for_each(change));
    let mut all = vec![
        layers(&|layer| slower(&mut layer.expert_seconds)),
        layers(&|layer| match &mut layer.remote_expert_seconds {
            Some(profile) => slower(profile),
            None => {
                let mut profile = layer.expert_seconds.clone();
                slower(&mut profile);
                layer.remote_expert_seconds = Some(profile);
            }
        }),
        layers(&|layer| {
            layer.nonexpert_decode_seconds *= WRONG;
            let Affine { base, per_token } = layer.nonexpert_prefill_seconds;
            layer.nonexpert_prefill_seconds = Affine { base: base * WRONG, per_token: per_token * WRONG };
            layer.cpu_nonexpert_seconds.iter_mut().for_each(slower);
        }),
        with(&|wrong| {
            wrong.transport.invoke_seconds *= WRONG;
            wrong.transport.send_seconds *= WRONG;
            wrong.transport.main_cpu_seconds *= WRONG;
            wrong.transport.function_cpu_seconds *= WRONG;
            wrong.transport.bytes_per_second /= WRONG;
        }),
        with(&|wrong| wrong.prediction.iter_mut().flatten().for_each(|shares| flattened(shares))),
    ];
    if problem.arrivals.is_some() {
        all.push(with(&|wrong| {
            let Some(arrivals) = &mut wrong.arrivals else { return };
            arrivals.per_second *= MORE_REQUESTS;
            arrivals.recorded_seconds.iter_mut().flatten().for_each(|time| *time /= MORE_REQUESTS);
        }));
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
