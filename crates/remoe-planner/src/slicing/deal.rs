//! Dealing of experts: the remote experts of every layer go to groups so that each has the same work on it.

use crate::search::tables::LayerTable;
use remoe_plan::cost::lpt::longest_first;
use remoe_plan::model::Model;

/// How layers and their remote experts become groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Contiguous blocks of layers, each with groups of its own: 1 for groups that hold a part of every
    /// layer, the number of layers for a function per layer.
    pub(crate) blocks: usize,
    /// Groups of each block.
    pub(crate) slices: usize,
}

impl Cut {
    /// The block of `layer`, of so many layers.
    pub(crate) fn block(self, layer: usize, layers: usize) -> usize {
        layer * self.blocks / layers
    }
}

/// The experts of every group, per layer by position and ascending; groups without any are left out.
pub(crate) fn deal(
    model: &Model<'_>,
    tables: &[LayerTable],
    counts: &[usize],
    cut: Cut,
) -> Vec<Vec<Vec<u32>>> {
    let layers = model.layers.len();
    model.meter.count(model.experts());
    let mut groups = vec![vec![Vec::new(); layers]; cut.blocks * cut.slices];
    let mut bytes: Vec<f64> = vec![0.0; groups.len()];
    for (layer, (table, count)) in tables.iter().zip(counts).enumerate() {
        let first = cut.block(layer, layers) * cut.slices;
        let mut bins: Vec<Vec<u32>> = slices(model, table, layer, *count, cut.slices);
        // The bin with the most experts goes to the group with the fewest bytes so far.
        bins.sort_by_key(|bin| std::cmp::Reverse(bin.len()));
        let mut order: Vec<usize> = (first..first + cut.slices).collect();
        order.sort_by(|a, b| bytes[*a].total_cmp(&bytes[*b]));
        for (group, mut bin) in order.into_iter().zip(bins) {
            bytes[group] += bin.len() as f64 * model.layers[layer].expert_bytes;
            bin.sort_unstable();
            groups[group][layer] = bin;
        }
    }
    groups.retain(|group| group.iter().any(|experts| !experts.is_empty()));
    groups
}

/// The `count` least used experts of a layer in `slices` bins, longest first by what they take of a request.
fn slices(model: &Model<'_>, table: &LayerTable, layer: usize, count: usize, slices: usize) -> Vec<Vec<u32>> {
    let items: Vec<usize> = (0..count).collect();
    slices_of(model, table, layer, &items, slices)
}

/// The experts at `items` of a layer's order in `slices` bins; none where there are no bins.
pub(super) fn slices_of(
    model: &Model<'_>,
    table: &LayerTable,
    layer: usize,
    items: &[usize],
    slices: usize,
) -> Vec<Vec<u32>> {
    if slices == 0 {
        return Vec::new();
    }
    let parts = &model.layers[layer];
    let curve = parts.remote_curve();
    // Any size will do: only ratios between experts matter.
    let column = curve.column(1.0);
    let one = curve.seconds(1.0, column) + model.down;
    let both_ways = model.up + model.down;
    let weights: Vec<f64> = items
        .iter()
        .map(|item| (&table.tokens[*item], &table.rows[*item]))
        .map(|(tokens, row)| {
            let share = tokens / (model.input * parts.per_token());
            let prefill = curve.at(*row, column) + tokens * both_ways;
            prefill + model.output * parts.per_token() * share * one
        })
        .collect();
    let dealt = longest_first(&weights, slices);
    dealt
        .into_iter()
        .map(|bin| bin.items.into_iter().map(|item| table.order[items[item]]).collect())
        .collect()
}
