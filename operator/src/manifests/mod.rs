//! Manifests of the objects of a deployment. Pure.

mod budgets;
mod disk;
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
mod shutdown;

pub(crate) use budgets::budgets;
pub(crate) use extras::PodExtras;
#[cfg(test)]
pub(crate) use functions::BuildError;
pub(crate) use functions::{
    Count, Function, LOAD_SECONDS, Revision, TargetPlan, max_batch, revision, served_name,
};
pub(crate) use inspector::{inspector, inspector_pod_place};
#[cfg(any(test, fuzzing))]
pub(crate) use plan::plan_hash;
pub(crate) use plan::{find_plan, plan_name, plan_object};
pub(crate) use profiler::{measured_vcpus, profiler};
pub(crate) use remote::Hosted;

use super::deployment_policy::DeploymentPolicy;
use super::exposure::GatewayService;
use super::identity::SignerName;
use super::pod_comparison::PodComparison;
use super::source_policy::SourcePolicy;
use super::trace_collector::TraceCollector;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use remoe_api::{Device, MoEDeployment};

/// Settings of the operator that manifests depend on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OperatorEnvironment {
    /// Image with main-model-fn, remote-expert-fn and remoe.
    pub main_image: String,
    /// Image that replaces `main_image` for device cuda.
    pub main_cuda_image: String,
    /// Image with remote-expert-fn and remoe.
    pub remote_image: String,
    /// Image pull policy: Always, IfNotPresent or Never.
    pub pull_policy: String,
    /// Policy on sources that pods may fetch weights from.
    pub sources: SourcePolicy,
    /// Additions to the pods of functions.
    pub pods: PodExtras,
    /// Namespace of the operator; main functions accept control calls only from there.
    pub operator_namespace: String,
    /// Namespace of Prometheus, which may scrape metrics.
    pub metrics_namespace: String,
    /// Release of the operator and its gateways.
    pub release: String,
    /// Signer of the certificates of functions.
    pub signer: SignerName,
    /// Service of the gateways. Without one, clients reach main functions directly, and nothing scales to zero.
    pub gateway: Option<GatewayService>,
    /// Set if some gateways present no certificate yet, so that main functions do not require one.
    pub uncertified_gateways: bool,
    /// Trace export of functions, if any.
    pub trace_collector: Option<TraceCollector>,
    /// Comparison of pods with their desired specs.
    pub comparison: PodComparison,
    /// Limits on deployments.
    pub policy: DeploymentPolicy,
}

impl OperatorEnvironment {
    /// Returns the image for main functions on `device`.
    pub(crate) fn main_image(&self, device: Device) -> &str {
        match device {
            Device::Cpu => &self.main_image,
            Device::Cuda => &self.main_cuda_image,
        }
    }
}

/// Objects of a deployment that do not depend on a plan.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Frame {
    /// Services of the pods.
    pub services: Vec<Service>,
    /// Network policies of the pods.
    pub network_policies: Vec<NetworkPolicy>,
}

/// Builds the plan-independent objects of `owner`.
pub(crate) fn frame(owner: &MoEDeployment, environment: &OperatorEnvironment) -> Frame {
    Frame {
        services: services::services(owner, environment),
        network_policies: network::policies(owner, environment),
    }
}
