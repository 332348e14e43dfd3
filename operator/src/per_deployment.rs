//! What this process knows of each deployment between two looks, and may forget: nothing is decided that a new look would not.

use super::api::MoEDeployment;
use kube::runtime::reflector::ObjectRef;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value for each deployment.
#[derive(Default)]
pub(super) struct PerDeployment<T>(Mutex<HashMap<ObjectRef<MoEDeployment>, T>>);

impl<T: Clone + Default> PerDeployment<T> {
    /// That of `owner`; the default where nothing is known.
    pub(super) fn of(&self, owner: &MoEDeployment) -> T {
        self.lock().get(&ObjectRef::from_obj(owner)).cloned().unwrap_or_default()
    }

    /// Those of all deployments but `owner`, each with its namespace.
    pub(super) fn but(&self, owner: &MoEDeployment) -> Vec<(String, T)> {
        let owner = ObjectRef::from_obj(owner);
        let values = self.lock();
        let others = values.iter().filter(|(key, _)| **key != owner);
        others.map(|(key, value)| (key.namespace.clone().unwrap_or_default(), value.clone())).collect()
    }

    /// Takes note of `value` for `owner`.
    pub(super) fn note(&self, owner: &MoEDeployment, value: T) {
        self.lock().insert(ObjectRef::from_obj(owner), value);
    }

    /// That of `owner`, which is not known any more until it is noted again; the default where nothing is known.
    pub(super) fn take(&self, owner: &MoEDeployment) -> T {
        self.lock().remove(&ObjectRef::from_obj(owner)).unwrap_or_default()
    }

    /// Forgets a deployment.
    pub(super) fn forget(&self, deployment: &ObjectRef<MoEDeployment>) {
        self.lock().remove(deployment);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectRef<MoEDeployment>, T>> {
        // Every change is one insertion or removal: a panic elsewhere cannot have left it half-done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
