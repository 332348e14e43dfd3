//! Ownership of objects: metadata of owned objects, and checks of the owner.

use super::names;
use super::status_issue::StatusIssue;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use remoe_api::MoEDeployment;

/// Reason of an issue: another owner has an object of the desired name.
pub(crate) const NAME_TAKEN: &str = "NameTaken";

/// Returns name, labels and owner reference of an object that belongs to `owner` and is deleted with it.
pub(crate) fn owned_meta(owner: &MoEDeployment, name: impl FnOnce(&str) -> String) -> ObjectMeta {
    let deployment = owner.name_any();
    ObjectMeta {
        name: Some(name(&deployment)),
        namespace: owner.namespace(),
        labels: Some(names::labels(&deployment)),
        // Only an object that was read from the API has a UID to refer to.
        owner_references: owner.controller_owner_ref(&()).map(|reference| vec![reference]),
        ..ObjectMeta::default()
    }
}

/// Returns whether the controller of `object` is the one with `uid`.
pub(crate) fn is_owned_by<K: Resource>(object: &K, uid: &str) -> bool {
    object.owner_references().iter().any(|owner| owner.controller == Some(true) && owner.uid == uid)
}

/// Returns the issue about an object whose name another owner has taken.
pub(crate) fn name_taken<K: Resource<DynamicType = ()>>(wanted: &K) -> StatusIssue {
    let (kind, name) = (K::kind(&()), wanted.name_any());
    StatusIssue::new(NAME_TAKEN, format!("{kind} {name} has another owner; rename it, or this deployment"))
}
