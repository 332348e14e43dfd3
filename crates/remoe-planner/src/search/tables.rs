//! Prefix sums over the experts of a layer, which give the times of every remote set in constant time.
//!
//! The remote set of a layer is a prefix of its experts by use. Times are linear between the measured vCPU columns. So
//! prefix and suffix sums at these columns are enough for every set on every size.

use crate::search::options::LocalTimes;
use crate::search::selection::by_use;
use ndarray::Array2;
use remoe_plan::model::{Model, Seconds};
use remoe_plan::problem::curve::{Column, Row};
use std::rc::Rc;

/// Prefix sums of one layer.
#[derive(Debug, Clone)]
pub(crate) struct LayerTable {
    /// Experts in the order in which they become remote: the least used first, or after a given set ([`Self::with_first`]).
    pub(crate) order: Vec<u32>,
    /// Expected prefill tokens of each expert, in that order.
    pub(crate) tokens: Vec<f64>,
    /// Positions of these tokens on the remote curve.
    pub(crate) rows: Vec<Row>,
    /// `[count]`: share of the first `count` experts.
    pub(crate) share: Vec<f64>,
    /// `[count]`: tokens of the first `count` experts.
    pub(crate) token_sum: Vec<f64>,
    /// `[count][column]`: prefill seconds of the first `count` experts on remote functions.
    remote_prefill: Array2<f64>,
    /// `[count][column]`: prefill seconds of all other experts on the main function.
    local_prefill: Array2<f64>,
    /// Positions of the main sizes between the vCPU columns.
    pub(crate) main: Rc<[Column]>,
    /// Positions of the remote sizes between the vCPU columns.
    pub(crate) remote: Rc<[Column]>,
    /// Seconds of the non-expert part on each main size.
    pub(crate) fixed: Rc<[Seconds]>,
    /// Seconds of one expert for one token on each main size.
    pub(crate) main_step: Rc<[f64]>,
    /// Seconds of one expert for one token on each remote size, including the returned row.
    pub(crate) remote_step: Rc<[f64]>,
}

/// Prefix sums of one layer for one order of its experts.
struct LayerSums {
    tokens: Vec<f64>,
    rows: Vec<Row>,
    share: Vec<f64>,
    token_sum: Vec<f64>,
    remote_prefill: Array2<f64>,
    local_prefill: Array2<f64>,
}

impl LayerSums {
    fn new(model: &Model<'_>, layer: usize, order: &[u32]) -> Self {
        let parts = &model.layers[layer];
        let (curve, remote_curve) = (&parts.curve, parts.remote_curve());
        let shares: Vec<f64> = order.iter().map(|expert| model.shares[layer][*expert as usize]).collect();
        let tokens: Vec<f64> = shares.iter().map(|share| model.input * parts.per_token() * share).collect();
        let rows: Vec<Row> = tokens.iter().map(|tokens| remote_curve.row(*tokens)).collect();
        let experts = order.len();
        let mut remote_prefill = Array2::zeros((experts + 1, remote_curve.columns()));
        for column in 0..remote_curve.columns() {
            for (index, row) in rows.iter().enumerate() {
                remote_prefill[(index + 1, column)] =
                    remote_prefill[(index, column)] + remote_curve.at_column(*row, column);
            }
        }
        let mut local_prefill = Array2::zeros((experts + 1, curve.columns()));
        for column in 0..curve.columns() {
            for (index, tokens) in tokens.iter().enumerate().rev() {
                let row = curve.row(*tokens);
                local_prefill[(index, column)] =
                    local_prefill[(index + 1, column)] + curve.at_column(row, column);
            }
        }
        Self {
            share: prefix_sums(&shares),
            token_sum: prefix_sums(&tokens),
            tokens,
            rows,
            remote_prefill,
            local_prefill,
        }
    }
}

impl LayerTable {
    pub(crate) fn new(model: &Model<'_>, layer: usize) -> Self {
        let parts = &model.layers[layer];
        let (curve, remote_curve) = (&parts.curve, parts.remote_curve());
        let order = by_use(model, layer);
        let LayerSums { tokens, rows, share, token_sum, remote_prefill, local_prefill } =
            LayerSums::new(model, layer, &order);
        let main: Vec<Column> =
            model.main_sizes.iter().map(|bytes| curve.column(model.main_vcpus(*bytes))).collect();
        let remote: Vec<Column> =
            model.remote_sizes.iter().map(|bytes| remote_curve.column(model.remote_vcpus(*bytes))).collect();
        let (one, remote_one) = (curve.row(1.0), remote_curve.row(1.0));
        Self {
            fixed: model.main_sizes.iter().map(|bytes| parts.fixed(model.main_vcpus(*bytes))).collect(),
            main_step: main.iter().map(|column| curve.at(one, *column)).collect(),
            remote_step: remote
                .iter()
                .map(|column| remote_curve.at(remote_one, *column) + model.down)
                .collect(),
            main: main.into(),
            remote: remote.into(),
            order,
            tokens,
            rows,
            share,
            token_sum,
            remote_prefill,
            local_prefill,
        }
    }

    /// Returns the table with the experts of `first` before all others. Both parts are ordered by use.
    pub(crate) fn with_first(&self, model: &Model<'_>, layer: usize, first: &[u32]) -> Self {
        let is_first = |expert: &u32| first.contains(expert);
        let (mut order, rest): (Vec<u32>, Vec<u32>) = self.order.iter().copied().partition(is_first);
        order.extend(rest);
        let LayerSums { tokens, rows, share, token_sum, remote_prefill, local_prefill } =
            LayerSums::new(model, layer, &order);
        let (main, remote, fixed) = (self.main.clone(), self.remote.clone(), self.fixed.clone());
        let (main_step, remote_step) = (self.main_step.clone(), self.remote_step.clone());
        Self {
            order,
            tokens,
            rows,
            share,
            token_sum,
            remote_prefill,
            local_prefill,
            main,
            remote,
            fixed,
            main_step,
            remote_step,
        }
    }

    /// Returns the prefill seconds of the first `count` experts on the remote size `memory`.
    pub(crate) fn remote_prefill(&self, count: usize, memory: usize) -> f64 {
        self.remote[memory].of(self.remote_prefill.row(count))
    }

    /// Returns the prefill seconds of the first `count` experts at each vCPU column.
    pub(crate) fn remote_prefill_columns(&self, count: usize) -> ndarray::ArrayView1<'_, f64> {
        self.remote_prefill.row(count)
    }

    /// Returns the prefill seconds of all but the first `count` experts at each vCPU column.
    pub(crate) fn local_prefill_columns(&self, count: usize) -> ndarray::ArrayView1<'_, f64> {
        self.local_prefill.row(count)
    }

    /// Returns the times of the layer with all experts local, with the main size at `main`.
    pub(crate) fn all_local(&self, main: usize) -> LocalTimes {
        let prefill = self.main[main].of(self.local_prefill_columns(0));
        LocalTimes { fixed: self.fixed[main], prefill, step: self.main_step[main], stressed_prefill: prefill }
    }

    /// Returns the first `count` experts, ascending.
    pub(crate) fn remote_set(&self, count: usize) -> Vec<u32> {
        let mut set = self.order[..count].to_vec();
        set.sort_unstable();
        set
    }
}

fn prefix_sums(values: &[f64]) -> Vec<f64> {
    let mut sums = Vec::with_capacity(values.len() + 1);
    let mut sum = 0.0;
    sums.push(sum);
    for value in values {
        sum += value;
        sums.push(sum);
    }
    sums
}
