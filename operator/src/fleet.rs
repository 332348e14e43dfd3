//! How many functions of all deployments are silent: what a look at one of them cannot see.

use super::api::MoEDeployment;
use super::pods::{NOT_READY, PodView};
use kube::runtime::reflector::ObjectRef;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

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
        let is_coming = |pod: &&PodView| pod.is_sound() && !pod.ready && pod.name.incarnation > 0;
        Self {
            there: there().count(),
            silent: there().filter(|pod| pod.faulty_at.is_some() || is_lost(pod)).count(),
            coming: there().filter(|pod| is_coming(pod) && pod.faulty_at.is_none()).count(),
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

/// What the last look at each deployment saw.
#[derive(Default)]
pub(super) struct Fleet {
    deployments: Mutex<HashMap<ObjectRef<MoEDeployment>, Silence>>,
}

impl Fleet {
    /// All deployments but `owner`.
    pub(super) fn but(&self, owner: &MoEDeployment) -> Silence {
        let owner = ObjectRef::from_obj(owner);
        let deployments = self.lock();
        let others = deployments.iter().filter(|(key, _)| **key != owner);
        others.fold(Silence::default(), |sum, (_, silence)| sum.and(*silence))
    }

    /// Takes note of what a look at `owner` saw.
    pub(super) fn note(&self, owner: &MoEDeployment, silence: Silence) {
        self.lock().insert(ObjectRef::from_obj(owner), silence);
    }

    /// Forgets a deployment.
    pub(super) fn forget(&self, deployment: &ObjectRef<MoEDeployment>) {
        self.lock().remove(deployment);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, Silence>> {
        // Every change is one insertion or removal: a panic elsewhere cannot have left it half-done.
        self.deployments.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
