//! Selection of remote experts (Remoe paper, section IV-D), and candidates of remote counts.

use crate::preallocation::ratio_counts;
use remoe_plan::model::Model;
use serde::Serialize;

/// How the number of remote experts per layer was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Selection {
    /// One ratio for every layer.
    Ratio,
    /// The least used experts per byte of all layers, within the bytes of a ratio.
    AcrossLayers,
    /// Any experts of every layer: some layers may be wholly local, others wholly remote.
    Mixed,
}

/// A number of remote experts for every layer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) selection: Selection,
    /// Ratio times the experts of the largest layer. For a selection across layers, the ratio whose bytes are the budget.
    pub(crate) i: usize,
    /// Remote experts of each layer.
    pub(crate) counts: Vec<usize>,
}

/// Returns the experts of a layer by expected use (u), the least used first; ties by index.
pub(crate) fn by_use(model: &Model<'_>, layer: usize) -> Vec<u32> {
    let used = expert_uses(model, layer);
    // Checked layers have at most 65,536 experts.
    let mut order: Vec<u32> = (0..used.len() as u32).collect();
    order.sort_by(|a, b| used[*a as usize].total_cmp(&used[*b as usize]));
    order
}

/// Returns the expected assignments of each expert in prefill and decode.
fn expert_uses(model: &Model<'_>, layer: usize) -> Vec<f64> {
    let per_token = model.layers[layer].per_token();
    let shares = model.shares[layer].iter();
    shares.map(|share| model.input * per_token * share + model.output * per_token * share).collect()
}

/// Returns one candidate for each ratio, the largest first.
pub(crate) fn by_ratio(model: &Model<'_>) -> Vec<Candidate> {
    (0..=model.most_experts()).rev().map(|i| ratio_candidate(model, i)).collect()
}

/// Returns the candidate of the ratio `i` / K, where K is the number of experts of the largest layer.
pub(crate) fn ratio_candidate(model: &Model<'_>, i: usize) -> Candidate {
    let counts = ratio_counts(model, i, model.most_experts());
    Candidate { selection: Selection::Ratio, i, counts }
}

/// Returns all combinations of remote counts that are not in `known`, or none if there are more than `most` combinations.
pub(crate) fn other_combinations(model: &Model<'_>, known: &[Candidate], most: usize) -> Vec<Candidate> {
    let sizes = model.layers.iter().map(|layer| layer.experts + 1);
    if sizes.clone().try_fold(1_usize, |product, size| product.checked_mul(size)).is_none_or(|all| all > most)
    {
        return Vec::new();
    }
    let mut all: Vec<Vec<usize>> = vec![Vec::new()];
    for size in sizes {
        all = all
            .into_iter()
            .flat_map(|counts| (0..size).map(move |count| [counts.as_slice(), &[count]].concat()))
            .collect();
    }
    all.retain(|counts| !known.iter().any(|candidate| candidate.counts == *counts));
    let largest = |counts: &Vec<usize>| counts.iter().copied().max().unwrap_or(0);
    all.into_iter()
        .map(|counts| Candidate { selection: Selection::AcrossLayers, i: largest(&counts), counts })
        .collect()
}

/// Maximum number of candidates of [`whole_layers`] for each order of layers.
const MAX_WHOLE_LAYER_CANDIDATES: usize = 24;

/// Returns candidates whose layers are wholly remote or wholly local.
///
/// The remote layers are the first ones, or those with the least use per byte.
pub(crate) fn whole_layers(model: &Model<'_>) -> Vec<Candidate> {
    let layers = model.layers.len();
    let uses = |layer: &usize| model.layers[*layer].per_token() / model.layers[*layer].expert_bytes;
    let in_order: Vec<usize> = (0..layers).collect();
    let mut by_use = in_order.clone();
    by_use.sort_by(|a, b| uses(a).total_cmp(&uses(b)));
    let steps = MAX_WHOLE_LAYER_CANDIDATES.min(layers.saturating_sub(1));
    let mut found: Vec<Candidate> = Vec::new();
    for order in [in_order, by_use] {
        for step in 1..=steps {
            let mut counts = vec![0; layers];
            for layer in &order[..(step * layers / (steps + 1)).max(1)] {
                counts[*layer] = model.layers[*layer].experts;
            }
            if found.iter().all(|known| known.counts != counts) {
                let i = counts.iter().copied().max().unwrap_or(0);
                found.push(Candidate { selection: Selection::Mixed, i, counts });
            }
        }
    }
    found
}

/// Returns for each of `ratios` the candidate whose remote experts are the least used per byte over all layers.
///
/// Their bytes are within those of the ratio. Equal candidates are left out.
pub(crate) fn across_layers(model: &Model<'_>, ratios: &[Candidate]) -> Vec<Candidate> {
    let mut experts: Vec<(f64, usize)> = Vec::new();
    for (index, layer) in model.layers.iter().enumerate() {
        experts.extend(expert_uses(model, index).into_iter().map(|uses| (uses / layer.expert_bytes, index)));
    }
    experts.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut budgets: Vec<(f64, &Candidate)> = ratios
        .iter()
        .map(|ratio| {
            let layers = model.layers.iter().zip(&ratio.counts);
            (layers.map(|(layer, count)| *count as f64 * layer.expert_bytes).sum(), ratio)
        })
        .collect();
    budgets.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.i.cmp(&b.1.i)));

    let mut counts = vec![0; model.layers.len()];
    let mut bytes = 0.0;
    let mut next = experts.into_iter().peekable();
    let mut found: Vec<Candidate> = Vec::new();
    for (budget, ratio) in budgets {
        // A sum of equal terms in another order may differ in its last bits.
        let allowed = budget * (1.0 + 1e-12);
        while let Some((_, layer)) =
            next.next_if(|(_, layer)| bytes + model.layers[*layer].expert_bytes <= allowed)
        {
            bytes += model.layers[layer].expert_bytes;
            counts[layer] += 1;
        }
        let seen = found.last().is_some_and(|last| last.counts == counts);
        if counts != ratio.counts && !seen {
            let counts = counts.clone();
            found.push(Candidate { selection: Selection::AcrossLayers, i: ratio.i, counts });
        }
    }
    found
}
