//! Where work was predicted to be and where it was, in a few figures however many experts a model has: the experts of each layer
//! in the order of the prediction, cut into parts of the same size, and neighbouring layers together.

use remoe_predictor::Shares;

/// Groups of neighbouring layers, at most.
pub const LAYER_GROUPS: usize = 4;
/// Parts of a layer's experts, at most.
pub const PARTS: usize = 8;

/// The work of one part of the experts, as a share of that of their layers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ExpertSetShare {
    /// As it was predicted.
    pub predicted: f64,
    /// As it was.
    pub observed: f64,
}

/// By groups of layers, and in each by parts of the experts: those first that were predicted to be used most. What a model has
/// no layers or no experts for is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Calibration(pub [[ExpertSetShare; PARTS]; LAYER_GROUPS]);

/// The bounds of the part `number` of `count` things in `parts` parts that differ by one at most.
fn bounds(number: usize, parts: usize, count: usize) -> std::ops::Range<usize> {
    number * count / parts..(number + 1) * count / parts
}

/// The layers of each group, as positions among `layers` of them.
pub(crate) fn layer_groups(layers: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let groups = layers.min(LAYER_GROUPS);
    (0..groups).map(move |group| bounds(group, groups, layers))
}

/// Into how many parts `experts` fall.
pub(crate) fn parts(experts: usize) -> usize {
    experts.min(PARTS)
}

impl Calibration {
    /// Calibration of one request with its `prediction` and its `truth`, both [layers, experts].
    pub(crate) fn of(prediction: &Shares, truth: &Shares) -> Self {
        let mut found = Self::default();
        let experts = prediction.experts();
        let rows: Vec<_> = prediction.rows().zip(truth.rows()).collect();
        for (group, layers) in found.0.iter_mut().zip(layer_groups(rows.len())) {
            let weight = 1.0 / layers.len() as f64;
            for (predicted, observed) in &rows[layers] {
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|&a, &b| predicted[b].total_cmp(&predicted[a]).then(a.cmp(&b)));
                for (number, part) in group.iter_mut().enumerate().take(parts(experts)) {
                    for &expert in &order[bounds(number, parts(experts), experts)] {
                        part.predicted += weight * f64::from(predicted[expert]);
                        part.observed += weight * f64::from(observed[expert]);
                    }
                }
            }
        }
        found
    }

    /// Every figure with the one of `other` in its place.
    pub(crate) fn each(&mut self, other: &Self, mut with: impl FnMut(&mut f64, f64)) {
        for (part, other) in self.0.as_flattened_mut().iter_mut().zip(other.0.as_flattened()) {
            with(&mut part.predicted, other.predicted);
            with(&mut part.observed, other.observed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shares of `layers` equal layers.
    fn shares(row: &[f32], layers: usize) -> Shares {
        Shares::from_weights(row.len(), row.repeat(layers)).unwrap()
    }

    #[test]
    fn parts_follow_the_order_of_the_prediction() {
        let (predicted, truth) = (shares(&[0.1, 0.6, 0.0, 0.3], 5), shares(&[0.5, 0.25, 0.25, 0.0], 5));
        let found = Calibration::of(&predicted, &truth);
        for group in found.0 {
            let said = group.map(|part| (part.predicted * 100.0).round());
            let seen = group.map(|part| (part.observed * 100.0).round());
            assert_eq!(said, [60.0, 30.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
            assert_eq!(seen, [25.0, 0.0, 50.0, 25.0, 0.0, 0.0, 0.0, 0.0]);
        }
    }

    #[test]
    fn all_layers_and_experts_are_in_one_part() {
        for layers in 1..20 {
            let covered: Vec<usize> = layer_groups(layers).flatten().collect();
            assert_eq!(covered, (0..layers).collect::<Vec<_>>());
            for experts in 1..20_u8 {
                let weights: Vec<f32> = (0..experts).map(|expert| f32::from(expert) + 1.0).collect();
                let both = shares(&weights, layers);
                let found = Calibration::of(&both, &both);
                for (number, group) in found.0.iter().enumerate() {
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
