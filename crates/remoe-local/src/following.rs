//! Replans the placement of a model by the expert usage of its requests.

use crate::deployment::DesiredDeployment;
use crate::error::LocalError;
use crate::replan::{BetterPlacement, PlacementBasis, ReplanOccasion, ReplanRequest};
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

/// Deadline of the search for a wake's plan: the best plan found by then is used.
const WAKE_SEARCH_DEADLINE: Duration = Duration::from_millis(150);
/// Longest time that a wake waits for its plan. Then it continues with the last one.
const MAX_WAKE_WAIT: Duration = Duration::from_millis(250);

/// Follower of expert usage: replans the placement.
pub struct PlacementFollower {
    /// Learned usage of the model.
    pub usage: ModelUsage,
    /// Pause between two revisions.
    pub pause: Duration,
    /// Metrics of the model's predictions.
    pub metrics: ModelPredictionMetrics,
}

/// Search in progress. Dropping it cancels the search.
pub(crate) struct PendingReplan {
    search: JoinHandle<Result<Option<BetterPlacement>, LocalError>>,
    cancelled: Arc<AtomicBool>,
}

impl PendingReplan {
    fn start(request: ReplanRequest, deadline: Option<Duration>) -> Self {
        let cancelled = Arc::<AtomicBool>::default();
        let (flag, started) = (cancelled.clone(), Instant::now());
        let search = tokio::task::spawn_blocking(move || {
            let proceed = || match deadline {
                _ if flag.load(Ordering::Relaxed) => Proceed::Cancel,
                Some(deadline) if started.elapsed() >= deadline => Proceed::Finish,
                _ => Proceed::Continue,
            };
            request.search(Budget::new(&proceed))
        });
        Self { search, cancelled }
    }

    /// Waits for the result. This is cancel-safe.
    pub(crate) async fn result(
        &mut self,
    ) -> Result<Result<Option<BetterPlacement>, LocalError>, tokio::task::JoinError> {
        (&mut self.search).await
    }
}

impl Drop for PendingReplan {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

impl PlacementFollower {
    /// Returns the deployment with a main function pre-allocated for waiting requests with expert usage `shares`;
    /// `None` if it has that size already.
    pub(crate) async fn preallocated(
        &self,
        basis: &PlacementBasis,
        report: &Report,
        shares: UsageShares,
    ) -> Option<BetterPlacement> {
        let request = ReplanRequest::new(basis, &report.wanted, shares, ReplanOccasion::Wake);
        result_or_warn(report, tokio::task::spawn_blocking(move || request.preallocated()).await)
    }

    /// Returns a better placement for waiting requests with expert usage `shares`, beside the starting main function;
    /// `None` if the last one is good enough, or planning takes too long.
    pub(crate) async fn for_waiting_requests(
        &self,
        basis: &PlacementBasis,
        report: &Report,
        shares: UsageShares,
    ) -> Option<BetterPlacement> {
        let request = ReplanRequest::new(basis, &report.wanted, shares, ReplanOccasion::Wake);
        let mut pending = PendingReplan::start(request, Some(WAKE_SEARCH_DEADLINE));
        result_or_warn(report, timeout(MAX_WAKE_WAIT, pending.result()).await.ok()?)
    }

    /// Starts a search for a better placement by recent usage, if the usage changed since the last search.
    pub(crate) fn start_search(
        &mut self,
        basis: &PlacementBasis,
        wanted: &DesiredDeployment,
    ) -> Option<PendingReplan> {
        let shares = self.usage.recent_if_changed()?;
        let request = ReplanRequest::new(basis, wanted, shares, ReplanOccasion::Serving);
        Some(PendingReplan::start(request, None))
    }
}

/// Returns the placement that was found. Warns about errors, after which nothing changes.
pub(crate) fn result_or_warn(
    report: &Report,
    result: Result<Result<Option<BetterPlacement>, LocalError>, tokio::task::JoinError>,
) -> Option<BetterPlacement> {
    match result {
        Ok(Ok(better)) => better,
        Ok(Err(error)) => {
            report.warn(&format!("placement unchanged: {error}"));
            None
        }
        Err(_broken_off) => None,
    }
}
