//! Status stage: computes the status from observations and decisions. Pure.

use super::billed_pods::{billed_pods, cost_per_hour};
use super::conditions::{ConditionContent, sentence, whole_seconds};
use super::decide::Decided;
use super::diff::profiler_blocked;
use super::exposure::{GatewayService, exposed};
use super::inputs::Inputs;
use super::manifests::{LOAD_SECONDS, Revision};
use super::names::{Component, component_selector, selector_text};
use super::observed::Observed;
use super::ownership::NAME_TAKEN;
use super::plan::{PlanState, serving};
use super::planning::three_digits;
use super::pods::PodView;
use super::ports::HTTP_PORT;
use super::scale::{DemandDecision, scaled_to_zero, timeline};
use super::status_issue::StatusIssue;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use remoe_api::{
    ConditionType, MoEDeployment, MoEDeploymentStatus, MoEPlanSpec, Mode, ModelStatus, ProfileSource,
};
use remoe_autoscale::scale_to_zero::ScalingPhase;

/// Progress deadline of planning: the default of a Kubernetes Deployment.
const PLANNING_DEADLINE: SignedDuration = SignedDuration::from_secs(600);
/// Progress deadline of a rollout, which includes the time that a function may take to load.
const ROLLOUT_DEADLINE: SignedDuration = SignedDuration::from_secs(600 + LOAD_SECONDS as i64);

/// Reason after the progress deadline, as in Kubernetes Deployments.
const PROGRESS_DEADLINE_EXCEEDED: &str = "ProgressDeadlineExceeded";

const NO_PLAN: &str = "No plan yet; see condition Planned.";
const NOT_ACCEPTED: &str = "No plan accepted; set spec.acceptedPlan to the hash in status.proposedPlan.";

/// Everything that the status is computed from.
#[derive(Debug, Clone)]
pub(crate) struct StatusInputs<'a> {
    /// Deployment.
    pub deployment: &'a MoEDeployment,
    /// Checkpoint; absent before it was inspected.
    pub model: Option<ModelStatus>,
    /// State of planning.
    pub planning: PlanState,
    /// Progress of the hardware measurement, while the plan uses a prior.
    pub profiling: Option<String>,
    /// Desired revision, and its plan.
    pub target: Option<(&'a Revision, &'a MoEPlanSpec)>,
    /// Plan of the latest routing generation.
    pub running: Option<&'a str>,
    /// Plan that main functions have in force.
    pub serving: Option<String>,
    /// Pods of functions.
    pub pods: &'a [PodView],
    /// Issues found by the reconcile.
    pub issues: Vec<StatusIssue>,
    /// Decision on whether functions are to run.
    pub demanded: &'a DemandDecision,
    /// Cost of the pods, in nano-dollars per hour.
    pub cost_per_hour_nanodollars: u64,
    /// Savings that gateways report, in nano-dollars; absent if no gateway reports any.
    pub saved_nanodollars: Option<i64>,
    /// Set if everything is in the desired state.
    pub settled: bool,
    /// Set if the rollout waits for its turn.
    pub awaits_turn: bool,
    /// Set if the platform's prices replace those of the spec.
    pub repriced: bool,
    /// Gateways, if there are any.
    pub gateway: Option<&'a GatewayService>,
    /// Time of the reconcile.
    pub now: Timestamp,
}

impl<'a> StatusInputs<'a> {
    /// Collects the findings of a reconcile. `refused` lists the writes that the API refused.
    pub(crate) fn collect(
        inputs: Inputs<'a>,
        decided: &'a Decided,
        refused: Vec<(Option<Component>, StatusIssue)>,
    ) -> Self {
        let Inputs { owner: deployment, observed, repriced, .. } = inputs;
        let Decided { resolved, planned, scaled, manifests, diff } = decided;
        let mut findings = Self {
            deployment,
            model: resolved.model.facts().map(|facts| ModelStatus {
                source: deployment.spec.model.source.clone(),
                revision: facts.revision.clone(),
                digest: facts.inspection.fingerprint.clone(),
            }),
            planning: planned.state.clone(),
            profiling: diff.profiling.clone(),
            target: manifests.target.as_ref().map(|target| (&target.revision, &target.plan)),
            running: planned.running.as_deref(),
            serving: serving(deployment, observed),
            pods: &scaled.pods,
            issues: diff.issues.clone(),
            demanded: &scaled.demanded,
            cost_per_hour_nanodollars: cost_per_hour(&billed_pods(deployment, &observed.pods, true)),
            saved_nanodollars: reported_savings(observed),
            settled: diff.settled,
            awaits_turn: diff.awaits_turn,
            repriced,
            gateway: inputs.environment.gateway.as_ref(),
            now: observed.now,
        };
        for (component, issue) in refused {
            match component {
                Some(Component::Inspector) => {
                    findings.planning = PlanState::Inspecting { issue: Some(issue) };
                }
                // Another deployment measures the same hardware already.
                Some(Component::Profiler) if issue.reason == NAME_TAKEN => {}
                Some(Component::Profiler) => findings.profiling = Some(profiler_blocked(&issue)),
                Some(Component::Main | Component::RemoteExpert) | None => findings.issues.push(issue),
            }
        }
        findings
    }
}

/// Returns the sum of the savings that gateways report.
fn reported_savings(observed: &Observed) -> Option<i64> {
    let entries = observed.demand.as_ref().map_or(&[][..], |demand| demand.gateways());
    let savings = entries.iter().map(|entry| entry.saved).filter(|saved| *saved != 0);
    savings.reduce(i64::saturating_add)
}

/// Returns the status for `findings`.
pub(crate) fn status(findings: &StatusInputs<'_>) -> MoEDeploymentStatus {
    let owner = findings.deployment;
    let before = owner.status.clone().unwrap_or_default();
    let name = owner.name_any();
    let target = findings.target.map(|(revision, _)| revision);
    let functions = target
        .map(|target| format!("{}/{}", ready_functions(target, findings.pods), desired_functions(target)));
    let shown = findings.running.map(str::to_owned).or_else(|| target.map(|target| target.plan.clone()));
    let last_progress = match &before.last_progress_time {
        Some(time)
            if before.functions == functions
                && before.plan == shown
                && before.observed_generation == owner.metadata.generation =>
        {
            time.clone()
        }
        _ => Time(whole_seconds(findings.now)),
    };
    // No progress is expected while the deployment is scaled to zero.
    let woken = findings.demanded.since.filter(|_| findings.demanded.is_wake());
    let progressing =
        progressing(findings, woken.map_or(last_progress.0, |woken| woken.max(last_progress.0)));
    let mut issues = issues(findings);
    let failed_plan = failed_plan(findings, &before, progressing.reason == PROGRESS_DEADLINE_EXCEEDED);
    if progressing.reason == PROGRESS_DEADLINE_EXCEEDED {
        issues.push(StatusIssue::new(PROGRESS_DEADLINE_EXCEEDED, progressing.message.clone()));
    }
    let contents = [
        (ConditionType::Ready, ready(findings, &issues)),
        (ConditionType::Planned, planned(findings)),
        (ConditionType::Progressing, progressing),
        (ConditionType::Degraded, degraded(&issues)),
        (ConditionType::Active, active(findings)),
        (ConditionType::Exposed, exposed(findings.gateway)),
    ];
    let conditions = contents.map(|(condition_type, content)| {
        content.condition(
            condition_type,
            before.condition(condition_type),
            owner.metadata.generation,
            findings.now,
        )
    });
    let proposed = match &findings.planning {
        PlanState::Planned { hash, .. } => Some(hash.clone()),
        _ => None,
    };
    MoEDeploymentStatus {
        observed_generation: owner.metadata.generation,
        conditions: conditions.to_vec(),
        url: target.map(|_| {
            let scheme = if findings.gateway.is_some_and(|gateway| gateway.tls) { "https" } else { "http" };
            format!("{scheme}://{name}.{}.svc:{HTTP_PORT}", owner.namespace().unwrap_or_default())
        }),
        model: findings.model.clone().or(before.model),
        proposed_plan: proposed.filter(|proposed| shown.as_ref() != Some(proposed)),
        plan: shown,
        failed_plan,
        functions,
        saving: findings.target.map(|(_, plan)| saving(plan)),
        verdict: findings.target.and_then(|(_, plan)| Some(plan.verdict.as_ref()?.sentence.clone())),
        cost_per_hour: target.map(|_| dollars(findings.cost_per_hour_nanodollars as f64)),
        saved: findings.saved_nanodollars.map(|saved| dollars(saved as f64)),
        replicas: target.map_or(0, |target| {
            let mains = findings.pods.iter().filter(|pod| pod.is_main && pod.is_sound());
            u32::try_from(mains.filter(|pod| pod.identity == target.main.identity).count())
                .unwrap_or(u32::MAX)
        }),
        selector: Some(selector_text(&component_selector(&name, Component::Main))),
        last_progress_time: Some(last_progress),
    }
}

/// Formats `nanodollars` as dollars with three significant digits.
fn dollars(nanodollars: f64) -> String {
    let sign = if nanodollars < 0.0 { "-" } else { "" };
    format!("{sign}${}", three_digits(nanodollars.abs() / 1e9))
}

/// Returns the hash of the plan that missed the progress deadline while another plan serves. It stays failed until
/// the spec or the plan changes.
fn failed_plan(findings: &StatusInputs<'_>, before: &MoEDeploymentStatus, is_stuck: bool) -> Option<String> {
    let PlanState::Planned { hash, .. } = &findings.planning else { return None };
    let already_failed = before.failed_plan.as_ref() == Some(hash)
        && before.observed_generation == findings.deployment.metadata.generation;
    let runs = findings.target.is_some_and(|(target, _)| target.plan == *hash);
    let another_serves = findings.serving.as_ref().is_some_and(|serving| serving != hash);
    (already_failed || (is_stuck && runs && another_serves)).then(|| hash.clone())
}

fn desired_functions(target: &Revision) -> u64 {
    target.functions().map(|function| u64::from(function.replicas)).sum()
}

fn ready_functions(target: &Revision, pods: &[PodView]) -> usize {
    let ready = pods.iter().filter(|pod| pod.is_sound() && pod.ready);
    ready
        .filter(|pod| {
            target.functions().any(|function| {
                function.name == pod.function
                    && function.identity == pod.identity
                    && pod.replica < function.replicas
            })
        })
        .count()
}

fn saving(plan: &MoEPlanSpec) -> String {
    match (plan.profile, plan.numbers.savings.mix) {
        (ProfileSource::Prior, _) | (_, None) => "n/a".to_owned(),
        // A warning means that the figures are assumed.
        _ if plan.warning.is_some() => "n/a".to_owned(),
        // Possible in mode Always; the plan has the figure.
        (_, Some(share)) if share < 0.0 => "n/a (costs more)".to_owned(),
        (_, Some(share)) => format!("{:.0} %", share * 100.0),
    }
}

fn issues(findings: &StatusInputs<'_>) -> Vec<StatusIssue> {
    let mut all = findings.issues.clone();
    match &findings.planning {
        PlanState::Inspecting { issue: Some(issue) } | PlanState::Refused(issue) => {
            all.push(issue.clone());
        }
        PlanState::Inspecting { issue: None } | PlanState::Planning | PlanState::Planned { .. } => {}
    }
    let mut pods: Vec<&PodView> =
        findings.pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none()).collect();
    pods.sort_by_key(|pod| &pod.name);
    for pod in pods {
        if let Some(issue) = pod.fault.as_ref().or(pod.issue.as_ref()) {
            all.push(StatusIssue::new(issue.reason, format!("{}: {}", pod.name, issue.message)));
        }
    }
    all
}

fn ready(findings: &StatusInputs<'_>, issues: &[StatusIssue]) -> ConditionContent {
    let serving = findings.pods.iter().filter(|pod| pod.is_main && pod.is_sound() && pod.ready).count();
    let wanted_mains = findings.deployment.spec.main_functions() as usize;
    match findings.target {
        _ if findings.demanded.phase == ScalingPhase::Asleep => ConditionContent::met(
            "Asleep",
            "Scaled to zero; the next request wakes the model and waits for it.",
        ),
        _ if serving == 0 && issues.is_empty() && findings.demanded.is_wake() => {
            ConditionContent::met("Waking", "Waking; requests are queued until a main function is ready.")
        }
        _ if serving >= wanted_mains => ConditionContent::met("Serving", "The endpoint serves requests."),
        _ if serving > 0 => {
            let message = format!(
                "The endpoint serves requests: {serving} of {wanted_mains} main functions are ready."
            );
            ConditionContent::met("Serving", message)
        }
        None if findings.deployment.spec.mode == Mode::Advisory && issues.is_empty() => {
            ConditionContent::unmet("AwaitingAcceptance", NOT_ACCEPTED)
        }
        target => {
            let ready = target.map(|(target, _)| readiness_summary(target, findings.pods));
            match (issues.first(), ready) {
                (Some(issue), ready) => {
                    let message = ready.unwrap_or_else(|| "No plan yet".to_owned());
                    ConditionContent::unmet(issue.reason, format!("{message}; {}", issue.message))
                }
                (None, Some(ready)) => ConditionContent::unmet("Starting", format!("{ready}.")),
                (None, None) => ConditionContent::unmet("Starting", NO_PLAN),
            }
        }
    }
}

fn planned(findings: &StatusInputs<'_>) -> ConditionContent {
    match &findings.planning {
        PlanState::Inspecting { issue: None } => {
            ConditionContent::unmet("Inspecting", "Inspecting the model.")
        }
        PlanState::Planning => ConditionContent::unmet("Planning", "Planning."),
        PlanState::Inspecting { issue: Some(issue) } | PlanState::Refused(issue) => {
            ConditionContent::unmet(issue.reason, issue.message.clone())
        }
        PlanState::Planned { hash, plan } => {
            let reason = match plan.profile {
                ProfileSource::Prior => "PriorProfile",
                ProfileSource::Measured => "MeasuredProfile",
                ProfileSource::Supplied => "SuppliedProfile",
            };
            let (assumed, remedy) = match plan.profile {
                ProfileSource::Prior => ("the prior profile", "wait for the measured profile"),
                // A measured profile has assumed times only for the GPU of the main function.
                ProfileSource::Measured | ProfileSource::Supplied => (
                    "assumed times of the GPU",
                    "supply a profile that was measured on the GPU (spec.profile)",
                ),
            };
            let warning = plan.warning.as_ref().map(|warning| {
                format!("; limits not met on {assumed}: {warning}; raise spec.slo, or {remedy}")
            });
            let profiling = findings.profiling.as_ref().map(|note| format!("; {note}"));
            let even = "; assumes uniform expert usage until requests are observed";
            let even = plan.prediction.is_none().then(|| even.to_owned());
            let repriced = "; the price list of the platform applies, not spec.pricing";
            let repriced = findings.repriced.then(|| repriced.to_owned());
            let notes = [even, repriced, profiling, warning].into_iter().flatten().collect::<String>();
            ConditionContent::met(reason, format!("Plan {hash}{notes}."))
        }
    }
}

fn progressing(findings: &StatusInputs<'_>, last_progress: Timestamp) -> ConditionContent {
    let (reason, clause, limit) = match (&findings.planning, findings.target) {
        (_, Some((target, _))) if findings.demanded.phase == ScalingPhase::Asleep => {
            let message = format!("Scaled to zero; plan {} starts with the next request.", target.plan);
            return ConditionContent::unmet("Asleep", message);
        }
        // The running revision may not match the spec.
        (PlanState::Inspecting { .. }, _) => {
            ("Inspecting", "inspecting the model".to_owned(), PLANNING_DEADLINE)
        }
        (PlanState::Planning, _) => ("Planning", "planning".to_owned(), PLANNING_DEADLINE),
        (_, Some((target, _))) if findings.settled => {
            return ConditionContent::unmet("Settled", format!("Plan {} is rolled out.", target.plan));
        }
        (_, Some((target, _))) if findings.awaits_turn => {
            let message = format!(
                "Waiting for its turn to roll out plan {} with this version of the operator, which rolls out a \
                 few deployments at a time; the present functions serve until then.",
                target.plan
            );
            return ConditionContent::met("WaitsItsTurn", message);
        }
        (_, Some((target, _))) => {
            let ready = readiness_summary(target, findings.pods);
            ("RollingOut", format!("rolling out plan {}: {ready}", target.plan), ROLLOUT_DEADLINE)
        }
        (PlanState::Refused(issue), None) => {
            return ConditionContent::unmet(issue.reason, "No plan; see condition Planned.");
        }
        (PlanState::Planned { .. }, None) => {
            return ConditionContent::unmet("AwaitingAcceptance", NOT_ACCEPTED);
        }
    };
    // Terminating main functions finish their requests first.
    let ending = findings
        .pods
        .iter()
        .any(|pod| pod.is_main && pod.fault.is_none() && pod.ends_by.is_some_and(|end| findings.now < end));
    if ending || findings.now.duration_since(last_progress) < limit {
        return ConditionContent::met(reason, sentence(&clause));
    }
    let minutes = limit.as_secs() / 60;
    let message = format!("no progress for {minutes} minutes ({clause}); check the pods and their logs");
    ConditionContent::unmet(PROGRESS_DEADLINE_EXCEEDED, message)
}

/// Describes how many functions of the target are ready.
fn readiness_summary(target: &Revision, pods: &[PodView]) -> String {
    format!("{} of {} functions are ready", ready_functions(target, pods), desired_functions(target))
}

fn degraded(issues: &[StatusIssue]) -> ConditionContent {
    match issues.first() {
        None => ConditionContent::unmet("AsExpected", "No known fault."),
        Some(first) => {
            let messages: Vec<&str> = issues.iter().map(|issue| issue.message.as_str()).collect();
            ConditionContent::met(first.reason, messages.join("; "))
        }
    }
}

fn active(findings: &StatusInputs<'_>) -> ConditionContent {
    if findings.demanded.phase == ScalingPhase::Asleep {
        ConditionContent::unmet("Asleep", scaled_to_zero(findings.deployment.spec.idle_window()))
    } else if findings.target.is_some() {
        let woken = findings.demanded.timeline.as_ref();
        let woken = woken.map_or_else(String::new, |wake| {
            format!("; {}", timeline(wake, findings.demanded.planning.as_ref()))
        });
        ConditionContent::met("Running", format!("Functions are running{woken}."))
    } else if findings.deployment.spec.mode == Mode::Advisory {
        ConditionContent::unmet("Advisory", "No functions; set spec.acceptedPlan to start a plan.")
    } else {
        ConditionContent::unmet("NoPlan", NO_PLAN)
    }
}
