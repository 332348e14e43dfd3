//! Everything but routed experts, in all layers together: the same for every arrangement.

use ndarray::ArrayView1;
use remoe_plan::cost::running::Times;
use remoe_plan::model::{LayerModel, Model};
use remoe_plan::problem::curve::Column;

/// Times of everything but routed experts in all layers, over the vCPUs of the main function.
pub(crate) struct RestOfLayers {
    /// All vCPUs at which any layer was measured, ascending: between two of them every time is linear.
    vcpus: Vec<f64>,
    /// Seconds of a prefill, then of a decode step at each of [`Model::batches`], at each of these vCPUs.
    seconds: Vec<Vec<f64>>,
    /// Seconds of these that the main function's CPUs compute.
    computing: Vec<Vec<f64>>,
}

impl RestOfLayers {
    pub(crate) fn new(model: &Model<'_>) -> Self {
        let mut vcpus: Vec<f64> = model.layers.iter().flat_map(LayerModel::rest_vcpus).collect();
        vcpus.sort_by(f64::total_cmp);
        vcpus.dedup();
        let batches = model.batches();
        model.add_work(model.layers.len() * vcpus.len() * (1 + batches.len()));
        let layers = || model.layers.iter();
        let over = |of: &dyn Fn(f64) -> f64| vcpus.iter().map(|vcpus| of(*vcpus)).collect::<Vec<f64>>();
        let mut seconds = vec![over(&|vcpus| layers().map(|layer| layer.fixed(vcpus).prefill).sum())];
        let mut computing =
            vec![over(&|vcpus| layers().map(|layer| layer.computing(vcpus, model.input)).sum())];
        for rows in batches {
            seconds.push(over(&|vcpus| layers().map(|layer| layer.fixed_step(vcpus, rows)).sum()));
            computing.push(over(&|vcpus| layers().map(|layer| layer.step_computing(vcpus, rows)).sum()));
        }
        Self { vcpus, seconds, computing }
    }

    /// How long it takes on a main function with `vcpus`; `least` says the least that it takes with so many or
    /// fewer.
    pub(crate) fn times(&self, vcpus: f64, least: bool) -> Times {
        self.at(&self.seconds, vcpus, least)
    }

    /// Returns the part of [`Self::times`] that the main function's CPUs compute.
    pub(crate) fn work(&self, vcpus: f64, least: bool) -> Times {
        self.at(&self.computing, vcpus, least)
    }

    fn at(&self, of: &[Vec<f64>], vcpus: f64, least: bool) -> Times {
        let place = SizeBound { column: Column::between(&self.vcpus, vcpus), least };
        let mut figures = of.iter().map(|row| place.of(row));
        let prefill = figures.next().unwrap_or(0.0);
        Times { prefill, steps: figures.collect() }
    }
}

/// Where a size stands between measured vCPUs, or at the least of all that is up to there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SizeBound {
    pub(crate) column: Column,
    pub(crate) least: bool,
}

impl SizeBound {
    /// The value there of a row over the measured vCPUs.
    pub(crate) fn of(self, row: &[f64]) -> f64 {
        let row = ArrayView1::from(row);
        if self.least { self.column.least_of(row) } else { self.column.of(row) }
    }
}
