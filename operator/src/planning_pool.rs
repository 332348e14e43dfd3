//! Planning beside the reconciler: a bounded pool of threads, fair by namespace. Every search can be cancelled.
//!
//! A reconcile never waits for a plan. It asks for one, goes on with the plan that runs, and is made again when the
//! plan is there. A plan for waiting requests has a lane of its own: full searches never delay it.

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

/// Deadline of a plan for waiting requests: the best plan found by then is taken.
const WAKE_DEADLINE: Duration = Duration::from_millis(150);
/// Deadline of any other plan.
const DEADLINE: Duration = Duration::from_secs(120);
/// A search that has found no plan at its deadline goes on for at most this factor of it.
const OVERTIME: u32 = 2;

/// Time for which remote functions of a wake wait for their plan. Then they start by the last one.
pub(crate) const SOON: Duration = Duration::from_millis(250);

/// A deployment, as the pool tells them apart.
pub(super) type DeploymentKey = ObjectRef<MoEDeployment>;
/// A plan, or none if the present one is good enough.
pub(super) type PlanOutcome = Result<Option<Box<MoEPlanSpec>>, PlanningError>;
/// A search for a plan.
pub(super) type Search = Box<dyn FnOnce(Budget<'_>) -> PlanOutcome + Send>;

/// Kind of a plan. Each has threads of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    /// For requests that wait for functions to start.
    Wake,
    /// For a new spec, or for requests as they are.
    Full,
}

impl Lane {
    const fn deadline(self) -> Duration {
        match self {
            Self::Wake => WAKE_DEADLINE,
            Self::Full => DEADLINE,
        }
    }
}

/// State of a plan that was asked for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PlanProgress {
    /// The search is queued or runs.
    Underway {
        /// Time since it was asked for.
        elapsed: Duration,
    },
    /// The search has ended.
    Done {
        /// Plan, or none if the present one is good enough.
        outcome: PlanOutcome,
        /// Time from the question to the answer.
        elapsed: Duration,
    },
}

/// The plan for a wake.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WakePlan {
    /// Number of the wake.
    pub wake: u64,
    /// State of the plan.
    pub progress: PlanProgress,
}

impl WakePlan {
    /// Returns how long remote functions are still to wait for this plan, if it is the one of the wake that `demand` is at
    /// or begins.
    pub(crate) fn holds_remote(&self, demand: Option<&MoEDemand>) -> Option<Duration> {
        let demand = &demand?.spec;
        let is_present = match demand.phase {
            DemandPhase::Asleep => self.wake == demand.wakes.saturating_add(1),
            DemandPhase::Waking => self.wake == demand.wakes,
            DemandPhase::Active | DemandPhase::Draining => false,
        };
        match self.progress {
            PlanProgress::Underway { elapsed } if is_present => {
                SOON.checked_sub(elapsed).filter(|left| !left.is_zero())
            }
            PlanProgress::Underway { .. } | PlanProgress::Done { .. } => None,
        }
    }
}

/// A bounded pool of planning threads.
#[derive(Clone)]
pub(super) struct PlanningPool {
    state: Arc<Mutex<PoolState>>,
    /// Threads of each lane.
    threads: usize,
    /// Deployments to reconcile again.
    news: mpsc::Sender<DeploymentKey>,
}

#[derive(Default)]
struct PoolState {
    asked: HashMap<(DeploymentKey, Lane), RequestedPlan>,
    /// Searches that have no thread yet, oldest first.
    queue: VecDeque<Queued>,
    /// Searches that run, by lane and namespace.
    running: HashMap<(Lane, String), usize>,
    /// Sequence number of the next search.
    next: u64,
}

/// A plan that was asked for.
struct RequestedPlan {
    /// Identity of the question. The answer to another question is dropped.
    id: String,
    sequence: u64,
    at: Instant,
    cancelled: Arc<AtomicBool>,
    done: Option<(PlanOutcome, Duration)>,
}

struct Queued {
    key: DeploymentKey,
    lane: Lane,
    sequence: u64,
    cancelled: Arc<AtomicBool>,
    search: Search,
}

impl PlanningPool {
    /// Creates a pool with `threads` threads in each lane. Deployments with a new plan are sent to `news`.
    pub(super) fn new(threads: usize, news: mpsc::Sender<DeploymentKey>) -> Self {
        Self { state: Arc::default(), threads: threads.max(1), news }
    }

    /// Returns the state of the plan with this `id` for `key`, and queues `search` if it is new. A search for the same
    /// deployment and lane with another id is cancelled.
    pub(super) fn ask(
        &self,
        key: &DeploymentKey,
        lane: Lane,
        id: &str,
        search: impl FnOnce() -> Search,
    ) -> PlanProgress {
        let mut state = self.lock();
        let slot = (key.clone(), lane);
        if let Some(asked) = state.asked.get(&slot).filter(|asked| asked.id == id) {
            return asked.progress();
        }
        let (sequence, cancelled) = (state.next, Arc::<AtomicBool>::default());
        state.next += 1;
        let asked = RequestedPlan {
            id: id.to_owned(),
            sequence,
            at: Instant::now(),
            cancelled: cancelled.clone(),
            done: None,
        };
        if let Some(before) = state.asked.insert(slot, asked) {
            before.cancelled.store(true, Ordering::Relaxed);
        }
        state.queue.retain(|queued| (&queued.key, queued.lane) != (key, lane));
        state.queue.push_back(Queued { key: key.clone(), lane, sequence, cancelled, search: search() });
        self.start(&mut state);
        PlanProgress::Underway { elapsed: Duration::ZERO }
    }

    /// Returns the state of the plan for `key` in `lane` that was asked for last, with its id.
    pub(super) fn progress(&self, key: &DeploymentKey, lane: Lane) -> Option<(String, PlanProgress)> {
        let state = self.lock();
        let asked = state.asked.get(&(key.clone(), lane))?;
        Some((asked.id.clone(), asked.progress()))
    }

    /// Forgets the plan for `key` in `lane` if the search has ended.
    pub(super) fn forget_lane(&self, key: &DeploymentKey, lane: Lane) {
        let slot = (key.clone(), lane);
        let mut state = self.lock();
        if state.asked.get(&slot).is_some_and(|asked| asked.done.is_some()) {
            state.asked.remove(&slot);
        }
    }

    /// Cancels all searches for `key`, and forgets what they found.
    pub(super) fn forget(&self, key: &DeploymentKey) {
        let mut state = self.lock();
        for lane in [Lane::Wake, Lane::Full] {
            if let Some(asked) = state.asked.remove(&(key.clone(), lane)) {
                asked.cancelled.store(true, Ordering::Relaxed);
            }
        }
        state.queue.retain(|queued| queued.key != *key);
    }

    /// Gives threads to queued searches: first to the namespace that has the fewest, then to the oldest search. One
    /// namespace never has all threads of a lane, if there are several.
    fn start(&self, state: &mut PoolState) {
        for lane in [Lane::Wake, Lane::Full] {
            while let Some(queued) = state.take(lane, self.threads) {
                let pool = self.clone();
                tokio::task::spawn_blocking(move || pool.run(queued));
            }
        }
    }

    fn run(&self, queued: Queued) {
        let Queued { key, lane, sequence, cancelled, search } = queued;
        let (started, deadline) = (Instant::now(), lane.deadline());
        let proceed = || match started.elapsed() {
            _ if cancelled.load(Ordering::Relaxed) => Proceed::Cancel,
            elapsed if elapsed >= deadline * OVERTIME => Proceed::Cancel,
            elapsed if elapsed >= deadline => Proceed::Finish,
            _ => Proceed::Continue,
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| search(Budget::new(&proceed))));
        let outcome =
            outcome.unwrap_or_else(|_panic| Err(PlanningError::Aborted("planner panicked".to_owned())));
        let mut state = self.lock();
        let namespace = key.namespace.clone().unwrap_or_default();
        if let Some(running) = state.running.get_mut(&(lane, namespace)) {
            *running = running.saturating_sub(1);
        }
        state.running.retain(|_, running| *running > 0);
        let asked = state.asked.get_mut(&(key.clone(), lane)).filter(|asked| asked.sequence == sequence);
        let is_wanted = asked.is_some();
        if let Some(asked) = asked {
            asked.done = Some((outcome, asked.at.elapsed()));
        }
        self.start(&mut state);
        drop(state);
        // If the channel is full, the next reconcile by time finds the plan.
        if is_wanted && self.news.try_send(key.clone()).is_err() {
            tracing::debug!(deployment = key.name, "plan waits for the next reconcile");
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // Every change is whole: a panic elsewhere cannot have left it half-done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolState {
    /// Takes the next search of `lane` from the queue, if one of its `threads` threads is free.
    fn take(&mut self, lane: Lane, threads: usize) -> Option<Queued> {
        let of_lane = self.running.iter().filter(|((of, _), _)| *of == lane);
        if of_lane.map(|(_, running)| running).sum::<usize>() >= threads {
            return None;
        }
        let most = threads.saturating_sub(1).max(1);
        let candidates = self.queue.iter().enumerate().filter(|(_, queued)| queued.lane == lane);
        let (_, index) = candidates
            .map(|(index, queued)| (self.running_of(lane, queued.namespace()), index))
            .filter(|(running, _)| *running < most)
            .min()?;
        let queued = self.queue.remove(index)?;
        *self.running.entry((lane, queued.namespace().to_owned())).or_default() += 1;
        Some(queued)
    }

    fn running_of(&self, lane: Lane, namespace: &str) -> usize {
        self.running.get(&(lane, namespace.to_owned())).copied().unwrap_or(0)
    }
}

impl Queued {
    fn namespace(&self) -> &str {
        self.key.namespace.as_deref().unwrap_or_default()
    }
}

impl RequestedPlan {
    fn progress(&self) -> PlanProgress {
        match &self.done {
            Some((outcome, elapsed)) => PlanProgress::Done { outcome: outcome.clone(), elapsed: *elapsed },
            None => PlanProgress::Underway { elapsed: self.at.elapsed() },
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
        let (news, looks) = mpsc::channel(64);
        (PlanningPool::new(threads, news), looks)
    }

    /// A search that runs until it is cancelled.
    fn endless(started: channel::Sender<()>) -> Search {
        Box::new(move |budget| {
            started.send(()).unwrap();
            while budget.proceed() != Proceed::Cancel {
                std::thread::yield_now();
            }
            Err(PlanningError::Aborted("cancelled".to_owned()))
        })
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn searches_of_one_namespace_leave_a_thread_to_others() {
        let (pool, mut looks) = pool(2);
        let (started, starts) = channel::channel();
        for number in 0..8 {
            let search = endless(started.clone());
            pool.ask(&key("greedy", &number.to_string()), Lane::Full, "a", || search);
        }
        starts.recv().unwrap();
        let other = key("other", "one");
        assert!(matches!(
            pool.ask(&other, Lane::Full, "a", || Box::new(|_| Ok(None))),
            PlanProgress::Underway { .. }
        ));
        assert_eq!(looks.recv().await, Some(other.clone()));
        let (id, progress) = pool.progress(&other, Lane::Full).unwrap();
        assert!(id == "a" && matches!(progress, PlanProgress::Done { outcome: Ok(None), .. }));
        assert!(starts.try_recv().is_err(), "the second thread is not for the greedy namespace");
        (0..8).for_each(|number| pool.forget(&key("greedy", &number.to_string())));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn wakes_do_not_wait_for_full_searches() {
        let (pool, mut looks) = pool(1);
        let (started, starts) = channel::channel();
        let demo = key("default", "demo");
        pool.ask(&demo, Lane::Full, "a", || endless(started));
        starts.recv().unwrap();
        pool.ask(&demo, Lane::Wake, "wake 1", || Box::new(|_| Ok(None)));
        assert_eq!(looks.recv().await, Some(demo.clone()));
        assert!(matches!(pool.progress(&demo, Lane::Wake), Some((_, PlanProgress::Done { .. }))));
        pool.forget(&demo);
        assert_eq!(pool.progress(&demo, Lane::Full), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn another_question_cancels_the_search_before() {
        let (pool, mut looks) = pool(1);
        let (started, starts) = channel::channel();
        let demo = key("default", "demo");
        pool.ask(&demo, Lane::Full, "a", || endless(started));
        starts.recv().unwrap();
        // The only thread is free only once the first search has ended.
        pool.ask(&demo, Lane::Full, "b", || Box::new(|_| Ok(None)));
        assert_eq!(looks.recv().await, Some(demo.clone()));
        let (id, progress) = pool.progress(&demo, Lane::Full).unwrap();
        assert!(id == "b" && matches!(progress, PlanProgress::Done { outcome: Ok(None), .. }));
        // The same question has the same answer, and no search.
        let progress = pool.ask(&demo, Lane::Full, "b", || unreachable!("asked again"));
        assert!(matches!(progress, PlanProgress::Done { .. }));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn panic_of_a_search_is_its_outcome() {
        let (pool, mut looks) = pool(1);
        let demo = key("default", "demo");
        pool.ask(&demo, Lane::Full, "a", || Box::new(|_| std::panic::resume_unwind(Box::new("broken"))));
        looks.recv().await.unwrap();
        let progress = pool.progress(&demo, Lane::Full);
        assert!(matches!(
            progress,
            Some((_, PlanProgress::Done { outcome: Err(PlanningError::Aborted(_)), .. }))
        ));
        // Its thread is free again.
        pool.ask(&demo, Lane::Full, "b", || Box::new(|_| Ok(None)));
        assert_eq!(looks.recv().await, Some(demo));
    }
}
