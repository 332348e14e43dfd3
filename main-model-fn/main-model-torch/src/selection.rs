//! Selections on the device, of experts and of tokens, that come to the host in one copy.

use crate::library::{Kind, Tensor};
use main_model_fn::backend::BackendError;
use main_model_fn::{Routed, RoutingRule};
use remoe_model::{GroupFacts, Score};

/// Term that is added to the rank of an expert whose group was not chosen. Beyond all scores, and finite.
const NOT_CHOSEN: f64 = -1e30;

/// Routes rows by their `logits`, rows x experts; `correction` is the rule's. Returns the bytes of `x`, rows x hidden,
/// and the experts of each row, which come to the host in one copy.
pub(crate) fn route(
    rule: &RoutingRule,
    correction: Option<&Tensor>,
    logits: &Tensor,
    x: &Tensor,
) -> Result<(Vec<u8>, Routed), BackendError> {
    let scores = match rule.facts.score {
        // Few experts, chosen one after the other: the host does that.
        Score::SparseMixer { .. } => {
            let (rows, [logits]) = together(x, [logits])?;
            return Ok((rows, rule.route(&floats(&logits))));
        }
        Score::Softmax => logits.softmax_last(Kind::Float)?,
        Score::Sigmoid => logits.to_kind(Kind::Float)?.sigmoid()?,
        Score::SoftmaxOfChosen | Score::Unweighted => logits.alias(),
    };
    let corrected = correction.map(|correction| scores.add(correction)).transpose()?;
    let ranks = corrected.as_ref().unwrap_or(&scores);
    let grouped = rule.facts.groups.map(|groups| in_chosen_groups(ranks, groups)).transpose()?;
    let ranks = grouped.as_ref().unwrap_or(ranks);
    let (best, experts) = ranks.top(rule.top_k as i64)?;
    let weights =
        if correction.is_some() || grouped.is_some() { scores.gather_last(&experts)? } else { best };
    let (rows, [weights, experts]) = together(x, [&weights, &experts])?;
    Ok((rows, rule.weigh_selected(&ids(&experts), &floats(&weights))))
}

/// The `count` largest of each row of `logits` and where they are, row by row. Those of a row with an element that is not
/// finite are not finite.
pub(crate) fn likeliest(logits: &Tensor, count: usize) -> Result<(Vec<u32>, Vec<f32>), BackendError> {
    let (best, tokens) = logits.top(count as i64)?;
    // 0 for each finite element, else NaN.
    let check = logits.sub(logits)?.sum_last()?.unsqueeze(1)?;
    let best = best.add(&check)?.to_kind(Kind::Float)?;
    let (values, [tokens]) = together(&best, [&tokens])?;
    Ok((ids(&tokens), floats(&values)))
}

/// Whole numbers of 64 bits, below 2^32.
fn ids(bytes: &[u8]) -> Vec<u32> {
    let (ids, _) = bytes.as_chunks::<8>();
    ids.iter().map(|id| u64::from_le_bytes(*id) as u32).collect()
}

/// Ranks in which experts outside of the best groups come last (arXiv 2405.04434, section 2.2.2).
fn in_chosen_groups(ranks: &Tensor, groups: GroupFacts) -> Result<Tensor, BackendError> {
    let (size, of) = (ranks.size(), groups.groups as i64);
    let (rows, members) = (size[0], size[1] / of);
    let grouped = ranks.to_kind(Kind::Float)?.reshape(&[rows, of, members])?;
    let of_group = match groups.best {
        1 => grouped.max_last()?,
        best => grouped.top(best as i64)?.0.sum_last()?,
    };
    let (_, chosen) = of_group.top(groups.chosen as i64)?;
    let penalty = Tensor::full(ranks.device(), &[rows, of], NOT_CHOSEN, Kind::Float)?;
    penalty.scatter_last_(&chosen, 0.0)?;
    grouped.add(&penalty.unsqueeze(2)?)?.reshape(&size)
}

/// The bytes of `x` and of others, numbers of which are float32 or whole, in one copy.
fn together<const N: usize>(
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

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (elements, _) = bytes.as_chunks::<4>();
    elements.iter().map(|element| f32::from_le_bytes(*element)).collect()
}
