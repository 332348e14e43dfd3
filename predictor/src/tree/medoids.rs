//! The customised k-medoids: roulette-wheel seeding, roulette-wheel swaps, medoids updated inside each
//! subcluster.

use crate::random::Random;
use crate::tree::points::Points;
use rayon::prelude::*;

/// A large node chooses its medoids among this many of its prompts per fork, and only then assigns all:
/// more change the clusters hardly, and cost most of the time.
const SAMPLE_PER_FORK: usize = 64;
/// Swaps that are tried per fork after seeding.
const SWAPS_PER_FORK: usize = 2;
/// Rounds of assignment and update, at most.
const ROUNDS: usize = 4;
/// Points whose distances one task computes.
const TASK: usize = 64;
/// No more points than this are worth the other threads: learning would wait until one of them is free.
const ALONE: usize = 512;
/// A point's distance to itself is not 0 after rounding; nearer points are taken as equal.
const EQUAL: f32 = 1e-6;

/// A group of points and the one that stands for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cluster {
    pub(super) medoid: u32,
    pub(super) members: Vec<u32>,
}

/// Points, or clusters of them, that one thread computes at least, of `points` in all.
pub(super) fn at_least(points: usize, task: usize) -> usize {
    if points <= ALONE { ALONE } else { task }
}

/// Splits `members` into at most `forks` clusters, none empty. Fewer than two when they cannot be told
/// apart.
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
            .with_min_len(at_least(sample.len(), 1))
            .filter_map(|cluster| points.medoid(&cluster.members))
            .collect();
        if updated == medoids {
            break;
        }
        medoids = updated;
    }
    assign(points, members, &medoids)
}

/// Medoids under construction, with the distance of every point of the sample to each.
struct Seeds<'a> {
    points: &'a Points<'a>,
    sample: &'a [u32],
    medoids: Vec<u32>,
    /// Per medoid the distances of the sample.
    distances: Vec<Vec<f32>>,
}

impl<'a> Seeds<'a> {
    /// Roulette wheel: the first medoid is any point, each further one is drawn with a probability in
    /// proportion to its distance from the nearest medoid so far. Points equal to a medoid are never drawn.
    fn draw(points: &'a Points<'a>, sample: &'a [u32], forks: usize, random: &mut Random) -> Self {
        let mut seeds = Self { points, sample, medoids: Vec::new(), distances: Vec::new() };
        let mut newest = sample.get(random.below(sample.len().max(1))).copied();
        let mut nearest = vec![f32::INFINITY; sample.len()];
        while let Some(medoid) = newest.filter(|_| seeds.medoids.len() < forks) {
            let distances = seeds.distances_to(medoid);
            nearest
                .iter_mut()
                .zip(&distances)
                .for_each(|(nearest, distance)| *nearest = nearest.min(*distance));
            seeds.medoids.push(medoid);
            seeds.distances.push(distances);
            newest = spin(&nearest, random).and_then(|index| sample.get(index).copied());
        }
        seeds
    }

    fn distances_to(&self, medoid: u32) -> Vec<f32> {
        let points = self.sample.par_iter().with_min_len(at_least(self.sample.len(), TASK));
        points.map(|&point| self.points.distance(point, medoid)).collect()
    }

    /// Draws one more medoid by the wheel and puts it in the place of the one that is missed least, if the
    /// sum of distances falls (local search after seeding: Lattanzi and Sohler 2019).
    fn try_swap(&mut self, random: &mut Random) {
        let nearest: Vec<Nearest> = (0..self.sample.len()).map(|point| self.nearest(point)).collect();
        let firsts: Vec<f32> = nearest.iter().map(|nearest| nearest.first).collect();
        let Some(&candidate) = spin(&firsts, random).and_then(|index| self.sample.get(index)) else { return };
        let distances = self.distances_to(candidate);
        // What the sum changes by: for any medoid that goes, and on top of it for each.
        let mut of_all = 0.0_f64;
        let mut of_medoid = vec![0.0_f64; self.medoids.len()];
        for (nearest, &distance) in nearest.iter().zip(&distances) {
            of_all += f64::from((distance - nearest.first).min(0.0));
            of_medoid[nearest.medoid] +=
                f64::from(nearest.second.min(distance) - nearest.first.min(distance));
        }
        let best = (0..).zip(of_medoid).min_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((place, _)) = best.filter(|(_, change)| change + of_all < 0.0) {
            self.medoids[place] = candidate;
            self.distances[place] = distances;
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

/// A point's nearest medoid, and how far this and the second nearest are.
#[derive(Clone, Copy)]
struct Nearest {
    medoid: usize,
    first: f32,
    second: f32,
}

/// A place drawn in proportion to its weight, `None` where all are next to 0.
fn spin(weights: &[f32], random: &mut Random) -> Option<usize> {
    let weight = |value: f32| if value > EQUAL { f64::from(value) } else { 0.0 };
    let total: f64 = weights.iter().map(|&value| weight(value)).sum();
    let mut left = random.unit() * total;
    weights.iter().position(|&value| {
        left -= weight(value);
        value > EQUAL && left < 0.0
    })
}

/// Each member goes to its nearest medoid, ties to the first. Clusters without members are left out.
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
    let tasks = members.par_iter().with_min_len(at_least(members.len(), TASK));
    let chosen: Vec<usize> = tasks.map(nearest).collect();
    let mut clusters: Vec<Cluster> =
        medoids.iter().map(|&medoid| Cluster { medoid, members: Vec::new() }).collect();
    for (&member, index) in members.iter().zip(chosen) {
        clusters[index].members.push(member);
    }
    clusters.retain(|cluster| !cluster.members.is_empty());
    clusters
}
