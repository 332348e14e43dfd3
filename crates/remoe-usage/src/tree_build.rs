//! Builds search trees in the background, one at a time. Searches use the previous tree meanwhile.

use remoe_predictor::{PredictError, SimilarPrompts, Tree, TreeOptions, TreeRebuild};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

/// Changed slots that a built tree catches up with per learned request. More than one, so that it catches up
/// eventually.
const CATCH_UP_SLOTS: usize = 8;

type BuildFunction = dyn Fn(TreeRebuild) -> Result<Tree, PredictError> + Send + Sync;

/// Builder of search trees: one background thread at a time.
pub(crate) struct TreeBuilder {
    pub(crate) options: TreeOptions,
    run: Arc<BuildFunction>,
    /// Token of the running build, cloned by [`TreeBuild`] and its thread. A second reference means that a build runs.
    token: Arc<()>,
}

/// Build of a tree, which replaces the present index once it has caught up with the slots that changed meanwhile.
#[derive(Debug)]
pub(crate) struct TreeBuild {
    built: Receiver<Result<Tree, PredictError>>,
    tree: Option<Tree>,
    changed: BTreeSet<u32>,
    _token: Arc<()>,
}

/// State of a tree build.
pub(crate) enum BuildState {
    /// The build or the catching up continues.
    Building,
    /// The tree has all slots.
    Ready(Box<Tree>),
    /// The build failed, as logged.
    Failed,
}

impl fmt::Debug for TreeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeBuilder").field("options", &self.options).finish_non_exhaustive()
    }
}

impl TreeBuilder {
    pub(crate) fn new(options: TreeOptions) -> Self {
        Self::with_build_function(options, TreeRebuild::run)
    }

    pub(crate) fn with_build_function(
        options: TreeOptions,
        run: impl Fn(TreeRebuild) -> Result<Tree, PredictError> + Send + Sync + 'static,
    ) -> Self {
        Self { options, run: Arc::new(run), token: Arc::new(()) }
    }

    /// Starts to build a tree of the prompts in `similar`. Returns `None` while another build runs, or if no thread
    /// can be started.
    pub(crate) fn start(&self, similar: &SimilarPrompts) -> Option<TreeBuild> {
        if Arc::strong_count(&self.token) > 1 {
            return None;
        }
        let (result_sender, built) = sync_channel(1);
        let (run, rebuild, token) =
            (self.run.clone(), similar.tree_rebuild(self.options), self.token.clone());
        let thread = std::thread::Builder::new().name("tree-builder".to_owned()).spawn(move || {
            // The receiver is dropped with the tenant.
            let _dropped = result_sender.send(run(rebuild));
            drop(token);
        });
        if let Err(error) = thread {
            tracing::warn!(%error, "cannot start the search tree builder: searches are slower");
            return None;
        }
        Some(TreeBuild { built, tree: None, changed: BTreeSet::new(), _token: self.token.clone() })
    }
}

impl TreeBuild {
    /// Marks `slot` as changed since the start of the build.
    pub(crate) fn mark_changed(&mut self, slot: u32) {
        self.changed.insert(slot);
    }

    /// Advances the build. `similar` holds the present prompts.
    pub(crate) fn advance(&mut self, similar: &SimilarPrompts) -> BuildState {
        if self.tree.is_none() {
            match self.built.try_recv() {
                Ok(Ok(tree)) => self.tree = Some(tree),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot build the search tree: searches are slower");
                    return BuildState::Failed;
                }
                Err(TryRecvError::Empty) => return BuildState::Building,
                Err(TryRecvError::Disconnected) => return BuildState::Failed,
            }
        }
        let Some(tree) = &mut self.tree else { return BuildState::Building };
        for _ in 0..CATCH_UP_SLOTS {
            let Some(slot) = self.changed.pop_first() else { break };
            similar.catch_up(tree, slot);
        }
        match self.tree.take_if(|_| self.changed.is_empty()) {
            Some(tree) => BuildState::Ready(Box::new(tree)),
            None => BuildState::Building,
        }
    }
}
