//! Finds the prompts most similar to a new one.

use crate::history::History;
use crate::tree::{Content, ROOT, Tree};
use crate::vector::dot;

/// A past prompt and how similar it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Neighbour {
    /// Its slot in the [`History`].
    pub slot: u32,
    /// Soft cosine similarity, -1 to 1.
    pub similarity: f32,
}

impl Tree {
    /// The `alpha` most similar prompts among those that algorithm 1 of the Remoe paper looks at, best
    /// first; all there are where the history holds fewer. `query` is a unit vector.
    #[must_use]
    pub fn search(&self, history: &History, query: &[f32], alpha: usize) -> Vec<Neighbour> {
        let mut candidates = self.candidates(query, alpha);
        if let Some(sketches) = &self.sketches {
            candidates = sketches.most_similar(candidates, query, self.options.rerank.max(alpha));
        }
        let found = candidates.into_iter().map(|slot| similarity(history, slot, query)).collect();
        best_of(found, alpha)
    }

    /// The slots that a search looks at. First the closest leaf's, and while they are fewer than `alpha`
    /// those of whole siblings, the nearest medoid first, then of the parent's siblings, and so on. Beyond
    /// that, up to the breadth, those of the leaves whose medoids are nearest, wherever they are.
    pub(crate) fn candidates(&self, query: &[f32], alpha: usize) -> Vec<u32> {
        let guide = self.guide(query);
        let breadth = alpha.max(self.options.breadth);
        let mut open = Vec::new();
        let mut node = ROOT;
        let mut depth = 0;
        while let Content::Children(children) = self.content(node) {
            depth += 1;
            open.extend(children.iter().map(|&child| self.branch(child, depth, &guide)));
            let Some(closest) = take_best(&mut open, |branch| (branch.depth, branch.closeness)) else {
                break;
            };
            node = closest.node;
        }
        let mut slots = Vec::new();
        self.collect(node, &mut slots);
        while slots.len() < alpha {
            let Some(sibling) = take_best(&mut open, |branch| (branch.depth, branch.closeness)) else {
                break;
            };
            self.collect(sibling.node, &mut slots);
        }
        while slots.len() < breadth {
            let Some(nearest) = take_best(&mut open, |branch| (0, branch.closeness)) else { break };
            match self.content(nearest.node) {
                Content::Slots(own) => slots.extend_from_slice(own),
                Content::Children(children) => {
                    open.extend(children.iter().map(|&child| self.branch(child, nearest.depth + 1, &guide)));
                }
            }
        }
        slots
    }

    fn branch(&self, node: u32, depth: usize, guide: &[f32]) -> Branch {
        Branch { node, depth, closeness: dot(self.medoids.row(node as usize), guide) }
    }

    /// The leaf where a new prompt belongs.
    pub(super) fn home_of(&self, vector: &[f32]) -> u32 {
        let guide = self.guide(vector);
        let mut node = ROOT;
        while let Content::Children(children) = self.content(node) {
            let mut branches = children.iter().map(|&child| self.branch(child, 0, &guide)).collect();
            let Some(closest) = take_best(&mut branches, |branch| (0, branch.closeness)) else { break };
            node = closest.node;
        }
        node
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

/// A node that has not been gone into.
struct Branch {
    node: u32,
    /// Steps from the root.
    depth: usize,
    /// Similarity of its medoid.
    closeness: f32,
}

/// Removes the branch with the largest key, of equal ones the first node.
fn take_best(open: &mut Vec<Branch>, key: impl Fn(&Branch) -> (usize, f32)) -> Option<Branch> {
    let order = |a: &Branch, b: &Branch| {
        let (a_key, b_key) = (key(a), key(b));
        a_key.0.cmp(&b_key.0).then(a_key.1.total_cmp(&b_key.1)).then(b.node.cmp(&a.node))
    };
    let best = (0..open.len()).max_by(|&a, &b| order(&open[a], &open[b]))?;
    Some(open.swap_remove(best))
}

/// Compares with every prompt (the paper's brute force): the `alpha` most similar, best first.
#[must_use]
pub fn exhaustive(history: &History, query: &[f32], alpha: usize) -> Vec<Neighbour> {
    best_of(history.slots().map(|slot| similarity(history, slot, query)).collect(), alpha)
}

fn similarity(history: &History, slot: u32, query: &[f32]) -> Neighbour {
    Neighbour { slot, similarity: dot(history.vector(slot), query) }
}

/// The `count` most similar, best first; ties go to the lower slot.
pub(super) fn best_of(mut found: Vec<Neighbour>, count: usize) -> Vec<Neighbour> {
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
    use crate::tree::{Clustering, NONE, TreeOptions, TreeParts};

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
        tree(CLOSENESS, &LEAVES, breadth).candidates(&[1.0, 0.0], alpha)
    }

    #[test]
    fn siblings_come_whole_the_nearest_first_and_only_then_those_of_the_parent() {
        // Down to leaf 3, though leaf 7 is closer than all: the way goes over node 1.
        assert_eq!(candidates(0, 1), [0]);
        assert_eq!(candidates(0, 2), [0, 3]);
        // Leaf 4 comes whole.
        assert_eq!(candidates(0, 3), [0, 3, 1, 2]);
        // And so does all below node 2.
        assert_eq!(candidates(0, 5), [0, 3, 1, 2, 4, 5]);
        assert_eq!(candidates(0, 99), [0, 3, 1, 2, 4, 5]);
    }

    #[test]
    fn beyond_alpha_the_nearest_leaves_come_wherever_they_are() {
        // Node 2 is nearer than the siblings, and below it leaf 7 nearer than leaf 6.
        assert_eq!(candidates(2, 1), [0, 5]);
        assert_eq!(candidates(3, 1), [0, 5, 4]);
        assert_eq!(candidates(4, 1), [0, 5, 4, 3]);
        assert_eq!(candidates(5, 2), [0, 3, 5, 4, 1, 2]);
    }
}
