//! Jensen-Shannon divergence of two distributions.

use crate::shares::UsageShares;

/// Returns the Jensen-Shannon divergence of two distributions in nats, between 0 and ln 2.
///
/// JS(p, q) = KL(p, m) / 2 + KL(q, m) / 2 with m = (p + q) / 2: the quality measure in section V-B of the Remoe
/// paper.
#[must_use]
pub fn jensen_shannon(p: &[f32], q: &[f32]) -> f64 {
    let term = |a: f64, b: f64| if a > 0.0 { a * (2.0 * a / (a + b)).ln() } else { 0.0 };
    let sum: f64 = p
        .iter()
        .zip(q)
        .map(|(&p, &q)| {
            let (p, q) = (f64::from(p), f64::from(q));
            term(p, q) + term(q, p)
        })
        .sum();
    (sum / 2.0).max(0.0)
}

/// Returns the divergence of each layer.
#[must_use]
pub fn per_layer(p: &UsageShares, q: &UsageShares) -> Vec<f64> {
    p.rows().zip(q.rows()).map(|(p, q)| jensen_shannon(p, q)).collect()
}

/// Returns the mean divergence over layers.
#[must_use]
pub fn mean(p: &UsageShares, q: &UsageShares) -> f64 {
    let sum: f64 = p.rows().zip(q.rows()).map(|(p, q)| jensen_shannon(p, q)).sum();
    sum / p.layers() as f64
}
