//! How many functions are replaced at once because they seem to be lost. Pure.
//!
//! A pod that stopped being ready may work all the same: its node, or the way to it, may be what is slow.
//! So such pods are replaced a few at a time, of a deployment, of a namespace and of all, and none while many are silent
//! together: then it is no pod that failed. Pods that certainly ended are replaced at once, whatever their number.
//!
//! A namespace is one tenant's: endless failures in it leave other namespaces their replacements.

use super::fleet::{OtherFunctions, SilentFunctions, are_many, is_coming};
use super::manifests::Revision;
use super::pods::PodView;
use super::trouble::{NOT_READY, Trouble};

/// How many pods that are presumed lost may be replaced in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Replacements {
    pub(super) left: usize,
    /// Why none is, although some seem to be lost.
    pub(super) held: Option<Trouble>,
}

impl Replacements {
    /// Returns the replacements that `others` allow of `pods`, of which those of `target` are to stay.
    pub(super) fn of(target: &Revision, pods: &[PodView], others: OtherFunctions) -> Self {
        let wanted = |pod: &PodView| {
            target.functions().any(|function| {
                function.name == pod.function
                    && function.identity == pod.identity
                    && pod.replica < function.most()
            })
        };
        let there: Vec<&PodView> =
            pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none() && wanted(pod)).collect();
        let is_silent = |pod: &PodView| pod.fault.as_ref().is_some_and(|fault| fault.reason == NOT_READY);
        let deployment = SilentFunctions {
            there: there.len(),
            silent: there.iter().filter(|pod| is_silent(pod)).count(),
            coming: there.iter().filter(|pod| is_coming(pods, pod)).count(),
        };
        let all = SilentFunctions::among(pods);
        let held = held(deployment, all, others);
        Self { left: if held.is_some() { 0 } else { left(deployment, all, others) }, held }
    }
}

/// Why none is replaced of a deployment whose functions that are to stay are `deployment`, and `all` with those that are not.
fn held(deployment: SilentFunctions, all: SilentFunctions, others: OtherFunctions) -> Option<Trouble> {
    let many = |what: String| {
        let message = format!(
            "{what} became unready together; replacement is paused until some recover or their nodes are \
             reported lost"
        );
        Some(Trouble::new("ManyNotReady", message))
    };
    if deployment.silent >= 2 && deployment.is_many() {
        return many(format!("{} of {} functions", deployment.silent, deployment.there));
    }
    let namespace = all.and(others.namespace);
    if deployment.silent > 0 && others.namespace.silent > 0 && namespace.is_many() {
        return many(format!("{} of {} functions of the namespace", namespace.silent, namespace.there));
    }
    // Where one namespace alone is silent, its functions are what failed.
    let silent = others.silent_namespaces + usize::from(namespace.is_many());
    let namespaces = others.namespaces + 1;
    if deployment.silent > 0 && silent >= 2 && are_many(silent, namespaces) {
        return many(format!("many functions in {silent} of {namespaces} namespaces"));
    }
    None
}

/// How many may be replaced now, where nothing holds them.
fn left(deployment: SilentFunctions, all: SilentFunctions, others: OtherFunctions) -> usize {
    let left = |of: SilentFunctions| of.most_coming().saturating_sub(of.coming);
    let namespace = all.and(others.namespace);
    // However many are on their way elsewhere, a namespace that has none of them may have one.
    let own = usize::from(namespace.coming == 0);
    left(deployment).min(left(namespace)).min(left(namespace.and(others.elsewhere)).max(own))
}
