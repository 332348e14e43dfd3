//! Services of a deployment.

use super::OperatorEnvironment;
use crate::names::{Component, component_selector};
use crate::ownership::owned_meta;
use crate::ports::{EXPERT_PORT, HTTP_PORT, METRICS_PORT};
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use remoe_api::MoEDeployment;

/// Returns the Services of the deployment. Those of functions are headless: behind a virtual address, gRPC and
/// kept-alive HTTP connections would all lead to one pod.
pub(super) fn services(owner: &MoEDeployment, environment: &OperatorEnvironment) -> Vec<Service> {
    let (http, metrics) = (("http", HTTP_PORT), ("metrics", METRICS_PORT));
    let front = match &environment.gateway {
        Some(gateway) => gateway_alias(owner, &gateway.name),
        None => service(owner, String::new(), Component::Main, &[http]),
    };
    vec![
        front,
        service(owner, "-main".to_owned(), Component::Main, &[http, metrics]),
        service(owner, "-remote".to_owned(), Component::RemoteExpert, &[("grpc", EXPERT_PORT), metrics]),
    ]
}

/// Returns a Service that makes the deployment's name an alias of the gateways' DNS name.
fn gateway_alias(owner: &MoEDeployment, gateway: &str) -> Service {
    Service {
        metadata: owned_meta(owner, str::to_owned),
        spec: Some(ServiceSpec {
            type_: Some("ExternalName".to_owned()),
            external_name: Some(gateway.to_owned()),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

fn service(owner: &MoEDeployment, suffix: String, to: Component, ports: &[(&str, u16)]) -> Service {
    let deployment = owner.name_any();
    let ports = ports.iter().map(|(name, number)| ServicePort {
        name: Some((*name).to_owned()),
        port: (*number).into(),
        target_port: Some(IntOrString::Int((*number).into())),
        protocol: Some("TCP".to_owned()),
        ..ServicePort::default()
    });
    Service {
        metadata: owned_meta(owner, |name| format!("{name}{suffix}")),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            cluster_ip: Some("None".to_owned()),
            selector: Some(component_selector(&deployment, to)),
            ports: Some(ports.collect()),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}
