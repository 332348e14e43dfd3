//! Replanning: decides if expert usage or measurements call for another placement.

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

/// Default of the maximum additional cost, as a share, of a plan that keeps its limits even if a figure is wrong.
pub const STURDY: f64 = 0.02;
/// Share by which a new placement must be better to replace the current one.
const HYSTERESIS: f64 = 0.05;

/// Basis for placements.
#[derive(Debug, Clone)]
pub enum PlacementBasis {
    /// Planning problem, and whether experts may be remote.
    Planned(Box<Problem>, Remote),
    /// Share of the least used experts.
    Ratio(Ratio),
}

/// Result of a measurement of this machine, beside a running model.
pub struct Measured {
    /// Planning problem with the measured figures.
    pub problem: Problem,
    /// Duration of the measurement, including pauses.
    pub took: Duration,
}

/// Request for a better placement; any thread can process it.
#[derive(Debug, Clone)]
pub(crate) struct ReplanRequest {
    basis: PlacementBasis,
    wanted: DesiredDeployment,
    shares: UsageShares,
    occasion: ReplanOccasion,
}

/// Occasion of a replan. The main function keeps its size in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplanOccasion {
    /// A wake, with waiting requests.
    Wake,
    /// The main function serves.
    Serving,
}

/// Placement that is better than the current one.
#[derive(Debug)]
pub struct BetterPlacement {
    /// Deployment with the placement.
    pub wanted: DesiredDeployment,
    /// Reason, for users.
    pub why: String,
}

impl ReplanRequest {
    /// Creates a request to replan `wanted` for requests with expert usage `shares`.
    pub(crate) fn new(
        basis: &PlacementBasis,
        wanted: &DesiredDeployment,
        shares: UsageShares,
        occasion: ReplanOccasion,
    ) -> Self {
        Self { basis: basis.clone(), wanted: wanted.clone(), shares, occasion }
    }

    /// Returns the current placement with the memory that MMP gives the main function (Remoe paper, Algorithm 2);
    /// `None` if it has that already, or if nothing was planned.
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
            // No size satisfies the limits: the last one stays.
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

    /// Returns the better placement found within `budget`; `None` if the current one stays.
    pub(crate) fn search(self, budget: Budget<'_>) -> Result<Option<BetterPlacement>, LocalError> {
        let usage = self.shares.to_rows();
        let Self { basis, mut wanted, occasion, .. } = self;
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
                search_with_same_main(&problem, remote, wanted, occasion, budget)
            }
        }
    }
}

/// Returns the better placement for `problem` with the current main function of `wanted`; `None` if the current
/// placement stays.
fn search_with_same_main(
    problem: &Problem,
    remote: Remote,
    mut wanted: DesiredDeployment,
    occasion: ReplanOccasion,
    budget: Budget<'_>,
) -> Result<Option<BetterPlacement>, LocalError> {
    let Some(plan) = wanted.account.as_ref().map(|account| account.plan().clone()) else { return Ok(None) };
    let revision = next_revision(&wanted);
    let problem = problem.clone().with_main(plan.main_bytes, plan.main_vcpus);
    let options = options(remote);
    let draft = PlanDraft::from(&plan);
    let found = match occasion {
        ReplanOccasion::Wake => replan(&problem, &draft, &options, budget),
        ReplanOccasion::Serving => solve_within(&problem, Some(&draft), &options, budget),
    };
    let answer = match found {
        Ok(answer) => answer,
        // No plan keeps the limits, or the search was cancelled: the current placement stays.
        Err(PlanError::Infeasible(_) | PlanError::Cancelled) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let PlanningResult { change: Some(change), .. } = &answer else { return Ok(None) };
    if change.kept {
        return Ok(None);
    }
    let why = describe_change(change);
    let before = wanted.placement.processes();
    wanted.place_as_planned(&problem, &answer)?;
    let of = |process: &RemoteProcess| (process.hosted.clone(), process.memory_bytes, process.cpu_millis);
    // The processes would be the same; only the account differs.
    if before.iter().map(of).eq(wanted.placement.processes().iter().map(of)) {
        return Ok(None);
    }
    wanted.placement = wanted.placement.revised(revision);
    Ok(Some(BetterPlacement { wanted, why }))
}

/// Returns the number of the next revision, whose functions have their own names and can run beside the current ones.
fn next_revision(wanted: &DesiredDeployment) -> u32 {
    wanted.placement.revision().wrapping_add(1).max(1)
}

fn options(remote: Remote) -> Options {
    Options { remote, sturdy: STURDY, hysteresis: HYSTERESIS, ..Options::default() }
}

/// Describes the cost of a new plan compared with the previous one.
fn describe_change(change: &PlanChange) -> String {
    change.new_cost.map_or_else(
        || "the previous plan misses a limit".to_owned(),
        |cost| {
            let million = |cost: f64| dollars(cost * 1e6);
            format!("{} per million requests, was {}", million(cost), million(change.previous_cost))
        },
    )
}

/// Outcome of replanning after a measurement.
#[derive(Debug)]
pub(crate) struct MeasuredReplan {
    /// Placement beside the running main function.
    pub(crate) now: Option<BetterPlacement>,
    /// Plan with a main function of another size, for its next start.
    pub(crate) next: Option<BetterPlacement>,
    /// Description, for users.
    pub(crate) line: String,
}

/// Replans `wanted` for a `problem` with measured figures.
pub(crate) fn replan_on_measurements(
    problem: &Problem,
    remote: Remote,
    wanted: &DesiredDeployment,
) -> Result<MeasuredReplan, LocalError> {
    let stays = |line: String| Ok(MeasuredReplan { now: None, next: None, line });
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
    let why = describe_change(change);
    let mut planned = wanted.clone();
    planned.place_as_planned(problem, &answer)?;
    planned.placement = planned.placement.revised(next_revision(wanted));
    let main = |wanted: &DesiredDeployment| {
        wanted.desired().functions.into_iter().find(|function| function.role == Role::Main)
    };
    if main(&planned) == main(wanted) {
        let line = format!("placement revised: {why}");
        return Ok(MeasuredReplan { now: Some(BetterPlacement { wanted: planned, why }), next: None, line });
    }
    // Another main function would have to restart and lose its requests, so it waits for the next start.
    let mut now =
        search_with_same_main(problem, remote, wanted.clone(), ReplanOccasion::Serving, Budget::UNLIMITED)?;
    if let Some(better) = &mut now {
        better.wanted.keep_main_of(wanted);
    }
    let line = match &now {
        Some(better) => format!("placement revised: {}; the next start has {why}", better.why),
        None => format!("the placement stays until the next start, which has {why}"),
    };
    Ok(MeasuredReplan { now, next: Some(BetterPlacement { wanted: planned, why }), line })
}

/// Returns the share of all pairs that is remote under `placement`, averaged over layers.
fn remote_share(wanted: &DesiredDeployment, placement: &Placement, usage: &[Vec<f64>]) -> f64 {
    let remote = placement.remote();
    let of_layer = |(moe, usage): (&remoe_rollout::MoeLayer, &Vec<f64>)| {
        let remote_set = remote.iter().find(|set| set.layer == moe.layer);
        let experts = remote_set.into_iter().flat_map(|set| &set.experts);
        experts.filter_map(|expert| usage.get(*expert as usize)).sum::<f64>()
    };
    wanted.moe_layers.iter().zip(usage).map(of_layer).sum::<f64>() / usage.len().max(1) as f64
}
