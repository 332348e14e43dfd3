//! Plans are made beside the reconciler: what is asked for, and what follows from an answer or from its absence.
//!
//! A wake goes through the chain of the Remoe paper: the waiting requests' expert usage is predicted, the main function
//! is pre-allocated (MMP) so that its pod starts at once, remote functions are planned and experts partitioned over
//! them while it starts.

use super::task::{Improvement, PlanState, ReadyPlan, Task, refused};
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

/// A plan to be made.
#[derive(Debug)]
pub(crate) enum SearchRequest {
    /// The plan of a new spec.
    Solve {
        /// Planning problem.
        planning: Box<Planning>,
        /// The plan that runs.
        previous: Option<Box<MoEPlanSpec>>,
    },
    /// A better plan than `plan` for the expert usage of answered requests.
    Improve {
        /// Planning problem.
        planning: Box<Planning>,
        /// The plan that runs.
        plan: Box<MoEPlanSpec>,
    },
    /// The plan for waiting requests: `plan`, by which main functions start, improved until the deadline.
    Wake {
        /// Planning problem.
        planning: Box<Planning>,
        /// The plan that main functions start by.
        plan: Box<MoEPlanSpec>,
    },
}

impl SearchRequest {
    /// Returns the plan, or none if the present one is good enough.
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

/// Makes the plans of one deployment.
pub(crate) trait Planner {
    /// Returns the state of the plan with this `id`, and begins to make it if it is new.
    fn request(&mut self, kind: SearchKind, id: &str, request: SearchRequest) -> PlanProgress;
    /// Returns the state of the plan for the latest wake, with its number.
    fn wake(&self) -> Option<WakePlan>;
    /// Forgets the last answer in `kind`: the same question has another answer later.
    fn forget(&mut self, kind: SearchKind);
}

/// The pool, for one deployment.
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

/// Result of a task, as far as it is known now.
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
    /// No better plan was found: none is looked for again for a while.
    pub(super) is_fruitless: bool,
    /// Times of the chain at a wake, as far as they are known.
    pub(super) chain: Option<WakePlanning>,
}

impl PlanDecision {
    fn of(state: PlanState) -> Self {
        Self { state, new: None, events: Vec::new(), cause: None, is_fruitless: false, chain: None }
    }
}

/// Has `planner` do `task`, as far as that is possible now.
///
/// # Errors
/// A plan cannot be written as JSON.
pub(super) fn carry_out(
    inputs: Inputs<'_>,
    task: Task,
    planner: &mut impl Planner,
) -> Result<PlanDecision, serde_json::Error> {
    let Inputs { owner, observed, .. } = inputs;
    match task {
        Task::Done(state) => Ok(PlanDecision::of(state)),
        Task::Solve { planning, previous } => {
            let id = planning.request_id(previous.as_deref())?;
            match planner.request(SearchKind::Full, &id, SearchRequest::Solve { planning, previous }) {
                PlanProgress::Underway { .. } => Ok(PlanDecision::of(PlanState::Planning)),
                PlanProgress::Done { outcome, .. } => {
                    if matches!(outcome, Err(PlanningError::Aborted(_))) {
                        // The next reconcile tries again.
                        planner.forget(SearchKind::Full);
                    }
                    let solution = outcome.and_then(|plan| plan.ok_or_else(no_plan));
                    let (state, new) = solved(owner, solution.map(|plan| *plan))?;
                    Ok(PlanDecision { new, ..PlanDecision::of(state) })
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
                    Ok(PlanDecision::of(PlanState::Planned { hash, plan: Box::new(plan) }))
                }
                PlanProgress::Done { outcome, .. } => {
                    let better = better_or_none(outcome, &hash);
                    if better.is_none() {
                        planner.forget(SearchKind::Full);
                    }
                    let is_fruitless = better.is_none();
                    let (state, new, event) = replaced(owner, (hash, plan, cause), better)?;
                    let events = event.into_iter().collect();
                    let cause = (!is_fruitless).then_some(cause);
                    Ok(PlanDecision { new, events, cause, is_fruitless, ..PlanDecision::of(state) })
                }
            }
        }
        Task::Take(take) => {
            let ReadyPlan { planning, hash, plan, better, elapsed, wake } = *take;
            let mut planned = taken(inputs, &planning, (hash, plan, better), (wake, elapsed))?;
            let told = observed.demand.as_ref().and_then(|demand| demand.spec.planning);
            let told = told.filter(|told| told.wake == wake);
            if let (Some(chain), Some(told)) = (&mut planned.chain, told) {
                *chain = WakePlanning { plan_us: chain.plan_us, partition_us: chain.partition_us, ..told };
            }
            Ok(planned)
        }
    }
}

/// Returns a new plan as the state of planning, and its object.
///
/// # Errors
/// The plan cannot be written as JSON.
fn solved(
    owner: &MoEDeployment,
    solution: Result<MoEPlanSpec, PlanningError>,
) -> Result<(PlanState, Option<MoEPlan>), serde_json::Error> {
    let plan = match solution {
        Ok(plan) => plan,
        Err(error) => return Ok((PlanState::Refused(refused(&error)), None)),
    };
    let (hash, object) = plan_object(owner, plan)?;
    Ok((PlanState::Planned { hash, plan: Box::new(object.spec.clone()) }, Some(object)))
}

/// Returns the `better` plan as the state of planning, its object and an event. If there is none, the plan `hash` stays.
///
/// # Errors
/// The plan cannot be written as JSON.
fn replaced(
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

/// First step of a wake: the main function starts with the size that it is pre-allocated, while the plan for the waiting
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
    let preallocating = started.elapsed();
    // Of two plans with the same prediction the later one has the larger number.
    let further = planning.clone().revised(u32::from(preallocated.is_some()))?;
    let by = preallocated.clone().unwrap_or_else(|| plan.clone());
    let request = SearchRequest::Wake { planning: Box::new(further), plan: Box::new(by) };
    let mut events = vec![predicted.event()];
    let mut chain = WakePlanning {
        wake,
        predict_us: predicted.microseconds,
        preallocate_us: microseconds(preallocating),
        ..WakePlanning::default()
    };
    let note = match &preallocated {
        Some(sized) => format!(
            "Preallocated {} MB for main functions in {}: bound on the waiting requests' expert usage; plan {hash} \
             has {} MB.",
            sized.main.memory_mb,
            seconds(preallocating),
            plan.main.memory_mb
        ),
        None => format!(
            "Preallocated {} MB for main functions in {}, as in plan {hash}.",
            plan.main.memory_mb,
            seconds(preallocating)
        ),
    };
    events.push(ClusterEvent::normal("Preallocated", note));
    let mut planned = match planner.request(SearchKind::Wake, &wake.to_string(), request) {
        PlanProgress::Underway { .. } => match preallocated {
            Some(sized) => {
                let (new, object) = plan_object(owner, sized)?;
                let state = PlanState::Planned { hash: new, plan: Box::new(object.spec.clone()) };
                PlanDecision { new: Some(object), ..PlanDecision::of(state) }
            }
            None => PlanDecision::of(PlanState::Planned { hash, plan: Box::new(plan) }),
        },
        PlanProgress::Done { outcome, elapsed } => {
            // If gateways wrote meanwhile, the wake is decided again, and its plan is there already.
            let is_newer = |better: &MoEPlanSpec| revision_of(better) > revision_of(&plan);
            let better = better_or_none(outcome, &hash).or(preallocated).filter(is_newer);
            let is_fruitless = better.is_none();
            let taken = taken(inputs, &planning, (hash, plan, better), (wake, elapsed))?;
            if let Some(of) = taken.chain {
                chain = WakePlanning { plan_us: of.plan_us, partition_us: of.partition_us, ..chain };
            }
            PlanDecision { is_fruitless, ..taken }
        }
    };
    let of_wake = events.into_iter().map(|event| event.of_wake(observed.now));
    planned.events.splice(0..0, of_wake);
    planned.chain = Some(chain);
    Ok(planned)
}

/// The plan for a wake is there: it replaces the one that main functions start by, unless that is good enough.
fn taken(
    inputs: Inputs<'_>,
    planning: &Planning,
    (hash, plan, better): (String, MoEPlanSpec, Option<MoEPlanSpec>),
    (wake, elapsed): (u64, Duration),
) -> Result<PlanDecision, serde_json::Error> {
    let Inputs { owner, observed, environment, .. } = inputs;
    let cause = better.as_ref().map(|_| MixOf::Waiting);
    let (state, new, replanned) = replaced(owner, (hash.clone(), plan, MixOf::Waiting), better)?;
    let PlanState::Planned { hash: runs, plan } = &state else { return Ok(PlanDecision::of(state)) };
    let what = if new.is_some() { "replaces" } else { "stays" };
    let before = if new.is_some() { format!(" {hash}") } else { String::new() };
    let note =
        format!("Plan {runs} {what}{before} for wake {wake}, {} after it was asked for.", seconds(elapsed));
    let mut events = vec![ClusterEvent::normal("Planned", note).of_wake(observed.now)];
    let started = Instant::now();
    let partition = partition(owner, environment, planning, (runs, plan));
    let partitioning = started.elapsed();
    events.extend(
        partition.map(|partition| ClusterEvent::normal("Partitioned", partition).of_wake(observed.now)),
    );
    events.extend(replanned.map(|replanned| replanned.of_wake(observed.now)));
    let chain = WakePlanning {
        wake,
        // 0 stands for a plan that is not there yet.
        plan_us: microseconds(elapsed).max(1),
        partition_us: microseconds(partitioning),
        ..WakePlanning::default()
    };
    Ok(PlanDecision { new, events, cause, chain: Some(chain), ..PlanDecision::of(state) })
}

/// Describes how the expected work of `plan` is divided over its remote functions; none if nothing is remote, or nothing
/// is known of requests.
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

/// The prediction that a wake is planned for.
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
