//! Sums over experts that the search reads instead of experts.
//!
//! The remote set of a layer is a prefix of its experts by use, and times are linear in the measured
//! vCPU columns, so that prefix and suffix sums at those columns give the time of every remote or
//! local set on every size in constant time.

use crate::search::options::Local;
use crate::search::selection::by_use;
use ndarray::Array2;
use remoe_plan::model::{Model, Seconds};
use remoe_plan::problem::curve::{Column, Row};
use std::rc::Rc;

/// The sums of one layer.
#[derive(Debug, Clone)]
pub(crate) struct LayerTable {
    /// Experts in the order in which they become remote: by use, the least used first, unless a set of its own
    /// comes before the others.
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
    pub(crate) main: Rc<[Column]>,
    pub(crate) remote: Rc<[Column]>,
    /// Seconds of everything but routed experts on each main size.
    pub(crate) fixed: Rc<[Seconds]>,
    /// Seconds of one token on each main size.
    pub(crate) main_step: Rc<[f64]>,
    /// Seconds of one token on each remote size, with the way back.
    pub(crate) remote_step: Rc<[f64]>,
}

/// The sums of one layer over one order of its experts.
struct LayerSums {
    tokens: Vec<f64>,
    rows: Vec<Row>,
    share: Vec<f64>,
    token_sum: Vec<f64>,
    away: Array2<f64>,
    stay: Array2<f64>,
}

impl LayerSums {
    fn new(model: &Model<'_>, layer: usize, order: &[u32]) -> Self {
        let parts = &model.layers[layer];
        let (curve, remote_curve) = (&parts.curve, parts.remote_curve());
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
        Self { share: prefix_sums(&shares), token_sum: prefix_sums(&tokens), tokens, rows, away, stay }
    }
}

impl LayerTable {
    pub(crate) fn new(model: &Model<'_>, layer: usize) -> Self {
        let parts = &model.layers[layer];
        let (curve, remote_curve) = (&parts.curve, parts.remote_curve());
        let order = by_use(model, layer);
        let LayerSums { tokens, rows, share, token_sum, away, stay } = LayerSums::new(model, layer, &order);
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
            away,
            stay,
        }
    }

    /// Returns the table of the layer where the experts of `first` become remote before all others; both parts by
    /// use.
    pub(crate) fn led_by(&self, model: &Model<'_>, layer: usize, first: &[u32]) -> Self {
        let leads = |expert: &u32| first.contains(expert);
        let (mut order, rest): (Vec<u32>, Vec<u32>) = self.order.iter().copied().partition(leads);
        order.extend(rest);
        let LayerSums { tokens, rows, share, token_sum, away, stay } = LayerSums::new(model, layer, &order);
        let (main, remote, fixed) = (self.main.clone(), self.remote.clone(), self.fixed.clone());
        let (main_step, remote_step) = (self.main_step.clone(), self.remote_step.clone());
        Self {
            order,
            tokens,
            rows,
            share,
            token_sum,
            away,
            stay,
            main,
            remote,
            fixed,
            main_step,
            remote_step,
        }
    }

    /// Prefill seconds of the first `count` experts on the remote size `memory`.
    pub(crate) fn away(&self, count: usize, memory: usize) -> f64 {
        self.remote[memory].of(self.away.row(count))
    }

    /// Returns the prefill seconds of the first `count` experts at each vCPU column.
    pub(crate) fn away_at(&self, count: usize) -> ndarray::ArrayView1<'_, f64> {
        self.away.row(count)
    }

    /// Prefill seconds of all but the first `count` experts at each vCPU column.
    pub(crate) fn stay(&self, count: usize) -> ndarray::ArrayView1<'_, f64> {
        self.stay.row(count)
    }

    /// Terms of the layer with the main size at `main` when nothing of it is remote.
    pub(crate) fn all_local(&self, main: usize) -> Local {
        let prefill = self.main[main].of(self.stay(0));
        Local { fixed: self.fixed[main], prefill, step: self.main_step[main], stressed_prefill: prefill }
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
