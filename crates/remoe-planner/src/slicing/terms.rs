//! Contribution of every expert to the times of an arrangement, wherever it is: computed once for all of them.

use remoe_plan::model::ExpertUse;
use remoe_plan::model::Model;
use remoe_plan::problem::curve::Curve;

/// Numbers that are kept of all experts together, at most: 64 MB.
const MOST_KEPT: usize = 8_000_000;

/// The experts of one layer in the main function and in groups.
pub(crate) struct LayerTerms {
    pub(crate) here: PathTerms,
    /// Absent where the curves are the same.
    away: Option<PathTerms>,
}

/// Seconds of the experts of a layer where they are computed on one curve.
pub(crate) struct PathTerms {
    /// Prefill.
    pub(crate) prefill: Columns,
    /// Decode step at each batch but the first: the mean, and the variance.
    pub(crate) batches: Vec<(Columns, Columns)>,
}

/// A number per expert and measured vCPU column.
pub(crate) struct Columns {
    columns: usize,
    values: Vec<f64>,
}

impl Columns {
    fn new(curve: &Curve, experts: impl Iterator<Item = ExpertUse>, term: impl Fn(f64, f64) -> f64) -> Self {
        let columns = curve.columns();
        let values = experts.flat_map(|(used, tokens)| {
            let row = curve.row(tokens);
            let term = &term;
            (0..columns).map(move |column| term(used, curve.at_column(row, column)))
        });
        Self { columns, values: values.collect() }
    }

    /// Sums over `experts`, in their order, at each column.
    pub(crate) fn sums(&self, experts: impl Iterator<Item = u32>) -> Vec<f64> {
        let mut sums = vec![0.0; self.columns];
        for expert in experts {
            let own = &self.values[expert as usize * self.columns..][..self.columns];
            sums.iter_mut().zip(own).for_each(|(sum, value)| *sum += value);
        }
        sums
    }
}

impl PathTerms {
    fn new(model: &Model<'_>, layer: usize, curve: &Curve) -> Self {
        let per_token = model.layers[layer].per_token();
        let prefill = model.shares[layer].iter().map(|share| (1.0, model.input * per_token * share));
        let of_batch = |used: &Vec<Vec<ExpertUse>>| {
            let experts = || used[layer].iter().copied();
            let mean = Columns::new(curve, experts(), |used, seconds| used * seconds);
            let variance = |used: f64, seconds: f64| used * (1.0 - used) * seconds.powi(2);
            (mean, Columns::new(curve, experts(), variance))
        };
        Self {
            prefill: Columns::new(curve, prefill, |_, seconds| seconds),
            batches: model.used().iter().map(of_batch).collect(),
        }
    }
}

impl LayerTerms {
    pub(crate) fn new(model: &Model<'_>, layer: usize) -> Self {
        let parts = &model.layers[layer];
        model.add_work(parts.experts * model.batches().len());
        let curve = |curve: &Curve| PathTerms::new(model, layer, curve);
        Self { here: curve(&parts.curve), away: parts.own_remote_curve().map(curve) }
    }

    /// Returns the terms of all layers, where that is not too much to keep.
    pub(crate) fn of_all(model: &Model<'_>) -> Option<Vec<Self>> {
        let numbers = 2 * model.batches().len() - 1;
        let kept = model.layers.iter().map(|layer| {
            let columns = layer.curve.columns() + layer.own_remote_curve().map_or(0, Curve::columns);
            layer.experts * columns * numbers
        });
        let fits = kept.sum::<usize>() <= MOST_KEPT;
        fits.then(|| (0..model.layers.len()).map(|layer| Self::new(model, layer)).collect())
    }

    /// Returns the terms of experts in groups.
    pub(crate) fn away(&self) -> &PathTerms {
        self.away.as_ref().unwrap_or(&self.here)
    }
}
