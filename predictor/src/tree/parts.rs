//! A tree as arrays, for a file and back.

use crate::error::PredictError;
use crate::history::History;
use crate::rows::Rows;
use crate::tree::{Clustering, Content, NONE, Node, ROOT, Sketches, Tree, TreeOptions};

/// The nodes of a tree in breadth-first order, as arrays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TreeParts {
    /// Parent of each node; `u32::MAX` for the root, which is the first.
    pub(crate) parents: Vec<u32>,
    /// Leaf of each slot.
    pub(crate) leaves: Vec<u32>,
}

impl Tree {
    /// Returns the vector that is taken off queries.
    pub(crate) fn centre(&self) -> &[f32] {
        &self.centre
    }

    /// Short stand-ins for the vectors, where searches use them.
    pub(crate) fn sketches(&self) -> Option<&Sketches> {
        self.sketches.as_ref()
    }

    /// The slots, each leaf's next to each other, near leaves near each other.
    pub(crate) fn leaf_order(&self) -> Vec<u32> {
        let mut slots = Vec::with_capacity(self.leaf_of.len());
        self.collect(ROOT, &mut slots);
        slots
    }

    /// Returns the history with each leaf's prompts next to each other, so that a search reads memory in long runs;
    /// this tree is renumbered with it.
    ///
    /// # Errors
    /// Never for a tree over `history`.
    pub fn arrange(&mut self, history: &History) -> Result<History, PredictError> {
        let order = self.leaf_order();
        let (parts, medoids) = self.to_parts(&order);
        let medoids = Rows::from_values(self.medoids.width(), medoids);
        let sketches = self.sketches.as_ref().map(|sketches| sketches.gather(&order));
        let centre = self.centre.clone();
        *self = Self::from_parts(&parts, medoids, centre, sketches, self.clustering, self.options)?;
        Ok(history.gather(&order))
    }

    /// Returns the arrays, and the medoids' rows in their order. Slots are renumbered by their order in `slots`; pruned
    /// nodes are left out.
    pub(crate) fn to_parts(&self, slots: &[u32]) -> (TreeParts, Vec<f32>) {
        let mut order = vec![ROOT];
        let mut parents = vec![NONE];
        let mut next = 0;
        while let Some(&node) = order.get(next) {
            if let Content::Children(children) = self.content(node) {
                order.extend_from_slice(children);
                parents.extend(children.iter().map(|_| next as u32));
            }
            next += 1;
        }
        let mut number = vec![NONE; self.nodes.len()];
        for (new, &old) in (0..).zip(&order) {
            number[old as usize] = new;
        }
        let leaf = |&slot: &u32| {
            let leaf = self.leaf_of.get(slot as usize).copied().unwrap_or(NONE);
            number.get(leaf as usize).copied().unwrap_or(NONE)
        };
        let medoids = order.iter().flat_map(|&node| self.medoids.row(node as usize)).copied().collect();
        (TreeParts { parents, leaves: slots.iter().map(leaf).collect() }, medoids)
    }

    /// The tree that was saved.
    ///
    /// # Errors
    /// The arrays are not those of a tree: a parent does not come before its child, a slot is not in a
    /// leaf.
    pub(crate) fn from_parts(
        parts: &TreeParts,
        medoids: Rows,
        centre: Vec<f32>,
        sketches: Option<Sketches>,
        clustering: Clustering,
        options: TreeOptions,
    ) -> Result<Self, PredictError> {
        let wrong = |message: String| PredictError::Saved(message);
        PredictError::require_size("`tree.medoids`", parts.parents.len(), medoids.len())?;
        if parts.parents.first() != Some(&NONE) {
            return Err(wrong("the first node of the tree is not its root".to_owned()));
        }
        let mut nodes: Vec<Node> = Vec::with_capacity(parts.parents.len());
        for (child, &parent) in (0..).zip(&parts.parents) {
            if child != ROOT {
                match nodes.get_mut(parent as usize).map(|node| &mut node.content) {
                    Some(Content::Children(children)) => children.push(child),
                    Some(content) => *content = Content::Children(vec![child]),
                    None => {
                        return Err(wrong(format!(
                            "node {child} of the tree comes before its parent {parent}"
                        )));
                    }
                }
            }
            nodes.push(Node { parent, content: Content::Slots(Vec::new()) });
        }
        for (slot, &leaf) in (0..).zip(&parts.leaves) {
            match nodes.get_mut(leaf as usize).map(|node| &mut node.content) {
                Some(Content::Slots(slots)) => slots.push(slot),
                _ => return Err(wrong(format!("prompt {slot} is in node {leaf}, which is not a leaf"))),
            }
        }
        PredictError::require_size("`tree.centre`", medoids.width(), centre.len())?;
        Ok(Self {
            options,
            clustering,
            nodes,
            centre,
            medoids,
            sketches,
            leaf_of: parts.leaves.clone(),
            vacant: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_tree_may_be_as_deep_as_its_file_is_long() {
        const DEPTH: u32 = 200_000;
        let parents = std::iter::once(NONE).chain(0..DEPTH).collect();
        let parts = TreeParts { parents, leaves: vec![DEPTH; 3] };
        let medoids = Rows::from_values(1, vec![1.0; DEPTH as usize + 1]);
        let (clustering, options) = (Clustering::Centred, TreeOptions::default());
        let tree = Tree::from_parts(&parts, medoids, vec![0.0], None, clustering, options).unwrap();
        assert_eq!(tree.leaf_order(), [0, 1, 2]);
        assert_eq!(tree.candidates(&[1.0], 2).slots, [0, 1, 2]);
    }
}
