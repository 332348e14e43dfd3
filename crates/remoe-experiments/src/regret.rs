//! Regret: what a plan is worth when the figures that it was made from are wrong.
//!
//! A problem is planned twice, exactly (the cheapest plan of its figures) and sturdily (the plan that `remoe plan` and
//! the operator take: within 2 % of the cheapest cost the one that breaks the fewest limits in wrong problems). Then
//! one figure at a time turns out to be another ([`MisestimatedInput`], in both directions), and both plans are evaluated
//! under the true figures beside the plan that is made from those: a clairvoyant's.

use crate::error::ExperimentError;
use crate::map::{Subject, UnitRegime};
use remoe_planner::{
    ErrorDirection, Evaluation, MisestimatedInput, Options, PlanDraft, PlanError, PlanningResult, Pricing,
    Problem, Slo, evaluate, solve,
};
use serde::Serialize;

/// Share of the cost by which a sturdy plan may be dearer.
const STURDY: f64 = 0.02;
/// Requests per day where functions are always there, and where they sleep between requests.
const PER_DAY: [f64; 2] = [1_000.0, 100.0];
/// Larger models take a second or more for each of some hundred plans.
const MOST_EXPERTS: usize = 2_000;
/// A limit binds where it is this part of what the cheapest plan takes without it.
const TIGHT: f64 = 0.8;

/// A problem to plan for.
#[derive(Debug, Clone, PartialEq)]
pub struct RegretSubject {
    /// Name of the subject.
    pub name: String,
    /// The figures that it is planned from.
    pub problem: Problem,
}

/// Cost of a plan under the true figures, and the limits that it breaks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Met {
    /// Dollars of a request.
    pub cost: f64,
    /// Limits that it breaks.
    pub broken: Vec<String>,
    /// Share by which it costs more than the clairvoyant's plan; absent where there is none, and where the plan breaks
    /// a limit, which the clairvoyant's does not.
    pub regret: Option<f64>,
}

/// One figure that turned out to be another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RegretCase {
    /// Name of the subject that was planned for.
    pub subject: String,
    /// Which figure.
    pub figure: MisestimatedInput,
    /// In which direction.
    pub truth: ErrorDirection,
    /// The plan that is taken.
    pub sturdy: Met,
    /// The cheapest plan of the wrong figures.
    pub exact: Met,
    /// Dollars of the cheapest plan of the true figures; absent where no plan keeps the limits under them.
    pub clairvoyant: Option<f64>,
}

/// Sturdy plan of a problem, compared with the exact one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SturdyPlan {
    /// Name of the subject that was planned for.
    pub subject: String,
    /// Groups of the sturdy plan; 0 where every layer has a function of its own, or nothing is remote.
    pub groups: usize,
    /// Remote functions of the sturdy plan.
    pub functions: u64,
    /// Share by which it costs more than the exact plan, figures being right.
    pub above_exact: f64,
}

/// Regret over all subjects.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Regret {
    /// Plans of the subjects; subjects without any plan are left out.
    pub plans: Vec<SturdyPlan>,
    /// Every case.
    pub cases: Vec<RegretCase>,
}

/// Some cases in numbers, for one of the two plans.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Cases in which some plan keeps the limits.
    pub cases: usize,
    /// Cases among these in which this plan breaks a limit.
    pub broken: usize,
    /// Median share by which it costs more than the clairvoyant's, where it keeps the limits; absent where it never
    /// does.
    pub median: Option<f64>,
    /// The largest.
    pub most: Option<f64>,
}

impl RegretSubject {
    /// Published models of the map, those with up to 2,000 experts in all, under requests at random, always there at
    /// the prices and on the machine of the map's first regime and asleep between requests at those of its second,
    /// each with the map's limits and with limits that bind.
    ///
    /// # Errors
    /// No problem can be made of a model.
    pub fn published(pricing: Pricing) -> Result<Vec<Self>, ExperimentError> {
        let regimes = UnitRegime::all(pricing);
        let mut all = Vec::new();
        let experts = |subject: &Subject| subject.facts.experts * subject.facts.moe_layers.len();
        for subject in Subject::all().into_iter().filter(|subject| experts(subject) <= MOST_EXPERTS) {
            for (regime, per_day) in regimes.iter().zip(PER_DAY) {
                let window = regime.windows.last().copied().flatten();
                let problem = regime.problem(&subject, per_day, 0, window)?;
                let name = format!("{}, {per_day:.0} a day", subject.name);
                if let Some(tight) = tightened(&problem) {
                    all.push(Self { name: format!("{name}, tight"), problem: tight });
                }
                all.push(Self { name, problem });
            }
        }
        Ok(all)
    }
}

/// `problem` with a limit of the time per output token that keeps the cheapest plan without it out; none where there
/// is no such plan.
fn tightened(problem: &Problem) -> Option<Problem> {
    let slo = Slo { tpot_seconds: 1e6, ttft_seconds: 1e6, ..problem.slo };
    let loose = solve(&Problem { slo, ..problem.clone() }, None, &Options::default()).ok()?;
    let slo = Slo { tpot_seconds: TIGHT * loose.evaluation.tpot_seconds, ..problem.slo };
    Some(Problem { slo, ..problem.clone() })
}

impl Regret {
    /// Every figure of every subject wrong, one at a time, in both directions.
    ///
    /// # Errors
    /// An invalid problem.
    pub fn of(subjects: &[RegretSubject], mut done: impl FnMut(&str)) -> Result<Self, ExperimentError> {
        let mut regret = Self { plans: Vec::new(), cases: Vec::new() };
        for subject in subjects {
            regret.add(subject)?;
            done(&subject.name);
        }
        Ok(regret)
    }

    fn add(&mut self, subject: &RegretSubject) -> Result<(), ExperimentError> {
        let failed = |error: PlanError| ExperimentError::Plan { scenario: subject.name.clone(), error };
        let sturdy = Options { sturdy: STURDY, ..Options::default() };
        let exactly = answered(&subject.problem, &Options::default()).map_err(failed)?;
        let sturdily = answered(&subject.problem, &sturdy).map_err(failed)?;
        let (Some(exactly), Some(sturdily)) = (exactly, sturdily) else { return Ok(()) };
        self.plans.push(SturdyPlan {
            subject: subject.name.clone(),
            groups: sturdily.plan.groups.len(),
            functions: sturdily.plan.replicas(),
            above_exact: sturdily.evaluation.total_cost / exactly.evaluation.total_cost - 1.0,
        });
        let plans = [&sturdily, &exactly].map(|answer| PlanDraft::from(&answer.plan));
        for figure in MisestimatedInput::ALL {
            for truth in ErrorDirection::ALL {
                let Some(is) = figure.apply(&subject.problem, truth) else { continue };
                // The search proves no optimum: the clairvoyant may as well take one of the two plans.
                let found =
                    answered(&is, &Options::default()).map_err(failed)?.map(|answer| answer.evaluation);
                let [sturdy, exact] = &plans;
                let sturdy = evaluate(&is, sturdy, false).map_err(failed)?;
                let exact = evaluate(&is, exact, false).map_err(failed)?;
                let kept = [&sturdy, &exact].into_iter().filter(|known| known.violations.is_empty());
                let costs = found.iter().chain(kept).map(|evaluation| evaluation.total_cost);
                let clairvoyant = costs.reduce(f64::min);
                self.cases.push(RegretCase {
                    subject: subject.name.clone(),
                    figure,
                    truth,
                    sturdy: Met::new(&sturdy, clairvoyant),
                    exact: Met::new(&exact, clairvoyant),
                    clairvoyant,
                });
            }
        }
        Ok(())
    }

    /// The cases of `figure` and `truth`, of all where none is named, for the plan that `of` takes.
    #[must_use]
    pub fn summary(
        &self,
        which: Option<(MisestimatedInput, ErrorDirection)>,
        of: fn(&RegretCase) -> &Met,
    ) -> Summary {
        let chosen = self.cases.iter().filter(|case| {
            case.clairvoyant.is_some() && which.is_none_or(|which| which == (case.figure, case.truth))
        });
        let met: Vec<&Met> = chosen.map(of).collect();
        let mut regrets: Vec<f64> = met.iter().filter_map(|met| met.regret).collect();
        regrets.sort_by(f64::total_cmp);
        Summary {
            cases: met.len(),
            broken: met.iter().filter(|met| !met.broken.is_empty()).count(),
            median: regrets.get(regrets.len().saturating_sub(1) / 2).copied(),
            most: regrets.last().copied(),
        }
    }
}

impl Met {
    fn new(evaluation: &Evaluation, clairvoyant: Option<f64>) -> Self {
        let cost = evaluation.total_cost;
        let kept = clairvoyant.filter(|_| evaluation.violations.is_empty());
        Self {
            cost,
            broken: evaluation.violations.iter().map(|violation| violation.limit.clone()).collect(),
            regret: kept.map(|least| cost / least - 1.0),
        }
    }
}

/// The answer, or none where no plan keeps the limits.
fn answered(problem: &Problem, options: &Options) -> Result<Option<PlanningResult>, PlanError> {
    match solve(problem, None, options) {
        Ok(answer) => Ok(Some(answer)),
        Err(PlanError::Infeasible(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
