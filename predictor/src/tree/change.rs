//! Prompts that come and go without a rebuild.

use crate::history::History;
use crate::tree::{Content, NONE, ROOT, Tree};

impl Tree {
    /// Puts a slot of `history` into its closest leaf; a leaf that becomes too large is split.
    pub(crate) fn insert(&mut self, history: &History, slot: u32) {
        let leaf = self.home_of(history.vector(slot));
        self.set_leaf(slot, leaf);
        if let Some(sketches) = &mut self.sketches {
            sketches.insert(history, slot, self.options.seed);
        }
        let mut overflow = Vec::new();
        if let Some(Content::Slots(slots)) = self.nodes.get_mut(leaf as usize).map(|node| &mut node.content) {
            slots.push(slot);
            if slots.len() > self.options.beta {
                overflow = std::mem::take(slots);
            }
        }
        if !overflow.is_empty() {
            self.grow(history, leaf, overflow);
        }
    }

    /// Takes a slot out. A leaf that becomes empty goes, and so does a node without children.
    pub(crate) fn remove(&mut self, slot: u32) {
        let Some(leaf) = self.leaf_of.get_mut(slot as usize).map(|leaf| std::mem::replace(leaf, NONE)) else {
            return;
        };
        let Some(Content::Slots(slots)) = self.nodes.get_mut(leaf as usize).map(|node| &mut node.content)
        else {
            return;
        };
        slots.retain(|&other| other != slot);
        let mut empty = slots.is_empty();
        let mut node = leaf;
        while empty && node != ROOT {
            let parent = std::mem::replace(&mut self.nodes[node as usize].parent, NONE);
            self.vacant.push(node);
            let above = &mut self.nodes[parent as usize].content;
            if let Content::Children(children) = above {
                children.retain(|&child| child != node);
                empty = children.is_empty();
            }
            if empty {
                *above = Content::Slots(Vec::new());
            }
            node = parent;
        }
    }
}
