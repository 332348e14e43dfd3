//! Finds the prompts most similar to a new one.

use crate::history::History;
use crate::random::Random;
use crate::tree::{Content, NONE, ROOT, Tree};
use crate::vector::dot;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A past prompt and how similar it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Neighbour {
    /// Slot of the prompt in the [`History`].
    pub slot: u32,
    /// Soft cosine similarity, -1 to 1.
    pub similarity: f32,
}

/// Effort of a search, whatever the machine: it grows with the options of the tree and not with the history.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effort {
    /// Nodes whose medoids were compared with the prompt.
    pub branches: usize,
    /// Prompts that were looked at, by their sketches where there are any.
    pub looked_at: usize,
    /// Prompts whose vectors were compared in full.
    pub compared: usize,
}

impl Tree {
    /// The `alpha` most similar prompts among those that algorithm 1 of the Remoe paper looks at, best
    /// first; all there are where the history holds fewer. `query` is a unit vector.
    #[must_use]
    pub fn search(&self, history: &History, query: &[f32], alpha: usize) -> Vec<Neighbour> {
        self.search_counted(history, query, alpha).0
    }

    /// [`Self::search`], and what it came to.
    pub(crate) fn search_counted(
        &self,
        history: &History,
        query: &[f32],
        alpha: usize,
    ) -> (Vec<Neighbour>, Effort) {
        let Candidates { mut slots, branches } = self.candidates(query, alpha);
        let looked_at = slots.len();
        if let Some(sketches) = &self.sketches {
            slots = sketches.most_similar(slots, query, self.options.rerank.max(alpha));
        }
        let effort = Effort { branches, looked_at, compared: slots.len() };
        let found = slots.into_iter().map(|slot| similarity(history, slot, query)).collect();
        (best_of(found, alpha), effort)
    }

    /// The slots that a search looks at. First the closest leaf's, and while they are fewer than `alpha`
    /// those of whole siblings, the nearest medoid first, then of the parent's siblings, and so on. Beyond
    /// that, up to the breadth, those of the leaves whose medoids are nearest, wherever they are.
    ///
    /// A sibling may be nearly all of the tree: of one that has more than the breadth the nearest leaves come, unless
    /// the breadth is no more than `alpha`, as the paper has it.
    pub(crate) fn candidates(&self, query: &[f32], alpha: usize) -> Candidates {
        let guide = self.guide(query);
        let breadth = alpha.max(self.options.breadth);
        let most = if self.options.breadth > alpha { breadth } else { usize::MAX };
        let mut found = Candidates::default();
        // Those that were not gone into, level by level, the nearest of each at its end.
        let mut levels: Vec<Vec<Branch>> = Vec::new();
        let mut node = ROOT;
        while let Content::Children(children) = self.content(node) {
            let mut level: Vec<Branch> = self.branches(children, &guide).collect();
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
                Some(sibling) => self.take_nearest(BinaryHeap::from([sibling]), &guide, most, &mut found),
                None => drop(levels.pop()),
            }
        }
        self.take_nearest(levels.into_iter().flatten().collect(), &guide, breadth, &mut found);
        found
    }

    /// Takes leaves of the subtrees `open`, those with the nearest medoids first, until `most` slots are found.
    fn take_nearest(&self, mut open: BinaryHeap<Branch>, guide: &[f32], most: usize, found: &mut Candidates) {
        while found.slots.len() < most
            && let Some(nearest) = open.pop()
        {
            match self.content(nearest.node) {
                Content::Slots(own) => found.slots.extend_from_slice(own),
                Content::Children(children) => {
                    found.branches += children.len();
                    open.extend(self.branches(children, guide));
                }
            }
        }
    }

    fn branches(&self, nodes: &[u32], guide: &[f32]) -> impl Iterator<Item = Branch> {
        nodes.iter().map(|&node| Branch { node, closeness: dot(self.medoids.row(node as usize), guide) })
    }

    /// The leaf where the prompt of `slot` belongs. Where medoids are equally close, as for a prompt that comes again
    /// and again, the slot decides: else the first of them would grow for ever, level by level.
    pub(super) fn home_of(&self, vector: &[f32], slot: u32) -> u32 {
        let guide = self.guide(vector);
        let mut node = ROOT;
        while let Content::Children(children) = self.content(node) {
            let branches: Vec<Branch> = self.branches(children, &guide).collect();
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

    /// Steps from the root to the leaf of `slot`; 0 where it is in none.
    pub(crate) fn depth_of(&self, slot: u32) -> usize {
        let leaf = self.leaf_of.get(slot as usize).copied().unwrap_or(NONE);
        let parent = |node: &u32| self.nodes.get(*node as usize).map(|node| node.parent);
        let path = std::iter::successors(Some(leaf), parent).take_while(|node| *node != NONE);
        path.count().saturating_sub(1)
    }

    /// Appends the slots of a whole subtree, leaf after leaf. Not recursive: how deep a saved tree is, its file
    /// decides.
    pub(super) fn collect(&self, node: u32, slots: &mut Vec<u32>) {
        let mut open = vec![node];
        while let Some(node) = open.pop() {
            match self.content(node) {
                Content::Slots(own) => slots.extend_from_slice(own),
                Content::Children(children) => open.extend(children.iter().rev()),
            }
        }
    }
}

/// Slots that a search looks at, and the nodes whose medoids it compared to find them.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    pub(crate) slots: Vec<u32>,
    branches: usize,
}

/// A node that has not been gone into. The largest is the one whose medoid is nearest, of equal ones the first node.
#[derive(Debug)]
struct Branch {
    node: u32,
    /// Similarity of its medoid.
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

/// Compares with every prompt (the paper's brute force): the `alpha` most similar, best first.
#[must_use]
pub fn exhaustive(history: &History, query: &[f32], alpha: usize) -> Vec<Neighbour> {
    sampled(history, query, alpha, usize::MAX).0
}

/// As [`exhaustive`] with at most `most` prompts, evenly over the slots where there are more.
pub(crate) fn sampled(
    history: &History,
    query: &[f32],
    alpha: usize,
    most: usize,
) -> (Vec<Neighbour>, Effort) {
    let slots = history.sampled_slots(most);
    let found: Vec<Neighbour> = slots.map(|slot| similarity(history, slot, query)).collect();
    let effort = Effort { branches: 0, looked_at: found.len(), compared: found.len() };
    (best_of(found, alpha), effort)
}

fn similarity(history: &History, slot: u32, query: &[f32]) -> Neighbour {
    Neighbour { slot, similarity: dot(history.vector(slot), query) }
}

/// The `count` most similar, best first; ties go to the lower slot.
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

    /// Root 0 with inner nodes 1 and 2; leaves 3, 4, 5 below 1, and 6, 7 below 2. The query is (1, 0); the
    /// closeness of each node to it is given.
    fn tree(closeness: [f32; 8], leaves: &[u32], breadth: usize) -> Tree {
        let parents = vec![NONE, 0, 0, 1, 1, 1, 2, 2];
        let medoids = closeness.iter().flat_map(|x| [*x, (1.0 - x * x).sqrt()]).collect();
        let parts = TreeParts { parents, leaves: leaves.to_vec() };
        let options = TreeOptions { breadth, rerank: breadth, ..TreeOptions::default() };
        let rows = Rows::from_values(2, medoids);
        Tree::from_parts(&parts, rows, vec![0.0; 2], None, Clustering::Similarity, options).unwrap()
    }

    const CLOSENESS: [f32; 8] = [0.0, 0.9, 0.8, 0.7, 0.3, 0.5, 0.6, 0.95];
    /// Slots 0; 1, 2; 3; 4; 5 in the leaves 3 to 7.
    const LEAVES: [u32; 6] = [3, 4, 4, 5, 6, 7];

    fn candidates(breadth: usize, alpha: usize) -> Vec<u32> {
        tree(CLOSENESS, &LEAVES, breadth).candidates(&[1.0, 0.0], alpha).slots
    }

    #[test]
    fn tree_search_visits_nearest_siblings_before_parent_siblings() {
        // Down to leaf 3, though leaf 7 is closer than all: the way goes over node 1.
        assert_eq!(candidates(0, 1), [0]);
        assert_eq!(candidates(0, 2), [0, 3]);
        // Leaf 4 comes whole.
        assert_eq!(candidates(0, 3), [0, 3, 1, 2]);
        // And so does all below node 2.
        assert_eq!(candidates(0, 5), [0, 3, 1, 2, 5, 4]);
        assert_eq!(candidates(0, 99), [0, 3, 1, 2, 5, 4]);
    }

    #[test]
    fn beyond_alpha_the_nearest_leaves_come_wherever_they_are() {
        // Node 2 is nearer than the siblings, and below it leaf 7 nearer than leaf 6.
        assert_eq!(candidates(2, 1), [0, 5]);
        assert_eq!(candidates(3, 1), [0, 5, 4]);
        assert_eq!(candidates(4, 1), [0, 5, 4, 3]);
        assert_eq!(candidates(5, 2), [0, 3, 5, 4, 1, 2]);
    }

    #[test]
    fn large_sibling_contributes_its_nearest_leaves() {
        // A leaf with one prompt beside a subtree of 64 with 10,000 in all.
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
        // The nearest ones: those of the last nodes.
        assert!(found.slots[1..].iter().all(|slot| leaves[*slot as usize] >= 3 + 64 - 7));
        // To the letter of the paper it comes whole.
        assert_eq!(of(0).slots.len(), 10_001);
    }
}
