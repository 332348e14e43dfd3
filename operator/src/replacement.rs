//! Limits how many presumably lost functions are replaced at once. Pure.
//!
//! A pod that stopped being ready may still work: its node or the network may be slow. So such pods are replaced a
//! few at a time per deployment, per namespace and overall, and none while many are unready together, which indicates
//! a common cause. Pods that certainly ended are replaced at once.
//!
//! Each namespace is one tenant: endless failures in one do not use up the replacements of others.

use super::fleet::{FunctionCounts, OtherDeployments, are_many, is_pending_replacement};
use super::manifests::Revision;
use super::pods::PodView;
use super::status_issue::{NOT_READY, StatusIssue};

/// Number of presumably lost pods that may be replaced in this step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Replacements {
    pub(super) allowed: usize,
    /// Reason why replacement is paused, if it is.
    pub(super) paused: Option<StatusIssue>,
}

impl Replacements {
    /// Computes the replacements among `pods`, of which those of `target` are wanted, given the counts of `others`.
    pub(super) fn compute(target: &Revision, pods: &[PodView], others: OtherDeployments) -> Self {
        let is_wanted = |pod: &PodView| {
            target.functions().any(|function| {
                function.name == pod.function
                    && function.identity == pod.identity
                    && pod.replica < function.total_replicas()
            })
        };
        let functions: Vec<&PodView> =
            pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none() && is_wanted(pod)).collect();
        let is_unready = |pod: &PodView| pod.fault.as_ref().is_some_and(|fault| fault.reason == NOT_READY);
        let deployment = FunctionCounts {
            functions: functions.len(),
            unready: functions.iter().filter(|pod| is_unready(pod)).count(),
            replacing: functions.iter().filter(|pod| is_pending_replacement(pods, pod)).count(),
        };
        let all = FunctionCounts::of_pods(pods);
        let paused = paused(deployment, all, others);
        Self { allowed: if paused.is_some() { 0 } else { allowed(deployment, all, others) }, paused }
    }
}

/// Returns why replacement is paused, if it is. `deployment` counts the wanted functions, `all` also counts the
/// others.
fn paused(deployment: FunctionCounts, all: FunctionCounts, others: OtherDeployments) -> Option<StatusIssue> {
    let paused_issue = |subject: String| {
        let message = format!(
            "{subject} became unready together; replacement is paused until some recover or their nodes are \
             reported lost"
        );
        Some(StatusIssue::new("ManyNotReady", message))
    };
    if deployment.unready >= 2 && deployment.are_many_unready() {
        return paused_issue(format!("{} of {} functions", deployment.unready, deployment.functions));
    }
    let namespace = all.plus(others.namespace);
    if deployment.unready > 0 && others.namespace.unready > 0 && namespace.are_many_unready() {
        return paused_issue(format!(
            "{} of {} functions of the namespace",
            namespace.unready, namespace.functions
        ));
    }
    // If a single namespace is unready, its own functions are the likely cause.
    let unready_namespaces = others.unready_namespaces + usize::from(namespace.are_many_unready());
    let namespaces = others.namespaces + 1;
    if deployment.unready > 0 && unready_namespaces >= 2 && are_many(unready_namespaces, namespaces) {
        return paused_issue(format!("many functions in {unready_namespaces} of {namespaces} namespaces"));
    }
    None
}

/// Returns how many functions may be replaced now, if replacement is not paused.
fn allowed(deployment: FunctionCounts, all: FunctionCounts, others: OtherDeployments) -> usize {
    let allowed = |of: FunctionCounts| of.max_replacements().saturating_sub(of.replacing);
    let namespace = all.plus(others.namespace);
    // A namespace without a pending replacement may always have one.
    let own = usize::from(namespace.replacing == 0);
    allowed(deployment).min(allowed(namespace)).min(allowed(namespace.plus(others.elsewhere)).max(own))
}
