//! A tree that is grown beside the one that searches go through, on a thread of its own.

use crate::error::PredictError;
use crate::history::History;
use crate::sps::{Index, SimilarPrompts};
use crate::tree::{Clustering, Tree, TreeOptions};

/// Input for growing a tree: a copy of the prompts' vectors as they were, in their slots.
#[derive(Debug)]
pub struct Regrowth {
    vectors: History,
    options: TreeOptions,
    alpha: usize,
}

impl Regrowth {
    /// Grows the tree. It takes one thread: searches and learning have the others meanwhile.
    ///
    /// # Errors
    /// The options are wrong, or the system refuses a thread.
    pub fn run(self) -> Result<Tree, PredictError> {
        let Self { vectors, options, alpha } = self;
        let thread = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let thread = thread.map_err(|error| PredictError::Thread(error.to_string()))?;
        thread.install(|| grown(&vectors, options, alpha))
    }
}

/// Grows a tree whose owner sees to it that it is grown again as prompts change.
fn grown(history: &History, options: TreeOptions, alpha: usize) -> Result<Tree, PredictError> {
    let mut tree = Tree::build(history, Clustering::Centred, options, alpha)?;
    tree.keep_directions();
    Ok(tree)
}

impl SimilarPrompts {
    /// Grows a tree over its prompts, through which it searches from then on.
    ///
    /// # Errors
    /// The options are wrong.
    pub fn plant(&mut self, options: TreeOptions) -> Result<(), PredictError> {
        let tree = grown(self.history(), options, self.alpha())?;
        self.search_through(tree);
        Ok(())
    }

    /// Returns the input for growing a tree over the present prompts elsewhere. It copies their vectors.
    #[must_use]
    pub fn regrowth(&self, options: TreeOptions) -> Regrowth {
        Regrowth { vectors: self.history().of_vectors(), options, alpha: self.alpha() }
    }

    /// Brings `tree`, which was grown from a [`Regrowth`], up to what `slot` holds by now.
    pub fn catch_up(&self, tree: &mut Tree, slot: u32) {
        tree.remove(slot);
        if self.history().holds(slot) {
            tree.insert(self.history(), slot);
        }
    }

    /// Searches go through `tree` from now on, which knows the present prompts.
    pub fn search_through(&mut self, tree: Tree) {
        self.with_index(Index::Tree(Box::new(tree)));
    }
}
