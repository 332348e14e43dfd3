//! Top-k selection of experts and of tokens on the device. Results reach the host in one copy.

use crate::library::{Kind, Tensor};
use main_model_fn::backend::BackendError;
use main_model_fn::{Routed, RoutingRule};
use remoe_model::{GroupFacts, Score};

/// Term that is added to the rank of experts in groups that were not selected. Below all scores, and finite.
const EXCLUDED: f64 = -1e30;

/// Selects the experts of each row by router `logits`, rows x experts. `correction` is that of the rule. Returns the bytes of
/// `x`, rows x hidden, and the selected experts, which reach the host in one copy.
pub(crate) fn route(
    rule: &RoutingRule,
    correction: Option<&Tensor>,
    logits: &Tensor,
    x: &Tensor,
) -> Result<(Vec<u8>, Routed), BackendError> {
    let scores = match rule.facts.score {
        // It selects few experts one after the other, which would take many launches.
        Score::SparseMixer { .. } => {
            let (rows, [logits]) = copy_together(x, [logits])?;
            return Ok((rows, rule.route(&decode_floats(&logits))));
        }
        Score::Softmax => logits.softmax_last(Kind::Float)?,
        Score::Sigmoid => logits.to_kind(Kind::Float)?.sigmoid()?,
        Score::SoftmaxOfChosen | Score::Unweighted => logits.alias(),
    };
    let corrected = correction.map(|correction| scores.add(correction)).transpose()?;
    let ranks = corrected.as_ref().unwrap_or(&scores);
    let grouped = rule.facts.groups.map(|groups| restrict_to_best_groups(ranks, groups)).transpose()?;
    let ranks = grouped.as_ref().unwrap_or(ranks);
    let (best, experts) = ranks.top_k(rule.top_k as i64)?;
    let weights =
        if correction.is_some() || grouped.is_some() { scores.gather_last(&experts)? } else { best };
    let (rows, [weights, experts]) = copy_together(x, [&weights, &experts])?;
    Ok((rows, rule.weigh_selected(&decode_ids(&experts), &decode_floats(&weights))))
}

/// Returns token ids and values of the `count` largest `logits` of each row, row by row. If a row has an element that is not
/// finite, none of its values is.
pub(crate) fn likeliest(logits: &Tensor, count: usize) -> Result<(Vec<u32>, Vec<f32>), BackendError> {
    let (best, tokens) = logits.top_k(count as i64)?;
    // 0 if all elements of a row are finite, else NaN.
    let check = logits.sub(logits)?.sum_last()?.unsqueeze(1)?;
    let best = best.add(&check)?.to_kind(Kind::Float)?;
    let (values, [tokens]) = copy_together(&best, [&tokens])?;
    Ok((decode_ids(&tokens), decode_floats(&values)))
}

/// Decodes ids below 2^32 that were stored with 64 bits.
fn decode_ids(bytes: &[u8]) -> Vec<u32> {
    let (ids, _) = bytes.as_chunks::<8>();
    ids.iter().map(|id| u64::from_le_bytes(*id) as u32).collect()
}

/// Returns ranks in which experts outside of the best groups are last (arXiv 2405.04434, section 2.2.2).
fn restrict_to_best_groups(ranks: &Tensor, groups: GroupFacts) -> Result<Tensor, BackendError> {
    let (size, count) = (ranks.size(), groups.groups as i64);
    let (rows, members) = (size[0], size[1] / count);
    let grouped = ranks.to_kind(Kind::Float)?.reshape(&[rows, count, members])?;
    let group_ranks = match groups.best {
        1 => grouped.max_last()?,
        best => grouped.top_k(best as i64)?.0.sum_last()?,
    };
    let (_, best_groups) = group_ranks.top_k(groups.chosen as i64)?;
    let penalty = Tensor::full(ranks.device(), &[rows, count], EXCLUDED, Kind::Float)?;
    penalty.scatter_last_(&best_groups, 0.0)?;
    grouped.add(&penalty.unsqueeze(2)?)?.reshape(&size)
}

/// Copies `x` and `others` to the host in one copy. Floating-point elements of `others` become float32.
fn copy_together<const N: usize>(
    x: &Tensor,
    others: [&Tensor; N],
) -> Result<(Vec<u8>, [Vec<u8>; N]), BackendError> {
    let bytes = |x: &Tensor| x.contiguous()?.reshape(&[-1])?.view_as(Kind::Uint8);
    let mut parts = vec![bytes(x)?];
    let mut sizes = Vec::with_capacity(N);
    for other in others {
        let wide = match other.kind() {
            Kind::BFloat16 => other.to_kind(Kind::Float)?,
            _ => other.alias(),
        };
        parts.push(bytes(&wide)?);
        sizes.push(wide.byte_count());
    }
    let mut rows = Tensor::cat(&parts.iter().collect::<Vec<_>>(), 0)?.bytes()?;
    let mut split: [Vec<u8>; N] = std::array::from_fn(|_| Vec::new());
    for (at, size) in sizes.into_iter().enumerate().rev() {
        split[at] = rows.split_off(rows.len() - size);
    }
    Ok((rows, split))
}

fn decode_floats(bytes: &[u8]) -> Vec<f32> {
    let (elements, _) = bytes.as_chunks::<4>();
    elements.iter().map(|element| f32::from_le_bytes(*element)).collect()
}
