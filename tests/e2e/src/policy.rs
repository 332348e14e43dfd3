//! Evaluation of NetworkPolicies, as a network plug-in would enforce them. The test cluster has no such plug-in.

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use std::collections::BTreeMap;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Pod in terms of policies.
#[derive(Debug, Clone, Copy)]
pub struct PolicyEndpoint<'a> {
    /// Name of its namespace.
    pub namespace: &'a str,
    /// Labels of its namespace.
    pub of_namespace: &'a Labels,
    /// Labels of the pod.
    pub labels: &'a Labels,
}

/// Returns true if `policies` of the namespace of `to` allow `from` to reach its TCP port `port`.
#[must_use]
pub fn admits(
    policies: &[NetworkPolicy],
    from: PolicyEndpoint<'_>,
    to: PolicyEndpoint<'_>,
    port: u16,
) -> bool {
    let specs = policies.iter().filter_map(|policy| policy.spec.as_ref());
    let mut selecting = specs.filter(|spec| {
        let types = spec.policy_types.as_deref().unwrap_or_default();
        let selects = spec.pod_selector.as_ref().is_none_or(|selector| selects(selector, to.labels));
        selects && types.iter().any(|of| of == "Ingress")
    });
    let Some(first) = selecting.next() else { return true };
    std::iter::once(first).chain(selecting).any(|spec| {
        spec.ingress.iter().flatten().any(|rule| {
            let ports = rule.ports.as_deref().unwrap_or_default();
            let is_port = ports.is_empty()
                || ports
                    .iter()
                    .any(|each| each.port.is_none() || each.port == Some(IntOrString::Int(port.into())));
            let peers = rule.from.as_deref().unwrap_or_default();
            is_port && (peers.is_empty() || peers.iter().any(|peer| is_peer(peer, from, to)))
        })
    })
}

fn is_peer(peer: &NetworkPolicyPeer, from: PolicyEndpoint<'_>, to: PolicyEndpoint<'_>) -> bool {
    // Address blocks: none of the chart's blocks allows pods.
    if peer.ip_block.is_some() {
        return true;
    }
    let namespace = match &peer.namespace_selector {
        Some(selector) => selects(selector, from.of_namespace),
        None => from.namespace == to.namespace,
    };
    namespace && peer.pod_selector.as_ref().is_none_or(|selector| selects(selector, from.labels))
}

/// Returns true if `selector` matches `labels`. Expressions count as a match, which only makes a policy wider here.
fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value))
}
