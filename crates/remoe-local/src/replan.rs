//! Decision if a placement is replaced, now that something is known of requests.

use crate::deployment::{DesiredDeployment, Ratio};
use crate::error::LocalError;
use remoe_planner::{
    Budget, Options, PlanChange, PlanDraft, PlanError, PlanningResult, Problem, Remote, dollars,
    preallocate_for, replan, solve, solve_within,
};
use remoe_predictor::UsageShares;
use remoe_process::Role;
use remoe_rollout::Placement;
use remoe_rollout::placement::RemoteProcess;
use std::time::Duration;

/// Default share of the cost that a plan may be dearer to keep its limits when a figure is wrong.
pub const STURDY: f64 = 0.02;
/// By which share a new placement must be better to replace the one that there is.
const HYSTERESIS: f64 = 0.05;

/// Basis of placements.
#[derive(Debug, Clone)]
pub enum PlacementBasis {
    /// The planner's problem and whether experts may be remote.
    Planned(Box<Problem>, Remote),
    /// A number of the least used experts.
    Ratio(Ratio),
}

/// Result of measurements of this machine, beside a model.
pub struct Measured {
    /// The problem on these figures.
    pub problem: Problem,
    /// Time that it took, pauses included.
    pub took: Duration,
}

/// A question that can be answered by any thread.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    basis: PlacementBasis,
    wanted: DesiredDeployment,
    shares: UsageShares,
    moment: Moment,
}

/// When a placement is asked for. The main function keeps its size in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// A wake: requests wait.
    Wakes,
    /// The main function serves.
    Serves,
}

/// A placement that is better than the one that there is.
#[derive(Debug)]
pub struct BetterPlacement {
    /// With it.
    pub wanted: DesiredDeployment,
    /// Why, for people.
    pub why: String,
}

impl Question {
    /// Asks if `wanted` is to be placed in another way where requests use experts by `shares`.
    pub(crate) fn new(
        basis: &PlacementBasis,
        wanted: &DesiredDeployment,
        shares: UsageShares,
        moment: Moment,
    ) -> Self {
        Self { basis: basis.clone(), wanted: wanted.clone(), shares, moment }
    }

    /// Returns the present placement with the memory that MMP gives the main function (Remoe paper, Algorithm 2); `None` if it
    /// has that, or nothing was planned.
    pub(crate) fn preallocated(self) -> Result<Option<BetterPlacement>, LocalError> {
        let usage = self.shares.to_rows();
        let Self { basis: PlacementBasis::Planned(problem, _), mut wanted, .. } = self else {
            return Ok(None);
        };
        let Some(plan) = wanted.account.as_ref().map(|account| account.plan().clone()) else {
            return Ok(None);
        };
        let problem = Problem { prediction: Some(usage), prediction_p95: None, ..*problem };
        let answer = match preallocate_for(&problem, &PlanDraft::from(&plan)) {
            Ok(answer) if answer.plan.main_bytes != plan.main_bytes => answer,
            // No size is safe: the last one is as good as any.
            Ok(_) | Err(PlanError::Infeasible(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let why = format!(
            "main function of {:.0} MB, was {:.0} MB",
            answer.plan.main_bytes / 1e6,
            plan.main_bytes / 1e6
        );
        let revision = next_revision(&wanted);
        wanted.place_as_planned(&problem, &answer)?;
        wanted.placement = wanted.placement.revised(revision);
        Ok(Some(BetterPlacement { wanted, why }))
    }

    /// Returns the better placement that is found within `budget`; `None` where the one that there is stays.
    pub(crate) fn answer(self, budget: Budget<'_>) -> Result<Option<BetterPlacement>, LocalError> {
        let usage = self.shares.to_rows();
        let Self { basis, mut wanted, moment, .. } = self;
        match basis {
            PlacementBasis::Ratio(ratio) => {
                let placement = ratio.place(&wanted.moe_layers, Some(&usage))?;
                let remote = |placement: &Placement| remote_share(&wanted, placement, &usage);
                let (before, after) = (remote(&wanted.placement), remote(&placement));
                if after >= before * (1.0 - HYSTERESIS) {
                    return Ok(None);
                }
                let why = format!("{:.1} % of pairs remote, was {:.1} %", after * 100.0, before * 100.0);
                wanted.placement = placement.revised(next_revision(&wanted));
                Ok(Some(BetterPlacement { wanted, why }))
            }
            PlacementBasis::Planned(problem, remote) => {
                let problem = Problem { prediction: Some(usage), prediction_p95: None, ..*problem };
                beside_main(&problem, remote, wanted, moment, budget)
            }
        }
    }
}

/// Returns the better placement for `problem` beside the main function of `wanted` as large as it is; `None` where the one
/// that there is stays.
fn beside_main(
    problem: &Problem,
    remote: Remote,
    mut wanted: DesiredDeployment,
    moment: Moment,
    budget: Budget<'_>,
) -> Result<Option<BetterPlacement>, LocalError> {
    let Some(plan) = wanted.account.as_ref().map(|account| account.plan().clone()) else { return Ok(None) };
    let revision = next_revision(&wanted);
    let problem = problem.clone().with_main(plan.main_bytes, plan.main_vcpus);
    let options = options(remote);
    let draft = PlanDraft::from(&plan);
    let found = match moment {
        Moment::Wakes => replan(&problem, &draft, &options, budget),
        Moment::Serves => solve_within(&problem, Some(&draft), &options, budget),
    };
    let answer = match found {
        Ok(answer) => answer,
        // Nothing would keep the limits, or the answer comes too late: what runs goes on.
        Err(PlanError::Infeasible(_) | PlanError::Cancelled) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let PlanningResult { change: Some(change), .. } = &answer else { return Ok(None) };
    if change.kept {
        return Ok(None);
    }
    let why = compared(change);
    let before = wanted.placement.processes();
    wanted.place_as_planned(&problem, &answer)?;
    let of = |process: &RemoteProcess| (process.hosted.clone(), process.memory_bytes, process.cpu_millis);
    // What would run is what runs: only the main function's account is another.
    if before.iter().map(of).eq(wanted.placement.processes().iter().map(of)) {
        return Ok(None);
    }
    wanted.placement = wanted.placement.revised(revision);
    Ok(Some(BetterPlacement { wanted, why }))
}

/// The number of the next revision: its functions have names of their own and can run beside those that there are.
fn next_revision(wanted: &DesiredDeployment) -> u32 {
    wanted.placement.revision().wrapping_add(1).max(1)
}

fn options(remote: Remote) -> Options {
    Options { remote, sturdy: STURDY, hysteresis: HYSTERESIS, ..Options::default() }
}

/// The cost of a new plan beside that of the one before.
fn compared(change: &PlanChange) -> String {
    change.new_cost.map_or_else(
        || "the previous plan misses a limit".to_owned(),
        |cost| {
            let million = |cost: f64| dollars(cost * 1e6);
            format!("{} per million requests, was {}", million(cost), million(change.previous_cost))
        },
    )
}

/// Changes that measured figures lead to.
#[derive(Debug)]
pub(crate) struct OnMeasurements {
    /// A placement beside the main function as it runs.
    pub(crate) now: Option<BetterPlacement>,
    /// A plan with a main function of another size, for its next start.
    pub(crate) next: Option<BetterPlacement>,
    /// The outcome, for people.
    pub(crate) line: String,
}

/// Plans `wanted`'s model again, for a `problem` that stands on measurements.
pub(crate) fn on_measurements(
    problem: &Problem,
    remote: Remote,
    wanted: &DesiredDeployment,
) -> Result<OnMeasurements, LocalError> {
    let stays = |line: String| Ok(OnMeasurements { now: None, next: None, line });
    let Some(plan) = wanted.account.as_ref().map(|account| account.plan().clone()) else {
        return stays("the placement stays".to_owned());
    };
    let answer = match solve(problem, Some(&PlanDraft::from(&plan)), &options(remote)) {
        Ok(answer) => answer,
        Err(PlanError::Infeasible(why)) => {
            return stays(format!("the placement stays: no other one is possible: {why}"));
        }
        Err(error) => return Err(error.into()),
    };
    let cost = answer.evaluation.total_cost;
    let kept = answer.change.as_ref().filter(|change| !change.kept);
    let Some(change) = kept else {
        return stays(format!("the placement stays, at {} per million requests", dollars(cost * 1e6)));
    };
    let why = compared(change);
    let mut planned = wanted.clone();
    planned.place_as_planned(problem, &answer)?;
    planned.placement = planned.placement.revised(next_revision(wanted));
    let main = |wanted: &DesiredDeployment| {
        wanted.desired().functions.into_iter().find(|function| function.role == Role::Main)
    };
    if main(&planned) == main(wanted) {
        let line = format!("placement revised: {why}");
        return Ok(OnMeasurements { now: Some(BetterPlacement { wanted: planned, why }), next: None, line });
    }
    // Another main function starts from nothing, and so do its requests: that waits for its next start.
    let mut now = beside_main(problem, remote, wanted.clone(), Moment::Serves, Budget::UNLIMITED)?;
    if let Some(better) = &mut now {
        better.wanted.keep_main_of(wanted);
    }
    let line = match &now {
        Some(better) => format!("placement revised: {}; the next start has {why}", better.why),
        None => format!("the placement stays until the next start, which has {why}"),
    };
    Ok(OnMeasurements { now, next: Some(BetterPlacement { wanted: planned, why }), line })
}

/// The share of all pairs that is remote under `placement`, the mean over layers.
fn remote_share(wanted: &DesiredDeployment, placement: &Placement, usage: &[Vec<f64>]) -> f64 {
    let remote = placement.remote();
    let of_layer = |(moe, usage): (&remoe_rollout::MoeLayer, &Vec<f64>)| {
        let away = remote.iter().find(|set| set.layer == moe.layer);
        let experts = away.into_iter().flat_map(|set| &set.experts);
        experts.filter_map(|expert| usage.get(*expert as usize)).sum::<f64>()
    };
    wanted.moe_layers.iter().zip(usage).map(of_layer).sum::<f64>() / usage.len().max(1) as f64
}
