//! Regret of plans whose problem was misestimated.
//!
//! Each problem has two plans. The exact plan is the cheapest one. The robust plan is that of `remoe plan` and the operator:
//! within 2 % of the cheapest cost, the one that breaks the fewest limits if an input was misestimated. Then one input at a
//! time has another true value ([`MisestimatedInput`], in both directions). Both plans are evaluated on the true problem,
//! and compared with the plan that is made for it: the clairvoyant plan.

use crate::error::ExperimentError;
use crate::map::{Subject, UnitRegime};
use remoe_planner::{
    ErrorDirection, Evaluation, MisestimatedInput, Options, PlanDraft, PlanError, PlanningResult, Pricing,
    Problem, Slo, evaluate, solve,
};
use serde::Serialize;

/// Share of the cost by which a robust plan may be dearer.
const ROBUST_PREMIUM: f64 = 0.02;
/// Requests per day with functions that are always alive, and with functions that scale to zero.
const PER_DAY: [f64; 2] = [1_000.0, 100.0];
/// Largest number of experts: larger models take a second or more for each of hundreds of plans.
const MAX_EXPERTS: usize = 2_000;
/// Tight TPOT limit, as a share of the TPOT of the cheapest plan without a limit.
const TIGHT: f64 = 0.8;

/// A problem to plan for.
#[derive(Debug, Clone, PartialEq)]
pub struct RegretSubject {
    /// Name of the subject.
    pub name: String,
    /// Problem that it is planned for.
    pub problem: Problem,
}

/// Cost of a plan on the true problem, and the limits that it breaks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanOutcome {
    /// Dollars of a request.
    pub cost: f64,
    /// Names of the broken limits.
    pub broken: Vec<String>,
    /// Share by which it costs more than the clairvoyant plan; absent if it breaks a limit, or without a clairvoyant plan.
    pub regret: Option<f64>,
}

/// Outcome of both plans if one input was misestimated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RegretCase {
    /// Name of the subject that was planned for.
    pub subject: String,
    /// Misestimated input.
    pub figure: MisestimatedInput,
    /// Direction of the error.
    pub truth: ErrorDirection,
    /// Outcome of the robust plan.
    pub sturdy: PlanOutcome,
    /// Outcome of the exact plan.
    pub exact: PlanOutcome,
    /// Dollars of the clairvoyant plan; absent if no plan keeps the limits of the true problem.
    pub clairvoyant: Option<f64>,
}

/// Robust plan of a problem, compared with the exact one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RobustPlan {
    /// Name of the subject that was planned for.
    pub subject: String,
    /// Groups of the robust plan; 0 if it has a function for each layer, or no remote experts.
    pub groups: usize,
    /// Remote functions of the robust plan.
    pub functions: u64,
    /// Share by which it costs more than the exact plan if no input was misestimated.
    pub above_exact: f64,
}

/// Regret over all subjects.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Regret {
    /// Plans of the subjects; subjects without any plan are left out.
    pub plans: Vec<RobustPlan>,
    /// Every case.
    pub cases: Vec<RegretCase>,
}

/// Summary of cases for one of both plans.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Cases in which some plan keeps the limits.
    pub cases: usize,
    /// Cases among these in which this plan breaks a limit.
    pub broken: usize,
    /// Median regret of the cases in which it keeps the limits; absent without such cases.
    pub median: Option<f64>,
    /// Largest regret.
    pub most: Option<f64>,
}

impl RegretSubject {
    /// Returns the subjects of the published models of the map with up to 2,000 experts, under random arrivals.
    ///
    /// Each is planned with functions that are always alive (the map's first regime) and with functions that scale to zero
    /// (its second regime), with the map's limits and with tight limits.
    ///
    /// # Errors
    /// No problem can be made of a model.
    pub fn published(pricing: Pricing) -> Result<Vec<Self>, ExperimentError> {
        let regimes = UnitRegime::all(pricing);
        let mut all = Vec::new();
        let experts = |subject: &Subject| subject.facts.experts * subject.facts.moe_layers.len();
        for subject in Subject::all().into_iter().filter(|subject| experts(subject) <= MAX_EXPERTS) {
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

/// Returns `problem` with a TPOT limit that excludes the cheapest plan without limits, or `None` without such a plan.
fn tightened(problem: &Problem) -> Option<Problem> {
    let slo = Slo { tpot_seconds: 1e6, ttft_seconds: 1e6, ..problem.slo };
    let loose = solve(&Problem { slo, ..problem.clone() }, None, &Options::default()).ok()?;
    let slo = Slo { tpot_seconds: TIGHT * loose.evaluation.tpot_seconds, ..problem.slo };
    Some(Problem { slo, ..problem.clone() })
}

impl Regret {
    /// Evaluates the regret of every input of every subject, in both directions. `done`: called after each subject.
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
        let robust = Options { sturdy: ROBUST_PREMIUM, ..Options::default() };
        let exact_result = feasible(&subject.problem, &Options::default()).map_err(failed)?;
        let robust_result = feasible(&subject.problem, &robust).map_err(failed)?;
        let (Some(exact_result), Some(robust_result)) = (exact_result, robust_result) else { return Ok(()) };
        self.plans.push(RobustPlan {
            subject: subject.name.clone(),
            groups: robust_result.plan.groups.len(),
            functions: robust_result.plan.replicas(),
            above_exact: robust_result.evaluation.total_cost / exact_result.evaluation.total_cost - 1.0,
        });
        let plans = [&robust_result, &exact_result].map(|answer| PlanDraft::from(&answer.plan));
        for figure in MisestimatedInput::ALL {
            for direction in ErrorDirection::ALL {
                let Some(actual) = figure.apply(&subject.problem, direction) else { continue };
                // The search may miss the optimum: the clairvoyant plan may be one of both plans.
                let found =
                    feasible(&actual, &Options::default()).map_err(failed)?.map(|answer| answer.evaluation);
                let [sturdy, exact] = &plans;
                let sturdy = evaluate(&actual, sturdy, false).map_err(failed)?;
                let exact = evaluate(&actual, exact, false).map_err(failed)?;
                let kept = [&sturdy, &exact].into_iter().filter(|known| known.violations.is_empty());
                let costs = found.iter().chain(kept).map(|evaluation| evaluation.total_cost);
                let clairvoyant = costs.reduce(f64::min);
                self.cases.push(RegretCase {
                    subject: subject.name.clone(),
                    figure,
                    truth: direction,
                    sturdy: PlanOutcome::new(&sturdy, clairvoyant),
                    exact: PlanOutcome::new(&exact, clairvoyant),
                    clairvoyant,
                });
            }
        }
        Ok(())
    }

    /// Summarises the cases of one input and direction, or all cases if `which` is `None`.
    ///
    /// `of`: selects the plan.
    #[must_use]
    pub fn summary(
        &self,
        which: Option<(MisestimatedInput, ErrorDirection)>,
        of: fn(&RegretCase) -> &PlanOutcome,
    ) -> Summary {
        let chosen = self.cases.iter().filter(|case| {
            case.clairvoyant.is_some() && which.is_none_or(|which| which == (case.figure, case.truth))
        });
        let outcomes: Vec<&PlanOutcome> = chosen.map(of).collect();
        let mut regrets: Vec<f64> = outcomes.iter().filter_map(|outcome| outcome.regret).collect();
        regrets.sort_by(f64::total_cmp);
        Summary {
            cases: outcomes.len(),
            broken: outcomes.iter().filter(|outcome| !outcome.broken.is_empty()).count(),
            median: regrets.get(regrets.len().saturating_sub(1) / 2).copied(),
            most: regrets.last().copied(),
        }
    }
}

impl PlanOutcome {
    fn new(evaluation: &Evaluation, clairvoyant: Option<f64>) -> Self {
        let cost = evaluation.total_cost;
        let least = clairvoyant.filter(|_| evaluation.violations.is_empty());
        Self {
            cost,
            broken: evaluation.violations.iter().map(|violation| violation.limit.clone()).collect(),
            regret: least.map(|least| cost / least - 1.0),
        }
    }
}

/// Solves `problem`, or returns `None` if no plan keeps the limits.
fn feasible(problem: &Problem, options: &Options) -> Result<Option<PlanningResult>, PlanError> {
    match solve(problem, None, options) {
        Ok(answer) => Ok(Some(answer)),
        Err(PlanError::Infeasible(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
