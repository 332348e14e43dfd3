//! Plans are made beside the reconciler: what is asked for, and what follows from an answer or from its absence.
//!
//! A wake goes through the chain of the Remoe paper: the waiting requests' expert usage is predicted, the main function
//! is pre-allocated (MMP) so that its pod starts at once, remote functions are planned and experts partitioned over
//! them while it starts.

use super::api::{MixOf, MoEDeployment, MoEPlanSpec, WakePlanning};
use super::events::Happening;
use super::following::revision_of;
use super::manifests::{Surroundings, plan_object, revision};
use super::observed::Observed;
use super::planned::{Decision, Follow, PlanState, Take, Task, followed, solved};
use super::planning::{Planning, PlanningError, counted};
use super::planning_pool::{Key, Lane, Outcome, PlanningPool, Progress, Search, WakePlan};
use remoe_planner::Budget;
use remoe_rollout::need;
use std::time::{Duration, Instant};

/// A plan to be made.
#[derive(Debug)]
pub(crate) enum Question {
    /// The plan of a new spec.
    Solve {
        /// Planning problem.
        planning: Box<Planning>,
        /// The plan that runs.
        previous: Option<Box<MoEPlanSpec>>,
    },
    /// The plan that follows `plan` while functions serve.
    Follow {
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

impl Question {
    /// Returns the plan, or none if the present one is good enough.
    ///
    /// # Errors
    /// No plan keeps every limit, or the search was cancelled.
    pub(crate) fn answer(self, budget: Budget<'_>) -> Outcome {
        match self {
            Self::Solve { planning, previous } => {
                planning.solve(previous.as_deref(), budget).map(|plan| Some(Box::new(plan)))
            }
            Self::Follow { planning, plan } => Ok(planning.follow(&plan, budget)?.map(Box::new)),
            Self::Wake { planning, plan } => Ok(planning.replan(&plan, budget)?.map(Box::new)),
        }
    }
}

/// Makes the plans of one deployment.
pub(crate) trait Planner {
    /// Returns the state of the plan with this `id`, and begins to make it if it is new.
    fn ask(&mut self, lane: Lane, id: &str, question: Question) -> Progress;
    /// Returns the state of the plan for the latest wake, with its number.
    fn wake(&self) -> Option<WakePlan>;
    /// Forgets the last answer in `lane`: the same question has another answer later.
    fn forget(&mut self, lane: Lane);
}

/// The pool, for one deployment.
pub(super) struct Pooled<'p> {
    pub(super) pool: &'p PlanningPool,
    pub(super) key: Key,
}

impl Planner for Pooled<'_> {
    fn ask(&mut self, lane: Lane, id: &str, question: Question) -> Progress {
        self.pool.ask(&self.key, lane, id, || -> Search { Box::new(move |budget| question.answer(budget)) })
    }

    fn wake(&self) -> Option<WakePlan> {
        let (id, progress) = self.pool.progress(&self.key, Lane::Wake)?;
        Some(WakePlan { wake: id.parse().ok()?, progress })
    }

    fn forget(&mut self, lane: Lane) {
        self.pool.forget_lane(&self.key, lane);
    }
}

/// Has `task` done by `planner`, as far as that is possible now.
///
/// # Errors
/// A plan cannot be written as JSON.
pub(crate) fn plan(
    owner: &MoEDeployment,
    observed: &Observed,
    around: &Surroundings,
    task: Task,
    planner: &mut impl Planner,
) -> Result<Decision, serde_json::Error> {
    match task {
        Task::Done(state) => Ok(Decision::of(state)),
        Task::Solve { planning, previous } => {
            let id = planning.question(previous.as_deref())?;
            match planner.ask(Lane::Full, &id, Question::Solve { planning, previous }) {
                Progress::Underway { .. } => Ok(Decision::of(PlanState::Planning)),
                Progress::Done { outcome, .. } => {
                    if matches!(outcome, Err(PlanningError::Aborted(_))) {
                        // The next reconcile tries again.
                        planner.forget(Lane::Full);
                    }
                    let solution = outcome.and_then(|plan| plan.ok_or_else(no_plan));
                    let (state, new) = solved(owner, solution.map(|plan| *plan))?;
                    Ok(Decision { new, ..Decision::of(state) })
                }
            }
        }
        Task::Follow(follow) if follow.cause == MixOf::Waiting => {
            wake(owner, observed, around, *follow, planner)
        }
        Task::Follow(follow) => {
            let Follow { planning, hash, plan, cause } = *follow;
            let question = Question::Follow { planning: Box::new(planning), plan: Box::new(plan.clone()) };
            match planner.ask(Lane::Full, &hash, question) {
                Progress::Underway { .. } => {
                    Ok(Decision::of(PlanState::Planned { hash, plan: Box::new(plan) }))
                }
                Progress::Done { outcome, .. } => {
                    let better = better_or_none(outcome, &hash);
                    if better.is_none() {
                        planner.forget(Lane::Full);
                    }
                    let rests = better.is_none();
                    let (state, new, happening) = followed(owner, (hash, plan, cause), better)?;
                    let happenings = happening.into_iter().collect();
                    let cause = (!rests).then_some(cause);
                    Ok(Decision { new, happenings, cause, rests, ..Decision::of(state) })
                }
            }
        }
        Task::Take(take) => {
            let Take { planning, hash, plan, better, elapsed, wake } = *take;
            let mut planned =
                taken(owner, observed, around, &planning, (hash, plan, better), (wake, elapsed))?;
            let told = observed.demand.as_ref().and_then(|demand| demand.spec.planning);
            let told = told.filter(|told| told.wake == wake);
            if let (Some(chain), Some(told)) = (&mut planned.chain, told) {
                *chain = WakePlanning { plan_us: chain.plan_us, partition_us: chain.partition_us, ..told };
            }
            Ok(planned)
        }
    }
}

/// First step of a wake: the main function starts with the size that it is pre-allocated, while the plan for the waiting
/// requests is made.
fn wake(
    owner: &MoEDeployment,
    observed: &Observed,
    around: &Surroundings,
    follow: Follow,
    planner: &mut impl Planner,
) -> Result<Decision, serde_json::Error> {
    let Follow { planning, hash, plan, .. } = follow;
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
    let question = Question::Wake { planning: Box::new(further), plan: Box::new(by) };
    let mut happenings = vec![predicted.happening()];
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
    happenings.push(Happening::normal("Preallocated", note));
    let mut planned = match planner.ask(Lane::Wake, &wake.to_string(), question) {
        Progress::Underway { .. } => match preallocated {
            Some(sized) => {
                let (new, object) = plan_object(owner, sized)?;
                let state = PlanState::Planned { hash: new, plan: Box::new(object.spec.clone()) };
                Decision { new: Some(object), ..Decision::of(state) }
            }
            None => Decision::of(PlanState::Planned { hash, plan: Box::new(plan) }),
        },
        Progress::Done { outcome, elapsed } => {
            // If gateways wrote meanwhile, the wake is decided again, and its plan is there already.
            let is_newer = |better: &MoEPlanSpec| revision_of(better) > revision_of(&plan);
            let better = better_or_none(outcome, &hash).or(preallocated).filter(is_newer);
            let rests = better.is_none();
            let taken = taken(owner, observed, around, &planning, (hash, plan, better), (wake, elapsed))?;
            if let Some(of) = taken.chain {
                chain = WakePlanning { plan_us: of.plan_us, partition_us: of.partition_us, ..chain };
            }
            Decision { rests, ..taken }
        }
    };
    let of_wake = happenings.into_iter().map(|happening| happening.of_wake(observed.now));
    planned.happenings.splice(0..0, of_wake);
    planned.chain = Some(chain);
    Ok(planned)
}

/// The plan for a wake is there: it replaces the one that main functions start by, unless that is good enough.
fn taken(
    owner: &MoEDeployment,
    observed: &Observed,
    around: &Surroundings,
    planning: &Planning,
    (hash, plan, better): (String, MoEPlanSpec, Option<MoEPlanSpec>),
    (wake, elapsed): (u64, Duration),
) -> Result<Decision, serde_json::Error> {
    let cause = better.as_ref().map(|_| MixOf::Waiting);
    let (state, new, replanned) = followed(owner, (hash.clone(), plan, MixOf::Waiting), better)?;
    let PlanState::Planned { hash: runs, plan } = &state else { return Ok(Decision::of(state)) };
    let what = if new.is_some() { "replaces" } else { "stays" };
    let before = if new.is_some() { format!(" {hash}") } else { String::new() };
    let note =
        format!("Plan {runs} {what}{before} for wake {wake}, {} after it was asked for.", seconds(elapsed));
    let mut happenings = vec![Happening::normal("Planned", note).of_wake(observed.now)];
    let started = Instant::now();
    let partition = partition(owner, around, planning, (runs, plan));
    let partitioning = started.elapsed();
    happenings
        .extend(partition.map(|partition| Happening::normal("Partitioned", partition).of_wake(observed.now)));
    happenings.extend(replanned.map(|replanned| replanned.of_wake(observed.now)));
    let chain = WakePlanning {
        wake,
        // 0 stands for a plan that is not there yet.
        plan_us: microseconds(elapsed).max(1),
        partition_us: microseconds(partitioning),
        ..WakePlanning::default()
    };
    Ok(Decision { new, happenings, cause, chain: Some(chain), ..Decision::of(state) })
}

/// Describes how the expected work of `plan` is divided over its remote functions; none if nothing is remote, or nothing
/// is known of requests.
fn partition(
    owner: &MoEDeployment,
    around: &Surroundings,
    planning: &Planning,
    (hash, plan): (&str, &MoEPlanSpec),
) -> Option<String> {
    let functions = revision(owner, hash, plan, around).ok()?.remote;
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
    fn happening(&self) -> Happening {
        let of = match self.of {
            MixOf::Waiting => "waiting",
            MixOf::Answered => "recent",
        };
        let note = format!(
            "Predicted the expert usage of {} in {}.",
            counted(self.requests as usize, &format!("{of} request")),
            seconds(Duration::from_micros(self.microseconds)),
        );
        Happening::normal("Predicted", note)
    }
}

fn predicted(observed: &Observed, planning: &Planning) -> Predicted {
    let (requests, of) = planning.predicted().unwrap_or((0, MixOf::Answered));
    let mixes = observed.gateways_alive().filter_map(|entry| entry.mix.as_ref());
    let slowest = mixes.filter(|mix| mix.of == of).map(|mix| mix.predicted_us).max();
    Predicted { requests, of, microseconds: slowest.unwrap_or(0) }
}

fn better_or_none(outcome: Outcome, hash: &str) -> Option<MoEPlanSpec> {
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
