//! Hoeffding bound of the assignments that a set of experts receives.

use std::f64::consts::{LN_2, LN_10};

/// ln(1 / 0.05): the bound holds with a probability of 95 %.
const LN_20: f64 = LN_2 + LN_10;

/// Returns the 95 % bound of the assignments that `set` of `experts` experts receive, out of `tokens` x `top_k`.
///
/// Routing is uniform, and tokens are independent.
///
/// A token contributes at most min(`set`, `top_k`) assignments, which are sampled without
/// replacement, so Hoeffding's inequality gives a deviation of
/// sqrt(`tokens` min(`set`, `top_k`) ln 20 / 2). Theorem 1 and Corollary 1 of the Remoe paper take
/// sqrt(3 `tokens`) / 2 and one assignment per token: see [`paper_bound`].
#[must_use]
pub fn assignments_bound(tokens: f64, set: f64, top_k: f64, experts: f64) -> f64 {
    let per_token = set.min(top_k);
    let deviation = (tokens * per_token * LN_20 / 2.0).sqrt();
    (tokens * per_token).min(set * tokens * top_k / experts + deviation)
}

/// Returns the bound as the Remoe paper states it (Corollary 1), with the expectation counted in assignments.
///
/// By Hoeffding's inequality its deviation sqrt(3 `tokens`) / 2 is a 78 % bound.
#[must_use]
pub fn paper_bound(tokens: f64, set: f64, top_k: f64, experts: f64) -> f64 {
    set * tokens * top_k / experts + (3.0 * tokens).sqrt() / 2.0
}
