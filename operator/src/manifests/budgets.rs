use super::Revision;
use crate::names::function_selector;
use crate::ownership::owned_meta;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use remoe_api::MoEDeployment;

/// One replica of a function may be evicted at a time. A function of one replica has no budget: it
/// would keep its node from ever being drained.
///
/// `minAvailable` as a number, since a percentage or `maxUnavailable` would be taken of the scale of the
/// pods' controller, which counts main functions only.
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
                // A pod that does not work keeps no node from being drained.
                unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
                max_unavailable: None,
            }),
            status: None,
        }
    };
    several.map(|function| budget(&function.name, function.replicas)).collect()
}
