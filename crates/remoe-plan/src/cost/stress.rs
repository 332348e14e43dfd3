//! Robust plans: limits must also hold if predictions err as far as they do in 5 % of the cases.

use crate::cost::{Evaluation, Violation};
use crate::model::Model;
use crate::plan::Plan;
use crate::problem::ErrorFactor;
use crate::problem::stressed::stressed_scales;
use std::borrow::Cow;

/// Returns the limits that `plan` breaks for the prediction, or if each remote set's share is `factors` times the
/// predicted one.
///
/// If both break the same limit, the larger value is returned. Factors by count were measured for the least used
/// experts; other sets of the same size are assumed to err as much.
pub fn all_violations(
    model: &Model<'_>,
    factors: &[ErrorFactor],
    plan: &Plan,
    evaluation: &Evaluation,
) -> Vec<Violation> {
    let mut found = evaluation.violations.clone();
    for violation in stressed(model, factors, plan).evaluate(plan).violations {
        match found.iter_mut().find(|known| known.limit == violation.limit) {
            Some(known) if violation.value > known.value => *known = violation,
            Some(_) => {}
            None => found.push(violation),
        }
    }
    found
}

/// Returns the model with the remote shares of `plan` scaled by `factors`, and the local shares scaled down to match.
pub fn stressed<'p>(model: &Model<'p>, factors: &[ErrorFactor], plan: &Plan) -> Model<'p> {
    let layers = model.shares.iter().zip(&plan.layers).zip(factors);
    let shares = layers.enumerate().map(|(layer, ((shares, part), factor))| {
        let (up, down) = stressed_scales(model.share_of(layer, &part.remote), factor.of(part.remote.len()));
        let scale = |(expert, share): (usize, &f64)| {
            let is_remote = part.remote.binary_search(&(expert as u32)).is_ok();
            share * if is_remote { up } else { down }
        };
        shares.iter().enumerate().map(scale).collect()
    });
    let shares: Vec<Vec<f64>> = shares.collect();
    Model { shares: Cow::Owned(shares), ..model.beside(model.problem) }
}
