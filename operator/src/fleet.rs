//! How many functions of all deployments are silent: what a look at one of them cannot see.

use super::pods::{NOT_READY, PodView};

/// How many functions say nothing, of how many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Silence {
    /// Functions that are there to stay.
    pub there: usize,
    /// Those among them that were ready and are not.
    pub silent: usize,
    /// Those that are on their way to replace others.
    pub coming: usize,
}

impl Silence {
    /// Among `pods`.
    pub fn among(pods: &[PodView]) -> Self {
        let there = || pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none());
        let is_lost = |pod: &&PodView| pod.fault.as_ref().is_some_and(|fault| fault.reason == NOT_READY);
        Self {
            there: there().count(),
            silent: there().filter(|pod| pod.faulty_at.is_some() || is_lost(pod)).count(),
            coming: there().filter(|pod| is_coming(pods, pod) && pod.faulty_at.is_none()).count(),
        }
    }

    /// Both together.
    pub fn and(self, other: Self) -> Self {
        Self {
            there: self.there.saturating_add(other.there),
            silent: self.silent.saturating_add(other.silent),
            coming: self.coming.saturating_add(other.coming),
        }
    }
}

/// Whether `pod` is on its way to replace another one: not where its place is filled without it.
pub(super) fn is_coming(pods: &[PodView], pod: &PodView) -> bool {
    let fills = |other: &PodView| {
        other.owned && other.is_sound() && other.ready && other.name.place == pod.name.place
    };
    pod.is_sound() && !pod.ready && pod.name.incarnation > 0 && !pods.iter().any(fills)
}
