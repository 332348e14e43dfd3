//! Builds the subtree of a node.

use crate::history::History;
use crate::random::Random;
use crate::rows::Rows;
use crate::tree::medoids::{self, Cluster};
use crate::tree::points::Points;
use crate::tree::{Clustering, NONE, Node, NodeContent, Tree, TreeOptions, pam};
use rayon::prelude::*;

/// Largest depth of splits by clustering. Below it, prompts are distributed evenly.
const MAX_DEPTH: usize = 24;

/// Subtree before its nodes have indices.
struct Branch {
    medoid: u32,
    content: BranchContent,
}

enum BranchContent {
    Branches(Vec<Branch>),
    Slots(Vec<u32>),
}

impl BranchContent {
    /// Replaces the indices of points, which are positions in `slots`, by the slots.
    fn renumbered(self, slots: &[u32]) -> Self {
        let slot = |point: u32| slots.get(point as usize).copied().unwrap_or(NONE);
        match self {
            Self::Slots(points) => Self::Slots(points.into_iter().map(slot).collect()),
            Self::Branches(branches) => {
                let branches = branches.into_iter().map(|branch| Branch {
                    medoid: slot(branch.medoid),
                    content: branch.content.renumbered(slots),
                });
                Self::Branches(branches.collect())
            }
        }
    }
}

impl Tree {
    /// Turns `node` into a subtree of `slots`.
    pub(super) fn build_subtree(&mut self, history: &History, node: u32, slots: Vec<u32>) {
        let rows = match self.clustering {
            Clustering::Centred | Clustering::Similarity | Clustering::Pam => &history.vectors,
            Clustering::Activations => &history.shares,
        };
        let centre = self.centre.clone();
        // A later subtree must not repeat the random numbers of an earlier one.
        let seed = self.options.seed ^ u64::from(node).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let split = |rows: &Rows, points: Vec<u32>| {
            let space = Points::new(rows, self.clustering, &centre);
            split(&space, self.clustering, self.options, points, seed, 0)
        };
        let content = match slots.len() < rows.len() / 2 {
            // Gathers the rows, so that splitting a leaf takes the same time in any history.
            true => split(&rows.gather(&slots), (0..slots.len() as u32).collect()).renumbered(&slots),
            false => split(rows, slots),
        };
        self.attach(history, node, content);
    }

    fn attach(&mut self, history: &History, node: u32, content: BranchContent) {
        let content = match content {
            BranchContent::Slots(slots) => {
                for &slot in &slots {
                    self.set_leaf(slot, node);
                }
                NodeContent::Slots(slots)
            }
            BranchContent::Branches(branches) => {
                let mut children = Vec::with_capacity(branches.len());
                for branch in &branches {
                    let child = self.add_node(node);
                    self.medoids.set(child as usize, &self.centred(history.vector(branch.medoid)));
                    children.push(child);
                }
                for (&child, branch) in children.iter().zip(branches) {
                    self.attach(history, child, branch.content);
                }
                NodeContent::Children(children)
            }
        };
        if let Some(node) = self.nodes.get_mut(node as usize) {
            node.content = content;
        }
    }

    fn add_node(&mut self, parent: u32) -> u32 {
        let node = Node { parent, content: NodeContent::Slots(Vec::new()) };
        let index = self.free_nodes.pop().unwrap_or(self.nodes.len() as u32);
        match self.nodes.get_mut(index as usize) {
            Some(free_node) => *free_node = node,
            None => self.nodes.push(node),
        }
        index
    }

    pub(super) fn set_leaf(&mut self, slot: u32, leaf: u32) {
        let slot = slot as usize;
        if self.leaf_of.len() <= slot {
            self.leaf_of.resize(slot + 1, NONE);
        }
        if let Some(target) = self.leaf_of.get_mut(slot) {
            *target = leaf;
        }
    }
}

/// Splits `slots` until no leaf has more than beta.
fn split(
    points: &Points<'_>,
    clustering: Clustering,
    options: TreeOptions,
    slots: Vec<u32>,
    seed: u64,
    depth: usize,
) -> BranchContent {
    if slots.len() <= options.beta {
        return BranchContent::Slots(slots);
    }
    let forks = slots.len().div_ceil(options.beta).clamp(2, options.forks);
    let min_per_task = medoids::min_per_task(slots.len(), 1);
    let mut random = Random::new(seed);
    let mut clusters = if depth >= MAX_DEPTH {
        Vec::new()
    } else if clustering == Clustering::Pam {
        pam::cluster(points, &slots, forks)
    } else {
        medoids::cluster(points, &slots, forks, &mut random)
    };
    if clusters.len() < 2 {
        // Duplicates cannot be clustered: cuts them into even runs.
        let runs = slots.chunks(slots.len().div_ceil(forks));
        clusters = runs.map(|run| Cluster { medoid: run[0], members: run.to_vec() }).collect();
    }
    let seeds: Vec<u64> = clusters.iter().map(|_| random.next()).collect();
    let branches =
        clusters.into_par_iter().zip(seeds).with_min_len(min_per_task).map(|(cluster, seed)| Branch {
            medoid: cluster.medoid,
            content: split(points, clustering, options, cluster.members, seed, depth + 1),
        });
    BranchContent::Branches(branches.collect())
}
