//! Insertion and removal of prompts without a rebuild.

use crate::history::History;
use crate::tree::{NONE, NodeContent, ROOT, Tree};

impl Tree {
    /// Inserts a slot of `history` into its closest leaf and splits a leaf that becomes too large.
    pub(crate) fn insert(&mut self, history: &History, slot: u32) {
        let leaf = self.closest_leaf(history.vector(slot), slot);
        self.set_leaf(slot, leaf);
        if let Some(sketches) = &mut self.sketches {
            sketches.insert(history, slot, self.options.seed);
        }
        let mut overflow = Vec::new();
        if let Some(NodeContent::Slots(slots)) =
            self.nodes.get_mut(leaf as usize).map(|node| &mut node.content)
        {
            slots.push(slot);
            if slots.len() > self.options.beta {
                overflow = std::mem::take(slots);
            }
        }
        if !overflow.is_empty() {
            self.build_subtree(history, leaf, overflow);
        }
    }

    /// Removes a slot, its leaf if it becomes empty, and all ancestors without children.
    pub(crate) fn remove(&mut self, slot: u32) {
        let Some(leaf) = self.leaf_of.get_mut(slot as usize).map(|leaf| std::mem::replace(leaf, NONE)) else {
            return;
        };
        let Some(NodeContent::Slots(slots)) = self.nodes.get_mut(leaf as usize).map(|node| &mut node.content)
        else {
            return;
        };
        slots.retain(|&other| other != slot);
        let mut empty = slots.is_empty();
        let mut node = leaf;
        while empty && node != ROOT {
            let parent = std::mem::replace(&mut self.nodes[node as usize].parent, NONE);
            self.free_nodes.push(node);
            let above = &mut self.nodes[parent as usize].content;
            if let NodeContent::Children(children) = above {
                children.retain(|&child| child != node);
                empty = children.is_empty();
            }
            if empty {
                *above = NodeContent::Slots(Vec::new());
            }
            node = parent;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::UsageShares;
    use crate::tree::points::prepared;
    use crate::tree::{Clustering, TreeOptions};

    /// Returns a vector on the unit circle.
    fn vector(number: usize) -> [f32; 2] {
        let angle = number as f32 * 2.399_963;
        [angle.cos(), angle.sin()]
    }

    /// Creates a history of `prompts` prompts and its tree.
    fn history_with_tree(prompts: usize) -> (History, Tree) {
        let vectors = (0..prompts).flat_map(vector).collect();
        let tokens = vec![Box::from([0]); prompts];
        let history = History::from_vectors(1, 1, vectors, vec![1.0; prompts], tokens).unwrap();
        let mut tree = Tree::build(&history, Clustering::Centred, TreeOptions::default(), 15).unwrap();
        tree.fix_sketch_directions();
        (history, tree)
    }

    #[test]
    fn learning_effort_is_independent_of_history_size() {
        let beta = TreeOptions::default().beta;
        for prompts in [1_000, 20_000] {
            let (mut history, mut tree) = history_with_tree(prompts);
            let (before, nodes) = (prepared::so_far(), tree.nodes());
            for number in prompts..prompts + 2_000 {
                let slot = history.insert(&[0], &vector(number), &UsageShares::uniform(1, 1), None);
                tree.insert(&history, slot);
            }
            let splits = tree.nodes() - nodes;
            assert!(splits > 0, "{prompts}: nothing was split");
            let rows = prepared::so_far() - before;
            assert!(rows <= splits * (beta + 1), "{prompts}: {rows} rows for {splits} more nodes");
            assert_eq!(tree.leaf_sizes().iter().sum::<usize>(), prompts + 2_000);
        }
    }
}
