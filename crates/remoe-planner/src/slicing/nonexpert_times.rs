//! Times of the non-expert part of all layers, which are the same for every arrangement.

use ndarray::ArrayView1;
use remoe_plan::cost::running::PhaseTimes;
use remoe_plan::model::{LayerModel, Model};
use remoe_plan::problem::curve::Column;

/// Seconds of the non-expert part of all layers, over the vCPUs of the main function.
pub(crate) struct NonExpertTimes {
    /// All vCPUs at which any layer was measured, ascending. Times are linear between two of them.
    vcpus: Vec<f64>,
    /// `[phase][vcpus]`: seconds of a prefill, then of a decode step at each of [`Model::batches`].
    seconds: Vec<Vec<f64>>,
    /// `[phase][vcpus]`: the part of `seconds` that the main function's CPUs compute; 0 on a GPU.
    cpu_seconds: Vec<Vec<f64>>,
}

impl NonExpertTimes {
    pub(crate) fn new(model: &Model<'_>) -> Self {
        let mut vcpus: Vec<f64> = model.layers.iter().flat_map(LayerModel::nonexpert_vcpus).collect();
        vcpus.sort_by(f64::total_cmp);
        vcpus.dedup();
        let batches = model.batches();
        model.add_work(model.layers.len() * vcpus.len() * (1 + batches.len()));
        let layers = || model.layers.iter();
        let over_vcpus =
            |seconds: &dyn Fn(f64) -> f64| vcpus.iter().map(|vcpus| seconds(*vcpus)).collect::<Vec<f64>>();
        let mut seconds = vec![over_vcpus(&|vcpus| layers().map(|layer| layer.fixed(vcpus).prefill).sum())];
        let mut cpu_seconds =
            vec![over_vcpus(&|vcpus| layers().map(|layer| layer.nonexpert_cpu(vcpus, model.input)).sum())];
        for rows in batches {
            seconds.push(over_vcpus(&|vcpus| layers().map(|layer| layer.fixed_step(vcpus, rows)).sum()));
            cpu_seconds
                .push(over_vcpus(&|vcpus| layers().map(|layer| layer.nonexpert_step_cpu(vcpus, rows)).sum()));
        }
        Self { vcpus, seconds, cpu_seconds }
    }

    /// Returns the seconds on a main function with `vcpus`, or if `lower_bound` the least with up to `vcpus`.
    pub(crate) fn times(&self, vcpus: f64, lower_bound: bool) -> PhaseTimes {
        self.interpolated(&self.seconds, vcpus, lower_bound)
    }

    /// Returns the part of [`Self::times`] that the main function's CPUs compute.
    pub(crate) fn cpu_times(&self, vcpus: f64, lower_bound: bool) -> PhaseTimes {
        self.interpolated(&self.cpu_seconds, vcpus, lower_bound)
    }

    fn interpolated(&self, phases: &[Vec<f64>], vcpus: f64, lower_bound: bool) -> PhaseTimes {
        let position = CurvePosition { column: Column::between(&self.vcpus, vcpus), lower_bound };
        let mut seconds = phases.iter().map(|row| position.value(row));
        let prefill = seconds.next().unwrap_or(0.0);
        PhaseTimes { prefill, steps: seconds.collect() }
    }
}

/// Position of a function's vCPUs on a measured curve.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CurvePosition {
    pub(crate) column: Column,
    /// Set if values are the least up to this position, instead of those at it.
    pub(crate) lower_bound: bool,
}

impl CurvePosition {
    /// Returns the value of `row`, which has a value for each measured number of vCPUs, at this position.
    pub(crate) fn value(self, row: &[f64]) -> f64 {
        let row = ArrayView1::from(row);
        if self.lower_bound { self.column.least_of(row) } else { self.column.of(row) }
    }
}
