//! Whether a placement is to be another one, now that something is known of requests.

use crate::deployment::{RatioArgs, Wanted};
use crate::exit::CliError;
use crate::planning::{RemoteArg, STURDY};
use remoe_launcher::Placement;
use remoe_launcher::placement::RemoteProcess;
use remoe_planner::{Answer, Options, PlanDraft, PlanError, Problem, dollars, solve};
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
    /// The main function goes on: its size stays.
    main_runs: bool,
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
    pub(super) fn new(basis: &Basis, wanted: &Wanted, shares: Shares, main_runs: bool) -> Self {
        Self { basis: basis.clone(), wanted: wanted.clone(), shares, main_runs }
    }

    /// The better placement; `None` where the one that there is stays.
    pub(super) fn answer(self) -> Result<Option<Better>, CliError> {
        let usage = self.shares.to_rows();
        let Self { basis, mut wanted, main_runs, .. } = self;
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
                let mut problem = Problem { prediction: Some(usage), prediction_p95: None, ..*problem };
                if main_runs {
                    problem = problem.with_main(plan.main_bytes, None);
                }
                let options = Options {
                    remote: remote.into(),
                    sturdy: STURDY,
                    hysteresis: HYSTERESIS,
                    ..Options::default()
                };
                let answer = match solve(&problem, Some(&PlanDraft::from(&plan)), &options) {
                    Ok(answer) => answer,
                    // Nothing would keep the limits: what runs goes on.
                    Err(PlanError::Infeasible(_)) => return Ok(None),
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
                if main_runs && before.iter().map(of).eq(wanted.placement.processes().iter().map(of)) {
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
