//! The search for a plan with a profile that may be a prior instead of measurements.

use crate::profile::Origin;
use remoe_planner::{Infeasible, PlanError, PlanningResult, Problem, Remote, Slo};

/// A latency limit that every plan keeps, in seconds.
const NO_LIMIT: f64 = 1e6;

/// Returns the plan that `search` finds for `problem`, whose times are of `origin`, and the latency limits that the plan
/// is expected to miss.
///
/// With measured times, this is one search within the limits. With a prior, plans whose experts are all local come first,
/// and if no plan keeps the latency limits, one is returned that ignores them: the times of a prior are overestimates, and
/// measured ones are only available from a deployment that runs.
///
/// # Errors
/// No plan keeps the limits that must be kept, or `search` fails.
pub fn search_by_origin(
    problem: &Problem,
    origin: Origin,
    allowed: Remote,
    search: impl Fn(&Problem, Remote) -> Result<PlanningResult, PlanError>,
) -> Result<(PlanningResult, Option<Box<Infeasible>>), PlanError> {
    let mut refusal = None;
    for (remote, without_slo) in searches_to_try(origin, allowed) {
        let found = match without_slo {
            true => search(&Problem { slo: Slo::new(NO_LIMIT, NO_LIMIT), ..problem.clone() }, remote),
            false => search(problem, remote),
        };
        match found {
            Ok(answer) => return Ok((answer, refusal.filter(|_| without_slo))),
            Err(PlanError::Infeasible(why)) => refusal = Some(why),
            Err(error) => return Err(error),
        }
    }
    match refusal {
        Some(why) => Err(PlanError::Infeasible(why)),
        None => search(problem, allowed).map(|answer| (answer, None)),
    }
}

/// Lists the searches to try, in order: the use of remote experts, and true if the latency limits are ignored.
fn searches_to_try(origin: Origin, allowed: Remote) -> Vec<(Remote, bool)> {
    if origin != Origin::Prior {
        return vec![(allowed, false)];
    }
    let remotes: &[Remote] =
        if allowed == Remote::Auto { &[Remote::Never, Remote::Auto] } else { &[allowed] };
    remotes.iter().flat_map(|remote| [(*remote, false), (*remote, true)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prior_tries_local_plans_first_and_ignores_limits_next() {
        let auto = searches_to_try(Origin::Prior, Remote::Auto);
        let expected =
            [(Remote::Never, false), (Remote::Never, true), (Remote::Auto, false), (Remote::Auto, true)];
        assert_eq!(auto, expected);
        assert_eq!(
            searches_to_try(Origin::Prior, Remote::Always),
            [(Remote::Always, false), (Remote::Always, true)]
        );
        assert_eq!(searches_to_try(Origin::Measured, Remote::Auto), [(Remote::Auto, false)]);
    }
}
