//! Counts of unready functions over all deployments: a reconcile of one deployment does not see the others. Pure.
//!
//! Each namespace is one tenant and has the same weight, whatever runs and fails in it.

use super::pods::PodView;
use super::status_issue::NOT_READY;
use std::collections::BTreeMap;

/// One in this many pods may be a pending replacement; at least one may.
const REPLACEMENT_SHARE: usize = 4;
/// More than one in this many counts as many.
const MANY_SHARE: usize = 3;

/// Counts of functions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FunctionCounts {
    /// Functions that are not terminating.
    pub functions: usize,
    /// Functions among them that were ready and no longer are.
    pub unready: usize,
    /// Pending replacements among them.
    pub replacing: usize,
}

impl FunctionCounts {
    /// Counts the functions among `pods`.
    pub(crate) fn of_pods(pods: &[PodView]) -> Self {
        let staying = || pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none());
        let is_lost = |pod: &&PodView| pod.fault.as_ref().is_some_and(|fault| fault.reason == NOT_READY);
        Self {
            functions: staying().count(),
            unready: staying().filter(|pod| pod.faulty_at.is_some() || is_lost(pod)).count(),
            replacing: staying()
                .filter(|pod| is_pending_replacement(pods, pod) && pod.faulty_at.is_none())
                .count(),
        }
    }

    /// Adds both counts.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            functions: self.functions.saturating_add(other.functions),
            unready: self.unready.saturating_add(other.unready),
            replacing: self.replacing.saturating_add(other.replacing),
        }
    }

    /// Returns the maximum number of concurrent replacements.
    pub(super) fn max_replacements(self) -> usize {
        (self.functions / REPLACEMENT_SHARE).max(1)
    }

    /// Returns whether so many are unready that a common cause is likely.
    pub(super) fn are_many_unready(self) -> bool {
        are_many(self.unready, self.functions)
    }
}

/// Returns whether `some` of `all` counts as many.
pub(super) fn are_many(some: usize, all: usize) -> bool {
    some.saturating_mul(MANY_SHARE) > all
}

/// Function counts of all deployments except one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OtherDeployments {
    /// Counts of the other deployments in the same namespace.
    pub namespace: FunctionCounts,
    /// Counts of all other namespaces. Pending replacements of each are capped at the namespace's own maximum, so
    /// that endless failures in one do not block the others.
    pub elsewhere: FunctionCounts,
    /// Other namespaces that have functions.
    pub namespaces: usize,
    /// Namespaces among them in which many functions are unready.
    pub unready_namespaces: usize,
}

impl OtherDeployments {
    /// Sums up `deployments`, each with its namespace, from the view of a deployment in `namespace`.
    pub(crate) fn sum<'a>(
        namespace: &str,
        deployments: impl IntoIterator<Item = (&'a str, FunctionCounts)>,
    ) -> Self {
        let mut by_namespace = BTreeMap::<&str, FunctionCounts>::new();
        for (name, function_counts) in deployments {
            let known = by_namespace.entry(name).or_default();
            *known = known.plus(function_counts);
        }
        let namespace = by_namespace.remove(namespace).unwrap_or_default();
        let others = || by_namespace.values().filter(|others| others.functions > 0);
        let capped = |others: &FunctionCounts| FunctionCounts {
            replacing: others.replacing.min(others.max_replacements()),
            ..*others
        };
        Self {
            namespace,
            elsewhere: others().map(capped).fold(FunctionCounts::default(), FunctionCounts::plus),
            namespaces: others().count(),
            unready_namespaces: others().filter(|others| others.are_many_unready()).count(),
        }
    }
}

/// Returns whether `pod` is a replacement that is not ready yet, unless another pod already serves as this replica.
pub(super) fn is_pending_replacement(pods: &[PodView], pod: &PodView) -> bool {
    let serves_place = |other: &PodView| {
        other.owned && other.is_sound() && other.ready && other.name.place == pod.name.place
    };
    pod.is_sound() && !pod.ready && pod.name.incarnation > 0 && !pods.iter().any(serves_place)
}
