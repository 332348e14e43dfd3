//! Requests plans from the planning pool, and decides by their results.
//!
//! A wake follows the steps of the Remoe paper. The waiting requests' expert usage is predicted. The main function is
//! pre-allocated (MMP), so that its pod starts at once. While it starts, remote functions are planned and experts are
//! partitioned over them.

use super::task::{Improvement, PlanState, ReadyPlan, Task, planning_issue};
use crate::events::ClusterEvent;
use crate::inputs::Inputs;
use crate::manifests::{OperatorEnvironment, plan_object, revision};
use crate::observed::Observed;
use crate::planning::{Planning, PlanningError, counted, three_digits};
use crate::planning_pool::{
    DeploymentKey, PlanOutcome, PlanProgress, PlanningPool, Search, SearchKind, WakePlan,
};
use crate::usage::revision_of;
use remoe_api::{MixOf, MoEDeployment, MoEPlan, MoEPlanSpec, Mode, WakePlanning};
use remoe_planner::Budget;
use remoe_rollout::need;
use std::time::{Duration, Instant};

/// Request for a plan.
#[derive(Debug)]
pub(crate) enum SearchRequest {
    /// Plan for a new spec.
    Solve {
        /// Planning problem.
        planning: Box<Planning>,
        /// Running plan.
        previous: Option<Box<MoEPlanSpec>>,
    },
    /// Better plan than `plan` for the expert usage of answered requests.
    Improve {
        /// Planning problem.
        planning: Box<Planning>,
        /// Running plan.
        plan: Box<MoEPlanSpec>,
    },
    /// Plan for waiting requests: `plan`, by which main functions start, improved until the deadline.
    Wake {
        /// Planning problem.
        planning: Box<Planning>,
        /// Plan by which main functions start.
        plan: Box<MoEPlanSpec>,
    },
}

impl SearchRequest {
    /// Runs the search. Returns the plan, or none if the current one is good enough.
    ///
    /// # Errors
    /// No plan keeps every limit, or the search was cancelled.
    pub(crate) fn carry_out(self, budget: Budget<'_>) -> PlanOutcome {
        match self {
            Self::Solve { planning, previous } => {
                planning.solve(previous.as_deref(), budget).map(|plan| Some(Box::new(plan)))
            }
            Self::Improve { planning, plan } => Ok(planning.improve(&plan, budget)?.map(Box::new)),
            Self::Wake { planning, plan } => Ok(planning.replan(&plan, budget)?.map(Box::new)),
        }
    }
}

/// Source of plans for one deployment.
pub(crate) trait Planner {
    /// Returns the progress of the plan with this `id`, and starts the search if the `id` is new.
    fn request(&mut self, kind: SearchKind, id: &str, request: SearchRequest) -> PlanProgress;
    /// Returns the requested plan of the latest wake.
    fn wake(&self) -> Option<WakePlan>;
    /// Drops the last result of `kind`, so that the same request starts a new search.
    fn forget(&mut self, kind: SearchKind);
}

/// Planning pool, for one deployment.
pub(crate) struct Pooled<'p> {
    pub(crate) pool: &'p PlanningPool,
    pub(crate) key: DeploymentKey,
}

impl Planner for Pooled<'_> {
    fn request(&mut self, kind: SearchKind, id: &str, request: SearchRequest) -> PlanProgress {
        self.pool
            .request(&self.key, kind, id, || -> Search { Box::new(move |budget| request.carry_out(budget)) })
    }

    fn wake(&self) -> Option<WakePlan> {
        let (id, progress) = self.pool.progress(&self.key, SearchKind::Wake)?;
        Some(WakePlan { wake: id.parse().ok()?, progress })
    }

    fn forget(&mut self, kind: SearchKind) {
        self.pool.forget_finished(&self.key, kind);
    }
}

/// Current result of a planning task.
#[derive(Debug)]
pub(super) struct PlanDecision {
    /// State of planning.
    pub(super) state: PlanState,
    /// A new plan.
    pub(super) new: Option<MoEPlan>,
    /// Events, once the new plan is written.
    pub(super) events: Vec<ClusterEvent>,
    /// Requests whose expert usage a new plan is for.
    pub(super) cause: Option<MixOf>,
    /// Set if no better plan was found: a cooldown begins.
    pub(super) is_fruitless: bool,
    /// Times of the planning steps of a wake, as far as known.
    pub(super) wake_times: Option<WakePlanning>,
}

impl PlanDecision {
    fn from_state(state: PlanState) -> Self {
        Self { state, new: None, events: Vec::new(), cause: None, is_fruitless: false, wake_times: None }
    }
}

/// Executes `task` with `planner`, as far as possible without waiting.
///
/// # Errors
/// A plan cannot be serialised as JSON.
pub(super) fn carry_out(
    inputs: Inputs<'_>,
    task: Task,
    planner: &mut impl Planner,
) -> Result<PlanDecision, serde_json::Error> {
    let Inputs { owner, observed, .. } = inputs;
    match task {
        Task::Done(state) => Ok(PlanDecision::from_state(state)),
        Task::Solve { planning, previous } => {
            let id = planning.request_id(previous.as_deref())?;
            match planner.request(SearchKind::Full, &id, SearchRequest::Solve { planning, previous }) {
                PlanProgress::Underway { .. } => Ok(PlanDecision::from_state(PlanState::Planning)),
                PlanProgress::Done { outcome, .. } => {
                    if matches!(outcome, Err(PlanningError::Aborted(_))) {
                        // The next reconcile tries again.
                        planner.forget(SearchKind::Full);
                    }
                    let solution = outcome.and_then(|plan| plan.ok_or_else(no_plan));
                    let (state, new) = plan_state(owner, solution.map(|plan| *plan))?;
                    Ok(PlanDecision { new, ..PlanDecision::from_state(state) })
                }
            }
        }
        Task::Improve(improvement) if improvement.cause == MixOf::Waiting => {
            wake(inputs, *improvement, planner)
        }
        Task::Improve(improvement) => {
            let Improvement { planning, hash, plan, cause } = *improvement;
            let request =
                SearchRequest::Improve { planning: Box::new(planning), plan: Box::new(plan.clone()) };
            match planner.request(SearchKind::Full, &hash, request) {
                PlanProgress::Underway { .. } => {
                    Ok(PlanDecision::from_state(PlanState::Planned { hash, plan: Box::new(plan) }))
                }
                PlanProgress::Done { outcome, .. } => {
                    let better = better_or_none(outcome, &hash);
                    if better.is_none() {
                        planner.forget(SearchKind::Full);
                    }
                    let is_fruitless = better.is_none();
                    let (state, new, event) = replacement(owner, (hash, plan, cause), better)?;
                    let events = event.into_iter().collect();
                    let cause = (!is_fruitless).then_some(cause);
                    Ok(PlanDecision { new, events, cause, is_fruitless, ..PlanDecision::from_state(state) })
                }
            }
        }
        Task::Take(take) => {
            let ReadyPlan { planning, hash, plan, better, elapsed, wake } = *take;
            let mut planned = wake_result(inputs, &planning, (hash, plan, better), (wake, elapsed))?;
            let recorded = observed.demand.as_ref().and_then(|demand| demand.spec.planning);
            let recorded = recorded.filter(|recorded| recorded.wake == wake);
            if let (Some(wake_times), Some(recorded)) = (&mut planned.wake_times, recorded) {
                *wake_times = WakePlanning {
                    plan_us: wake_times.plan_us,
                    partition_us: wake_times.partition_us,
                    ..recorded
                };
            }
            Ok(planned)
        }
    }
}

/// Returns the planning state and the plan object for a `solution`.
///
/// # Errors
/// The plan cannot be serialised as JSON.
fn plan_state(
    owner: &MoEDeployment,
    solution: Result<MoEPlanSpec, PlanningError>,
) -> Result<(PlanState, Option<MoEPlan>), serde_json::Error> {
    let plan = match solution {
        Ok(plan) => plan,
        Err(error) => return Ok((PlanState::Refused(planning_issue(&error)), None)),
    };
    let (hash, object) = plan_object(owner, plan)?;
    Ok((PlanState::Planned { hash, plan: Box::new(object.spec.clone()) }, Some(object)))
}

/// Returns the planning state, plan object and event for the `better` plan. Without one, the plan `hash` stays.
///
/// # Errors
/// The plan cannot be serialised as JSON.
fn replacement(
    owner: &MoEDeployment,
    (hash, plan, cause): (String, MoEPlanSpec, MixOf),
    better: Option<MoEPlanSpec>,
) -> Result<(PlanState, Option<MoEPlan>, Option<ClusterEvent>), serde_json::Error> {
    let Some(better) = better else {
        return Ok((PlanState::Planned { hash, plan: Box::new(plan) }, None, None));
    };
    let (new, object) = plan_object(owner, better)?;
    let dollars = |plan: &MoEPlanSpec| three_digits(plan.numbers.costs.total * 1e6);
    let verb = match owner.spec.mode {
        Mode::Active => "replaces",
        Mode::Advisory => "is proposed to replace",
    };
    let whom = match cause {
        MixOf::Waiting => "waiting requests",
        MixOf::Answered => "recent requests",
    };
    let note = format!(
        "Plan {new} {verb} {hash} for {whom}: ${} per million requests; {hash} was made for other requests, \
         at ${}.",
        dollars(&object.spec),
        dollars(&plan),
    );
    let event = ClusterEvent::normal("Replanned", note);
    let state = PlanState::Planned { hash: new, plan: Box::new(object.spec.clone()) };
    Ok((state, Some(object), Some(event)))
}

/// First step of a wake: the main function starts with its pre-allocated size, while the plan for the waiting
/// requests is made.
fn wake(
    inputs: Inputs<'_>,
    improvement: Improvement,
    planner: &mut impl Planner,
) -> Result<PlanDecision, serde_json::Error> {
    let Inputs { owner, observed, .. } = inputs;
    let Improvement { planning, hash, plan, .. } = improvement;
    let wake = observed.demand.as_ref().map_or(0, |demand| demand.spec.wakes).saturating_add(1);
    let predicted = predicted(observed, &planning);
    let started = Instant::now();
    let preallocated = planning.preallocated(&plan).unwrap_or_else(|error| {
        tracing::info!(plan = hash, %error, "main function starts with its last size");
        None
    });
    let preallocation_time = started.elapsed();
    // Of two plans for the same prediction the later one has the higher revision.
    let revised = planning.clone().revised(u32::from(preallocated.is_some()))?;
    let start_plan = preallocated.clone().unwrap_or_else(|| plan.clone());
    let request = SearchRequest::Wake { planning: Box::new(revised), plan: Box::new(start_plan) };
    let mut events = vec![predicted.event()];
    let mut wake_times = WakePlanning {
        wake,
        predict_us: predicted.microseconds,
        preallocate_us: microseconds(preallocation_time),
        ..WakePlanning::default()
    };
    let note = match &preallocated {
        Some(sized) => format!(
            "Preallocated {} MB for main functions in {}: bound on the waiting requests' expert usage; plan {hash} \
             has {} MB.",
            sized.main.memory_mb,
            seconds(preallocation_time),
            plan.main.memory_mb
        ),
        None => format!(
            "Preallocated {} MB for main functions in {}, as in plan {hash}.",
            plan.main.memory_mb,
            seconds(preallocation_time)
        ),
    };
    events.push(ClusterEvent::normal("Preallocated", note));
    let mut planned = match planner.request(SearchKind::Wake, &wake.to_string(), request) {
        PlanProgress::Underway { .. } => match preallocated {
            Some(sized) => {
                let (new, object) = plan_object(owner, sized)?;
                let state = PlanState::Planned { hash: new, plan: Box::new(object.spec.clone()) };
                PlanDecision { new: Some(object), ..PlanDecision::from_state(state) }
            }
            None => PlanDecision::from_state(PlanState::Planned { hash, plan: Box::new(plan) }),
        },
        PlanProgress::Done { outcome, elapsed } => {
            // If a gateway wrote meanwhile, the wake is decided again, and its plan may be ready by now.
            let is_newer = |better: &MoEPlanSpec| revision_of(better) > revision_of(&plan);
            let better = better_or_none(outcome, &hash).or(preallocated).filter(is_newer);
            let is_fruitless = better.is_none();
            let wake_result = wake_result(inputs, &planning, (hash, plan, better), (wake, elapsed))?;
            if let Some(of) = wake_result.wake_times {
                wake_times =
                    WakePlanning { plan_us: of.plan_us, partition_us: of.partition_us, ..wake_times };
            }
            PlanDecision { is_fruitless, ..wake_result }
        }
    };
    let of_wake = events.into_iter().map(|event| event.of_wake(observed.now));
    planned.events.splice(0..0, of_wake);
    planned.wake_times = Some(wake_times);
    Ok(planned)
}

/// Last step of a wake: its plan replaces the one by which main functions started, unless that is good enough.
fn wake_result(
    inputs: Inputs<'_>,
    planning: &Planning,
    (hash, plan, better): (String, MoEPlanSpec, Option<MoEPlanSpec>),
    (wake, elapsed): (u64, Duration),
) -> Result<PlanDecision, serde_json::Error> {
    let Inputs { owner, observed, environment, .. } = inputs;
    let cause = better.as_ref().map(|_| MixOf::Waiting);
    let (state, new, replanned) = replacement(owner, (hash.clone(), plan, MixOf::Waiting), better)?;
    let PlanState::Planned { hash: running_hash, plan } = &state else {
        return Ok(PlanDecision::from_state(state));
    };
    let verb = if new.is_some() { "replaces" } else { "stays" };
    let before = if new.is_some() { format!(" {hash}") } else { String::new() };
    let note = format!(
        "Plan {running_hash} {verb}{before} for wake {wake}, {} after it was asked for.",
        seconds(elapsed)
    );
    let mut events = vec![ClusterEvent::normal("Planned", note).of_wake(observed.now)];
    let started = Instant::now();
    let partition = partition(owner, environment, planning, (running_hash, plan));
    let partition_time = started.elapsed();
    events.extend(
        partition.map(|partition| ClusterEvent::normal("Partitioned", partition).of_wake(observed.now)),
    );
    events.extend(replanned.map(|replanned| replanned.of_wake(observed.now)));
    let wake_times = WakePlanning {
        wake,
        // 0 means that there is no plan yet.
        plan_us: microseconds(elapsed).max(1),
        partition_us: microseconds(partition_time),
        ..WakePlanning::default()
    };
    Ok(PlanDecision { new, events, cause, wake_times: Some(wake_times), ..PlanDecision::from_state(state) })
}

/// Describes how the expected work of `plan` is distributed over its remote functions; absent if the expert usage is
/// unknown.
fn partition(
    owner: &MoEDeployment,
    environment: &OperatorEnvironment,
    planning: &Planning,
    (hash, plan): (&str, &MoEPlanSpec),
) -> Option<String> {
    let functions = revision(owner, hash, plan, environment).ok()?.remote;
    let hosted: Vec<_> = functions.iter().filter_map(|function| function.hosted.as_ref()).collect();
    let mut layers: Vec<u32> = hosted.iter().flat_map(|hosted| hosted.sets()).map(|set| set.layer).collect();
    layers.sort_unstable();
    layers.dedup();
    let experts: usize = hosted.iter().flat_map(|hosted| hosted.sets()).map(|set| set.experts.len()).sum();
    if experts == 0 {
        return Some("Partitioned: no expert is remote.".to_owned());
    }
    let (ids, usage) = planning.expected_usage(plan)?;
    let work: Vec<f64> = hosted.iter().map(|hosted| need::work(hosted.sets(), &ids, &usage)).collect();
    let (most, sum) = (work.iter().copied().fold(0.0, f64::max), work.iter().sum::<f64>());
    let balance = if sum > 0.0 { most * work.len() as f64 / sum } else { 1.0 };
    Some(format!(
        "Partitioned {} of {} over {}: the busiest has {balance:.2} times the mean work.",
        counted(experts, "expert"),
        counted(layers.len(), "layer"),
        counted(work.len(), "remote function"),
    ))
}

/// Prediction that a wake is planned for.
struct Predicted {
    requests: u32,
    of: MixOf,
    microseconds: u64,
}

impl Predicted {
    fn event(&self) -> ClusterEvent {
        let of = match self.of {
            MixOf::Waiting => "waiting",
            MixOf::Answered => "recent",
        };
        let note = format!(
            "Predicted the expert usage of {} in {}.",
            counted(self.requests as usize, &format!("{of} request")),
            seconds(Duration::from_micros(self.microseconds)),
        );
        ClusterEvent::normal("Predicted", note)
    }
}

fn predicted(observed: &Observed, planning: &Planning) -> Predicted {
    let (requests, of) = planning.predicted().unwrap_or((0, MixOf::Answered));
    let mixes = observed.gateways_alive().filter_map(|entry| entry.mix.as_ref());
    let slowest = mixes.filter(|mix| mix.of == of).map(|mix| mix.predicted_us).max();
    Predicted { requests, of, microseconds: slowest.unwrap_or(0) }
}

fn better_or_none(outcome: PlanOutcome, hash: &str) -> Option<MoEPlanSpec> {
    outcome
        .unwrap_or_else(|error| {
            tracing::info!(plan = hash, why = %error, "plan kept: replanning failed");
            None
        })
        .map(|plan| *plan)
}

fn no_plan() -> PlanningError {
    PlanningError::Aborted("the planner returned no plan".to_owned())
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn seconds(time: Duration) -> String {
    format!("{:.4} s", time.as_secs_f64())
}
