//! Pods of the functions of a plan.

use super::disk::DiskLimits;
use super::pod::{
    HEALTH, ModelAccess, ProbeTiming, Program, main_resources, pod_spec, probe, resources, terminating,
    with_identity,
};
use super::remote::{Hosted, RemoteFunction, remote_functions_of};
use super::shutdown::{DEREGISTRATION_SECONDS, PodShutdown};
use super::{OperatorEnvironment, PodExtras};
use crate::digest::digest;
use crate::identity::{GATEWAY_IDENTITY, SignerName, gateway_identity, operator_identity, secret_name};
use crate::names::{
    COMPONENT, Component, FUNCTION, IDENTITY, MAIN, PodName, REPLICA, component_selector, function_selector,
};
use crate::ownership::owned_meta;
use crate::ports::{CONTROL_PORT, EXPERT_PORT, HEALTH_PORT, HTTP_PORT, METRICS_PORT};
use crate::quantity::{MB, megabytes, millicores_for_memory, threads, vcpus};
use crate::source_policy::SourceRefusal;
use k8s_openapi::api::core::v1::{
    Affinity, ContainerPort, Lifecycle, LifecycleHandler, Pod, PodAffinity, PodAffinityTerm, PodSpec,
    SleepAction, TopologySpreadConstraint, WeightedPodAffinityTerm,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use remoe_api::{MoEDeployment, MoEPlanSpec, RESTARTED_AT};
use remoe_proto::v1::LayerExperts;
use remoe_rollout::functions::DEFAULT_MAX_BATCH;
use std::collections::BTreeMap;
use std::net::{Ipv6Addr, SocketAddr};

/// Maximum replicas of a function.
const MAX_REPLICAS_WITH_LOAD: u32 = 1024;

/// Longest loading time of a function in seconds: a large model on a slow volume takes minutes. After that the
/// container is restarted.
pub(crate) const LOAD_SECONDS: i32 = 1800;
const STARTUP: ProbeTiming = ProbeTiming { period_seconds: 1, timeout_seconds: 2, failures: LOAD_SECONDS };
const READINESS: ProbeTiming = ProbeTiming { period_seconds: 1, timeout_seconds: 2, failures: 2 };
const LIVENESS: ProbeTiming = ProbeTiming { period_seconds: 10, timeout_seconds: 5, failures: 3 };
/// Annotation that lets the cluster autoscaler evict these pods; they are replaced.
const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";
const HOSTNAME_TOPOLOGY: &str = "kubernetes.io/hostname";

/// Function of a revision, with the template of its pods.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Function {
    /// Name: `main`, or that of a layer or group.
    pub name: String,
    /// Component of its pods.
    pub component: Component,
    /// Hash of its pod specification; pods with another hash are outdated.
    pub identity: String,
    /// Desired replicas that the rollout waits for.
    pub replicas: u32,
    /// Additional replicas because of load; the rollout does not wait for them.
    pub extra: u32,
    /// Memory of one replica in bytes.
    pub bytes: u64,
    /// Hosted remote experts; absent for main functions.
    pub hosted: Option<Hosted>,
    spec: PodSpec,
    extras: PodExtras,
}

/// Functions of one plan, with their specifications.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Revision {
    /// Hash of the plan.
    pub plan: String,
    /// Main function.
    pub main: Function,
    /// Remote functions: one per layer with remote experts, in layer order, or one per group.
    pub remote: Vec<Function>,
}

impl Revision {
    /// Returns this revision with the replicas of each function in `counts`.
    pub(crate) fn scaled(&self, counts: &BTreeMap<String, Count>) -> Self {
        let scaled = |function: &Function| {
            let Count { replicas, extra } =
                counts.get(&function.name).copied().unwrap_or_else(|| function.count());
            Function { replicas, extra, ..function.clone() }
        };
        Self {
            plan: self.plan.clone(),
            main: scaled(&self.main),
            remote: self.remote.iter().map(scaled).collect(),
        }
    }

    /// Returns all functions, the main one first.
    pub(crate) fn functions(&self) -> impl Iterator<Item = &Function> {
        std::iter::once(&self.main).chain(&self.remote)
    }

    /// Returns the remote experts of each layer that has any, by ascending layer.
    pub(crate) fn remote_sets(&self) -> Vec<LayerExperts> {
        let mut remote: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let hosted = self.remote.iter().filter_map(|function| function.hosted.as_ref());
        for set in hosted.flat_map(Hosted::sets) {
            remote.entry(set.layer).or_default().extend(&set.experts);
        }
        let sets = remote.into_iter().map(|(layer, mut experts)| {
            experts.sort_unstable();
            LayerExperts { layer, experts }
        });
        sets.collect()
    }
}

/// Desired plan.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TargetPlan {
    /// Functions of the plan.
    pub revision: Revision,
    /// Plan.
    pub plan: MoEPlanSpec,
}

/// Failure to build the functions of a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BuildError {
    /// The source of the weights is refused.
    #[error(transparent)]
    Source(#[from] SourceRefusal),
    /// The experts of its functions are invalid.
    #[error("invalid plan: {0}")]
    Experts(String),
    /// A value cannot be serialised as JSON.
    #[error("cannot write JSON: {0}")]
    Json(String),
}

impl BuildError {
    /// Returns the reason of the condition.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Source(refusal) => refusal.reason(),
            Self::Experts(_) | Self::Json(_) => "InvalidSpec",
        }
    }
}

/// Builds the functions of `plan` for `owner`.
///
/// # Errors
/// The plan's source is invalid or not allowed, or a listing of experts is invalid or contradicts another one.
pub(crate) fn revision(
    owner: &MoEDeployment,
    hash: &str,
    plan: &MoEPlanSpec,
    environment: &OperatorEnvironment,
) -> Result<Revision, BuildError> {
    let model = ModelAccess::new(&plan.model, &environment.sources)?;
    let spec = main_pod(owner, plan, &model, environment);
    let bytes = |megabytes: u32| u64::from(megabytes) * MB;
    let replicas = (owner.spec.main_functions(), bytes(plan.main.limit_mb));
    let extras = &environment.pods;
    let disk = DiskLimits::of_plan(owner, plan);
    let shutdown = (PodShutdown::of_main(plan), disk);
    let main = function(owner, MAIN.to_owned(), replicas, None, (spec, extras), shutdown)?;
    let remote = remote_functions_of(plan)?.into_iter().map(|remote_function| {
        let spec = remote_pod(owner, plan, &remote_function, &model, environment);
        let replicas = (remote_function.replicas, bytes(remote_function.memory_mb));
        function(
            owner,
            remote_function.name,
            replicas,
            Some(remote_function.hosted),
            (spec, extras),
            (PodShutdown::REMOTE, disk),
        )
    });
    Ok(Revision { plan: hash.to_owned(), main, remote: remote.collect::<Result<_, _>>()? })
}

fn function(
    owner: &MoEDeployment,
    name: String,
    (replicas, bytes): (u32, u64),
    hosted: Option<Hosted>,
    (mut spec, extras): (PodSpec, &PodExtras),
    (shutdown, disk): (PodShutdown, DiskLimits),
) -> Result<Function, BuildError> {
    let deployment = owner.name_any();
    extras.apply(&mut spec);
    spec.topology_spread_constraints = Some(vec![TopologySpreadConstraint {
        max_skew: 1,
        topology_key: HOSTNAME_TOPOLOGY.to_owned(),
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        label_selector: Some(LabelSelector {
            match_labels: Some(function_selector(&deployment, &name)),
            match_expressions: None,
        }),
        ..TopologySpreadConstraint::default()
    }]);
    let restarted_at = owner.annotations().get(RESTARTED_AT);
    let identity = digest(&(&spec, restarted_at)).map_err(|error| BuildError::Json(error.to_string()))?;
    shutdown.apply(&mut spec);
    disk.apply(&mut spec);
    let component = if hosted.is_some() { Component::RemoteExpert } else { Component::Main };
    Ok(Function {
        name,
        component,
        identity,
        replicas,
        extra: 0,
        bytes,
        hosted,
        spec,
        extras: extras.clone(),
    })
}

/// Numbers of replicas of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    /// Replicas that the rollout waits for.
    pub replicas: u32,
    /// Additional replicas because of load.
    pub extra: u32,
}

impl Count {
    /// Returns the total number of replicas, clamped to `MAX_REPLICAS_WITH_LOAD` since unchecked objects may say
    /// more.
    pub(crate) fn total_replicas(self) -> u32 {
        self.replicas.saturating_add(self.extra).min(MAX_REPLICAS_WITH_LOAD)
    }
}

impl Function {
    /// Returns its numbers of replicas.
    pub(crate) fn count(&self) -> Count {
        Count { replicas: self.replicas, extra: self.extra }
    }

    /// Returns the total number of replicas.
    pub(crate) fn total_replicas(&self) -> u32 {
        self.count().total_replicas()
    }

    /// Returns the place of one replica: its pod name without the incarnation.
    pub(crate) fn place(&self, deployment: &str, replica: u32) -> String {
        format!("{deployment}-{}-{}-{replica}", self.name, self.identity)
    }

    /// Returns the pod of one replica.
    pub(crate) fn pod(&self, owner: &MoEDeployment, replica: u32, incarnation: u32) -> Pod {
        let place = self.place(&owner.name_any(), replica);
        let mut metadata = owned_meta(owner, |_| PodName { place, incarnation }.to_string());
        metadata.annotations = Some(BTreeMap::from([(SAFE_TO_EVICT.to_owned(), "true".to_owned())]));
        metadata.labels.get_or_insert_default().extend([
            (COMPONENT.to_owned(), self.component.name().to_owned()),
            (FUNCTION.to_owned(), self.name.clone()),
            (IDENTITY.to_owned(), self.identity.clone()),
            (REPLICA.to_owned(), replica.to_string()),
        ]);
        self.extras.add_metadata(&mut metadata);
        Pod { metadata, spec: Some(self.spec.clone()), status: None }
    }
}

/// Returns the model's name in the HTTP API.
pub(crate) fn served_name(owner: &MoEDeployment) -> String {
    owner.spec.served_name.clone().unwrap_or_else(|| owner.name_any())
}

/// Returns the batch size of a main function of `plan`: its maximum number of concurrent requests.
pub(crate) fn max_batch(plan: &MoEPlanSpec) -> usize {
    (plan.workload.concurrency as usize).max(DEFAULT_MAX_BATCH)
}

fn main_pod(
    owner: &MoEDeployment,
    plan: &MoEPlanSpec,
    model: &ModelAccess,
    environment: &OperatorEnvironment,
) -> PodSpec {
    let millicores = plan.main.cpu_millicores.unwrap_or_else(|| millicores_for_memory(plan.main.memory_mb));
    let mut arguments = [model.arguments.clone(), plan.model.precision_of_all()].concat();
    for (flag, value) in [
        ("--device", plan.device.name().to_owned()),
        ("--threads", threads(millicores).to_string()),
        ("--http-listen", wildcard_address(HTTP_PORT)),
        ("--health-listen", wildcard_address(HEALTH_PORT)),
        ("--metrics-listen", wildcard_address(METRICS_PORT)),
        ("--control-listen", wildcard_address(CONTROL_PORT)),
        ("--served-model-name", served_name(owner)),
        ("--kv-cache-bytes", plan.main.kv_cache_bytes.to_string()),
        ("--fallback-bytes", plan.main.fallback_bytes.to_string()),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    if let Some(kept) = plan.model.kv_cache_dtype {
        let name = remoe_model::KvCacheDtype::from(kept).name();
        arguments.extend(["--kv-cache-dtype".to_owned(), name.to_owned()]);
    }
    if environment.gateway.is_some() {
        for name in
            [owner.name_any(), format!("{}/{}", owner.namespace().unwrap_or_default(), owner.name_any())]
        {
            arguments.extend(["--served-model-name".to_owned(), name]);
        }
    }
    // This does not depend on `spec.prediction`, so that a change of that field does not replace main functions.
    if environment.gateway.is_some() {
        arguments.push("--primer".to_owned());
    }
    if environment.signer != SignerName::Unsigned {
        let operator = operator_identity(&environment.operator_namespace).to_string();
        arguments.extend(["--operator-identity".to_owned(), operator]);
        if environment.gateway.is_some() && !environment.uncertified_gateways {
            let gateway = gateway_identity(&environment.operator_namespace).to_string();
            arguments.extend([GATEWAY_IDENTITY.to_owned(), gateway]);
        }
    }
    // Busy polling would use up the share of less than one vCPU.
    if millicores < 1000 {
        arguments.extend(["--poll-us".to_owned(), "0".to_owned()]);
    }
    if let Some(positions) = plan.model.max_model_len {
        arguments.extend(["--max-model-len".to_owned(), positions.to_string()]);
    }
    if let Some(variables) = &owner.spec.model.chat_template_kwargs {
        let variables = serde_json::Value::Object(variables.clone()).to_string();
        arguments.extend(["--chat-template-kwargs".to_owned(), variables]);
    }
    let batch = max_batch(plan);
    if batch > DEFAULT_MAX_BATCH {
        arguments.extend(["--max-batch".to_owned(), batch.to_string()]);
    }
    let program = Program {
        name: "main-model-fn",
        image: environment.main_image(plan.device),
        pull_policy: &environment.pull_policy,
        command: "main-model-fn",
        arguments,
        resources: main_resources(owner, vcpus(millicores), megabytes(plan.main.limit_mb)),
    };
    let mut spec = with_serving_lifecycle(pod_spec(program, model, &owner.spec.main.template));
    if let Some(secret) = secret_name(&owner.name_any(), Component::Main, environment.signer) {
        spec = with_identity(spec, secret);
    }
    let mut spec = with_trace_export(spec, owner, environment);
    if let Some(container) = spec.containers.first_mut() {
        container.ports = Some(vec![
            port("http", HTTP_PORT),
            port(HEALTH, HEALTH_PORT),
            port("metrics", METRICS_PORT),
            port("control", CONTROL_PORT),
        ]);
    }
    with_probes(spec)
}

fn remote_pod(
    owner: &MoEDeployment,
    plan: &MoEPlanSpec,
    remote_function: &RemoteFunction,
    model: &ModelAccess,
    environment: &OperatorEnvironment,
) -> PodSpec {
    let mut arguments = model.arguments.clone();
    arguments.extend(["--experts".to_owned(), remote_function.listing.clone()]);
    arguments.extend(plan.model.precision());
    for (flag, value) in [
        ("--memory-bytes", (u64::from(remote_function.memory_mb) * MB).to_string()),
        ("--threads", threads(remote_function.millicores).to_string()),
        // Calls come once per token: busy polling between them would use up the pod's vCPUs.
        ("--poll-us", "0".to_owned()),
        ("--listen", wildcard_address(EXPERT_PORT)),
        ("--health-listen", wildcard_address(HEALTH_PORT)),
        ("--metrics-listen", wildcard_address(METRICS_PORT)),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    let program = Program {
        name: "remote-expert-fn",
        image: &environment.remote_image,
        pull_policy: &environment.pull_policy,
        command: "remote-expert-fn",
        arguments,
        resources: resources(vcpus(remote_function.millicores), megabytes(remote_function.memory_mb)),
    };
    let template = &owner.spec.remote_experts.template;
    let mut spec = with_serving_lifecycle(pod_spec(program, model, template));
    if let Some(secret) = secret_name(&owner.name_any(), Component::RemoteExpert, environment.signer) {
        spec = with_identity(spec, secret);
    }
    let mut spec = with_trace_export(spec, owner, environment);
    spec.affinity = template.affinity.clone().or_else(|| Some(affinity_to_main(&owner.name_any())));
    if let Some(container) = spec.containers.first_mut() {
        container.ports =
            Some(vec![port("grpc", EXPERT_PORT), port(HEALTH, HEALTH_PORT), port("metrics", METRICS_PORT)]);
    }
    with_probes(spec)
}

/// Adds the probes. They have their own port, which clients cannot block, and which requires no certificate, since
/// kubelets have none.
fn with_probes(mut spec: PodSpec) -> PodSpec {
    if let Some(container) = spec.containers.first_mut() {
        container.startup_probe = Some(terminating(probe("/healthz", STARTUP)));
        container.liveness_probe = Some(terminating(probe("/healthz", LIVENESS)));
        container.readiness_probe = Some(probe("/readyz", READINESS));
    }
    spec
}

/// Configures the pod to serve until it is terminated.
fn with_serving_lifecycle(mut spec: PodSpec) -> PodSpec {
    spec.restart_policy = Some("Always".to_owned());
    if let Some(container) = spec.containers.first_mut() {
        container.lifecycle = Some(Lifecycle {
            pre_stop: Some(LifecycleHandler {
                sleep: Some(SleepAction { seconds: DEREGISTRATION_SECONDS }),
                ..LifecycleHandler::default()
            }),
            ..Lifecycle::default()
        });
    }
    spec
}

/// Adds the settings of the trace export, if there is one.
fn with_trace_export(mut spec: PodSpec, owner: &MoEDeployment, environment: &OperatorEnvironment) -> PodSpec {
    if let (Some(container), Some(trace_collector)) =
        (spec.containers.first_mut(), &environment.trace_collector)
    {
        container.env.get_or_insert_default().extend(trace_collector.environment(&owner.name_any()));
    }
    spec
}

/// Returns an affinity to the main functions' nodes: hidden states travel to remote functions and back in every
/// layer.
pub(super) fn affinity_to_main(deployment: &str) -> Affinity {
    let near = WeightedPodAffinityTerm {
        weight: 100,
        pod_affinity_term: PodAffinityTerm {
            label_selector: Some(LabelSelector {
                match_labels: Some(component_selector(deployment, Component::Main)),
                match_expressions: None,
            }),
            topology_key: HOSTNAME_TOPOLOGY.to_owned(),
            ..PodAffinityTerm::default()
        },
    };
    Affinity {
        pod_affinity: Some(PodAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(vec![near]),
            ..PodAffinity::default()
        }),
        ..Affinity::default()
    }
}

fn port(name: &str, number: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: number.into(),
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

/// Returns the wildcard address for IPv6 and IPv4 with `port`.
fn wildcard_address(port: u16) -> String {
    SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).to_string()
}
