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
        let found = candidates.drain(..).map(|slot| similarity(history, slot, query)).collect();
        best_of(found, alpha)
    }

    /// The slots that a search compares. First the closest leaf's, and while they are fewer than `alpha`
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
        let mut slots = Vec::with_capacity(breadth + self.options.beta);
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

    /// Appends the slots of a whole subtree.
    pub(super) fn collect(&self, node: u32, slots: &mut Vec<u32>) {
        match self.content(node) {
            Content::Slots(own) => slots.extend_from_slice(own),
            Content::Children(children) => children.iter().for_each(|&child| self.collect(child, slots)),
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
fn best_of(mut found: Vec<Neighbour>, count: usize) -> Vec<Neighbour> {
    let better =
        |a: &Neighbour, b: &Neighbour| b.similarity.total_cmp(&a.similarity).then(a.slot.cmp(&b.slot));
    if found.len() > count {
        found.select_nth_unstable_by(count, better);
        found.truncate(count);
    }
    found.sort_unstable_by(better);
    found
}
