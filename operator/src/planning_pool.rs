//! Bounded pool of planning threads, fair between namespaces. Every search can be cancelled.
//!
//! A reconcile never waits for a plan. It requests one, continues with the current plan, and runs again when the new
//! plan is ready. Plans for waiting requests (wakes) have their own threads, so full searches never delay them.

use super::planning::PlanningError;
use kube::runtime::reflector::ObjectRef;
use remoe_api::{DemandPhase, MoEDemand, MoEDeployment, MoEPlanSpec};
use remoe_planner::{Budget, Proceed};
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Deadline of a wake search. The best plan found by then is used.
const WAKE_DEADLINE: Duration = Duration::from_millis(150);
/// Deadline of a full search.
const DEADLINE: Duration = Duration::from_secs(120);
/// Maximum duration of a search that has no plan at its deadline, as a multiple of the deadline.
const OVERTIME_FACTOR: u32 = 2;

/// Longest time for which remote functions of a waking deployment wait for the plan of this wake. After that they
/// start by the previous plan.
pub(crate) const MAX_REMOTE_HOLD: Duration = Duration::from_millis(250);

/// Key of a deployment in the pool.
pub(super) type DeploymentKey = ObjectRef<MoEDeployment>;
/// Result of a search: a plan, or none if the current plan is good enough.
pub(super) type PlanOutcome = Result<Option<Box<MoEPlanSpec>>, PlanningError>;
/// Search for a plan, within a budget of time.
pub(super) type Search = Box<dyn FnOnce(Budget<'_>) -> PlanOutcome + Send>;

/// Kind of a search. Each kind has its own threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SearchKind {
    /// Search for requests that wait for functions to start.
    Wake,
    /// Search for a new spec, or for changed traffic.
    Full,
}

impl SearchKind {
    const fn deadline(self) -> Duration {
        match self {
            Self::Wake => WAKE_DEADLINE,
            Self::Full => DEADLINE,
        }
    }
}

/// Progress of a requested plan.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PlanProgress {
    /// The search is queued or runs.
    Underway {
        /// Time since the request.
        elapsed: Duration,
    },
    /// The search has ended.
    Done {
        /// Plan, or none if the current plan is good enough.
        outcome: PlanOutcome,
        /// Time from the request to the end of the search.
        elapsed: Duration,
    },
}

/// Requested plan of a wake.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WakePlan {
    /// Sequence number of the wake.
    pub wake: u64,
    /// Progress of its plan.
    pub progress: PlanProgress,
}

impl WakePlan {
    /// Returns how long remote functions still wait for this plan. Absent if `demand` is at another wake, or if the
    /// wait is over.
    pub(crate) fn remaining_hold(&self, demand: Option<&MoEDemand>) -> Option<Duration> {
        let demand = &demand?.spec;
        let is_current_wake = match demand.phase {
            DemandPhase::Asleep => self.wake == demand.wakes.saturating_add(1),
            DemandPhase::Waking => self.wake == demand.wakes,
            DemandPhase::Active | DemandPhase::Draining => false,
        };
        match self.progress {
            PlanProgress::Underway { elapsed } if is_current_wake => {
                MAX_REMOTE_HOLD.checked_sub(elapsed).filter(|left| !left.is_zero())
            }
            PlanProgress::Underway { .. } | PlanProgress::Done { .. } => None,
        }
    }
}

/// Bounded pool of planning threads.
#[derive(Clone)]
pub(super) struct PlanningPool {
    state: Arc<Mutex<PoolState>>,
    /// Threads of each kind of search.
    threads: usize,
    /// Deployments to reconcile again.
    reconcile_requests: mpsc::Sender<DeploymentKey>,
}

#[derive(Default)]
struct PoolState {
    requests: HashMap<(DeploymentKey, SearchKind), PlanRequest>,
    /// Searches without a thread, oldest first.
    queue: VecDeque<QueuedSearch>,
    /// Number of running searches by kind and namespace.
    running: HashMap<(SearchKind, String), usize>,
    /// Sequence number of the next search.
    next_sequence: u64,
}

/// Latest requested plan of one deployment and kind.
struct PlanRequest {
    /// Digest of the planning input. The result of an older request is dropped.
    id: String,
    sequence: u64,
    requested_at: Instant,
    cancelled: Arc<AtomicBool>,
    done: Option<(PlanOutcome, Duration)>,
}

struct QueuedSearch {
    key: DeploymentKey,
    kind: SearchKind,
    sequence: u64,
    cancelled: Arc<AtomicBool>,
    search: Search,
}

impl PlanningPool {
    /// Creates a pool with `threads` threads for each kind. Deployments whose plan is ready are sent to
    /// `reconcile_requests`.
    pub(super) fn new(threads: usize, reconcile_requests: mpsc::Sender<DeploymentKey>) -> Self {
        Self { state: Arc::default(), threads: threads.max(1), reconcile_requests }
    }

    /// Returns the progress of the plan with this `id`, and queues `search` if the `id` is new. That cancels the
    /// earlier search of the same deployment and kind.
    pub(super) fn request(
        &self,
        key: &DeploymentKey,
        kind: SearchKind,
        id: &str,
        search: impl FnOnce() -> Search,
    ) -> PlanProgress {
        let mut state = self.lock();
        let request_key = (key.clone(), kind);
        if let Some(requested) = state.requests.get(&request_key).filter(|requested| requested.id == id) {
            return requested.progress();
        }
        let (sequence, cancelled) = (state.next_sequence, Arc::<AtomicBool>::default());
        state.next_sequence += 1;
        let requested = PlanRequest {
            id: id.to_owned(),
            sequence,
            requested_at: Instant::now(),
            cancelled: cancelled.clone(),
            done: None,
        };
        if let Some(before) = state.requests.insert(request_key, requested) {
            before.cancelled.store(true, Ordering::Relaxed);
        }
        state.queue.retain(|queued| (&queued.key, queued.kind) != (key, kind));
        state.queue.push_back(QueuedSearch { key: key.clone(), kind, sequence, cancelled, search: search() });
        self.start(&mut state);
        PlanProgress::Underway { elapsed: Duration::ZERO }
    }

    /// Returns the id and progress of the latest request of `key` and `kind`.
    pub(super) fn progress(&self, key: &DeploymentKey, kind: SearchKind) -> Option<(String, PlanProgress)> {
        let state = self.lock();
        let requested = state.requests.get(&(key.clone(), kind))?;
        Some((requested.id.clone(), requested.progress()))
    }

    /// Drops the result of a finished search, so that the next request starts a new one.
    pub(super) fn forget_finished(&self, key: &DeploymentKey, kind: SearchKind) {
        let request_key = (key.clone(), kind);
        let mut state = self.lock();
        if state.requests.get(&request_key).is_some_and(|requested| requested.done.is_some()) {
            state.requests.remove(&request_key);
        }
    }

    /// Cancels all searches of `key` and drops their results.
    pub(super) fn forget(&self, key: &DeploymentKey) {
        let mut state = self.lock();
        for kind in [SearchKind::Wake, SearchKind::Full] {
            if let Some(requested) = state.requests.remove(&(key.clone(), kind)) {
                requested.cancelled.store(true, Ordering::Relaxed);
            }
        }
        state.queue.retain(|queued| queued.key != *key);
    }

    /// Starts queued searches: first of the namespace with the fewest running ones, then the oldest. If there are
    /// several threads, one namespace never occupies all of them.
    fn start(&self, state: &mut PoolState) {
        for kind in [SearchKind::Wake, SearchKind::Full] {
            while let Some(queued) = state.take_next(kind, self.threads) {
                let pool = self.clone();
                tokio::task::spawn_blocking(move || pool.run(queued));
            }
        }
    }

    fn run(&self, queued: QueuedSearch) {
        let QueuedSearch { key, kind, sequence, cancelled, search } = queued;
        let (started_at, deadline) = (Instant::now(), kind.deadline());
        let proceed = || match started_at.elapsed() {
            _ if cancelled.load(Ordering::Relaxed) => Proceed::Cancel,
            elapsed if elapsed >= deadline * OVERTIME_FACTOR => Proceed::Cancel,
            elapsed if elapsed >= deadline => Proceed::Finish,
            _ => Proceed::Continue,
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| search(Budget::new(&proceed))));
        let outcome =
            outcome.unwrap_or_else(|_panic| Err(PlanningError::Aborted("planner panicked".to_owned())));
        let mut state = self.lock();
        let namespace = key.namespace.clone().unwrap_or_default();
        if let Some(running) = state.running.get_mut(&(kind, namespace)) {
            *running = running.saturating_sub(1);
        }
        state.running.retain(|_, running| *running > 0);
        let requested =
            state.requests.get_mut(&(key.clone(), kind)).filter(|requested| requested.sequence == sequence);
        let is_current = requested.is_some();
        if let Some(requested) = requested {
            requested.done = Some((outcome, requested.requested_at.elapsed()));
        }
        self.start(&mut state);
        drop(state);
        // If the channel is full, the next periodic reconcile finds the plan.
        if is_current && self.reconcile_requests.try_send(key.clone()).is_err() {
            tracing::debug!(deployment = key.name, "plan waits for the next reconcile");
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // Every critical section keeps the state consistent up to any panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolState {
    /// Removes the next search of `kind` from the queue, if one of its `threads` threads is free.
    fn take_next(&mut self, kind: SearchKind, threads: usize) -> Option<QueuedSearch> {
        let running_of_kind = self.running.iter().filter(|((of, _), _)| *of == kind);
        if running_of_kind.map(|(_, running)| running).sum::<usize>() >= threads {
            return None;
        }
        let max_running = threads.saturating_sub(1).max(1);
        let candidates = self.queue.iter().enumerate().filter(|(_, queued)| queued.kind == kind);
        let (_, index) = candidates
            .map(|(index, queued)| (self.running_of(kind, queued.namespace()), index))
            .filter(|(running, _)| *running < max_running)
            .min()?;
        let queued = self.queue.remove(index)?;
        *self.running.entry((kind, queued.namespace().to_owned())).or_default() += 1;
        Some(queued)
    }

    fn running_of(&self, kind: SearchKind, namespace: &str) -> usize {
        self.running.get(&(kind, namespace.to_owned())).copied().unwrap_or(0)
    }
}

impl QueuedSearch {
    fn namespace(&self) -> &str {
        self.key.namespace.as_deref().unwrap_or_default()
    }
}

impl PlanRequest {
    fn progress(&self) -> PlanProgress {
        match &self.done {
            Some((outcome, elapsed)) => PlanProgress::Done { outcome: outcome.clone(), elapsed: *elapsed },
            None => PlanProgress::Underway { elapsed: self.requested_at.elapsed() },
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::mpsc as channel;

    fn key(namespace: &str, name: &str) -> DeploymentKey {
        ObjectRef::new(name).within(namespace)
    }

    fn pool(threads: usize) -> (PlanningPool, mpsc::Receiver<DeploymentKey>) {
        let (reconcile_requests, reconciles) = mpsc::channel(64);
        (PlanningPool::new(threads, reconcile_requests), reconciles)
    }

    /// Search that runs until it is cancelled.
    fn endless(started_at: channel::Sender<()>) -> Search {
        Box::new(move |budget| {
            started_at.send(()).unwrap();
            while budget.proceed() != Proceed::Cancel {
                std::thread::yield_now();
            }
            Err(PlanningError::Aborted("cancelled".to_owned()))
        })
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn searches_of_one_namespace_leave_a_thread_to_others() {
        let (pool, mut reconciles) = pool(2);
        let (started_at, starts) = channel::channel();
        for number in 0..8 {
            let search = endless(started_at.clone());
            pool.request(&key("greedy", &number.to_string()), SearchKind::Full, "a", || search);
        }
        starts.recv().unwrap();
        let other = key("other", "one");
        assert!(matches!(
            pool.request(&other, SearchKind::Full, "a", || Box::new(|_| Ok(None))),
            PlanProgress::Underway { .. }
        ));
        assert_eq!(reconciles.recv().await, Some(other.clone()));
        let (id, progress) = pool.progress(&other, SearchKind::Full).unwrap();
        assert!(id == "a" && matches!(progress, PlanProgress::Done { outcome: Ok(None), .. }));
        assert!(starts.try_recv().is_err(), "the second thread is not for the greedy namespace");
        (0..8).for_each(|number| pool.forget(&key("greedy", &number.to_string())));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn wakes_do_not_wait_for_full_searches() {
        let (pool, mut reconciles) = pool(1);
        let (started_at, starts) = channel::channel();
        let demo = key("default", "demo");
        pool.request(&demo, SearchKind::Full, "a", || endless(started_at));
        starts.recv().unwrap();
        pool.request(&demo, SearchKind::Wake, "wake 1", || Box::new(|_| Ok(None)));
        assert_eq!(reconciles.recv().await, Some(demo.clone()));
        assert!(matches!(pool.progress(&demo, SearchKind::Wake), Some((_, PlanProgress::Done { .. }))));
        pool.forget(&demo);
        assert_eq!(pool.progress(&demo, SearchKind::Full), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn another_question_cancels_the_search_before() {
        let (pool, mut reconciles) = pool(1);
        let (started_at, starts) = channel::channel();
        let demo = key("default", "demo");
        pool.request(&demo, SearchKind::Full, "a", || endless(started_at));
        starts.recv().unwrap();
        // The only thread becomes free when the first search was cancelled.
        pool.request(&demo, SearchKind::Full, "b", || Box::new(|_| Ok(None)));
        assert_eq!(reconciles.recv().await, Some(demo.clone()));
        let (id, progress) = pool.progress(&demo, SearchKind::Full).unwrap();
        assert!(id == "b" && matches!(progress, PlanProgress::Done { outcome: Ok(None), .. }));
        // The same id returns the stored result and starts no search.
        let progress = pool.request(&demo, SearchKind::Full, "b", || unreachable!("asked again"));
        assert!(matches!(progress, PlanProgress::Done { .. }));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn panic_of_a_search_is_its_outcome() {
        let (pool, mut reconciles) = pool(1);
        let demo = key("default", "demo");
        pool.request(&demo, SearchKind::Full, "a", || {
            Box::new(|_| std::panic::resume_unwind(Box::new("broken")))
        });
        reconciles.recv().await.unwrap();
        let progress = pool.progress(&demo, SearchKind::Full);
        assert!(matches!(
            progress,
            Some((_, PlanProgress::Done { outcome: Err(PlanningError::Aborted(_)), .. }))
        ));
        // The thread survives the panic.
        pool.request(&demo, SearchKind::Full, "b", || Box::new(|_| Ok(None)));
        assert_eq!(reconciles.recv().await, Some(demo));
    }
}
