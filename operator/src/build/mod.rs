//! The objects that a deployment consists of. Pure: the same values give the same objects.

mod budgets;
mod disk;
mod ending;
mod errand;
mod extras;
mod functions;
mod inspector;
mod network;
mod plan;
mod pod;
mod profiler;
mod remote;
mod services;

pub(crate) use budgets::budgets;
pub(crate) use extras::PodExtras;
#[cfg(test)]
pub(crate) use functions::BuildError;
pub(crate) use functions::{Function, LOAD_SECONDS, Revision, knows_gateways, revision, room, served_name};
pub(crate) use inspector::{inspector, inspector_place};
#[cfg(any(test, fuzzing))]
pub(crate) use plan::plan_hash;
pub(crate) use plan::{plan_name, plan_object};
pub(crate) use profiler::{measured_vcpus, profiler};
pub(crate) use remote::Hosted;

use super::allowed::Allowed;
use super::api::{Device, MoEDeployment};
use super::collector::Collector;
use super::exposure::GatewayService;
use super::names;
use super::rewritten::Comparison;
use super::settings::SignerName;
use super::sources::Sources;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};

/// The port of the HTTP interface of main functions.
pub(crate) const HTTP_PORT: u16 = 8000;
/// The port of all functions for probes, and for nothing else. Nodes reach their own pods whatever policies say, the operator
/// asks remote functions that start.
pub(crate) const HEALTH_PORT: u16 = 8081;
/// The port of the control interface of main functions.
pub(crate) const CONTROL_PORT: u16 = 9000;
/// The port of remote functions.
pub(crate) const EXPERT_PORT: u16 = 9001;
/// The port of the metrics of all functions.
pub(crate) const METRICS_PORT: u16 = 9090;

/// What the operator was told about its surroundings.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Surroundings {
    /// Image with main-model-fn, remote-expert-fn and remoe.
    pub main_image: String,
    /// The same for device cuda.
    pub main_cuda_image: String,
    /// Image with remote-expert-fn and remoe.
    pub remote_image: String,
    /// When nodes fetch images: Always, IfNotPresent or Never.
    pub pull_policy: String,
    /// Sources that pods that fetch may reach.
    pub sources: Sources,
    /// What the pods of functions have in addition.
    pub pods: PodExtras,
    /// Where the operator runs: main functions take orders from there only.
    pub operator_namespace: String,
    /// Where Prometheus runs: it may read metrics.
    pub metrics_namespace: String,
    /// The release that the operator and its gateways are of.
    pub release: String,
    /// Who signs the certificates of functions.
    pub signer: SignerName,
    /// Service of the gateways; none: clients reach main functions directly, and nothing sleeps.
    pub gateway: Option<GatewayService>,
    /// Some of them show no certificate yet: main functions do not ask for one.
    pub strange_gateways: bool,
    /// Where functions export traces to, if anywhere.
    pub collector: Option<Collector>,
    /// How pods are compared with what was written.
    pub comparison: Comparison,
    /// Limits on what deployments may ask for.
    pub allowed: Allowed,
}

impl Surroundings {
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
    /// Who may talk to whom.
    pub network_policies: Vec<NetworkPolicy>,
}

/// The frame around the pods of `owner`.
pub(crate) fn frame(owner: &MoEDeployment, around: &Surroundings) -> Frame {
    Frame { services: services::services(owner, around), network_policies: network::policies(owner, around) }
}

/// Name, labels and owner of an object that belongs to `owner` and goes with it.
pub(super) fn owned_meta(owner: &MoEDeployment, name: impl FnOnce(&str) -> String) -> ObjectMeta {
    let deployment = owner.name_any();
    ObjectMeta {
        name: Some(name(&deployment)),
        namespace: owner.namespace(),
        labels: Some(names::labels(&deployment)),
        // Only an object that was read from the API has an identity to refer to.
        owner_references: owner.controller_owner_ref(&()).map(|reference| vec![reference]),
        ..ObjectMeta::default()
    }
}
