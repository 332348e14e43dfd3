//! Calibration of predictions: predicted and observed work of sets of experts.
//!
//! The experts of each layer are ordered by their predicted shares and cut into sets of equal size; neighbouring
//! layers form groups. So the number of figures does not grow with the model.

use remoe_predictor::UsageShares;

/// Largest number of groups of neighbouring layers.
pub const LAYER_GROUPS: usize = 4;
/// Largest number of expert sets per layer.
pub const EXPERT_SETS: usize = 8;

/// Work of one set of experts, as a share of the work of their layers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ExpertSetShare {
    /// Predicted share.
    pub predicted: f64,
    /// Observed share.
    pub observed: f64,
}

/// Shares by group of layers and expert set, the set with the largest predicted shares first. Entries beyond the
/// layers or experts of the model are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UsageCalibration(pub [[ExpertSetShare; EXPERT_SETS]; LAYER_GROUPS]);

/// Returns the range of part `index` when `count` items are cut into `parts` whose sizes differ by at most one.
fn bounds(index: usize, parts: usize, count: usize) -> std::ops::Range<usize> {
    index * count / parts..(index + 1) * count / parts
}

/// Returns the layers of each group, as positions among all `layers`.
pub(crate) fn layer_groups(layers: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let groups = layers.min(LAYER_GROUPS);
    (0..groups).map(move |group| bounds(group, groups, layers))
}

/// Returns the number of sets for a layer with `experts` experts.
pub(crate) fn expert_sets(experts: usize) -> usize {
    experts.min(EXPERT_SETS)
}

impl UsageCalibration {
    /// Returns the calibration of one request from its predicted and actual shares, both [layers, experts].
    pub(crate) fn of_request(prediction: &UsageShares, truth: &UsageShares) -> Self {
        let mut calibration = Self::default();
        let experts = prediction.experts();
        let rows: Vec<_> = prediction.rows().zip(truth.rows()).collect();
        for (group, layers) in calibration.0.iter_mut().zip(layer_groups(rows.len())) {
            let weight = 1.0 / layers.len() as f64;
            for (predicted, observed) in &rows[layers] {
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|&a, &b| predicted[b].total_cmp(&predicted[a]).then(a.cmp(&b)));
                for (index, set) in group.iter_mut().enumerate().take(expert_sets(experts)) {
                    for &expert in &order[bounds(index, expert_sets(experts), experts)] {
                        set.predicted += weight * f64::from(predicted[expert]);
                        set.observed += weight * f64::from(observed[expert]);
                    }
                }
            }
        }
        calibration
    }

    /// Calls `update` with each share and the corresponding one of `other`.
    pub(crate) fn update_each(&mut self, other: &Self, mut update: impl FnMut(&mut f64, f64)) {
        for (part, other) in self.0.as_flattened_mut().iter_mut().zip(other.0.as_flattened()) {
            update(&mut part.predicted, other.predicted);
            update(&mut part.observed, other.observed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the shares of `layers` equal layers.
    fn shares(row: &[f32], layers: usize) -> UsageShares {
        UsageShares::from_weights(row.len(), row.repeat(layers)).unwrap()
    }

    #[test]
    fn expert_sets_follow_the_predicted_order() {
        let (predicted, truth) = (shares(&[0.1, 0.6, 0.0, 0.3], 5), shares(&[0.5, 0.25, 0.25, 0.0], 5));
        let calibration = UsageCalibration::of_request(&predicted, &truth);
        for group in calibration.0 {
            let predicted = group.map(|part| (part.predicted * 100.0).round());
            let observed = group.map(|part| (part.observed * 100.0).round());
            assert_eq!(predicted, [60.0, 30.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
            assert_eq!(observed, [25.0, 0.0, 50.0, 25.0, 0.0, 0.0, 0.0, 0.0]);
        }
    }

    #[test]
    fn every_layer_and_expert_is_in_exactly_one_set() {
        for layers in 1..20 {
            let covered: Vec<usize> = layer_groups(layers).flatten().collect();
            assert_eq!(covered, (0..layers).collect::<Vec<_>>());
            for experts in 1..20_u8 {
                let weights: Vec<f32> = (0..experts).map(|expert| f32::from(expert) + 1.0).collect();
                let both = shares(&weights, layers);
                let calibration = UsageCalibration::of_request(&both, &both);
                for (number, group) in calibration.0.iter().enumerate() {
                    let sum: f64 = group.iter().map(|part| part.predicted).sum();
                    let whole = if number < layers { 1.0 } else { 0.0 };
                    assert!((sum - whole).abs() < 1e-5, "{layers} layers, {experts} experts: {sum}");
                    assert!(group.iter().all(|part| part.predicted == part.observed));
                    assert!(
                        group.is_sorted_by(|one, next| one.predicted + 1e-5 >= next.predicted) || experts > 8
                    );
                }
            }
        }
    }
}
