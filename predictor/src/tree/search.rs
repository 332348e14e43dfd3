//! Search for the prompts most similar to a new one.

use crate::history::History;
use crate::random::Random;
use crate::tree::{NONE, NodeContent, ROOT, Tree};
use crate::vector::dot;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Past prompt with its similarity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Neighbour {
    /// Slot of the prompt in the [`History`].
    pub slot: u32,
    /// Soft cosine similarity, -1 to 1.
    pub similarity: f32,
}

/// Effort of a search in comparisons. It grows with the options of the tree, not with the history.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SearchEffort {
    /// Nodes whose medoids were compared with the prompt.
    pub branches: usize,
    /// Candidate prompts, which are compared by sketches, if there are any.
    pub candidates: usize,
    /// Prompts compared by full vectors.
    pub compared: usize,
}

impl Tree {
    /// Returns the `alpha` most similar prompts among the candidates of algorithm 1 of the Remoe paper, the most
    /// similar first, or fewer if the history has fewer. `query` is a unit vector.
    #[must_use]
    pub fn search(&self, history: &History, query: &[f32], alpha: usize) -> Vec<Neighbour> {
        self.search_counted(history, query, alpha).0
    }

    /// Searches as [`Self::search`] does and also returns the effort.
    pub(crate) fn search_counted(
        &self,
        history: &History,
        query: &[f32],
        alpha: usize,
    ) -> (Vec<Neighbour>, SearchEffort) {
        let Candidates { mut slots, branches } = self.candidates(query, alpha);
        let candidates = slots.len();
        if let Some(sketches) = &self.sketches {
            slots = sketches.most_similar(slots, query, self.options.rerank.max(alpha));
        }
        let effort = SearchEffort { branches, candidates, compared: slots.len() };
        let found = slots.into_iter().map(|slot| similarity(history, slot, query)).collect();
        (best_of(found, alpha), effort)
    }

    /// Collects the candidate slots of a search: first the closest leaf. While there are fewer than `alpha`, whole
    /// siblings follow, the nearest medoid first, then siblings of the parent, and so on. Beyond that, the leaves
    /// with the nearest medoids anywhere follow up to the breadth.
    ///
    /// A sibling may hold nearly the whole tree. From one larger than the breadth, only the nearest leaves are taken,
    /// unless the breadth is at most `alpha`, as in the paper.
    pub(crate) fn candidates(&self, query: &[f32], alpha: usize) -> Candidates {
        let centred = self.centred(query);
        let breadth = alpha.max(self.options.breadth);
        let sibling_limit = if self.options.breadth > alpha { breadth } else { usize::MAX };
        let mut found = Candidates::default();
        // Branches not taken, by level, the nearest last.
        let mut levels: Vec<Vec<Branch>> = Vec::new();
        let mut node = ROOT;
        while let NodeContent::Children(children) = self.content(node) {
            let mut level: Vec<Branch> = self.branches(children, &centred).collect();
            found.branches += level.len();
            level.sort_unstable();
            let Some(closest) = level.pop() else { break };
            levels.push(level);
            node = closest.node;
        }
        self.collect(node, &mut found.slots);
        while found.slots.len() < alpha {
            let Some(level) = levels.last_mut() else { break };
            match level.pop() {
                Some(sibling) => {
                    self.take_nearest(BinaryHeap::from([sibling]), &centred, sibling_limit, &mut found)
                }
                None => drop(levels.pop()),
            }
        }
        self.take_nearest(levels.into_iter().flatten().collect(), &centred, breadth, &mut found);
        found
    }

    /// Takes leaves of the `open` subtrees, the nearest medoids first, until `limit` slots are found.
    fn take_nearest(
        &self,
        mut open: BinaryHeap<Branch>,
        centred: &[f32],
        limit: usize,
        found: &mut Candidates,
    ) {
        while found.slots.len() < limit
            && let Some(nearest) = open.pop()
        {
            match self.content(nearest.node) {
                NodeContent::Slots(own) => found.slots.extend_from_slice(own),
                NodeContent::Children(children) => {
                    found.branches += children.len();
                    open.extend(self.branches(children, centred));
                }
            }
        }
    }

    fn branches(&self, nodes: &[u32], centred: &[f32]) -> impl Iterator<Item = Branch> {
        nodes.iter().map(|&node| Branch { node, closeness: dot(self.medoids.row(node as usize), centred) })
    }

    /// Returns the leaf for the prompt of `slot`. Among equally close medoids, as for a repeated prompt, the slot
    /// decides: otherwise the first would grow deeper and deeper.
    pub(super) fn closest_leaf(&self, vector: &[f32], slot: u32) -> u32 {
        let centred = self.centred(vector);
        let mut node = ROOT;
        while let NodeContent::Children(children) = self.content(node) {
            let branches: Vec<Branch> = self.branches(children, &centred).collect();
            let Some(closest) = branches.iter().max() else { break };
            let as_close = branches.iter().filter(|branch| branch.closeness == closest.closeness);
            let seed = u64::from(slot) << 32 | u64::from(node);
            let chosen = match as_close.clone().count() {
                1 => Some(closest),
                count => as_close.clone().nth(Random::new(seed).below(count)),
            };
            node = chosen.unwrap_or(closest).node;
        }
        node
    }

    /// Returns the number of edges from the root to the leaf of `slot`, 0 if it is in none.
    pub(crate) fn depth_of(&self, slot: u32) -> usize {
        let leaf = self.leaf_of.get(slot as usize).copied().unwrap_or(NONE);
        let parent = |node: &u32| self.nodes.get(*node as usize).map(|node| node.parent);
        let path = std::iter::successors(Some(leaf), parent).take_while(|node| *node != NONE);
        path.count().saturating_sub(1)
    }

    /// Appends the slots of a subtree, leaf by leaf. Iterates instead of recursing: the file of a saved tree decides
    /// its depth.
    pub(super) fn collect(&self, node: u32, slots: &mut Vec<u32>) {
        let mut open = vec![node];
        while let Some(node) = open.pop() {
            match self.content(node) {
                NodeContent::Slots(own) => slots.extend_from_slice(own),
                NodeContent::Children(children) => open.extend(children.iter().rev()),
            }
        }
    }
}

/// Candidate slots of a search, and the number of compared medoids.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    pub(crate) slots: Vec<u32>,
    branches: usize,
}

/// Node not yet expanded. Ordered by the closeness of its medoid, ties to the lower node.
#[derive(Debug)]
struct Branch {
    node: u32,
    /// Similarity of its medoid to the query.
    closeness: f32,
}

impl Ord for Branch {
    fn cmp(&self, other: &Self) -> Ordering {
        self.closeness.total_cmp(&other.closeness).then(other.node.cmp(&self.node))
    }
}

impl PartialOrd for Branch {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Branch {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Branch {}

/// Returns the `alpha` most similar prompts by a linear search (the paper's brute force), the most similar first.
#[must_use]
pub fn exhaustive_search(history: &History, query: &[f32], alpha: usize) -> Vec<Neighbour> {
    linear_search(history, query, alpha, usize::MAX).0
}

/// Searches linearly among at most `limit` prompts, evenly spaced over the slots, and also returns the effort.
pub(crate) fn linear_search(
    history: &History,
    query: &[f32],
    alpha: usize,
    limit: usize,
) -> (Vec<Neighbour>, SearchEffort) {
    let slots = history.sampled_slots(limit);
    let found: Vec<Neighbour> = slots.map(|slot| similarity(history, slot, query)).collect();
    let effort = SearchEffort { branches: 0, candidates: found.len(), compared: found.len() };
    (best_of(found, alpha), effort)
}

fn similarity(history: &History, slot: u32, query: &[f32]) -> Neighbour {
    Neighbour { slot, similarity: dot(history.vector(slot), query) }
}

/// Returns the `count` most similar neighbours, the most similar first, ties to the lower slot.
pub(crate) fn best_of(mut found: Vec<Neighbour>, count: usize) -> Vec<Neighbour> {
    let better =
        |a: &Neighbour, b: &Neighbour| b.similarity.total_cmp(&a.similarity).then(a.slot.cmp(&b.slot));
    if found.len() > count {
        found.select_nth_unstable_by(count, better);
        found.truncate(count);
    }
    found.sort_unstable_by(better);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::Rows;
    use crate::tree::{Clustering, TreeOptions, TreeParts};

    /// Builds a tree with root 0, inner nodes 1 and 2, leaves 3, 4, 5 below 1, and 6, 7 below 2. The query is (1, 0),
    /// and each node has the given closeness to it.
    fn tree(closeness: [f32; 8], leaves: &[u32], breadth: usize) -> Tree {
        let parents = vec![NONE, 0, 0, 1, 1, 1, 2, 2];
        let medoids = closeness.iter().flat_map(|x| [*x, (1.0 - x * x).sqrt()]).collect();
        let parts = TreeParts { parents, leaves: leaves.to_vec() };
        let options = TreeOptions { breadth, rerank: breadth, ..TreeOptions::default() };
        let rows = Rows::from_values(2, medoids);
        Tree::from_parts(&parts, rows, vec![0.0; 2], None, Clustering::Similarity, options).unwrap()
    }

    const CLOSENESS: [f32; 8] = [0.0, 0.9, 0.8, 0.7, 0.3, 0.5, 0.6, 0.95];
    /// Slots of the leaves 3 to 7: 0; 1, 2; 3; 4; 5.
    const LEAVES: [u32; 6] = [3, 4, 4, 5, 6, 7];

    fn candidates(breadth: usize, alpha: usize) -> Vec<u32> {
        tree(CLOSENESS, &LEAVES, breadth).candidates(&[1.0, 0.0], alpha).slots
    }

    #[test]
    fn tree_search_visits_nearest_siblings_before_parent_siblings() {
        // Descends over node 1 to leaf 3, although leaf 7 is the closest.
        assert_eq!(candidates(0, 1), [0]);
        assert_eq!(candidates(0, 2), [0, 3]);
        // Takes all of leaf 4.
        assert_eq!(candidates(0, 3), [0, 3, 1, 2]);
        // Takes everything below node 2.
        assert_eq!(candidates(0, 5), [0, 3, 1, 2, 5, 4]);
        assert_eq!(candidates(0, 99), [0, 3, 1, 2, 5, 4]);
    }

    #[test]
    fn search_beyond_alpha_takes_the_nearest_leaves_anywhere() {
        // Node 2 is nearer than the siblings, and leaf 7 nearer than leaf 6.
        assert_eq!(candidates(2, 1), [0, 5]);
        assert_eq!(candidates(3, 1), [0, 5, 4]);
        assert_eq!(candidates(4, 1), [0, 5, 4, 3]);
        assert_eq!(candidates(5, 2), [0, 3, 5, 4, 1, 2]);
    }

    #[test]
    fn large_sibling_contributes_its_nearest_leaves() {
        // A leaf with one prompt beside a subtree of 64 leaves with 10,000 prompts.
        let mut parents = vec![NONE, 0, 0];
        parents.extend([2; 64]);
        let closeness = |node: usize| if node < 3 { [0.0, 0.9, 0.1][node] } else { node as f32 / 100.0 };
        let medoids = (0..67).flat_map(|node| [closeness(node), (1.0 - closeness(node).powi(2)).sqrt()]);
        let leaves: Vec<u32> = [1].into_iter().chain((0..10_000).map(|slot| 3 + slot % 64)).collect();
        let of = |breadth: usize| {
            let parts = TreeParts { parents: parents.clone(), leaves: leaves.clone() };
            let options = TreeOptions { breadth, rerank: breadth, ..TreeOptions::default() };
            let rows = Rows::from_values(2, medoids.clone().collect());
            let tree = Tree::from_parts(&parts, rows, vec![0.0; 2], None, Clustering::Similarity, options);
            tree.unwrap().candidates(&[1.0, 0.0], 15)
        };
        let found = of(1000);
        assert!((1000..1000 + 157).contains(&found.slots.len()), "{}", found.slots.len());
        assert_eq!(found.branches, 2 + 64);
        // The nearest leaves are the last ones.
        assert!(found.slots[1..].iter().all(|slot| leaves[*slot as usize] >= 3 + 64 - 7));
        // In the paper's variant, all of it is taken.
        assert_eq!(of(0).slots.len(), 10_001);
    }
}
