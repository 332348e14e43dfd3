//! Growing of new trees in the background, one at a time: predictions go through the old ones meanwhile and wait for
//! nothing.

use remoe_predictor::{PredictError, Regrowth, SimilarPrompts, Tree, TreeOptions};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

/// Slots that a tree which has grown is brought up to date with for each request that is learned: more than one request
/// changes, so that there is an end to it.
const CAUGHT_UP: usize = 8;

type RegrowthFn = dyn Fn(Regrowth) -> Result<Tree, PredictError> + Send + Sync;

/// Grows trees, each by a thread of its own, one after the other.
pub(crate) struct Grower {
    pub(crate) options: TreeOptions,
    run: Arc<RegrowthFn>,
    /// Held by whatever grows, and by its thread.
    turn: Arc<()>,
}

/// A tree that takes over when it has grown and knows what has changed since it began.
#[derive(Debug)]
pub(crate) struct Growing {
    grown: Receiver<Result<Tree, PredictError>>,
    tree: Option<Tree>,
    changed: BTreeSet<u32>,
    _turn: Arc<()>,
}

/// How a tree stands.
pub(crate) enum TreeState {
    Underway,
    Grown(Box<Tree>),
    Failed,
}

impl fmt::Debug for Grower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grower").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Grower {
    pub(crate) fn new(options: TreeOptions) -> Self {
        Self::running(options, Regrowth::run)
    }

    pub(crate) fn running(
        options: TreeOptions,
        run: impl Fn(Regrowth) -> Result<Tree, PredictError> + Send + Sync + 'static,
    ) -> Self {
        Self { options, run: Arc::new(run), turn: Arc::new(()) }
    }

    /// Begins a tree over the prompts of `similar`; none while another one grows, or where there is no thread.
    pub(crate) fn begin(&self, similar: &SimilarPrompts) -> Option<Growing> {
        if Arc::strong_count(&self.turn) > 1 {
            return None;
        }
        let (tell, grown) = sync_channel(1);
        let (run, regrowth, turn) = (self.run.clone(), similar.regrowth(self.options), self.turn.clone());
        let thread = std::thread::Builder::new().name("regrowth".to_owned()).spawn(move || {
            // The receiver may be gone.
            let _unwanted = tell.send(run(regrowth));
            drop(turn);
        });
        if let Err(error) = thread {
            tracing::warn!(%error, "cannot start the search tree builder: searches are slower");
            return None;
        }
        Some(Growing { grown, tree: None, changed: BTreeSet::new(), _turn: self.turn.clone() })
    }
}

impl Growing {
    /// Notes that the content of `slot` changed.
    pub(crate) fn changes(&mut self, slot: u32) {
        self.changed.insert(slot);
    }

    /// One step further; `similar` has the prompts as they are.
    pub(crate) fn step(&mut self, similar: &SimilarPrompts) -> TreeState {
        if self.tree.is_none() {
            match self.grown.try_recv() {
                Ok(Ok(tree)) => self.tree = Some(tree),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot build the search tree: searches are slower");
                    return TreeState::Failed;
                }
                Err(TryRecvError::Empty) => return TreeState::Underway,
                Err(TryRecvError::Disconnected) => return TreeState::Failed,
            }
        }
        let Some(tree) = &mut self.tree else { return TreeState::Underway };
        for _ in 0..CAUGHT_UP {
            let Some(slot) = self.changed.pop_first() else { break };
            similar.catch_up(tree, slot);
        }
        match self.tree.take_if(|_| self.changed.is_empty()) {
            Some(tree) => TreeState::Grown(Box::new(tree)),
            None => TreeState::Underway,
        }
    }
}
