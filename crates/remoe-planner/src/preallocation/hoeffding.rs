//! How many assignments a set of experts receives at most.

use std::f64::consts::{LN_2, LN_10};

/// ln(1 / 0.05): the bound holds with a probability of 95 %.
const LN_20: f64 = LN_2 + LN_10;

/// At most how many of `tokens` x `top_k` assignments `set` of `experts` experts receive, with a
/// probability of 95 %, for uniform routing and independent tokens.
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

/// The bound as the Remoe paper states it (Corollary 1), with the expectation counted in
/// assignments: the deviation sqrt(3 `tokens`) / 2 is a 78 % bound, read as Hoeffding.
#[must_use]
pub fn paper_bound(tokens: f64, set: f64, top_k: f64, experts: f64) -> f64 {
    set * tokens * top_k / experts + (3.0 * tokens).sqrt() / 2.0
}
