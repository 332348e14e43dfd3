//! Network policies of a deployment.

use super::OperatorEnvironment;
use crate::names::{COMPONENT, Component, component_selector};
use crate::ownership::owned_meta;
use crate::ports::{CONTROL_PORT, EXPERT_PORT, HEALTH_PORT, HTTP_PORT, METRICS_PORT};
use crate::source::ModelSource;
use ipnet::IpNet;
use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer,
    NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use remoe_api::{MoEDeployment, RELEASE_LABEL};
use remoe_hub::Egress;
use std::collections::BTreeMap;

/// Returns the network policies of `owner`. If a network plug-in enforces them, all other traffic is denied.
///
/// Ingress: gateways reach the HTTP port of main functions; without gateways every client does. The operator reaches
/// their control port. Main functions reach the expert port of remote functions, and the operator their health port.
/// Prometheus reaches all metrics ports.
///
/// Egress: pods that fetch weights reach DNS, public addresses and the allowed ranges, since buckets and hubs have no
/// fixed addresses. All reach the port of the trace collector at its peers, and DNS if it has a host name.
pub(super) fn policies(owner: &MoEDeployment, environment: &OperatorEnvironment) -> Vec<NetworkPolicy> {
    // An invalid source is refused before any pod is created.
    let fetched = ModelSource::parse(&owner.spec.model.source).is_ok_and(|source| source.is_fetched());
    let deployment = owner.name_any();
    let pods = |component| peer(None, Some(component_selector(&deployment, component)));
    // The labels of the chart.
    let of_release = |component: &str| {
        let labels = [
            ("app.kubernetes.io/part-of", "remoe"),
            (RELEASE_LABEL, &environment.release),
            (COMPONENT, component),
        ];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        peer(Some(in_namespace(&environment.operator_namespace)), Some(BTreeMap::from(labels)))
    };
    let prometheus = || peer(Some(in_namespace(&environment.metrics_namespace)), None);
    let clients = environment.gateway.as_ref().map(|_| vec![of_release("gateway")]);
    let to_sources = || if fetched { sources(owner, environment) } else { Vec::new() };
    let to_experts = NetworkPolicyEgressRule {
        to: Some(vec![pods(Component::RemoteExpert)]),
        ports: Some(tcp(EXPERT_PORT)),
    };
    let to_collector = || {
        let trace_collector = environment.trace_collector.as_ref();
        trace_collector.into_iter().flat_map(move |trace_collector| {
            let port = NetworkPolicyEgressRule {
                to: Some(trace_collector.peers().to_vec()),
                ports: Some(tcp(trace_collector.port())),
            };
            let names = (trace_collector.has_name() && !fetched).then(to_dns);
            std::iter::once(port).chain(names)
        })
    };
    vec![
        policy(
            owner,
            Component::Main,
            vec![
                NetworkPolicyIngressRule { from: clients, ports: Some(tcp(HTTP_PORT)) },
                from(vec![of_release("operator")], CONTROL_PORT),
                from(vec![prometheus()], METRICS_PORT),
            ],
            std::iter::once(to_experts).chain(to_sources()).chain(to_collector()).collect(),
        ),
        policy(
            owner,
            Component::RemoteExpert,
            vec![
                from(vec![pods(Component::Main)], EXPERT_PORT),
                from(vec![of_release("operator")], HEALTH_PORT),
                from(vec![prometheus()], METRICS_PORT),
            ],
            to_sources().into_iter().chain(to_collector()).collect(),
        ),
        policy(owner, Component::Inspector, Vec::new(), to_sources()),
        policy(owner, Component::Profiler, Vec::new(), to_sources()),
    ]
}

/// Returns the egress rules of pods that fetch weights: to sources, to DNS, and, if ambient credentials are allowed,
/// to the services that issue them.
fn sources(owner: &MoEDeployment, environment: &OperatorEnvironment) -> Vec<NetworkPolicyEgressRule> {
    let egress = &environment.sources.egress;
    let blocks = egress.public_blocks().into_iter().chain(egress.allowed_blocks());
    let to = blocks.map(|(block, except)| address_peer(block, &except)).collect();
    let mut rules = vec![NetworkPolicyEgressRule { to: Some(to), ports: None }, to_dns()];
    if environment.sources.ambient_credentials && owner.spec.model.ambient_credentials {
        let services = Egress::credential_services().into_iter().map(|block| address_peer(block, &[]));
        rules.push(NetworkPolicyEgressRule { to: Some(services.collect()), ports: Some(tcp(80)) });
    }
    rules
}

fn address_peer(block: IpNet, except: &[IpNet]) -> NetworkPolicyPeer {
    let except: Vec<String> = except.iter().map(IpNet::to_string).collect();
    let block = IPBlock { cidr: block.to_string(), except: (!except.is_empty()).then_some(except) };
    NetworkPolicyPeer { ip_block: Some(block), ..NetworkPolicyPeer::default() }
}

fn to_dns() -> NetworkPolicyEgressRule {
    NetworkPolicyEgressRule { to: None, ports: Some(dns()) }
}

fn policy(
    owner: &MoEDeployment,
    component: Component,
    ingress: Vec<NetworkPolicyIngressRule>,
    egress: Vec<NetworkPolicyEgressRule>,
) -> NetworkPolicy {
    let selector = component_selector(&owner.name_any(), component);
    // An empty list denies all traffic like an absent one, and the API server drops it.
    let non_empty = |rules: Vec<NetworkPolicyIngressRule>| (!rules.is_empty()).then_some(rules);
    NetworkPolicy {
        metadata: owned_meta(owner, |name| format!("{name}-{}", component.name())),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(LabelSelector { match_labels: Some(selector), match_expressions: None }),
            policy_types: Some(vec!["Ingress".to_owned(), "Egress".to_owned()]),
            ingress: non_empty(ingress),
            egress: (!egress.is_empty()).then_some(egress),
        }),
    }
}

fn from(peers: Vec<NetworkPolicyPeer>, port: u16) -> NetworkPolicyIngressRule {
    NetworkPolicyIngressRule { from: Some(peers), ports: Some(tcp(port)) }
}

fn tcp(port: u16) -> Vec<NetworkPolicyPort> {
    vec![NetworkPolicyPort {
        protocol: Some("TCP".to_owned()),
        port: Some(IntOrString::Int(port.into())),
        end_port: None,
    }]
}

/// Returns the ports of DNS.
fn dns() -> Vec<NetworkPolicyPort> {
    let by_tcp = tcp(53);
    let by_udp =
        by_tcp.iter().map(|port| NetworkPolicyPort { protocol: Some("UDP".to_owned()), ..port.clone() });
    by_udp.chain(by_tcp.clone()).collect()
}

fn in_namespace(name: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("kubernetes.io/metadata.name".to_owned(), name.to_owned())])
}

fn peer(
    namespace: Option<BTreeMap<String, String>>,
    pods: Option<BTreeMap<String, String>>,
) -> NetworkPolicyPeer {
    let selector = |labels| LabelSelector { match_labels: Some(labels), match_expressions: None };
    NetworkPolicyPeer {
        namespace_selector: namespace.map(selector),
        pod_selector: pods.map(selector),
        ip_block: None,
    }
}
