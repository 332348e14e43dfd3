//! The multi-fork clustering tree of the Remoe paper (section IV-B, algorithm 1).
//!
//! A node with more than beta prompts is split by k-medoids; a search goes down to the closest child and
//! looks through what the leaf holds, and through other leaves while that is too little. [`Tree`] keeps slots of
//! a [`History`] and copies of the medoids' vectors, so that a medoid goes on guiding searches after its
//! prompt has left.
//!
//! All prompts have much in common, so that soft cosine similarities crowd near 1, and those of short
//! prompts, which average over few tokens, lie lowest. Clusters under the similarity as it is are therefore
//! a few large ones of long prompts, and many of outliers. [`Clustering::Centred`] takes the mean vector of
//! the history off before it compares for clustering; neighbours are ranked by the similarity as it is.

mod build;
mod change;
mod medoids;
mod pam;
mod parts;
mod points;
mod search;
mod sketches;

pub(crate) use parts::TreeParts;
pub use search::{Effort, Neighbour, exhaustive};
pub(crate) use search::{best_of, sampled};
pub(crate) use sketches::Sketches;

use crate::error::PredictError;
use crate::history::History;
use crate::rows::Rows;
use crate::vector::{add_scaled, dot, normalise};

/// How nodes are split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clustering {
    /// The customised k-medoids (roulette-wheel seeding, medoids updated inside each subcluster) under soft
    /// cosine similarity around the mean of the history. What SPS uses.
    Centred,
    /// As `Centred`, under soft cosine similarity as it is, to the letter of the paper.
    Similarity,
    /// Full Partitioning Around Medoids under the similarity of `Centred` (the paper's VarPAM).
    Pam,
    /// The customised k-medoids under the Euclidean distance of activation matrices (the paper's VarED).
    /// Searches still go down by the similarity of prompts.
    Activations,
}

/// How a tree is grown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeOptions {
    /// A node with more prompts than this is split; above alpha. The paper's beta.
    pub beta: usize,
    /// A search looks at this many prompts at least, and at alpha. The paper stops at alpha; ten times beta
    /// find nearly what brute force does.
    pub breadth: usize,
    /// Prompts that a search compares by their vectors, alpha at least: of those that it looks at, the most similar by
    /// their sketches, which are shorter. With `breadth` no larger there are no sketches.
    pub rerank: usize,
    /// Children of a node, at most. A node of n prompts gets min(forks, ceil(n / beta)), at least 2: no
    /// more than leaves of about beta prompts need, because small leaves find fewer true neighbours.
    pub forks: usize,
    /// Seed of the tree: the same seed gives the same tree, on any number of threads.
    pub seed: u64,
}

impl Default for TreeOptions {
    fn default() -> Self {
        Self { beta: 150, breadth: 1500, rerank: 100, forks: 64, seed: 0 }
    }
}

impl TreeOptions {
    /// Refuses options that make no tree for searches of `alpha` prompts.
    ///
    /// # Errors
    /// `alpha` is 0, `beta` is not above it, or a node could not fork.
    pub fn check(&self, alpha: usize) -> Result<(), PredictError> {
        if alpha == 0 {
            return Err(PredictError::option("alpha", alpha, "expected 1 or more"));
        }
        if self.beta <= alpha {
            return Err(PredictError::option(
                "beta",
                self.beta,
                format!("expected more than alpha, which is {alpha}"),
            ));
        }
        if !(2..=256).contains(&self.forks) {
            return Err(PredictError::option("forks", self.forks, "expected 2 to 256"));
        }
        Ok(())
    }

    /// Reports if searches look at prompts that they do not compare in full.
    pub(crate) fn sketches(&self) -> bool {
        self.breadth > self.rerank
    }
}

/// A tree over the slots of one [`History`].
#[derive(Debug, Clone)]
pub struct Tree {
    options: TreeOptions,
    clustering: Clustering,
    nodes: Vec<Node>,
    /// Vector that is taken off a query on its way down, [hidden]; zeros where nothing is.
    centre: Vec<f32>,
    /// Row n guides the way to node n, the centre taken off and scaled to length 1; the root's is not used.
    medoids: Rows,
    /// Where searches look at more prompts than they compare.
    sketches: Option<Sketches>,
    /// The leaf of each slot; [`NONE`] for slots that are not in the tree.
    leaf_of: Vec<u32>,
    /// Pruned nodes, to be used again.
    vacant: Vec<u32>,
}

/// No node.
const NONE: u32 = u32::MAX;
/// The root is the first node.
const ROOT: u32 = 0;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    /// [`NONE`] for the root.
    parent: u32,
    content: Content,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Content {
    /// Nodes.
    Children(Vec<u32>),
    /// Slots.
    Slots(Vec<u32>),
}

impl Tree {
    /// Clusters all prompts of `history`.
    ///
    /// # Errors
    /// The options make no tree for searches of `alpha` prompts.
    pub fn build(
        history: &History,
        clustering: Clustering,
        options: TreeOptions,
        alpha: usize,
    ) -> Result<Self, PredictError> {
        options.check(alpha)?;
        if clustering == Clustering::Pam && history.len() > pam::MAX_POINTS {
            let limit = format!("expected at most {} prompts, as full PAM is quadratic", pam::MAX_POINTS);
            return Err(PredictError::option("clustering", "Pam", limit));
        }
        let slots: Vec<u32> = history.slots().collect();
        let mut centre = vec![0.0; history.vectors.width()];
        if matches!(clustering, Clustering::Centred | Clustering::Pam) {
            let part = 1.0 / slots.len().max(1) as f32;
            slots.iter().for_each(|&slot| add_scaled(&mut centre, part, history.vector(slot)));
        }
        let mut tree = Self {
            options,
            clustering,
            centre,
            nodes: vec![Node { parent: NONE, content: Content::Slots(Vec::new()) }],
            medoids: Rows::from_values(history.vectors.width(), vec![0.0; history.vectors.width()]),
            sketches: options.sketches().then(|| Sketches::of(history, options.seed)),
            leaf_of: Vec::new(),
            vacant: Vec::new(),
        };
        tree.grow(history, ROOT, slots);
        Ok(tree)
    }

    /// The directions of sketches stay what they are, however many prompts come: finding them again takes long.
    pub(crate) fn keep_directions(&mut self) {
        if let Some(sketches) = &mut self.sketches {
            sketches.keep_basis();
        }
    }

    /// How it is grown.
    #[must_use]
    pub fn options(&self) -> TreeOptions {
        self.options
    }

    /// Nodes that lead somewhere, the root included.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Prompts of each leaf.
    #[must_use]
    pub fn leaf_sizes(&self) -> Vec<usize> {
        self.nodes
            .iter()
            .filter_map(|node| match &node.content {
                Content::Slots(slots) if !slots.is_empty() => Some(slots.len()),
                _ => None,
            })
            .collect()
    }

    /// Mean over prompts of 1 - the similarity to the closest medoid of a leaf: how tight the leaves are.
    #[must_use]
    pub fn medoid_cost(&self, history: &History) -> f64 {
        let leaves: Vec<usize> = (1..self.nodes.len())
            .filter(|&node| matches!(&self.nodes[node].content, Content::Slots(slots) if !slots.is_empty()))
            .collect();
        let distance = |slot: u32| {
            let vector = self.guide(history.vector(slot));
            let nearest = leaves.iter().map(|&leaf| dot(self.medoids.row(leaf), &vector));
            1.0 - f64::from(nearest.fold(f32::NEG_INFINITY, f32::max))
        };
        history.slots().map(distance).sum::<f64>() / history.len().max(1) as f64
    }

    /// Memory in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let lists: usize = self
            .nodes
            .iter()
            .map(|node| match &node.content {
                Content::Children(list) | Content::Slots(list) => list.len() * size_of::<u32>(),
            })
            .sum();
        let fixed = self.nodes.len() * size_of::<Node>() + self.leaf_of.len() * size_of::<u32>();
        let sketches =
            self.sketches.as_ref().map_or(0, |sketches| sketches.basis().bytes() + sketches.rows().bytes());
        self.medoids.bytes() + sketches + (size_of_val(self.centre.as_slice()) + fixed + lists) as u64
    }

    /// A vector as medoids are compared with it: the centre taken off, scaled to length 1.
    fn guide(&self, vector: &[f32]) -> Vec<f32> {
        let mut guide: Vec<f32> =
            vector.iter().zip(&self.centre).map(|(value, centre)| value - centre).collect();
        normalise(&mut guide);
        guide
    }

    fn content(&self, node: u32) -> &Content {
        const NOTHING: &Content = &Content::Slots(Vec::new());
        self.nodes.get(node as usize).map_or(NOTHING, |node| &node.content)
    }
}
