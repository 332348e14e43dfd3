//! Seconds of every expert in each phase of a request, computed once for all arrangements.

use remoe_plan::model::ExpertUse;
use remoe_plan::model::Model;
use remoe_plan::problem::curve::Curve;

/// Limit of the numbers that are kept in memory for all experts: 64 MB.
const MAX_KEPT_NUMBERS: usize = 8_000_000;

/// Seconds of the experts of one layer, if they are local and if they are in groups.
pub(crate) struct LayerExpertTimes {
    pub(crate) local: PathExpertTimes,
    /// Absent if remote functions have the curve of the main function.
    remote: Option<PathExpertTimes>,
}

/// Seconds of the experts of one layer on one measured curve.
pub(crate) struct PathExpertTimes {
    /// Prefill.
    pub(crate) prefill: ExpertColumns,
    /// Decode step at each of [`Model::batches`] but the first.
    pub(crate) steps: Vec<ExpertSteps>,
}

/// Seconds of the experts of one layer in a decode step of several requests, where each is used with a probability.
pub(crate) struct ExpertSteps {
    /// Mean seconds.
    pub(crate) mean: ExpertColumns,
    /// Variance in square seconds.
    pub(crate) variance: ExpertColumns,
}

/// `[expert][column]`: a number for each expert and measured vCPU column.
pub(crate) struct ExpertColumns {
    columns: usize,
    values: Vec<f64>,
}

impl ExpertColumns {
    /// `value`: computed from the probability of use and the seconds of each expert.
    fn new(curve: &Curve, experts: impl Iterator<Item = ExpertUse>, value: impl Fn(f64, f64) -> f64) -> Self {
        let columns = curve.columns();
        let values = experts.flat_map(|(used, tokens)| {
            let row = curve.row(tokens);
            let value = &value;
            (0..columns).map(move |column| value(used, curve.at_column(row, column)))
        });
        Self { columns, values: values.collect() }
    }

    /// Returns the sum over `experts`, in their order, at each column.
    pub(crate) fn sums(&self, experts: impl Iterator<Item = u32>) -> Vec<f64> {
        let mut sums = vec![0.0; self.columns];
        for expert in experts {
            let own = &self.values[expert as usize * self.columns..][..self.columns];
            sums.iter_mut().zip(own).for_each(|(sum, value)| *sum += value);
        }
        sums
    }
}

impl PathExpertTimes {
    fn new(model: &Model<'_>, layer: usize, curve: &Curve) -> Self {
        let per_token = model.layers[layer].per_token();
        let prefill = model.shares[layer].iter().map(|share| (1.0, model.input * per_token * share));
        let of_batch = |used: &Vec<Vec<ExpertUse>>| {
            let experts = || used[layer].iter().copied();
            let mean = ExpertColumns::new(curve, experts(), |used, seconds| used * seconds);
            let variance = |used: f64, seconds: f64| used * (1.0 - used) * seconds.powi(2);
            ExpertSteps { mean, variance: ExpertColumns::new(curve, experts(), variance) }
        };
        Self {
            prefill: ExpertColumns::new(curve, prefill, |_, seconds| seconds),
            steps: model.used().iter().map(of_batch).collect(),
        }
    }
}

impl LayerExpertTimes {
    pub(crate) fn new(model: &Model<'_>, layer: usize) -> Self {
        let layer_model = &model.layers[layer];
        model.add_work(layer_model.experts * model.batches().len());
        let on_curve = |curve: &Curve| PathExpertTimes::new(model, layer, curve);
        Self { local: on_curve(&layer_model.curve), remote: layer_model.own_remote_curve().map(on_curve) }
    }

    /// Computes the times of all layers, or returns `None` if they exceed [`MAX_KEPT_NUMBERS`].
    pub(crate) fn of_all(model: &Model<'_>) -> Option<Vec<Self>> {
        let numbers = 2 * model.batches().len() - 1;
        let kept = model.layers.iter().map(|layer| {
            let columns = layer.curve.columns() + layer.own_remote_curve().map_or(0, Curve::columns);
            layer.experts * columns * numbers
        });
        let fits = kept.sum::<usize>() <= MAX_KEPT_NUMBERS;
        fits.then(|| (0..model.layers.len()).map(|layer| Self::new(model, layer)).collect())
    }

    /// Returns the times of experts in groups.
    pub(crate) fn remote(&self) -> &PathExpertTimes {
        self.remote.as_ref().unwrap_or(&self.local)
    }
}
