//! How a plan is looked for while figures are assumed.

use crate::profile::Origin;
use remoe_planner::{Infeasible, PlanError, PlanningResult, Problem, Remote, Slo};

/// A limit that is meant not to bind, in seconds.
const NO_LIMIT: f64 = 1e6;

/// Returns the plan that `search` finds for `problem`, whose figures are of `origin`, and which limits it may miss.
///
/// Under a prior all experts are local if they fit, and a limit that seems to be missed is no refusal: the prior errs
/// on the slow side, and serving is what brings measurements.
///
/// # Errors
/// No plan keeps every limit, or `search` fails.
pub fn attempted(
    problem: &Problem,
    origin: Origin,
    wanted: Remote,
    search: impl Fn(&Problem, Remote) -> Result<PlanningResult, PlanError>,
) -> Result<(PlanningResult, Option<Box<Infeasible>>), PlanError> {
    let mut refusal = None;
    for (remote, relaxed) in attempts(origin, wanted) {
        let found = match relaxed {
            true => search(&Problem { slo: Slo::new(NO_LIMIT, NO_LIMIT), ..problem.clone() }, remote),
            false => search(problem, remote),
        };
        match found {
            Ok(answer) => return Ok((answer, refusal.filter(|_| relaxed))),
            Err(PlanError::Infeasible(why)) => refusal = Some(why),
            Err(error) => return Err(error),
        }
    }
    match refusal {
        Some(why) => Err(PlanError::Infeasible(why)),
        None => search(problem, wanted).map(|answer| (answer, None)),
    }
}

/// Uses of remote experts to try, in order, and whether latencies are left out of account.
fn attempts(origin: Origin, wanted: Remote) -> Vec<(Remote, bool)> {
    if origin != Origin::Prior {
        return vec![(wanted, false)];
    }
    let remotes: &[Remote] = if wanted == Remote::Auto { &[Remote::Never, Remote::Auto] } else { &[wanted] };
    remotes.iter().flat_map(|remote| [(*remote, false), (*remote, true)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn under_a_prior_local_plans_and_missed_limits_come_first() {
        let auto = attempts(Origin::Prior, Remote::Auto);
        let expected =
            [(Remote::Never, false), (Remote::Never, true), (Remote::Auto, false), (Remote::Auto, true)];
        assert_eq!(auto, expected);
        assert_eq!(
            attempts(Origin::Prior, Remote::Always),
            [(Remote::Always, false), (Remote::Always, true)]
        );
        assert_eq!(attempts(Origin::Measured, Remote::Auto), [(Remote::Auto, false)]);
    }
}
