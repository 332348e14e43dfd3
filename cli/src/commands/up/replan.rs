//! Whether a placement is to be another one, now that something is known of requests.

use crate::deployment::{RatioArgs, Wanted};
use crate::exit::CliError;
use crate::planning::{RemoteArg, STURDY};
use remoe_launcher::Placement;
use remoe_launcher::placement::RemoteProcess;
use remoe_planner::{
    Answer, Budget, Options, PlanDraft, PlanError, Problem, dollars, preallocate_for, replan, solve_within,
};
use remoe_predictor::Shares;

/// By which share a new placement must be better to replace the one that there is.
const HYSTERESIS: f64 = 0.05;

/// What placements are made from.
#[derive(Debug, Clone)]
pub(super) enum Basis {
    /// The planner's problem and whether experts may be remote.
    Planned(Box<Problem>, RemoteArg),
    /// A number of the least used experts.
    Ratio(RatioArgs),
}

/// A question that can be answered by any thread.
#[derive(Debug, Clone)]
pub(super) struct Question {
    basis: Basis,
    wanted: Wanted,
    shares: Shares,
    moment: Moment,
}

/// When a placement is asked for. The main function keeps its size in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    /// A wake: requests wait.
    Wakes,
    /// The main function serves.
    Serves,
}

/// A placement that is better than the one that there is.
#[derive(Debug)]
pub(super) struct Better {
    /// With it.
    pub(super) wanted: Wanted,
    /// Why, for people.
    pub(super) why: String,
}

impl Question {
    /// Whether `wanted` is to be placed in another way where requests use experts by `shares`.
    pub(super) fn new(basis: &Basis, wanted: &Wanted, shares: Shares, moment: Moment) -> Self {
        Self { basis: basis.clone(), wanted: wanted.clone(), shares, moment }
    }

    /// Returns the present placement with the memory that MMP gives the main function (Remoe paper, Algorithm 2); `None` if it
    /// has that, or nothing was planned.
    pub(super) fn preallocated(self) -> Result<Option<Better>, CliError> {
        let usage = self.shares.to_rows();
        let Self { basis: Basis::Planned(problem, _), mut wanted, .. } = self else { return Ok(None) };
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
        let revision = wanted.placement.revision().wrapping_add(1).max(1);
        wanted.place_as_planned(&problem, &answer)?;
        wanted.placement = wanted.placement.revised(revision);
        Ok(Some(Better { wanted, why }))
    }

    /// Returns the better placement that is found within `budget`; `None` where the one that there is stays.
    pub(super) fn answer(self, budget: Budget<'_>) -> Result<Option<Better>, CliError> {
        let usage = self.shares.to_rows();
        let Self { basis, mut wanted, moment, .. } = self;
        // Its functions have names of their own: they can run beside those that there are.
        let revision = wanted.placement.revision().wrapping_add(1).max(1);
        match basis {
            Basis::Ratio(ratio) => {
                let placement = ratio.place(&wanted.moe_layers, Some(&usage))?;
                let remote = |placement: &Placement| remote_share(&wanted, placement, &usage);
                let (before, after) = (remote(&wanted.placement), remote(&placement));
                if after >= before * (1.0 - HYSTERESIS) {
                    return Ok(None);
                }
                let why = format!("{:.1} % of pairs remote, was {:.1} %", after * 100.0, before * 100.0);
                wanted.placement = placement.revised(revision);
                Ok(Some(Better { wanted, why }))
            }
            Basis::Planned(problem, remote) => {
                let Some(plan) = wanted.account.as_ref().map(|account| account.plan().clone()) else {
                    return Ok(None);
                };
                let problem = Problem { prediction: Some(usage), prediction_p95: None, ..*problem };
                let problem = problem.with_main(plan.main_bytes, plan.main_vcpus);
                let options = Options {
                    remote: remote.into(),
                    sturdy: STURDY,
                    hysteresis: HYSTERESIS,
                    ..Options::default()
                };
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
                let Answer { change: Some(change), .. } = &answer else { return Ok(None) };
                if change.kept {
                    return Ok(None);
                }
                let why = change.new_cost.map_or_else(
                    || "the previous plan misses a limit".to_owned(),
                    |cost| format!("{} per request, was {}", dollars(cost), dollars(change.previous_cost)),
                );
                let before = wanted.placement.processes();
                wanted.place_as_planned(&problem, &answer)?;
                let of = |process: &RemoteProcess| {
                    (process.hosted.clone(), process.memory_bytes, process.cpu_millis)
                };
                // What would run is what runs: only the main function's account is another.
                if before.iter().map(of).eq(wanted.placement.processes().iter().map(of)) {
                    return Ok(None);
                }
                wanted.placement = wanted.placement.revised(revision);
                Ok(Some(Better { wanted, why }))
            }
        }
    }
}

/// The share of all pairs that is remote under `placement`, the mean over layers.
fn remote_share(wanted: &Wanted, placement: &Placement, usage: &[Vec<f64>]) -> f64 {
    let remote = placement.remote();
    let of_layer = |(moe, usage): (&remoe_launcher::MoeLayer, &Vec<f64>)| {
        let away = remote.iter().find(|set| set.layer == moe.layer);
        let experts = away.into_iter().flat_map(|set| &set.experts);
        experts.filter_map(|expert| usage.get(*expert as usize)).sum::<f64>()
    };
    wanted.moe_layers.iter().zip(usage).map(of_layer).sum::<f64>() / usage.len().max(1) as f64
}
