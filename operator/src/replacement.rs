//! How many functions are replaced at once because they seem to be lost. Pure.
//!
//! A pod that stopped being ready may work all the same: its node, or the way to it, may be what is slow.
//! So such pods are replaced a few at a time, of a deployment, of a namespace and of all, and none while many are silent
//! together: then it is no pod that failed. Pods that certainly ended are replaced at once, whatever their number.
//!
//! A namespace is one tenant's: endless failures in it leave other namespaces their replacements.

use super::fleet::{FunctionCounts, OtherDeployments, are_many, is_pending_replacement};
use super::manifests::Revision;
use super::pods::PodView;
use super::status_issue::{NOT_READY, StatusIssue};

/// How many pods that are presumed lost may be replaced in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Replacements {
    pub(super) left: usize,
    /// Why none is, although some seem to be lost.
    pub(super) held: Option<StatusIssue>,
}

impl Replacements {
    /// Returns the replacements that `others` allow of `pods`, of which those of `target` are to stay.
    pub(super) fn of(target: &Revision, pods: &[PodView], others: OtherDeployments) -> Self {
        let wanted = |pod: &PodView| {
            target.functions().any(|function| {
                function.name == pod.function
                    && function.identity == pod.identity
                    && pod.replica < function.most()
            })
        };
        let functions: Vec<&PodView> =
            pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none() && wanted(pod)).collect();
        let is_silent = |pod: &PodView| pod.fault.as_ref().is_some_and(|fault| fault.reason == NOT_READY);
        let deployment = FunctionCounts {
            functions: functions.len(),
            unready: functions.iter().filter(|pod| is_silent(pod)).count(),
            replacing: functions.iter().filter(|pod| is_pending_replacement(pods, pod)).count(),
        };
        let all = FunctionCounts::of_pods(pods);
        let held = held(deployment, all, others);
        Self { left: if held.is_some() { 0 } else { left(deployment, all, others) }, held }
    }
}

/// Why none is replaced of a deployment whose functions that are to stay are `deployment`, and `all` with those that are not.
fn held(deployment: FunctionCounts, all: FunctionCounts, others: OtherDeployments) -> Option<StatusIssue> {
    let many = |what: String| {
        let message = format!(
            "{what} became unready together; replacement is paused until some recover or their nodes are \
             reported lost"
        );
        Some(StatusIssue::new("ManyNotReady", message))
    };
    if deployment.unready >= 2 && deployment.are_many_unready() {
        return many(format!("{} of {} functions", deployment.unready, deployment.functions));
    }
    let namespace = all.and(others.namespace);
    if deployment.unready > 0 && others.namespace.unready > 0 && namespace.are_many_unready() {
        return many(format!("{} of {} functions of the namespace", namespace.unready, namespace.functions));
    }
    // Where one namespace alone is silent, its functions are what failed.
    let silent = others.unready_namespaces + usize::from(namespace.are_many_unready());
    let namespaces = others.namespaces + 1;
    if deployment.unready > 0 && silent >= 2 && are_many(silent, namespaces) {
        return many(format!("many functions in {silent} of {namespaces} namespaces"));
    }
    None
}

/// How many may be replaced now, where nothing holds them.
fn left(deployment: FunctionCounts, all: FunctionCounts, others: OtherDeployments) -> usize {
    let left = |of: FunctionCounts| of.max_replacements().saturating_sub(of.replacing);
    let namespace = all.and(others.namespace);
    // However many are on their way elsewhere, a namespace that has none of them may have one.
    let own = usize::from(namespace.replacing == 0);
    left(deployment).min(left(namespace)).min(left(namespace.and(others.elsewhere)).max(own))
}
