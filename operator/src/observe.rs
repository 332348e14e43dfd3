//! What there is, read from the API in one go.

use super::api::{MoEDeployment, MoEPlan};
use super::calls::{CallError, Calls};
use super::names;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::{Resource, ResourceExt};
use std::collections::BTreeMap;
use tokio::try_join;

/// Everything that belongs to a deployment.
#[derive(Debug, Clone, Default)]
pub(super) struct Observed {
    /// Pods of functions and helpers.
    pub(super) pods: Vec<Pod>,
    /// Services.
    pub(super) services: Vec<Service>,
    /// Network policies.
    pub(super) network_policies: Vec<NetworkPolicy>,
    /// Disruption budgets.
    pub(super) budgets: Vec<PodDisruptionBudget>,
    /// Plans, the newest last.
    pub(super) plans: Vec<MoEPlan>,
    /// The facts of the checkpoint.
    pub(super) model: Option<ConfigMap>,
    /// The routing generations.
    pub(super) routing: Option<ConfigMap>,
}

/// Reads everything that belongs to `deployment`.
///
/// # Errors
/// A call that came to nothing.
pub(super) async fn observe(calls: &Calls, deployment: &MoEDeployment) -> Result<Observed, CallError> {
    let name = deployment.name_any();
    let labels = BTreeMap::from([(names::DEPLOYMENT.to_owned(), name.clone())]);
    let selector = names::selector_text(&labels);
    let (pods, services, network_policies, budgets, plans, maps) = try_join!(
        calls.list(&selector),
        calls.list(&selector),
        calls.list(&selector),
        calls.list(&selector),
        calls.plans(&selector),
        calls.list::<ConfigMap>(&selector),
    )?;
    let uid = deployment.uid().unwrap_or_default();
    // What belongs to an earlier deployment of the same name is on its way out.
    let map =
        |name: String| maps.iter().find(|map| map.name_any() == name && is_owned_by(*map, &uid)).cloned();
    Ok(Observed {
        pods,
        services,
        network_policies,
        budgets,
        plans: plans.into_iter().filter(|plan| is_owned_by(plan, &uid)).collect(),
        model: map(names::model_config_map(&name)),
        routing: map(names::routing_config_map(&name)),
    })
}

/// Whether the object goes with the owner that has `uid`.
pub(super) fn is_owned_by<K: Resource>(object: &K, uid: &str) -> bool {
    object.owner_references().iter().any(|owner| owner.controller == Some(true) && owner.uid == uid)
}
