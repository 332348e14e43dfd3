//! Sums over experts that the search reads instead of experts.
//!
//! The remote set of a layer is a prefix of its experts by use, and times are linear in the measured
//! vCPU columns, so that prefix and suffix sums at those columns give the time of every remote or
//! local set on every size in constant time.

use crate::problem::curve::{Column, Row};
use crate::problem::model::{Model, Seconds};
use crate::search::selection::by_use;
use ndarray::Array2;

/// The sums of one layer.
#[derive(Debug)]
pub(crate) struct LayerTable {
    /// Experts by use, the least used first.
    pub(crate) order: Vec<u32>,
    /// Expected prefill tokens of each, in that order.
    pub(crate) tokens: Vec<f64>,
    /// Where those stand on the remote curve.
    pub(crate) rows: Vec<Row>,
    /// Share of the first experts, by how many.
    pub(crate) share: Vec<f64>,
    /// Tokens of the first experts, by how many.
    pub(crate) token_sum: Vec<f64>,
    /// Prefill seconds of the first experts, by how many and vCPU column.
    away: Array2<f64>,
    /// Prefill seconds of the others.
    stay: Array2<f64>,
    /// Where main and remote sizes stand between the columns.
    pub(crate) main: Vec<Column>,
    pub(crate) remote: Vec<Column>,
    /// Seconds of everything but routed experts on each main size.
    pub(crate) fixed: Vec<Seconds>,
    /// Seconds of one token on each main size.
    pub(crate) main_step: Vec<f64>,
    /// The same on each remote size, with the way back.
    pub(crate) remote_step: Vec<f64>,
}

impl LayerTable {
    pub(crate) fn new(model: &Model<'_>, layer: usize) -> Self {
        let parts = &model.layers[layer];
        let (curve, remote_curve) = (&parts.curve, parts.remote_curve());
        let order = by_use(model, layer);
        let shares: Vec<f64> = order.iter().map(|expert| model.shares[layer][*expert as usize]).collect();
        let tokens: Vec<f64> = shares.iter().map(|share| model.input * parts.per_token() * share).collect();
        let rows: Vec<Row> = tokens.iter().map(|tokens| remote_curve.row(*tokens)).collect();
        let experts = order.len();
        let mut away = Array2::zeros((experts + 1, remote_curve.columns()));
        for column in 0..remote_curve.columns() {
            for (index, row) in rows.iter().enumerate() {
                away[(index + 1, column)] = away[(index, column)] + remote_curve.at_column(*row, column);
            }
        }
        let mut stay = Array2::zeros((experts + 1, curve.columns()));
        for column in 0..curve.columns() {
            for (index, tokens) in tokens.iter().enumerate().rev() {
                let row = curve.row(*tokens);
                stay[(index, column)] = stay[(index + 1, column)] + curve.at_column(row, column);
            }
        }
        let main: Vec<Column> =
            model.main_sizes.iter().map(|bytes| curve.column(model.main_vcpus(*bytes))).collect();
        let remote: Vec<Column> =
            model.remote_sizes.iter().map(|bytes| remote_curve.column(model.remote_vcpus(*bytes))).collect();
        let (one, remote_one) = (curve.row(1.0), remote_curve.row(1.0));
        Self {
            share: prefix_sums(&shares),
            token_sum: prefix_sums(&tokens),
            fixed: model.main_sizes.iter().map(|bytes| parts.fixed(model.main_vcpus(*bytes))).collect(),
            main_step: main.iter().map(|column| curve.at(one, *column)).collect(),
            remote_step: remote
                .iter()
                .map(|column| remote_curve.at(remote_one, *column) + model.down)
                .collect(),
            order,
            tokens,
            rows,
            away,
            stay,
            main,
            remote,
        }
    }

    /// Prefill seconds of the first `count` experts on the remote size `memory`.
    pub(crate) fn away(&self, count: usize, memory: usize) -> f64 {
        self.remote[memory].of(self.away.row(count))
    }

    /// The same at each vCPU column.
    pub(crate) fn away_at(&self, count: usize) -> ndarray::ArrayView1<'_, f64> {
        self.away.row(count)
    }

    /// Prefill seconds of all but the first `count` experts at each vCPU column.
    pub(crate) fn stay(&self, count: usize) -> ndarray::ArrayView1<'_, f64> {
        self.stay.row(count)
    }

    /// The first `count` experts, ascending.
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
