//! The cheapest nodes that hold a number of equal functions.

/// Capacity and price of a node shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct NodeOffer {
    /// Functions that fit on one node.
    pub(super) capacity: usize,
    /// Dollars per hour of one node.
    pub(super) per_hour: f64,
    /// Maximum number of nodes.
    pub(super) max: Option<u32>,
}

/// Returns the price and the cheapest numbers of nodes of each offer that together hold `functions`.
///
/// Ties go to the fewest nodes. Returns `None` if all offers together do not hold them. All functions are equal, so this is
/// a one-dimensional covering problem, which dynamic programming over the remaining functions solves exactly.
pub(super) fn cheapest(functions: usize, offers: &[NodeOffer]) -> Option<(f64, Vec<u32>)> {
    // `[functions]`: price and number of nodes of the best cover with the offers so far.
    let mut best = vec![(f64::INFINITY, 0_u32); functions + 1];
    best[0] = (0.0, 0);
    let useful: Vec<usize> = (0..offers.len()).filter(|index| is_useful(offers, *index)).collect();
    let mut taken: Vec<Vec<u32>> = Vec::with_capacity(useful.len());
    for offer in useful.iter().map(|index| &offers[*index]) {
        let mut counts = vec![0; functions + 1];
        match offer.max {
            None => {
                for held in 1..=functions {
                    let before = held.saturating_sub(offer.capacity);
                    let with = (best[before].0 + offer.per_hour, best[before].1 + 1);
                    if is_cheaper(with, best[held]) {
                        (best[held], counts[held]) = (with, counts[before] + 1);
                    }
                }
            }
            Some(max) => {
                let all = best.clone();
                for held in 1..=functions {
                    let most = (held.div_ceil(offer.capacity) as u32).min(max);
                    for nodes in 1..=most {
                        let before = all[held.saturating_sub(nodes as usize * offer.capacity)];
                        let with = (before.0 + f64::from(nodes) * offer.per_hour, before.1 + nodes);
                        if is_cheaper(with, best[held]) {
                            (best[held], counts[held]) = (with, nodes);
                        }
                    }
                }
            }
        }
        taken.push(counts);
    }
    let price = best[functions].0;
    if !price.is_finite() {
        return None;
    }
    let mut remaining = functions;
    let mut nodes = vec![0; offers.len()];
    for (counts, index) in taken.iter().zip(&useful).rev() {
        nodes[*index] = counts[remaining];
        remaining = remaining.saturating_sub(nodes[*index] as usize * offers[*index].capacity);
    }
    Some((price, nodes))
}

fn is_cheaper(one: (f64, u32), other: (f64, u32)) -> bool {
    one.0 < other.0 || (one.0 == other.0 && one.1 < other.1)
}

/// Reports if no other unlimited offer holds as many functions for at most the price.
fn is_useful(offers: &[NodeOffer], index: usize) -> bool {
    let one = &offers[index];
    let replaces = |(other_index, other): (usize, &NodeOffer)| {
        let no_worse = other.capacity >= one.capacity && other.per_hour <= one.per_hour;
        let same = other.capacity == one.capacity && other.per_hour == one.per_hour;
        let unlimited = other.max.is_none();
        let first = !same || (one.max.is_some() && unlimited) || other_index < index;
        other_index != index && unlimited && no_worse && first
    };
    one.capacity > 0 && !offers.iter().enumerate().any(replaces)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tries every number of nodes of every offer.
    fn exhaustive(functions: usize, offers: &[NodeOffer]) -> Option<f64> {
        let Some((offer, others)) = offers.split_first() else {
            return (functions == 0).then_some(0.0);
        };
        let most = (functions as u32).min(offer.max.unwrap_or(u32::MAX));
        let most = if offer.capacity == 0 { 0 } else { most };
        (0..=most)
            .filter_map(|nodes| {
                let left = functions.saturating_sub(nodes as usize * offer.capacity);
                Some(exhaustive(left, others)? + f64::from(nodes) * offer.per_hour)
            })
            .min_by(f64::total_cmp)
    }

    proptest! {
        #[test]
        fn no_other_choice_of_nodes_is_cheaper(
            functions in 0_usize..9,
            offers in prop::collection::vec((0_usize..5, 1_u32..40, prop::option::of(1_u32..4)), 0..5),
        ) {
            let offers: Vec<NodeOffer> = offers
                .into_iter()
                .map(|(capacity, price, max)| NodeOffer { capacity, per_hour: f64::from(price) / 8.0, max })
                .collect();
            let found = cheapest(functions, &offers);
            prop_assert_eq!(found.as_ref().map(|(price, _)| *price), exhaustive(functions, &offers));
            if let Some((price, nodes)) = found {
                let held: usize = nodes.iter().zip(&offers).map(|(nodes, offer)| *nodes as usize * offer.capacity).sum();
                let paid: f64 = nodes.iter().zip(&offers).map(|(nodes, offer)| f64::from(*nodes) * offer.per_hour).sum();
                prop_assert!(held >= functions);
                prop_assert!((paid - price).abs() < 1e-9);
                for (nodes, offer) in nodes.iter().zip(&offers) {
                    prop_assert!(offer.max.is_none_or(|max| *nodes <= max));
                }
            }
        }
    }

    #[test]
    fn equally_cheap_covers_use_fewest_nodes() {
        let offer = |capacity, per_hour| NodeOffer { capacity, per_hour, max: None };
        assert_eq!(cheapest(4, &[offer(1, 1.0), offer(4, 4.0)]).unwrap(), (4.0, vec![0, 1]));
        assert_eq!(cheapest(1, &[]), None);
        assert_eq!(cheapest(0, &[]).unwrap(), (0.0, vec![]));
    }
}
