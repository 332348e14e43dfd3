//! Longest processing time first (LPT): assignment of experts to replicas.

/// One replica's share of the work.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Replica {
    /// Indices of its items, in the order in which they were assigned.
    pub items: Vec<usize>,
    /// Sum of their weights and of its initial load.
    pub load: f64,
}

/// Assigns items to `replicas`, the heaviest first, each to the least loaded replica; ties go to the
/// lower item, then to the lower replica.
///
/// The largest load is at most 4/3 - 1/(3 `replicas`) times the best possible one (Graham), and at
/// most [`load_bound`].
#[must_use]
pub fn longest_first(weights: &[f64], replicas: usize) -> Vec<Replica> {
    longest_first_beside(weights, &vec![0.0; replicas.max(1)])
}

/// Assigns items as [`longest_first`] does to replicas with initial `loads`, one for each replica.
///
/// The load of a replica that gets an item exceeds the mean of all loads by less than its last item. Without replicas
/// no item is assigned.
#[must_use]
pub fn longest_first_beside(weights: &[f64], loads: &[f64]) -> Vec<Replica> {
    let mut assigned: Vec<Replica> = loads.iter().map(|&load| Replica { items: Vec::new(), load }).collect();
    if assigned.is_empty() {
        return assigned;
    }
    for item in descending(weights) {
        let replica = least_loaded(assigned.iter().map(|replica| replica.load));
        assigned[replica].load += weights[item];
        assigned[replica].items.push(item);
    }
    assigned
}

/// Returns the indices of items by descending weight, ties by index.
fn descending(weights: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
    order
}

fn least_loaded(loads: impl Iterator<Item = f64>) -> usize {
    let mut least = (0, f64::INFINITY);
    for (replica, load) in loads.enumerate() {
        if load < least.1 {
            least = (replica, load);
        }
    }
    least.0
}

/// Returns an upper bound of the largest load of [`longest_first`] (Remoe paper, Theorem 4):
/// `(z - 1) / z` of the heaviest weight, plus `1 / z` of the sum of all weights, with z replicas.
#[must_use]
pub fn load_bound(weights: &[f64], replicas: usize) -> f64 {
    let count = replicas.max(1) as f64;
    let heaviest = weights.iter().copied().fold(0.0, f64::max);
    (count - 1.0) / count * heaviest + weights.iter().sum::<f64>() / count
}
