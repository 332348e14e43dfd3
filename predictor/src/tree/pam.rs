//! Full Partitioning Around Medoids (Kaufman and Rousseeuw): greedy BUILD, then the best of all swaps
//! until none helps.
//!
//! The swaps are evaluated as `FastPAM1` does (Schubert and Rousseeuw 2019): the same swaps in the same
//! order as PAM's, for one pass over the distance matrix instead of one per medoid.

use crate::tree::medoids::Cluster;
use crate::tree::points::Points;
use rayon::prelude::*;

/// Points whose distance matrix is made, at most: 10,000 take 400 MB.
pub(crate) const MAX_POINTS: usize = 10_000;

/// All distances, [points, points].
struct Distances {
    points: usize,
    values: Vec<f32>,
}

impl Distances {
    fn of(points: &Points<'_>, members: &[u32]) -> Self {
        let rows = members.par_iter().flat_map_iter(|&a| members.iter().map(move |&b| points.distance(a, b)));
        Self { points: members.len(), values: rows.collect() }
    }

    fn row(&self, point: usize) -> &[f32] {
        self.values.get(point * self.points..(point + 1) * self.points).unwrap_or_default()
    }
}

/// A point's nearest and second nearest medoid.
#[derive(Clone, Copy)]
struct Nearest {
    /// Position of the nearest in the list of medoids.
    medoid: usize,
    first: f32,
    second: f32,
}

/// Splits `members` into at most `forks` clusters, none empty.
pub(super) fn cluster(points: &Points<'_>, members: &[u32], forks: usize) -> Vec<Cluster> {
    let distances = Distances::of(points, members);
    let mut medoids = greedy(&distances, forks);
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

/// BUILD: each further medoid is the point that lowers the sum of distances most.
fn greedy(distances: &Distances, forks: usize) -> Vec<usize> {
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
    let of = |point: usize| {
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
    (0..distances.points).into_par_iter().map(of).collect()
}

/// SWAP: the medoid's position and the point that takes its place so that the sum of distances falls
/// most; `None` where no swap lowers it.
fn best_swap(distances: &Distances, medoids: &[usize], nearest: &[Nearest]) -> Option<(usize, usize)> {
    // What the sum grows by when a medoid goes and nothing comes.
    let mut removal = vec![0.0_f64; medoids.len()];
    for point in nearest {
        removal[point.medoid] += f64::from(point.second - point.first);
    }
    let change = |candidate: usize| {
        let mut of_medoid = removal.clone();
        let mut of_all = 0.0;
        for (&distance, point) in distances.row(candidate).iter().zip(nearest) {
            if distance < point.first {
                of_all += f64::from(distance - point.first);
                of_medoid[point.medoid] += f64::from(point.first - point.second);
            } else if distance < point.second {
                of_medoid[point.medoid] += f64::from(distance - point.second);
            }
        }
        let best = (0..).zip(of_medoid).min_by(|a, b| a.1.total_cmp(&b.1));
        best.map(|(position, change)| (change + of_all, position, candidate))
    };
    let best = (0..distances.points)
        .into_par_iter()
        .filter(|candidate| !medoids.contains(candidate))
        .filter_map(change)
        .min_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    // Rounding must not swap back and forth.
    best.filter(|(change, ..)| *change < -1e-6).map(|(_, position, candidate)| (position, candidate))
}
