//! Customised k-medoids of the paper: roulette-wheel seeding, roulette-wheel swaps, and medoids updated inside each
//! subcluster.

use crate::random::Random;
use crate::tree::points::Points;
use rayon::prelude::*;

/// Sample size per fork from which a large node chooses its medoids before it assigns all prompts. Larger samples
/// hardly change the clusters and take most of the time.
const SAMPLE_PER_FORK: usize = 64;
/// Tried swaps per fork after seeding.
const SWAPS_PER_FORK: usize = 2;
/// Largest number of rounds of assignment and update.
const ROUNDS: usize = 4;
/// Points per parallel task for distances.
const DISTANCES_PER_TASK: usize = 64;
/// Number of points up to which one thread does all work: waiting for a free thread would delay learning.
const SINGLE_THREAD_POINTS: usize = 512;
/// Distance up to which points count as equal: after rounding, the distance of a point to itself is not 0.
const EQUAL_DISTANCE: f32 = 1e-6;

/// Cluster of points with its medoid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cluster {
    pub(super) medoid: u32,
    pub(super) members: Vec<u32>,
}

/// Returns the least number of items per parallel task for `points` points in all.
pub(super) fn min_per_task(points: usize, task: usize) -> usize {
    if points <= SINGLE_THREAD_POINTS { SINGLE_THREAD_POINTS } else { task }
}

/// Splits `members` into at most `forks` non-empty clusters. Returns fewer than two if the points cannot be
/// distinguished.
pub(super) fn cluster(
    points: &Points<'_>,
    members: &[u32],
    forks: usize,
    random: &mut Random,
) -> Vec<Cluster> {
    let sample: Vec<u32> = if members.len() > SAMPLE_PER_FORK * forks {
        let chosen = random.sample(members.len(), SAMPLE_PER_FORK * forks);
        chosen.iter().filter_map(|&index| members.get(index as usize).copied()).collect()
    } else {
        members.to_vec()
    };
    let mut seeds = Seeds::draw(points, &sample, forks, random);
    for _ in 0..SWAPS_PER_FORK * seeds.medoids.len() {
        seeds.try_swap(random);
    }
    let mut medoids = seeds.medoids;
    for _ in 0..ROUNDS {
        let updated: Vec<u32> = assign(points, &sample, &medoids)
            .par_iter()
            .with_min_len(min_per_task(sample.len(), 1))
            .filter_map(|cluster| points.medoid(&cluster.members))
            .collect();
        if updated == medoids {
            break;
        }
        medoids = updated;
    }
    assign(points, members, &medoids)
}

/// Medoids under construction with the distance of each sample point to each.
struct Seeds<'a> {
    points: &'a Points<'a>,
    sample: &'a [u32],
    medoids: Vec<u32>,
    /// Distances of the sample to each medoid, [medoids, sample].
    distances: Vec<Vec<f32>>,
}

impl<'a> Seeds<'a> {
    /// Draws medoids by roulette wheel: the first uniformly, each further one with a probability in proportion to its
    /// distance from the nearest medoid. Points equal to a medoid are never drawn.
    fn draw(points: &'a Points<'a>, sample: &'a [u32], forks: usize, random: &mut Random) -> Self {
        let mut seeds = Self { points, sample, medoids: Vec::new(), distances: Vec::new() };
        let mut candidate = sample.get(random.below(sample.len().max(1))).copied();
        let mut nearest = vec![f32::INFINITY; sample.len()];
        while let Some(medoid) = candidate.filter(|_| seeds.medoids.len() < forks) {
            let distances = seeds.distances_to(medoid);
            nearest
                .iter_mut()
                .zip(&distances)
                .for_each(|(nearest, distance)| *nearest = nearest.min(*distance));
            seeds.medoids.push(medoid);
            seeds.distances.push(distances);
            candidate = roulette(&nearest, random).and_then(|index| sample.get(index).copied());
        }
        seeds
    }

    fn distances_to(&self, medoid: u32) -> Vec<f32> {
        let points = self.sample.par_iter().with_min_len(min_per_task(self.sample.len(), DISTANCES_PER_TASK));
        points.map(|&point| self.points.distance(point, medoid)).collect()
    }

    /// Draws a candidate by roulette wheel and swaps it for the medoid whose removal costs least, if the sum of
    /// distances falls (local search after seeding: Lattanzi and Sohler 2019).
    fn try_swap(&mut self, random: &mut Random) {
        let nearest: Vec<Nearest> = (0..self.sample.len()).map(|point| self.nearest(point)).collect();
        let firsts: Vec<f32> = nearest.iter().map(|nearest| nearest.first).collect();
        let Some(&candidate) = roulette(&firsts, random).and_then(|index| self.sample.get(index)) else {
            return;
        };
        let distances = self.distances_to(candidate);
        // Change of the sum: a part common to all removed medoids, and a further part for each.
        let mut common_change = 0.0_f64;
        let mut medoid_changes = vec![0.0_f64; self.medoids.len()];
        for (nearest, &distance) in nearest.iter().zip(&distances) {
            common_change += f64::from((distance - nearest.first).min(0.0));
            medoid_changes[nearest.medoid] +=
                f64::from(nearest.second.min(distance) - nearest.first.min(distance));
        }
        let best = (0..).zip(medoid_changes).min_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((position, _)) = best.filter(|(_, change)| change + common_change < 0.0) {
            self.medoids[position] = candidate;
            self.distances[position] = distances;
        }
    }

    fn nearest(&self, point: usize) -> Nearest {
        let mut nearest = Nearest { medoid: 0, first: f32::INFINITY, second: f32::INFINITY };
        for (medoid, distances) in self.distances.iter().enumerate() {
            let distance = distances[point];
            if distance < nearest.first {
                nearest = Nearest { medoid, first: distance, second: nearest.first };
            } else if distance < nearest.second {
                nearest.second = distance;
            }
        }
        nearest
    }
}

/// Nearest medoid of a point, with the distances of the nearest and the second nearest.
#[derive(Clone, Copy)]
struct Nearest {
    medoid: usize,
    first: f32,
    second: f32,
}

/// Draws an index in proportion to its weight. Returns `None` if all weights are next to 0.
fn roulette(weights: &[f32], random: &mut Random) -> Option<usize> {
    let weight = |value: f32| if value > EQUAL_DISTANCE { f64::from(value) } else { 0.0 };
    let total: f64 = weights.iter().map(|&value| weight(value)).sum();
    let mut remaining = random.unit() * total;
    weights.iter().position(|&value| {
        remaining -= weight(value);
        value > EQUAL_DISTANCE && remaining < 0.0
    })
}

/// Assigns each member to its nearest medoid, ties to the first. Omits clusters without members.
fn assign(points: &Points<'_>, members: &[u32], medoids: &[u32]) -> Vec<Cluster> {
    let nearest = |member: &u32| {
        let mut best = (0, f32::INFINITY);
        for (index, &medoid) in medoids.iter().enumerate() {
            let distance = points.distance(*member, medoid);
            if distance < best.1 {
                best = (index, distance);
            }
        }
        best.0
    };
    let tasks = members.par_iter().with_min_len(min_per_task(members.len(), DISTANCES_PER_TASK));
    let chosen: Vec<usize> = tasks.map(nearest).collect();
    let mut clusters: Vec<Cluster> =
        medoids.iter().map(|&medoid| Cluster { medoid, members: Vec::new() }).collect();
    for (&member, index) in members.iter().zip(chosen) {
        clusters[index].members.push(member);
    }
    clusters.retain(|cluster| !cluster.members.is_empty());
    clusters
}
