//! Remote set of a layer for a given share, and its assignment to replicas.

use crate::search::options::OptionChoice;
use crate::search::tables::LayerTable;
use remoe_plan::cost::decode::{SlowerPath, remote_count_probabilities};
use remoe_plan::cost::lpt::longest_first;
use remoe_plan::model::Model;
use remoe_plan::problem::curve::Row;
use remoe_plan::problem::sizes::BYTE_SLACK;
use remoe_plan::problem::stressed::stressed_scales;
use std::borrow::Cow;

/// The least used experts of a layer, with the tokens that they receive.
#[derive(Debug)]
pub(crate) struct RemoteSet<'m> {
    model: &'m Model<'m>,
    table: &'m LayerTable,
    layer: usize,
    /// Prefill tokens of each expert, ascending.
    pub(crate) tokens: Cow<'m, [f64]>,
    pub(crate) rows: Cow<'m, [Row]>,
    pub(crate) token_sum: f64,
    /// Share of the layer's assignments, at most 1.
    pub(crate) share: f64,
    /// Expected decode seconds of the slower path.
    pub(crate) path: SlowerPath,
}

/// Prefill work of all replicas of a set.
pub(crate) struct ReplicaWork {
    /// Prefill seconds of the slowest replica; infinite if its tokens exceed the payload limit.
    pub(crate) slowest: f64,
    /// Sum of the prefill seconds of all replicas.
    pub(crate) in_all: f64,
}

impl<'m> RemoteSet<'m> {
    /// Returns the `count` least used experts of `layer` with their predicted share.
    pub(crate) fn expected(model: &'m Model<'m>, table: &'m LayerTable, layer: usize, count: usize) -> Self {
        let share = table.share[count].min(1.0);
        Self {
            model,
            table,
            layer,
            tokens: Cow::Borrowed(&table.tokens[..count]),
            rows: Cow::Borrowed(&table.rows[..count]),
            token_sum: table.token_sum[count],
            share,
            path: slower_path(model, layer, share),
        }
    }

    /// Assigns the set to replicas, the longest first, as [`crate::longest_first`] does.
    pub(crate) fn split(&self, choice: OptionChoice) -> ReplicaWork {
        let model = self.model;
        let slice = model.layers[self.layer].remote_curve().slice(self.table.remote[choice.memory]);
        let both_ways = model.up + model.down;
        let mut items: Vec<(u32, f64, f64)> = self
            .rows
            .iter()
            .zip(self.tokens.iter())
            .zip(&self.table.order)
            .map(|((row, tokens), expert)| (*expert, row.of(&slice), *tokens))
            .collect();
        // Ties go to the lower expert id.
        items.sort_unstable_by_key(|(expert, ..)| *expert);
        let weights: Vec<f64> =
            items.iter().map(|(_, computing, tokens)| computing + tokens * both_ways).collect();
        let allowed = model.problem.limits.payload_bytes.unwrap_or(f64::INFINITY) + BYTE_SLACK;
        let mut split = ReplicaWork { slowest: 0.0, in_all: 0.0 };
        for replica in longest_first(&weights, choice.replicas) {
            let (mut work, mut tokens) = (0.0, 0.0);
            for (_, computing, sum) in replica.items.into_iter().map(|item| items[item]) {
                work += computing;
                tokens += sum;
            }
            let sent_tokens = f64::min(tokens, model.input);
            if sent_tokens == 0.0 {
                continue;
            }
            let seconds = work + tokens * model.down + sent_tokens * model.up + model.invoke;
            split.in_all += seconds;
            split.slowest = split.slowest.max(seconds);
            if sent_tokens * model.problem.transport.token_bytes_up > allowed {
                split.slowest = f64::INFINITY;
            }
        }
        split
    }
}

fn slower_path(model: &Model<'_>, layer: usize, share: f64) -> SlowerPath {
    SlowerPath::new(&remote_count_probabilities(model.layers[layer].top_k, share), model.round_trip())
}

/// A layer whose prediction errs as far as it does in 5 % of the cases.
#[derive(Debug)]
pub(crate) struct Stressed<'m> {
    pub(crate) set: RemoteSet<'m>,
    /// Prefill seconds of the local experts at each vCPU column.
    pub(crate) local: Vec<f64>,
}

impl<'m> Stressed<'m> {
    /// Scales the share of the remote set by `factor`.
    pub(crate) fn new(
        model: &'m Model<'m>,
        table: &'m LayerTable,
        layer: usize,
        count: usize,
        factor: f64,
    ) -> Self {
        let (curve, remote_curve) = (&model.layers[layer].curve, model.layers[layer].remote_curve());
        let (up, down) = stressed_scales(table.share[count], factor);
        let tokens: Vec<f64> = table.tokens[..count].iter().map(|tokens| tokens * up).collect();
        let rows: Vec<Row> = tokens.iter().map(|tokens| remote_curve.row(*tokens)).collect();
        let mut local = vec![0.0; curve.columns()];
        for tokens in &table.tokens[count..] {
            let row = curve.row(tokens * down);
            for (column, sum) in local.iter_mut().enumerate() {
                *sum += curve.at_column(row, column);
            }
        }
        let share = (table.share[count] * up).min(1.0);
        let set = RemoteSet {
            model,
            table,
            layer,
            token_sum: tokens.iter().sum(),
            tokens: Cow::Owned(tokens),
            rows: Cow::Owned(rows),
            share,
            path: slower_path(model, layer, share),
        };
        Self { set, local }
    }
}
