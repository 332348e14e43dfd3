//! Grows a node into a subtree.

use crate::history::History;
use crate::random::Random;
use crate::rows::Rows;
use crate::tree::medoids::{self, Cluster};
use crate::tree::points::Points;
use crate::tree::{Clustering, Content, NONE, Node, Tree, TreeOptions, pam};
use rayon::prelude::*;

/// Deeper than any tree of clusters that differ; below it prompts are dealt out evenly.
const MAX_DEPTH: usize = 24;

/// A subtree before its nodes have numbers.
struct Branch {
    medoid: u32,
    content: BranchContent,
}

enum BranchContent {
    Branches(Vec<Branch>),
    Slots(Vec<u32>),
}

impl BranchContent {
    /// Replaces the numbers of points, which are places in `slots`, by the slots.
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
    /// Makes `node` a subtree that holds `slots`.
    pub(super) fn grow(&mut self, history: &History, node: u32, slots: Vec<u32>) {
        let rows = match self.clustering {
            Clustering::Centred | Clustering::Similarity | Clustering::Pam => &history.vectors,
            Clustering::Activations => &history.shares,
        };
        let centre = self.centre.clone();
        // A subtree grown later must not repeat the draws of an earlier one.
        let seed = self.options.seed ^ u64::from(node).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let split = |rows: &Rows, points: Vec<u32>| {
            let space = Points::new(rows, self.clustering, &centre);
            split(&space, self.clustering, self.options, points, seed, 0)
        };
        let content = match slots.len() < rows.len() / 2 {
            // A leaf that overflows takes as long in a large history as in a small one.
            true => split(&rows.gather(&slots), (0..slots.len() as u32).collect()).renumbered(&slots),
            false => split(rows, slots),
        };
        self.place(history, node, content);
    }

    fn place(&mut self, history: &History, node: u32, content: BranchContent) {
        let content = match content {
            BranchContent::Slots(slots) => {
                for &slot in &slots {
                    self.set_leaf(slot, node);
                }
                Content::Slots(slots)
            }
            BranchContent::Branches(branches) => {
                let mut children = Vec::with_capacity(branches.len());
                for branch in &branches {
                    let child = self.add_node(node);
                    self.medoids.set(child as usize, &self.guide(history.vector(branch.medoid)));
                    children.push(child);
                }
                for (&child, branch) in children.iter().zip(branches) {
                    self.place(history, child, branch.content);
                }
                Content::Children(children)
            }
        };
        if let Some(node) = self.nodes.get_mut(node as usize) {
            node.content = content;
        }
    }

    fn add_node(&mut self, parent: u32) -> u32 {
        let node = Node { parent, content: Content::Slots(Vec::new()) };
        let index = self.vacant.pop().unwrap_or(self.nodes.len() as u32);
        match self.nodes.get_mut(index as usize) {
            Some(vacant) => *vacant = node,
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

/// Splits until no leaf holds more than beta slots.
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
    let least = medoids::at_least(slots.len(), 1);
    let mut random = Random::new(seed);
    let mut clusters = if depth >= MAX_DEPTH {
        Vec::new()
    } else if clustering == Clustering::Pam {
        pam::cluster(points, &slots, forks)
    } else {
        medoids::cluster(points, &slots, forks, &mut random)
    };
    if clusters.len() < 2 {
        // Duplicates: any cut is as good as another, and even ones end soonest.
        let runs = slots.chunks(slots.len().div_ceil(forks));
        clusters = runs.map(|run| Cluster { medoid: run[0], members: run.to_vec() }).collect();
    }
    let seeds: Vec<u64> = clusters.iter().map(|_| random.next()).collect();
    let branches = clusters.into_par_iter().zip(seeds).with_min_len(least).map(|(cluster, seed)| Branch {
        medoid: cluster.medoid,
        content: split(points, clustering, options, cluster.members, seed, depth + 1),
    });
    BranchContent::Branches(branches.collect())
}
