//! How the placement of one model follows what its requests use.

use crate::deployment::DesiredDeployment;
use crate::error::LocalError;
use crate::replan::{BetterPlacement, Moment, PlacementBasis, Question};
use crate::report::Report;
use crate::usage::ModelUsage;
use remoe_planner::{Budget, Proceed};
use remoe_predictor::UsageShares;
use remoe_usage::ModelPredictionMetrics;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Deadline of the plan for a wake: the best one found by then is taken.
const DEADLINE: Duration = Duration::from_millis(150);
/// Time that a wake waits for its plan at most. Then it goes on with the last one.
const PATIENCE: Duration = Duration::from_millis(250);

/// Parts that a placement needs to follow requests.
pub struct PlacementFollower {
    /// Learned usage of the model.
    pub usage: ModelUsage,
    /// Between two revisions.
    pub pause: Duration,
    /// Metrics of the model's predictions.
    pub metrics: ModelPredictionMetrics,
}

/// An answer on its way. Dropping it cancels the search.
pub(crate) struct PendingReplan {
    answer: JoinHandle<Result<Option<BetterPlacement>, LocalError>>,
    cancelled: Arc<AtomicBool>,
}

impl PendingReplan {
    fn start(question: Question, deadline: Option<Duration>) -> Self {
        let cancelled = Arc::<AtomicBool>::default();
        let (flag, started) = (cancelled.clone(), Instant::now());
        let answer = tokio::task::spawn_blocking(move || {
            let proceed = || match deadline {
                _ if flag.load(Ordering::Relaxed) => Proceed::Cancel,
                Some(deadline) if started.elapsed() >= deadline => Proceed::Finish,
                _ => Proceed::Continue,
            };
            question.answer(Budget::new(&proceed))
        });
        Self { answer, cancelled }
    }

    /// Waits for the answer. It is safe to cancel this.
    pub(crate) async fn answered(
        &mut self,
    ) -> Result<Result<Option<BetterPlacement>, LocalError>, tokio::task::JoinError> {
        (&mut self.answer).await
    }
}

impl Drop for PendingReplan {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

impl PlacementFollower {
    /// Returns the model of `report` with the main function that is pre-allocated for waiting requests that use experts by `shares`; none
    /// if it has that size already.
    pub(crate) async fn preallocated(
        &self,
        basis: &PlacementBasis,
        report: &Report,
        shares: UsageShares,
    ) -> Option<BetterPlacement> {
        let question = Question::new(basis, &report.wanted, shares, Moment::Wakes);
        taken(report, tokio::task::spawn_blocking(move || question.preallocated()).await)
    }

    /// Returns a better placement for waiting requests that use experts by `shares`, beside a main function that starts; none
    /// if the last one is good enough, or planning takes too long.
    pub(crate) async fn for_waiters(
        &self,
        basis: &PlacementBasis,
        report: &Report,
        shares: UsageShares,
    ) -> Option<BetterPlacement> {
        let question = Question::new(basis, &report.wanted, shares, Moment::Wakes);
        let mut answering = PendingReplan::start(question, Some(DEADLINE));
        taken(report, timeout(PATIENCE, answering.answered()).await.ok()?)
    }

    /// Asks for a better placement for what was used of late, where anything was since it was last asked.
    pub(crate) fn ask(
        &mut self,
        basis: &PlacementBasis,
        wanted: &DesiredDeployment,
    ) -> Option<PendingReplan> {
        let shares = self.usage.news()?;
        let question = Question::new(basis, wanted, shares, Moment::Serves);
        Some(PendingReplan::start(question, None))
    }
}

/// Returns the placement that was answered. Warns of problems, after which nothing changes.
pub(crate) fn taken(
    report: &Report,
    answered: Result<Result<Option<BetterPlacement>, LocalError>, tokio::task::JoinError>,
) -> Option<BetterPlacement> {
    match answered {
        Ok(Ok(better)) => better,
        Ok(Err(error)) => {
            report.warn(&format!("placement unchanged: {error}"));
            None
        }
        Err(_broken_off) => None,
    }
}
