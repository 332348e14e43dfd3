//! Conversion of a tree to arrays for a file, and back.

use crate::error::PredictError;
use crate::history::History;
use crate::rows::Rows;
use crate::tree::{Clustering, NONE, Node, NodeContent, ROOT, Sketches, Tree, TreeOptions};

/// Nodes of a tree in breadth-first order, as arrays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TreeParts {
    /// Parent of each node; `u32::MAX` for the root, which is the first.
    pub(crate) parents: Vec<u32>,
    /// Leaf of each slot.
    pub(crate) leaves: Vec<u32>,
}

impl Tree {
    /// Returns the vector that is subtracted from queries.
    pub(crate) fn centre(&self) -> &[f32] {
        &self.centre
    }

    /// Returns the sketches of the vectors, if searches use them.
    pub(crate) fn sketches(&self) -> Option<&Sketches> {
        self.sketches.as_ref()
    }

    /// Returns the slots in the order of the leaves, near leaves next to each other.
    pub(crate) fn leaf_order(&self) -> Vec<u32> {
        let mut slots = Vec::with_capacity(self.leaf_of.len());
        self.collect(ROOT, &mut slots);
        slots
    }

    /// Returns the history in the order of the leaves, so that a search reads contiguous memory, and renumbers the
    /// slots of this tree accordingly.
    ///
    /// # Errors
    /// Never fails for a tree of `history`.
    pub fn arrange(&mut self, history: &History) -> Result<History, PredictError> {
        let order = self.leaf_order();
        let (parts, medoids) = self.to_parts(&order);
        let medoids = Rows::from_values(self.medoids.width(), medoids);
        let sketches = self.sketches.as_ref().map(|sketches| sketches.gather(&order));
        let centre = self.centre.clone();
        *self = Self::from_parts(&parts, medoids, centre, sketches, self.clustering, self.options)?;
        Ok(history.gather(&order))
    }

    /// Returns the arrays, and the medoids in the order of the nodes. Renumbers slots by their position in `slots`
    /// and omits pruned nodes.
    pub(crate) fn to_parts(&self, slots: &[u32]) -> (TreeParts, Vec<f32>) {
        let mut order = vec![ROOT];
        let mut parents = vec![NONE];
        let mut next = 0;
        while let Some(&node) = order.get(next) {
            if let NodeContent::Children(children) = self.content(node) {
                order.extend_from_slice(children);
                parents.extend(children.iter().map(|_| next as u32));
            }
            next += 1;
        }
        let mut new_index = vec![NONE; self.nodes.len()];
        for (new, &old) in (0..).zip(&order) {
            new_index[old as usize] = new;
        }
        let leaf = |&slot: &u32| {
            let leaf = self.leaf_of.get(slot as usize).copied().unwrap_or(NONE);
            new_index.get(leaf as usize).copied().unwrap_or(NONE)
        };
        let medoids = order.iter().flat_map(|&node| self.medoids.row(node as usize)).copied().collect();
        (TreeParts { parents, leaves: slots.iter().map(leaf).collect() }, medoids)
    }

    /// Restores a saved tree.
    ///
    /// # Errors
    /// The arrays describe no tree: a parent does not precede its child, or a slot is not in a leaf.
    pub(crate) fn from_parts(
        parts: &TreeParts,
        medoids: Rows,
        centre: Vec<f32>,
        sketches: Option<Sketches>,
        clustering: Clustering,
        options: TreeOptions,
    ) -> Result<Self, PredictError> {
        let invalid = |message: String| PredictError::Saved(message);
        PredictError::require_size("`tree.medoids`", parts.parents.len(), medoids.len())?;
        if parts.parents.first() != Some(&NONE) {
            return Err(invalid("the first node of the tree is not its root".to_owned()));
        }
        let mut nodes: Vec<Node> = Vec::with_capacity(parts.parents.len());
        for (child, &parent) in (0..).zip(&parts.parents) {
            if child != ROOT {
                match nodes.get_mut(parent as usize).map(|node| &mut node.content) {
                    Some(NodeContent::Children(children)) => children.push(child),
                    Some(content) => *content = NodeContent::Children(vec![child]),
                    None => {
                        return Err(invalid(format!(
                            "node {child} of the tree comes before its parent {parent}"
                        )));
                    }
                }
            }
            nodes.push(Node { parent, content: NodeContent::Slots(Vec::new()) });
        }
        for (slot, &leaf) in (0..).zip(&parts.leaves) {
            match nodes.get_mut(leaf as usize).map(|node| &mut node.content) {
                Some(NodeContent::Slots(slots)) => slots.push(slot),
                _ => return Err(invalid(format!("prompt {slot} is in node {leaf}, which is not a leaf"))),
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
            free_nodes: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_tree_of_any_depth_is_searched() {
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
