//! Assignment of remote experts to groups: the groups share the work of every layer evenly.

use crate::search::tables::LayerTable;
use remoe_plan::cost::lpt::longest_first;
use remoe_plan::model::Model;

/// Division of layers and their remote experts into groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupLayout {
    /// Number of contiguous blocks of layers, each with its own groups: 1 for groups that host a slice of every layer, the
    /// number of layers for a function for each layer.
    pub(crate) blocks: usize,
    /// Groups of each block; each hosts one slice of its layers.
    pub(crate) slices: usize,
}

impl GroupLayout {
    /// Returns the block of `layer`. `layers`: number of layers.
    pub(crate) fn block(self, layer: usize, layers: usize) -> usize {
        layer * self.blocks / layers
    }
}

/// Returns the experts of every group: `[group][layer]`, ascending. Groups without experts are left out.
///
/// `counts`: remote experts of each layer.
pub(crate) fn assign_to_groups(
    model: &Model<'_>,
    tables: &[LayerTable],
    counts: &[usize],
    layout: GroupLayout,
) -> Vec<Vec<Vec<u32>>> {
    let layers = model.layers.len();
    model.meter.count(model.experts());
    let mut groups = vec![vec![Vec::new(); layers]; layout.blocks * layout.slices];
    let mut bytes: Vec<f64> = vec![0.0; groups.len()];
    for (layer, (table, count)) in tables.iter().zip(counts).enumerate() {
        let first = layout.block(layer, layers) * layout.slices;
        let mut bins: Vec<Vec<u32>> = slices(model, table, layer, *count, layout.slices);
        // The bin with the most experts goes to the group with the fewest bytes so far.
        bins.sort_by_key(|bin| std::cmp::Reverse(bin.len()));
        let mut order: Vec<usize> = (first..first + layout.slices).collect();
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

/// Assigns the `count` least used experts of a layer to `slices`, the longest first by their seconds of a request.
fn slices(model: &Model<'_>, table: &LayerTable, layer: usize, count: usize, slices: usize) -> Vec<Vec<u32>> {
    let items: Vec<usize> = (0..count).collect();
    assign_to_slices(model, table, layer, &items, slices)
}

/// Assigns the experts at positions `items` of a layer's order of use to `slices`; returns no slices if there are none.
pub(super) fn assign_to_slices(
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
    // The vCPUs hardly matter: only ratios between experts do.
    let column = curve.column(1.0);
    let token_step = curve.seconds(1.0, column) + model.down;
    let both_ways = model.up + model.down;
    let weights: Vec<f64> = items
        .iter()
        .map(|item| (&table.tokens[*item], &table.rows[*item]))
        .map(|(tokens, row)| {
            let share = tokens / (model.input * parts.per_token());
            let prefill = curve.at(*row, column) + tokens * both_ways;
            prefill + model.output * parts.per_token() * share * token_step
        })
        .collect();
    let assigned = longest_first(&weights, slices);
    assigned
        .into_iter()
        .map(|bin| bin.items.into_iter().map(|item| table.order[items[item]]).collect())
        .collect()
}
