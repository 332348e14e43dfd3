//! What a deployment looks like from outside. Pure: a function of what was observed and decided.

use super::api::{
    ConditionType, MoEDeployment, MoEDeploymentStatus, MoEPlanSpec, Mode, ModelStatus, ProfileSource,
};
use super::build::{HTTP_PORT, Revision};
use super::conditions::Verdict;
use super::names::{Component, component_selector, selector_text};
use super::pods::{PodView, Trouble};
use jiff::Timestamp;
use kube::ResourceExt;

/// How planning stands.
#[derive(Debug, Clone, PartialEq)]
pub enum PlanState {
    /// The model is being looked at.
    Inspecting {
        /// What keeps the inspector.
        trouble: Option<Trouble>,
    },
    /// There is no plan for the present spec.
    Refused(Trouble),
    /// There is.
    Planned {
        /// Its hash.
        hash: String,
        /// The plan.
        plan: Box<MoEPlanSpec>,
    },
}

/// Everything that the status says something about.
#[derive(Debug, Clone)]
pub struct Findings<'a> {
    /// The deployment.
    pub deployment: &'a MoEDeployment,
    /// The checkpoint, once it was looked at.
    pub model: Option<ModelStatus>,
    /// How planning stands.
    pub planning: &'a PlanState,
    /// What is to run.
    pub target: Option<(&'a Revision, &'a MoEPlanSpec)>,
    /// The plan that main functions were last told of.
    pub running: Option<&'a str>,
    /// The pods of functions.
    pub pods: &'a [PodView],
    /// What went wrong when this was brought about.
    pub troubles: Vec<Trouble>,
    /// Whether everything is as it is to be.
    pub settled: bool,
    /// When.
    pub now: Timestamp,
}

/// The status that follows from the findings.
pub fn status(findings: &Findings<'_>) -> MoEDeploymentStatus {
    let owner = findings.deployment;
    let before = owner.status.clone().unwrap_or_default();
    let name = owner.name_any();
    let troubles = troubles(findings);
    let verdicts = [
        (ConditionType::Ready, ready(findings, &troubles)),
        (ConditionType::Planned, planned(findings)),
        (ConditionType::Progressing, progressing(findings)),
        (ConditionType::Degraded, degraded(&troubles)),
        (ConditionType::Active, active(findings)),
    ];
    let conditions = verdicts.map(|(of, verdict)| {
        verdict.condition(of, before.condition(of), owner.metadata.generation, findings.now)
    });
    let target = findings.target.map(|(revision, _)| revision);
    let shown = findings.running.map(str::to_owned).or_else(|| target.map(|target| target.plan.clone()));
    let proposed = match findings.planning {
        PlanState::Planned { hash, .. } => Some(hash.clone()),
        _ => None,
    };
    MoEDeploymentStatus {
        observed_generation: owner.metadata.generation,
        conditions: conditions.to_vec(),
        url: target
            .map(|_| format!("http://{name}.{}.svc:{HTTP_PORT}", owner.namespace().unwrap_or_default())),
        model: findings.model.clone().or(before.model),
        proposed_plan: proposed.filter(|proposed| shown.as_ref() != Some(proposed)),
        plan: shown,
        functions: target
            .map(|target| format!("{}/{}", ready_functions(target, findings.pods), wanted(target))),
        saving: findings.target.map(|(_, plan)| saving(plan)),
        replicas: target.map_or(0, |target| {
            let mains = findings.pods.iter().filter(|pod| pod.is_main && pod.is_sound());
            mains.filter(|pod| pod.identity == target.main.identity).count() as u32
        }),
        selector: Some(selector_text(&component_selector(&name, Component::Main))),
    }
}

fn wanted(target: &Revision) -> u32 {
    target.functions().map(|function| function.replicas).sum()
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
        (_, Some(share)) => format!("{:.0} %", share * 100.0),
    }
}

fn troubles(findings: &Findings<'_>) -> Vec<Trouble> {
    let mut all = findings.troubles.clone();
    match findings.planning {
        PlanState::Inspecting { trouble: Some(trouble) } | PlanState::Refused(trouble) => {
            all.push(trouble.clone());
        }
        PlanState::Inspecting { trouble: None } | PlanState::Planned { .. } => {}
    }
    let mut pods: Vec<&PodView> =
        findings.pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none()).collect();
    pods.sort_by_key(|pod| &pod.name);
    for pod in pods {
        if let Some(trouble) = pod.fault.as_ref().or(pod.trouble.as_ref()) {
            all.push(Trouble::new(trouble.reason, format!("{}: {}", pod.name, trouble.message)));
        }
    }
    all
}

fn ready(findings: &Findings<'_>, troubles: &[Trouble]) -> Verdict {
    let serving = findings.pods.iter().filter(|pod| pod.is_main && pod.is_sound() && pod.ready).count();
    match findings.target {
        _ if serving > 0 => Verdict::yes("Serving", "the endpoint answers"),
        None if findings.deployment.spec.mode == Mode::Advisory && troubles.is_empty() => {
            Verdict::no("AwaitingAcceptance", "no plan was accepted yet")
        }
        target => {
            let message = target.map_or_else(
                || "there is no plan to run yet".to_owned(),
                |(target, _)| {
                    let ready = ready_functions(target, findings.pods);
                    format!("{ready} of {} functions are ready", wanted(target))
                },
            );
            match troubles.first() {
                Some(trouble) => Verdict::no(trouble.reason, format!("{message}; {}", trouble.message)),
                None => Verdict::no("Starting", message),
            }
        }
    }
}

fn planned(findings: &Findings<'_>) -> Verdict {
    match findings.planning {
        PlanState::Inspecting { trouble: None } => Verdict::no("Inspecting", "the model is being inspected"),
        PlanState::Inspecting { trouble: Some(trouble) } | PlanState::Refused(trouble) => {
            Verdict::no(trouble.reason, trouble.message.clone())
        }
        PlanState::Planned { hash, plan } => {
            let reason = match plan.profile {
                ProfileSource::Prior => "PriorProfile",
                ProfileSource::Measured => "MeasuredProfile",
                ProfileSource::Supplied => "SuppliedProfile",
            };
            let warning = plan.warning.as_ref().map(|warning| format!("; warning: {warning}"));
            Verdict::yes(reason, format!("plan {hash}{}", warning.unwrap_or_default()))
        }
    }
}

fn progressing(findings: &Findings<'_>) -> Verdict {
    let Some((target, _)) = findings.target else {
        return match findings.planning {
            PlanState::Inspecting { .. } => Verdict::yes("Inspecting", "the model is being inspected"),
            PlanState::Refused(trouble) => Verdict::no(trouble.reason, "there is no plan to run"),
            PlanState::Planned { .. } => Verdict::no("AwaitingAcceptance", "no plan was accepted yet"),
        };
    };
    if findings.settled {
        return Verdict::no("Settled", format!("everything is as plan {} has it", target.plan));
    }
    Verdict::yes("RollingOut", format!("bringing about plan {}", target.plan))
}

fn degraded(troubles: &[Trouble]) -> Verdict {
    match troubles.first() {
        None => Verdict::no("AsExpected", "nothing is known to be wrong"),
        Some(first) => {
            let messages: Vec<&str> = troubles.iter().map(|trouble| trouble.message.as_str()).collect();
            Verdict::yes(first.reason, messages.join("; "))
        }
    }
}

fn active(findings: &Findings<'_>) -> Verdict {
    if findings.target.is_some() {
        Verdict::yes("Running", "functions run")
    } else if findings.deployment.spec.mode == Mode::Advisory {
        Verdict::no("Advisory", "functions run once a plan is accepted: set spec.acceptedPlan")
    } else {
        Verdict::no("NoPlan", "there is no plan to run yet")
    }
}
