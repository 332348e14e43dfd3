//! Functions of all deployments that are not ready: a reconcile of one deployment cannot see those of others. Pure.
//!
//! Namespaces are tenants: each is one voice among the others, whatever runs and fails in it.

use super::pods::PodView;
use super::status_issue::NOT_READY;
use std::collections::BTreeMap;

/// One pod in so many may be on its way to replace another, and at least one.
const AT_ONCE: usize = 4;
/// More than one in so many is many.
const MANY: usize = 3;

/// How many functions say nothing, of how many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FunctionCounts {
    /// Functions that are there to stay.
    pub functions: usize,
    /// Functions among them that were ready and are not.
    pub unready: usize,
    /// Functions that are on their way to replace others.
    pub replacing: usize,
}

impl FunctionCounts {
    /// Among `pods`.
    pub(crate) fn of_pods(pods: &[PodView]) -> Self {
        let there = || pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none());
        let is_lost = |pod: &&PodView| pod.fault.as_ref().is_some_and(|fault| fault.reason == NOT_READY);
        Self {
            functions: there().count(),
            unready: there().filter(|pod| pod.faulty_at.is_some() || is_lost(pod)).count(),
            replacing: there()
                .filter(|pod| is_pending_replacement(pods, pod) && pod.faulty_at.is_none())
                .count(),
        }
    }

    /// Both together.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            functions: self.functions.saturating_add(other.functions),
            unready: self.unready.saturating_add(other.unready),
            replacing: self.replacing.saturating_add(other.replacing),
        }
    }

    /// How many pods may be on their way to replace others at most.
    pub(super) fn max_replacements(self) -> usize {
        (self.functions / AT_ONCE).max(1)
    }

    /// Reports if so many are silent that more than a single function must have failed.
    pub(super) fn are_many_unready(self) -> bool {
        are_many(self.unready, self.functions)
    }
}

/// Reports if `some` of `all` are many.
pub(super) fn are_many(some: usize, all: usize) -> bool {
    some.saturating_mul(MANY) > all
}

/// Functions of all deployments but one, as they count for that one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OtherDeployments {
    /// Functions of the other deployments of its namespace.
    pub namespace: FunctionCounts,
    /// Functions of all other namespaces. Those that are on their way count as far as their namespace may have them: whose
    /// functions fail without end takes no more room from others than that.
    pub elsewhere: FunctionCounts,
    /// Other namespaces that have functions.
    pub namespaces: usize,
    /// Namespaces among them in which many functions are silent.
    pub unready_namespaces: usize,
}

impl OtherDeployments {
    /// Sums up `deployments`, each with its namespace, as the others of a deployment in `namespace`.
    pub(crate) fn of<'a>(
        namespace: &str,
        deployments: impl IntoIterator<Item = (&'a str, FunctionCounts)>,
    ) -> Self {
        let mut by_namespace = BTreeMap::<&str, FunctionCounts>::new();
        for (name, function_counts) in deployments {
            let known = by_namespace.entry(name).or_default();
            *known = known.and(function_counts);
        }
        let namespace = by_namespace.remove(namespace).unwrap_or_default();
        let others = || by_namespace.values().filter(|others| others.functions > 0);
        let within = |others: &FunctionCounts| FunctionCounts {
            replacing: others.replacing.min(others.max_replacements()),
            ..*others
        };
        Self {
            namespace,
            elsewhere: others().map(within).fold(FunctionCounts::default(), FunctionCounts::and),
            namespaces: others().count(),
            unready_namespaces: others().filter(|others| others.are_many_unready()).count(),
        }
    }
}

/// Reports if `pod` is on its way to replace another one. It is not where another pod already fills its place.
pub(super) fn is_pending_replacement(pods: &[PodView], pod: &PodView) -> bool {
    let fills = |other: &PodView| {
        other.owned && other.is_sound() && other.ready && other.name.place == pod.name.place
    };
    pod.is_sound() && !pod.ready && pod.name.incarnation > 0 && !pods.iter().any(fills)
}
