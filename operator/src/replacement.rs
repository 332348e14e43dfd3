//! How many functions are replaced at once because they seem to be lost.
//!
//! A pod that stopped being ready may work all the same: its node, or the way to it, may be what is slow.
//! So such pods are replaced a few at a time, and none while many are silent together, of one deployment or of
//! all: then it is no pod that failed. Pods that certainly ended are replaced at once, whatever their number.

use super::fleet::{Silence, is_coming};
use super::pods::{NOT_READY, PodView, Trouble};
use super::rollout::Scene;

/// One pod in so many may be on its way to replace another, and at least one.
const AT_ONCE: usize = 4;
/// Where more than one pod in so many is silent, and at least two are, none is replaced.
const MANY: usize = 3;

/// How many pods that are presumed lost may be replaced in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Replacements {
    pub(super) left: usize,
    /// Why none is, although some seem to be lost.
    pub(super) held: Option<Trouble>,
}

impl Replacements {
    /// What `scene` allows.
    pub(super) fn of(scene: Scene<'_>) -> Self {
        let wanted = |pod: &PodView| {
            scene.target.functions().any(|function| {
                function.name == pod.function
                    && function.identity == pod.identity
                    && pod.replica < function.most()
            })
        };
        let there: Vec<&PodView> =
            scene.pods.iter().filter(|pod| pod.owned && pod.ends_by.is_none() && wanted(pod)).collect();
        let is_silent = |pod: &PodView| pod.fault.as_ref().is_some_and(|fault| fault.reason == NOT_READY);
        let silent = there.iter().filter(|pod| is_silent(pod)).count();
        if silent >= 2 && silent.saturating_mul(MANY) > there.len() {
            let message = format!(
                "{silent} of {} functions stopped being ready together; none of them is replaced before others \
                 are ready again, or the cluster says that their nodes are lost",
                there.len()
            );
            return Self { left: 0, held: Some(Trouble::new("ManyNotReady", message)) };
        }
        let fleet = Silence::among(scene.pods).and(scene.others);
        if scene.others.silent > 0 && silent > 0 && fleet.silent.saturating_mul(MANY) > fleet.there {
            let message = format!(
                "{} of {} functions of all deployments stopped being ready together; none of them is replaced \
                 before others are ready again, or the cluster says that their nodes are lost",
                fleet.silent, fleet.there
            );
            return Self { left: 0, held: Some(Trouble::new("ManyNotReady", message)) };
        }
        let coming = there.iter().filter(|pod| is_coming(scene.pods, pod)).count();
        let allowed = |there: usize, coming: usize| (there / AT_ONCE).max(1).saturating_sub(coming);
        Self { left: allowed(there.len(), coming).min(allowed(fleet.there, fleet.coming)), held: None }
    }
}
