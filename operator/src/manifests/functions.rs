//! The functions of a plan, as pods.

use super::disk::DiskLimits;
use super::ending::{LEAVE_SECONDS, PodShutdown};
use super::pod::{
    HEALTH, ModelAccess, ProbeTiming, Program, ending_container, main_resources, pod_spec, probe, resources,
    with_identity,
};
use super::remote::{Hosted, RemotePart, remote_parts};
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

/// Replicas of a function, at most.
const MOST_REPLICAS: u32 = 1024;

/// Loading a large model from a slow volume takes minutes. A container that has not loaded by then is
/// started again, in seconds.
pub(crate) const LOAD_SECONDS: i32 = 1800;
const STARTUP: ProbeTiming = ProbeTiming { period_seconds: 1, timeout_seconds: 2, failures: LOAD_SECONDS };
const READINESS: ProbeTiming = ProbeTiming { period_seconds: 1, timeout_seconds: 2, failures: 2 };
const LIVENESS: ProbeTiming = ProbeTiming { period_seconds: 10, timeout_seconds: 5, failures: 3 };
/// Evicting these pods loses nothing: they are replaced.
const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";
const HOSTNAME: &str = "kubernetes.io/hostname";

/// All pods of one function of a revision.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Function {
    /// `main`, or that of a layer or group.
    pub name: String,
    /// Which part it plays.
    pub component: Component,
    /// Hash of all that its pods consist of: pods with another one are not this function's.
    pub identity: String,
    /// How many there are to be.
    pub replicas: u32,
    /// Replicas beyond those, because of load: nothing waits for them.
    pub extra: u32,
    /// Memory of one, in bytes.
    pub bytes: u64,
    /// The remote experts that it hosts; none for main functions.
    pub hosted: Option<Hosted>,
    spec: PodSpec,
    extras: PodExtras,
}

/// The functions of one plan, in one shape.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Revision {
    /// Hash of the plan.
    pub plan: String,
    /// The main functions.
    pub main: Function,
    /// One function per layer with remote experts, in the order of the layers, or one per group.
    pub remote: Vec<Function>,
}

impl Revision {
    /// Returns this revision with as many replicas of each function as `counts` says by its name.
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

    /// All functions, the main ones first.
    pub(crate) fn functions(&self) -> impl Iterator<Item = &Function> {
        std::iter::once(&self.main).chain(&self.remote)
    }

    /// The remote experts of each layer that has any, ascending.
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

/// Plan that is to run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TargetPlan {
    /// As functions.
    pub revision: Revision,
    /// The plan.
    pub plan: MoEPlanSpec,
}

/// Why the functions of a plan cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BuildError {
    /// The source of the weights.
    #[error(transparent)]
    Source(#[from] SourceRefusal),
    /// The experts of its functions.
    #[error("invalid plan: {0}")]
    Experts(String),
    /// A value that cannot be written as JSON.
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

/// The functions of `plan` for `owner`.
///
/// # Errors
/// The plan's source is not allowed, it or one of its listings cannot be read, or its functions contradict each other.
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
    let ending = (PodShutdown::of_main(plan), disk);
    let main = function(owner, MAIN.to_owned(), replicas, None, (spec, extras), ending)?;
    let remote = remote_parts(plan)?.into_iter().map(|part| {
        let spec = remote_pod(owner, plan, &part, &model, environment);
        let replicas = (part.replicas, bytes(part.memory_mb));
        function(owner, part.name, replicas, Some(part.hosted), (spec, extras), (PodShutdown::REMOTE, disk))
    });
    Ok(Revision { plan: hash.to_owned(), main, remote: remote.collect::<Result<_, _>>()? })
}

fn function(
    owner: &MoEDeployment,
    name: String,
    (replicas, bytes): (u32, u64),
    hosted: Option<Hosted>,
    (mut spec, extras): (PodSpec, &PodExtras),
    (ending, disk): (PodShutdown, DiskLimits),
) -> Result<Function, BuildError> {
    let deployment = owner.name_any();
    extras.apply(&mut spec);
    spec.topology_spread_constraints = Some(vec![TopologySpreadConstraint {
        max_skew: 1,
        topology_key: HOSTNAME.to_owned(),
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        label_selector: Some(LabelSelector {
            match_labels: Some(function_selector(&deployment, &name)),
            match_expressions: None,
        }),
        ..TopologySpreadConstraint::default()
    }]);
    let restarted_at = owner.annotations().get(RESTARTED_AT);
    let identity = digest(&(&spec, restarted_at)).map_err(|error| BuildError::Json(error.to_string()))?;
    ending.apply(&mut spec);
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

/// Replicas of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    /// Replicas that the rollout waits for.
    pub replicas: u32,
    /// Replicas beyond those, because of load.
    pub extra: u32,
}

impl Count {
    /// Returns the replicas that are to run, those because of load among them: no more than a resource may ask for, even if
    /// an object that nothing checked says more.
    pub(crate) fn most(self) -> u32 {
        self.replicas.saturating_add(self.extra).min(MOST_REPLICAS)
    }
}

impl Function {
    /// Returns its replicas.
    pub(crate) fn count(&self) -> Count {
        Count { replicas: self.replicas, extra: self.extra }
    }

    /// Returns the replicas that are to run, those because of load among them.
    pub(crate) fn most(&self) -> u32 {
        self.count().most()
    }

    /// Where one of the replicas is, whatever its incarnation.
    pub(crate) fn place(&self, deployment: &str, replica: u32) -> String {
        format!("{deployment}-{}-{}-{replica}", self.name, self.identity)
    }

    /// The pod of one replica.
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
        self.extras.note(&mut metadata);
        Pod { metadata, spec: Some(self.spec.clone()), status: None }
    }
}

/// The model's name in the HTTP interface.
pub(crate) fn served_name(owner: &MoEDeployment) -> String {
    owner.spec.served_name.clone().unwrap_or_else(|| owner.name_any())
}

/// Requests that a main function of `plan` has at the same time.
pub(crate) fn room(plan: &MoEPlanSpec) -> usize {
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
        ("--http-listen", everywhere(HTTP_PORT)),
        ("--health-listen", everywhere(HEALTH_PORT)),
        ("--metrics-listen", everywhere(METRICS_PORT)),
        ("--control-listen", everywhere(CONTROL_PORT)),
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
    // Independent of `spec.prediction`: a change of it would have main functions replaced.
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
    // Polling for answers would use up what a share of a vCPU is allowed.
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
    let room = room(plan);
    if room > DEFAULT_MAX_BATCH {
        arguments.extend(["--max-batch".to_owned(), room.to_string()]);
    }
    let program = Program {
        name: "main-model-fn",
        image: environment.main_image(plan.device),
        pull_policy: &environment.pull_policy,
        command: "main-model-fn",
        arguments,
        resources: main_resources(owner, vcpus(millicores), megabytes(plan.main.limit_mb)),
    };
    let mut spec = serving(pod_spec(program, model, &owner.spec.main.template));
    if let Some(secret) = secret_name(&owner.name_any(), Component::Main, environment.signer) {
        spec = with_identity(spec, secret);
    }
    let mut spec = exporting(spec, owner, environment);
    if let Some(container) = spec.containers.first_mut() {
        container.ports = Some(vec![
            port("http", HTTP_PORT),
            port(HEALTH, HEALTH_PORT),
            port("metrics", METRICS_PORT),
            port("control", CONTROL_PORT),
        ]);
    }
    probed(spec)
}

fn remote_pod(
    owner: &MoEDeployment,
    plan: &MoEPlanSpec,
    part: &RemotePart,
    model: &ModelAccess,
    environment: &OperatorEnvironment,
) -> PodSpec {
    let mut arguments = model.arguments.clone();
    arguments.extend(["--experts".to_owned(), part.listing.clone()]);
    arguments.extend(plan.model.precision());
    for (flag, value) in [
        ("--memory-bytes", (u64::from(part.memory_mb) * MB).to_string()),
        ("--threads", threads(part.millicores).to_string()),
        // Called once a token: polling until then would use up the pod's vCPUs.
        ("--poll-us", "0".to_owned()),
        ("--listen", everywhere(EXPERT_PORT)),
        ("--health-listen", everywhere(HEALTH_PORT)),
        ("--metrics-listen", everywhere(METRICS_PORT)),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    let program = Program {
        name: "remote-expert-fn",
        image: &environment.remote_image,
        pull_policy: &environment.pull_policy,
        command: "remote-expert-fn",
        arguments,
        resources: resources(vcpus(part.millicores), megabytes(part.memory_mb)),
    };
    let template = &owner.spec.remote_experts.template;
    let mut spec = serving(pod_spec(program, model, template));
    if let Some(secret) = secret_name(&owner.name_any(), Component::RemoteExpert, environment.signer) {
        spec = with_identity(spec, secret);
    }
    let mut spec = exporting(spec, owner, environment);
    spec.affinity = template.affinity.clone().or_else(|| Some(near_main(&owner.name_any())));
    if let Some(container) = spec.containers.first_mut() {
        container.ports =
            Some(vec![port("grpc", EXPERT_PORT), port(HEALTH, HEALTH_PORT), port("metrics", METRICS_PORT)]);
    }
    probed(spec)
}

/// Probes have a port of their own: clients cannot keep it busy, and it asks for no certificate, which nodes
/// do not have.
fn probed(mut spec: PodSpec) -> PodSpec {
    if let Some(container) = spec.containers.first_mut() {
        container.startup_probe = Some(ending_container(probe("/healthz", STARTUP)));
        container.liveness_probe = Some(ending_container(probe("/healthz", LIVENESS)));
        container.readiness_probe = Some(probe("/readyz", READINESS));
    }
    spec
}

/// Makes the pod one that serves until it is told to end.
fn serving(mut spec: PodSpec) -> PodSpec {
    spec.restart_policy = Some("Always".to_owned());
    if let Some(container) = spec.containers.first_mut() {
        container.lifecycle = Some(Lifecycle {
            pre_stop: Some(LifecycleHandler {
                sleep: Some(SleepAction { seconds: LEAVE_SECONDS }),
                ..LifecycleHandler::default()
            }),
            ..Lifecycle::default()
        });
    }
    spec
}

/// Tells a function of `owner` where traces go, where they do.
fn exporting(mut spec: PodSpec, owner: &MoEDeployment, environment: &OperatorEnvironment) -> PodSpec {
    if let (Some(container), Some(trace_collector)) =
        (spec.containers.first_mut(), &environment.trace_collector)
    {
        container.env.get_or_insert_default().extend(trace_collector.environment(&owner.name_any()));
    }
    spec
}

/// Hidden states travel to remote functions and back in every layer: the same node is best.
pub(super) fn near_main(deployment: &str) -> Affinity {
    let near = WeightedPodAffinityTerm {
        weight: 100,
        pod_affinity_term: PodAffinityTerm {
            label_selector: Some(LabelSelector {
                match_labels: Some(component_selector(deployment, Component::Main)),
                match_expressions: None,
            }),
            topology_key: HOSTNAME.to_owned(),
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

/// Every address of the pod, of whichever version of IP.
fn everywhere(port: u16) -> String {
    SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).to_string()
}
