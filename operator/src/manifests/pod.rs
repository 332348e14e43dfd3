//! Common parts of the pods of all functions.

use crate::source::ModelSource;
use crate::source_policy::{SourcePolicy, SourceRefusal};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, EmptyDirVolumeSource, EnvFromSource, EnvVar, HTTPGetAction,
    PersistentVolumeClaimVolumeSource, PodSecurityContext, PodSpec, Probe, ResourceRequirements,
    SeccompProfile, SecretEnvSource, SecretVolumeSource, SecurityContext, Toleration, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use remoe_api::{MoEDeployment, PlannedModel, PodTemplate};
use std::collections::BTreeMap;

/// Name of the port for probes.
pub(super) const HEALTH: &str = "health";
/// User and group of all images.
const USER: i64 = 65532;
/// Taints of an unreachable node.
pub(super) const LOST_NODE: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
/// Toleration of these taints in the hashed pod spec, in seconds. [`PodShutdown`](super::shutdown::PodShutdown)
/// raises it without changing the hash.
const LOST_NODE_SECONDS: i64 = 30;
/// Name of the volume of fetched checkpoints.
pub(super) const CACHE_VOLUME: &str = "cache";
/// Mount path of claims with checkpoints.
const MODELS_PATH: &str = "/models";
/// Mount path of a function's certificate.
const IDENTITY: &str = "/identity";
/// Mount path of fetched checkpoints.
const CACHE_PATH: &str = "/cache";

/// Access of a pod to the checkpoint.
#[derive(Debug, Clone)]
pub(super) struct ModelAccess {
    /// `--model` and related arguments.
    pub(super) arguments: Vec<String>,
    volume: Volume,
    mount: VolumeMount,
    environment: Vec<EnvVar>,
    secrets: Vec<EnvFromSource>,
    fetched: bool,
}

impl ModelAccess {
    pub(super) fn new(model: &PlannedModel, sources: &SourcePolicy) -> Result<Self, SourceRefusal> {
        let source = sources.check_plan(model)?;
        let fetched = source.is_fetched();
        let is_hub = matches!(source, ModelSource::Hub { .. });
        let (mut arguments, volume, mount) = match source {
            ModelSource::Claim { claim, path } => {
                let folder =
                    if path.is_empty() { MODELS_PATH.to_owned() } else { format!("{MODELS_PATH}/{path}") };
                let volume = claim_volume("models", &claim, true);
                (vec!["--model".to_owned(), folder], volume, mount("models", MODELS_PATH, true))
            }
            ModelSource::Hub { repository } => {
                let revision = model.revision.as_deref().unwrap_or("main");
                let arguments = fetch_arguments(format!("hf://{repository}@{revision}"));
                (arguments, cache_volume(model), mount(CACHE_VOLUME, CACHE_PATH, false))
            }
            ModelSource::Url { url } => {
                (fetch_arguments(url), cache_volume(model), mount(CACHE_VOLUME, CACHE_PATH, false))
            }
        };
        if fetched {
            // This is an argument since the user's Secret could override an environment variable.
            arguments.extend(["--allow-source".to_owned(), sources.egress.to_string()]);
        }
        if model.ambient_credentials {
            arguments.push("--ambient-credentials".to_owned());
        }
        // The variables that Hugging Face and AWS tools use.
        let name = if is_hub { "HF_ENDPOINT" } else { "AWS_ENDPOINT_URL" };
        let endpoint = model.endpoint.iter().map(|endpoint| EnvVar {
            name: name.to_owned(),
            value: Some(endpoint.clone()),
            value_from: None,
        });
        let secrets = model.credentials_secret_name.iter().map(|secret| EnvFromSource {
            secret_ref: Some(SecretEnvSource { name: secret.clone(), optional: Some(false) }),
            ..EnvFromSource::default()
        });
        Ok(Self {
            arguments,
            volume,
            mount,
            environment: endpoint.collect(),
            secrets: secrets.collect(),
            fetched,
        })
    }
}

fn fetch_arguments(url: String) -> Vec<String> {
    vec!["--model".to_owned(), url, "--model-cache".to_owned(), CACHE_PATH.to_owned()]
}

fn claim_volume(name: &str, claim: &str, read_only: bool) -> Volume {
    Volume {
        name: name.to_owned(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim.to_owned(),
            read_only: Some(read_only),
        }),
        ..Volume::default()
    }
}

fn cache_volume(model: &PlannedModel) -> Volume {
    match &model.cache_claim_name {
        Some(claim) => claim_volume(CACHE_VOLUME, claim, false),
        None => Volume {
            name: CACHE_VOLUME.to_owned(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        },
    }
}

fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: Some(read_only),
        ..VolumeMount::default()
    }
}

/// Settings of a pod's only container.
pub(super) struct Program<'a> {
    pub(super) name: &'a str,
    pub(super) image: &'a str,
    pub(super) pull_policy: &'a str,
    pub(super) command: &'a str,
    pub(super) arguments: Vec<String>,
    pub(super) resources: BTreeMap<String, Quantity>,
}

/// Returns the spec of a pod that runs `program` on `model`, under the restricted pod security standard.
pub(super) fn pod_spec(program: Program<'_>, model: &ModelAccess, template: &PodTemplate) -> PodSpec {
    let container = Container {
        name: program.name.to_owned(),
        image: Some(program.image.to_owned()),
        image_pull_policy: Some(program.pull_policy.to_owned()),
        command: Some(vec![program.command.to_owned()]),
        args: Some(program.arguments),
        env: non_empty(model.environment.clone()),
        env_from: non_empty(model.secrets.clone()),
        // Requests equal limits, so that the pod has QoS class Guaranteed: it is evicted last, and gets the planned
        // resources.
        resources: Some(ResourceRequirements {
            limits: Some(program.resources.clone()),
            requests: Some(program.resources),
            claims: None,
        }),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
            read_only_root_filesystem: Some(true),
            ..SecurityContext::default()
        }),
        // The last log lines of a failed function become its termination message.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(vec![model.mount.clone(), mount("tmp", "/tmp", false)]),
        ..Container::default()
    };
    let temporary = Volume {
        name: "tmp".to_owned(),
        empty_dir: Some(EmptyDirVolumeSource::default()),
        ..Volume::default()
    };
    PodSpec {
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        service_account_name: template.service_account_name.clone(),
        runtime_class_name: template.runtime_class_name.clone(),
        priority_class_name: template.priority_class_name.clone(),
        node_selector: (!template.node_selector.is_empty()).then(|| template.node_selector.clone()),
        tolerations: Some(tolerations(template)),
        affinity: template.affinity.clone(),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            // Only a cache is written; a claim with a checkpoint is read-only.
            fs_group: model.fetched.then_some(USER),
            fs_group_change_policy: model.fetched.then(|| "OnRootMismatch".to_owned()),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".to_owned(),
                localhost_profile: None,
            }),
            ..PodSecurityContext::default()
        }),
        volumes: Some(vec![model.volume.clone(), temporary]),
        containers: vec![container],
        ..PodSpec::default()
    }
}

/// Mounts the certificate in `secret`; the pod does not start before the Secret exists.
pub(super) fn with_identity(mut spec: PodSpec, secret: String) -> PodSpec {
    spec.volumes.get_or_insert_default().push(Volume {
        name: "identity".to_owned(),
        secret: Some(SecretVolumeSource { secret_name: Some(secret), ..SecretVolumeSource::default() }),
        ..Volume::default()
    });
    if let Some(container) = spec.containers.first_mut() {
        container.volume_mounts.get_or_insert_default().push(mount("identity", IDENTITY, true));
        container.args.get_or_insert_default().extend(["--identity-dir".to_owned(), IDENTITY.to_owned()]);
    }
    spec
}

fn non_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn tolerations(template: &PodTemplate) -> Vec<Toleration> {
    let lost = |key: &str| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        toleration_seconds: Some(LOST_NODE_SECONDS),
        value: None,
    };
    let mut all: Vec<Toleration> = LOST_NODE.map(lost).into();
    all.extend(template.tolerations.iter().cloned());
    all
}

/// Returns the CPU, memory and GPUs of a container that works like a main function.
pub(super) fn main_resources(
    owner: &MoEDeployment,
    cpu: Quantity,
    memory: Quantity,
) -> BTreeMap<String, Quantity> {
    let mut all = resources(cpu, memory);
    let gpu = owner.spec.main.gpu.as_ref();
    all.extend(gpu.map(|gpu| (gpu.resource.clone(), Quantity(gpu.count.to_string()))));
    all
}

/// Returns the CPU and memory of a container.
pub(super) fn resources(cpu: Quantity, memory: Quantity) -> BTreeMap<String, Quantity> {
    BTreeMap::from([("cpu".to_owned(), cpu), ("memory".to_owned(), memory)])
}

/// Returns an HTTP probe of `path` at the port for probes.
pub(super) fn probe(path: &str, timing: ProbeTiming) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String(HEALTH.to_owned()),
            ..HTTPGetAction::default()
        }),
        ..timing.probe()
    }
}

/// Grace period in seconds of a container whose liveness probe failed; it is not drained.
const HUNG_GRACE_SECONDS: i64 = 10;

/// Returns a probe whose failure terminates the container.
pub(super) fn terminating(probe: Probe) -> Probe {
    Probe { termination_grace_period_seconds: Some(HUNG_GRACE_SECONDS), ..probe }
}

/// Timing of a probe, and its failure threshold.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProbeTiming {
    pub(super) period_seconds: i32,
    pub(super) timeout_seconds: i32,
    pub(super) failures: i32,
}

impl ProbeTiming {
    fn probe(self) -> Probe {
        Probe {
            period_seconds: Some(self.period_seconds),
            timeout_seconds: Some(self.timeout_seconds),
            failure_threshold: Some(self.failures),
            ..Probe::default()
        }
    }
}
