//! How the placement of one model follows what its requests use.

use super::replan::{Basis, Better, Question};
use super::seer::Seer;
use super::tariff::Tariff;
use crate::deployment::Wanted;
use crate::exit::CliError;
use crate::output::progress::print_warning;
use remoe_foresight::ModelForesightMetrics;
use remoe_planner::Pricing;
use remoe_predictor::Shares;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// What a wake waits for another plan, at most: the last one is there.
const PLAN: Duration = Duration::from_millis(250);

/// What it takes to follow.
pub(super) struct Following {
    pub(super) seer: Seer,
    pub(super) basis: Basis,
    /// Between two revisions.
    pub(super) pause: Duration,
    pub(super) metrics: ModelForesightMetrics,
    pub(super) pricing: Pricing,
    /// Tells whoever accounts what functions cost.
    pub(super) tell: watch::Sender<Option<Tariff>>,
}

/// An answer on its way.
pub(super) type Answering = JoinHandle<Result<Option<Better>, CliError>>;

impl Following {
    /// A better placement for those that wait and use experts by `shares`; none where the last one is good enough, or planning
    /// takes too long.
    pub(super) async fn for_waiters(&self, wanted: &Wanted, shares: Shares) -> Option<Better> {
        let question = Question::new(&self.basis, wanted, shares, false);
        let answering = tokio::task::spawn_blocking(move || question.answer());
        taken(timeout(PLAN, answering).await.ok()?)
    }

    /// Asks for a better placement for what was used of late, where anything was since it was last asked.
    pub(super) fn ask(&mut self, wanted: &Wanted) -> Option<Answering> {
        if !self.seer.observed.has_changed().unwrap_or(false) {
            return None;
        }
        let shares = self.seer.observed.borrow_and_update().clone()?;
        let question = Question::new(&self.basis, wanted, shares, true);
        Some(tokio::task::spawn_blocking(move || question.answer()))
    }
}

/// What was answered; problems are said, and nothing changes.
pub(super) fn taken(
    answered: Result<Result<Option<Better>, CliError>, tokio::task::JoinError>,
) -> Option<Better> {
    match answered {
        Ok(Ok(better)) => better,
        Ok(Err(error)) => {
            print_warning(&format!("placement unchanged: {}", error.message));
            None
        }
        Err(_broken_off) => None,
    }
}
