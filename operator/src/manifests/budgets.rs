//! Disruption budgets of functions.

use super::Revision;
use crate::names::function_selector;
use crate::ownership::owned_meta;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use remoe_api::MoEDeployment;

/// Returns disruption budgets that let one replica of a function be evicted at a time. A function with one replica
/// has no budget, since it would block node drains.
///
/// `minAvailable` is a number: a percentage or `maxUnavailable` would refer to the scale of the pods' controller,
/// which counts only main functions.
pub(crate) fn budgets(owner: &MoEDeployment, revision: &Revision) -> Vec<PodDisruptionBudget> {
    let several = revision.functions().filter(|function| function.replicas > 1);
    let budget = |name: &str, replicas: u32| {
        let available = i32::try_from(replicas.saturating_sub(1)).unwrap_or(i32::MAX);
        let selector = function_selector(&owner.name_any(), name);
        PodDisruptionBudget {
            metadata: owned_meta(owner, |deployment| format!("{deployment}-{name}")),
            spec: Some(PodDisruptionBudgetSpec {
                min_available: Some(IntOrString::Int(available)),
                selector: Some(LabelSelector { match_labels: Some(selector), match_expressions: None }),
                // An unhealthy pod does not block node drains.
                unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
                max_unavailable: None,
            }),
            status: None,
        }
    };
    several.map(|function| budget(&function.name, function.replicas)).collect()
}
