//! Lower bound of the time of the slowest of several concurrent paths.

use remoe_plan::cost::slowest::Path;

/// Largest supported top-k.
pub(super) const MAX_TOP_K: usize = 32;

/// Returns a lower bound of [`remoe_plan::cost::slowest::expected_slowest`], at a fraction of the work.
///
/// The slowest of equal paths takes no less than their mean.
pub(super) fn least_slowest(top_k: usize, paths: &[Path]) -> f64 {
    let lower_bound = |path: &Path| {
        let total_share = (path.share * path.count as f64).min(1.0);
        let called = 1.0 - (1.0 - total_share).powi(top_k as i32);
        called * path.trip + top_k as f64 * path.share * path.seconds
    };
    paths.iter().filter(|path| path.count > 0).map(lower_bound).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoe_plan::cost::slowest::expected_slowest;

    #[test]
    fn lower_bound_never_exceeds_expectation() {
        let path = |share, seconds, trip, count| Path { share, seconds, trip, count };
        for (paths, top_k) in [
            (vec![path(1.0, 2.0, 0.0, 1)], 3),
            (vec![path(0.4, 1.0, 0.0, 1), path(0.2, 0.7, 0.5, 3)], 4),
            (vec![path(0.0, 1.0, 0.0, 1), path(0.25, 1.0, 0.1, 4)], 5),
            (vec![path(0.5, 3.0, 0.0, 1), path(0.1, 1.0, 0.2, 2), path(0.3, 0.5, 1.0, 1)], 6),
            (vec![path(0.5, 0.0, 0.0, 1), path(0.5, 0.0, 1.0, 1)], 2),
        ] {
            let (exact, least) = (expected_slowest(top_k, &paths), least_slowest(top_k, &paths));
            assert!(least <= exact + 1e-12 && least > exact / 3.0, "{paths:?}: {least} {exact}");
        }
        assert_eq!(least_slowest(4, &[]), 0.0);
    }
}
