//! Rebuild of a search tree on another thread while searches use the present one.

use crate::error::PredictError;
use crate::history::History;
use crate::sps::{PromptIndex, SimilarPrompts};
use crate::tree::{Clustering, Tree, TreeOptions};

/// Input of a tree build: a copy of the prompts' vectors in their slots.
#[derive(Debug)]
pub struct TreeRebuild {
    vectors: History,
    options: TreeOptions,
    alpha: usize,
}

impl TreeRebuild {
    /// Builds the tree on one thread, so that searches and learning have the others.
    ///
    /// # Errors
    /// The options are invalid, or the system refuses a thread.
    pub fn run(self) -> Result<Tree, PredictError> {
        let Self { vectors, options, alpha } = self;
        let thread = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let thread = thread.map_err(|error| PredictError::Thread(error.to_string()))?;
        thread.install(|| build_with_fixed_directions(&vectors, options, alpha))
    }
}

/// Builds a tree with fixed sketch directions, for an owner that rebuilds it as prompts change.
fn build_with_fixed_directions(
    history: &History,
    options: TreeOptions,
    alpha: usize,
) -> Result<Tree, PredictError> {
    let mut tree = Tree::build(history, Clustering::Centred, options, alpha)?;
    tree.fix_sketch_directions();
    Ok(tree)
}

impl SimilarPrompts {
    /// Builds a tree of all prompts and makes it the index.
    ///
    /// # Errors
    /// The options are invalid.
    pub fn build_tree(&mut self, options: TreeOptions) -> Result<(), PredictError> {
        let tree = build_with_fixed_directions(self.history(), options, self.alpha())?;
        self.set_tree(tree);
        Ok(())
    }

    /// Returns the input for building a tree of the present prompts elsewhere. Copies their vectors.
    #[must_use]
    pub fn tree_rebuild(&self, options: TreeOptions) -> TreeRebuild {
        TreeRebuild { vectors: self.history().vectors_only(), options, alpha: self.alpha() }
    }

    /// Updates `slot` in `tree`, which was built from a [`TreeRebuild`], to its present prompt.
    pub fn catch_up(&self, tree: &mut Tree, slot: u32) {
        tree.remove(slot);
        if self.history().is_used(slot) {
            tree.insert(self.history(), slot);
        }
    }

    /// Makes `tree`, which must have all present prompts, the index.
    pub fn set_tree(&mut self, tree: Tree) {
        self.set_index(PromptIndex::Tree(Box::new(tree)));
    }
}
