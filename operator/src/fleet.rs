//! Functions of all deployments that are not ready: a reconcile of one deployment cannot see those of others. Pure.
//!
//! Namespaces are tenants: each is one voice among the others, whatever runs and fails in it.

use super::pods::PodView;
use super::trouble::NOT_READY;
use std::collections::BTreeMap;

/// One pod in so many may be on its way to replace another, and at least one.
const AT_ONCE: usize = 4;
/// More than one in so many is many.
const MANY: usize = 3;

/// How many functions say nothing, of how many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SilentFunctions {
    /// Functions that are there to stay.
    pub there: usize,
    /// Functions among them that were ready and are not.
    pub silent: usize,
    /// Functions that are on their way to replace others.
    pub coming: usize,
}

impl SilentFunctions {
    /// Among `pods`.
    pub(crate) fn among(pods: &[PodView]) -> Self {
        let there = || pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none());
        let is_lost = |pod: &&PodView| pod.fault.as_ref().is_some_and(|fault| fault.reason == NOT_READY);
        Self {
            there: there().count(),
            silent: there().filter(|pod| pod.faulty_at.is_some() || is_lost(pod)).count(),
            coming: there().filter(|pod| is_coming(pods, pod) && pod.faulty_at.is_none()).count(),
        }
    }

    /// Both together.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            there: self.there.saturating_add(other.there),
            silent: self.silent.saturating_add(other.silent),
            coming: self.coming.saturating_add(other.coming),
        }
    }

    /// How many pods may be on their way to replace others at most.
    pub(super) fn most_coming(self) -> usize {
        (self.there / AT_ONCE).max(1)
    }

    /// Reports if so many are silent that more than a single function must have failed.
    pub(super) fn is_many(self) -> bool {
        are_many(self.silent, self.there)
    }
}

/// Reports if `some` of `all` are many.
pub(super) fn are_many(some: usize, all: usize) -> bool {
    some.saturating_mul(MANY) > all
}

/// Functions of all deployments but one, as they count for that one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OtherFunctions {
    /// Functions of the other deployments of its namespace.
    pub namespace: SilentFunctions,
    /// Functions of all other namespaces. Those that are on their way count as far as their namespace may have them: whose
    /// functions fail without end takes no more room from others than that.
    pub elsewhere: SilentFunctions,
    /// Other namespaces that have functions.
    pub namespaces: usize,
    /// Namespaces among them in which many functions are silent.
    pub silent_namespaces: usize,
}

impl OtherFunctions {
    /// Sums up `deployments`, each with its namespace, as the others of a deployment in `namespace`.
    pub(crate) fn of<'a>(
        namespace: &str,
        deployments: impl IntoIterator<Item = (&'a str, SilentFunctions)>,
    ) -> Self {
        let mut by_namespace = BTreeMap::<&str, SilentFunctions>::new();
        for (name, silence) in deployments {
            let known = by_namespace.entry(name).or_default();
            *known = known.and(silence);
        }
        let namespace = by_namespace.remove(namespace).unwrap_or_default();
        let others = || by_namespace.values().filter(|others| others.there > 0);
        let within = |others: &SilentFunctions| SilentFunctions {
            coming: others.coming.min(others.most_coming()),
            ..*others
        };
        Self {
            namespace,
            elsewhere: others().map(within).fold(SilentFunctions::default(), SilentFunctions::and),
            namespaces: others().count(),
            silent_namespaces: others().filter(|others| others.is_many()).count(),
        }
    }
}

/// Reports if `pod` is on its way to replace another one. It is not where another pod already fills its place.
pub(super) fn is_coming(pods: &[PodView], pod: &PodView) -> bool {
    let fills = |other: &PodView| {
        other.owned && other.is_sound() && other.ready && other.name.place == pod.name.place
    };
    pod.is_sound() && !pod.ready && pod.name.incarnation > 0 && !pods.iter().any(fills)
}
