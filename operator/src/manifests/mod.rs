//! The objects that a deployment consists of. Pure: the same values give the same objects.

mod budgets;
mod disk;
mod ending;
mod extras;
mod functions;
mod inspector;
mod network;
mod one_shot;
mod plan;
mod pod;
mod profiler;
mod remote;
mod services;

pub(crate) use budgets::budgets;
pub(crate) use extras::PodExtras;
#[cfg(test)]
pub(crate) use functions::BuildError;
pub(crate) use functions::{
    Count, Function, LOAD_SECONDS, Revision, TargetPlan, revision, room, served_name,
};
pub(crate) use inspector::{inspector, inspector_place};
#[cfg(any(test, fuzzing))]
pub(crate) use plan::plan_hash;
pub(crate) use plan::{find_plan, plan_name, plan_object};
pub(crate) use profiler::{measured_vcpus, profiler};
pub(crate) use remote::Hosted;

use super::deployment_policy::DeploymentPolicy;
use super::exposure::GatewayService;
use super::identity::SignerName;
use super::pod_comparison::Comparison;
use super::source_policy::SourcePolicy;
use super::trace_collector::TraceCollector;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use remoe_api::{Device, MoEDeployment};

/// Settings of the operator about its surroundings.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OperatorEnvironment {
    /// Image with main-model-fn, remote-expert-fn and remoe.
    pub main_image: String,
    /// Image in place of `main_image` for device cuda.
    pub main_cuda_image: String,
    /// Image with remote-expert-fn and remoe.
    pub remote_image: String,
    /// When nodes fetch images: Always, IfNotPresent or Never.
    pub pull_policy: String,
    /// Sources that pods that fetch may reach.
    pub sources: SourcePolicy,
    /// Additions to the pods of functions.
    pub pods: PodExtras,
    /// Where the operator runs: main functions take orders from there only.
    pub operator_namespace: String,
    /// Where Prometheus runs: it may read metrics.
    pub metrics_namespace: String,
    /// The release that the operator and its gateways are of.
    pub release: String,
    /// Signer of the certificates of functions.
    pub signer: SignerName,
    /// Service of the gateways; none: clients reach main functions directly, and nothing sleeps.
    pub gateway: Option<GatewayService>,
    /// Some of them show no certificate yet: main functions do not ask for one.
    pub uncertified_gateways: bool,
    /// Where functions export traces to, if anywhere.
    pub trace_collector: Option<TraceCollector>,
    /// How pods are compared with what was written.
    pub comparison: Comparison,
    /// Limits on what deployments may ask for.
    pub policy: DeploymentPolicy,
}

impl OperatorEnvironment {
    /// The image of what computes on `device` as main functions do.
    pub(crate) fn main_image(&self, device: Device) -> &str {
        match device {
            Device::Cpu => &self.main_image,
            Device::Cuda => &self.main_cuda_image,
        }
    }
}

/// Objects around the pods; they do not depend on a plan.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Frame {
    /// Where clients and scrapers find the pods.
    pub services: Vec<Service>,
    /// Rules on which peers may reach the pods, and which the pods may reach.
    pub network_policies: Vec<NetworkPolicy>,
}

/// The frame around the pods of `owner`.
pub(crate) fn frame(owner: &MoEDeployment, environment: &OperatorEnvironment) -> Frame {
    Frame {
        services: services::services(owner, environment),
        network_policies: network::policies(owner, environment),
    }
}
