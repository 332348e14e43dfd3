//! Full Partitioning Around Medoids (Kaufman and Rousseeuw): greedy BUILD, then the best of all swaps until none
//! lowers the cost.
//!
//! Swaps are evaluated as in `FastPAM1` (Schubert and Rousseeuw 2019): the same swaps in the same order as PAM, with
//! one pass over the distance matrix instead of one per medoid.

use crate::tree::medoids::Cluster;
use crate::tree::points::Points;
use rayon::prelude::*;

/// Largest number of points: the distance matrix of 10,000 takes 400 MB.
pub(crate) const MAX_POINTS: usize = 10_000;

/// Distance matrix, [points, points].
struct Distances {
    points: usize,
    values: Vec<f32>,
}

impl Distances {
    fn compute(points: &Points<'_>, members: &[u32]) -> Self {
        let rows = members.par_iter().flat_map_iter(|&a| members.iter().map(move |&b| points.distance(a, b)));
        Self { points: members.len(), values: rows.collect() }
    }

    fn row(&self, point: usize) -> &[f32] {
        self.values.get(point * self.points..(point + 1) * self.points).unwrap_or_default()
    }
}

/// Nearest medoid of a point, with the distances of the nearest and the second nearest.
#[derive(Clone, Copy)]
struct Nearest {
    /// Position of the nearest medoid in the list.
    medoid: usize,
    first: f32,
    second: f32,
}

/// Splits `members` into at most `forks` non-empty clusters.
pub(super) fn cluster(points: &Points<'_>, members: &[u32], forks: usize) -> Vec<Cluster> {
    let distances = Distances::compute(points, members);
    let mut medoids = build_greedily(&distances, forks);
    let mut nearest = assign(&distances, &medoids);
    while let Some((position, candidate)) = best_swap(&distances, &medoids, &nearest) {
        medoids[position] = candidate;
        nearest = assign(&distances, &medoids);
    }
    let mut clusters: Vec<Cluster> = medoids
        .iter()
        .filter_map(|&medoid| Some(Cluster { medoid: *members.get(medoid)?, members: Vec::new() }))
        .collect();
    for (&member, nearest) in members.iter().zip(nearest) {
        clusters[nearest.medoid].members.push(member);
    }
    clusters.retain(|cluster| !cluster.members.is_empty());
    clusters
}

/// BUILD: chooses as each further medoid the point that lowers the sum of distances most.
fn build_greedily(distances: &Distances, forks: usize) -> Vec<usize> {
    let mut medoids: Vec<usize> = Vec::new();
    let mut nearest = vec![f32::MAX; distances.points];
    while medoids.len() < forks.min(distances.points) {
        let sum = |candidate: usize| -> f64 {
            let row = distances.row(candidate);
            row.iter().zip(&nearest).map(|(distance, nearest)| f64::from(distance.min(*nearest))).sum()
        };
        let best = (0..distances.points)
            .into_par_iter()
            .filter(|candidate| !medoids.contains(candidate))
            .map(|candidate| (sum(candidate), candidate))
            .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let Some((_, best)) = best else { break };
        nearest
            .iter_mut()
            .zip(distances.row(best))
            .for_each(|(nearest, distance)| *nearest = nearest.min(*distance));
        medoids.push(best);
    }
    medoids
}

fn assign(distances: &Distances, medoids: &[usize]) -> Vec<Nearest> {
    let nearest_of = |point: usize| {
        let mut nearest = Nearest { medoid: 0, first: f32::INFINITY, second: f32::INFINITY };
        for (position, &medoid) in medoids.iter().enumerate() {
            let distance = distances.row(medoid).get(point).copied().unwrap_or(f32::INFINITY);
            if distance < nearest.first {
                nearest = Nearest { medoid: position, first: distance, second: nearest.first };
            } else if distance < nearest.second {
                nearest.second = distance;
            }
        }
        nearest
    };
    (0..distances.points).into_par_iter().map(nearest_of).collect()
}

/// SWAP: returns the position of a medoid and the point to replace it, so that the sum of distances falls most.
/// Returns `None` if no swap lowers it.
fn best_swap(distances: &Distances, medoids: &[usize], nearest: &[Nearest]) -> Option<(usize, usize)> {
    // Increase of the sum when a medoid is removed without a replacement.
    let mut removal = vec![0.0_f64; medoids.len()];
    for point in nearest {
        removal[point.medoid] += f64::from(point.second - point.first);
    }
    let change = |candidate: usize| {
        let mut medoid_changes = removal.clone();
        let mut common_change = 0.0;
        for (&distance, point) in distances.row(candidate).iter().zip(nearest) {
            if distance < point.first {
                common_change += f64::from(distance - point.first);
                medoid_changes[point.medoid] += f64::from(point.first - point.second);
            } else if distance < point.second {
                medoid_changes[point.medoid] += f64::from(distance - point.second);
            }
        }
        let best = (0..).zip(medoid_changes).min_by(|a, b| a.1.total_cmp(&b.1));
        best.map(|(position, change)| (change + common_change, position, candidate))
    };
    let best = (0..distances.points)
        .into_par_iter()
        .filter(|candidate| !medoids.contains(candidate))
        .filter_map(change)
        .min_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    // A margin, so that rounding does not swap back and forth.
    best.filter(|(change, ..)| *change < -1e-6).map(|(_, position, candidate)| (position, candidate))
}
