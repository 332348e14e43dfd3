//! Multi-fork clustering tree of the Remoe paper (section IV-B, algorithm 1).
//!
//! A node with more than beta prompts is split by k-medoids. A search descends to the closest child, compares the
//! prompts of that leaf and, while they are too few, those of other leaves. [`Tree`] keeps slots of a [`History`] and
//! copies of the medoids' vectors, so that a medoid still guides searches after its prompt was removed.
//!
//! All prompts have much in common, so that soft cosine similarities lie near 1. Those of short prompts, which
//! average over few tokens, are the lowest. Clusters by this similarity are a few large ones of long prompts and many
//! of outliers. [`Clustering::Centred`] therefore subtracts the mean vector of the history before it compares for
//! clustering. Neighbours are ranked by the plain similarity.

mod arrays;
mod build;
mod medoids;
mod pam;
mod points;
mod search;
mod sketches;
mod update;

pub(crate) use arrays::TreeParts;
pub use search::{Neighbour, SearchEffort, exhaustive_search};
pub(crate) use search::{best_of, linear_search};
pub(crate) use sketches::Sketches;

use crate::error::PredictError;
use crate::history::History;
use crate::rows::Rows;
use crate::vector::{add_scaled, dot, normalise};

/// Algorithm and distance that split nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clustering {
    /// Customised k-medoids (roulette-wheel seeding, medoids updated inside each subcluster) by soft cosine
    /// similarity around the mean of the history. SPS uses it.
    Centred,
    /// As `Centred`, by plain soft cosine similarity, exactly as in the paper.
    Similarity,
    /// Full Partitioning Around Medoids by the similarity of `Centred` (the paper's VarPAM).
    Pam,
    /// Customised k-medoids by the Euclidean distance of activation matrices (the paper's VarED). Searches still
    /// descend by the similarity of prompts.
    Activations,
}

/// Options of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeOptions {
    /// Largest number of prompts in a leaf, more than alpha. The paper's beta.
    pub beta: usize,
    /// Least number of candidate prompts per search, besides alpha. The paper stops at alpha; ten times beta finds
    /// nearly the neighbours of a linear search.
    pub breadth: usize,
    /// Number of candidates, at least alpha, that a search compares by full vectors: the most similar ones by their
    /// shorter sketches. If `breadth` is not larger, there are no sketches.
    pub rerank: usize,
    /// Largest number of children. A node of n prompts gets min(forks, ceil(n / beta)), at least 2: no more leaves
    /// than needed, because small leaves find fewer true neighbours.
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
    /// Checks the options for searches of `alpha` prompts.
    ///
    /// # Errors
    /// `alpha` is 0, `beta` is not larger, or `forks` is out of range.
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

    /// Returns true if searches preselect candidates by sketches.
    pub(crate) fn uses_sketches(&self) -> bool {
        self.breadth > self.rerank
    }
}

/// Clustering tree over the slots of one [`History`].
#[derive(Debug, Clone)]
pub struct Tree {
    options: TreeOptions,
    clustering: Clustering,
    nodes: Vec<Node>,
    /// Vector that is subtracted before comparisons with medoids, [hidden]. Zeros without centring.
    centre: Vec<f32>,
    /// Medoid of each node, centred and scaled to length 1, [nodes, hidden]. The root's row is unused.
    medoids: Rows,
    /// Sketches of the vectors, if searches preselect candidates by them.
    sketches: Option<Sketches>,
    /// Leaf of each slot. [`NONE`] for slots outside the tree.
    leaf_of: Vec<u32>,
    /// Pruned nodes, for reuse.
    free_nodes: Vec<u32>,
}

/// Index that stands for no node.
const NONE: u32 = u32::MAX;
/// Index of the root.
const ROOT: u32 = 0;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    /// [`NONE`] for the root.
    parent: u32,
    content: NodeContent,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum NodeContent {
    /// Indices of child nodes.
    Children(Vec<u32>),
    /// Slots of a leaf.
    Slots(Vec<u32>),
}

impl Tree {
    /// Builds a tree of all prompts in `history`.
    ///
    /// # Errors
    /// The options are invalid for searches of `alpha` prompts.
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
            nodes: vec![Node { parent: NONE, content: NodeContent::Slots(Vec::new()) }],
            medoids: Rows::from_values(history.vectors.width(), vec![0.0; history.vectors.width()]),
            sketches: options.uses_sketches().then(|| Sketches::from_history(history, options.seed)),
            leaf_of: Vec::new(),
            free_nodes: Vec::new(),
        };
        tree.build_subtree(history, ROOT, slots);
        Ok(tree)
    }

    /// Fixes the directions of sketches, however many prompts are added: finding them again takes long.
    pub(crate) fn fix_sketch_directions(&mut self) {
        if let Some(sketches) = &mut self.sketches {
            sketches.fix_basis();
        }
    }

    /// Returns the options.
    #[must_use]
    pub fn options(&self) -> TreeOptions {
        self.options
    }

    /// Returns the number of nodes in use, with the root.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes.len() - self.free_nodes.len()
    }

    /// Returns the number of prompts of each leaf.
    #[must_use]
    pub fn leaf_sizes(&self) -> Vec<usize> {
        self.nodes
            .iter()
            .filter_map(|node| match &node.content {
                NodeContent::Slots(slots) if !slots.is_empty() => Some(slots.len()),
                _ => None,
            })
            .collect()
    }

    /// Returns the mean distance (1 - similarity) of prompts to the closest medoid of a leaf.
    #[must_use]
    pub fn medoid_cost(&self, history: &History) -> f64 {
        let leaves: Vec<usize> = (1..self.nodes.len())
            .filter(
                |&node| matches!(&self.nodes[node].content, NodeContent::Slots(slots) if !slots.is_empty()),
            )
            .collect();
        let distance = |slot: u32| {
            let vector = self.centred(history.vector(slot));
            let nearest = leaves.iter().map(|&leaf| dot(self.medoids.row(leaf), &vector));
            1.0 - f64::from(nearest.fold(f32::NEG_INFINITY, f32::max))
        };
        history.slots().map(distance).sum::<f64>() / history.len().max(1) as f64
    }

    /// Returns the memory, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let lists: usize = self
            .nodes
            .iter()
            .map(|node| match &node.content {
                NodeContent::Children(list) | NodeContent::Slots(list) => list.len() * size_of::<u32>(),
            })
            .sum();
        let fixed = self.nodes.len() * size_of::<Node>() + self.leaf_of.len() * size_of::<u32>();
        let sketches =
            self.sketches.as_ref().map_or(0, |sketches| sketches.basis().bytes() + sketches.rows().bytes());
        self.medoids.bytes() + sketches + (size_of_val(self.centre.as_slice()) + fixed + lists) as u64
    }

    /// Returns a vector for comparison with medoids: centred and scaled to length 1.
    fn centred(&self, vector: &[f32]) -> Vec<f32> {
        let mut centred: Vec<f32> =
            vector.iter().zip(&self.centre).map(|(value, centre)| value - centre).collect();
        normalise(&mut centred);
        centred
    }

    fn content(&self, node: u32) -> &NodeContent {
        const NOTHING: &NodeContent = &NodeContent::Slots(Vec::new());
        self.nodes.get(node as usize).map_or(NOTHING, |node| &node.content)
    }
}
