//! Parts that the pods of all functions share.

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

/// The name of the port for probes.
pub(super) const HEALTH: &str = "health";
/// The user of all images.
const USER: i64 = 65532;
/// Taints of a node that is not heard.
pub(super) const LOST_NODE: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
/// Toleration of these taints in the pod spec that is hashed, in seconds. [`PodShutdown`](super::ending::PodShutdown) raises it
/// without changing the hash.
const LOST_NODE_SECONDS: i64 = 30;
/// The volume of fetched checkpoints.
pub(super) const CACHE_VOLUME: &str = "cache";
/// Where claims with checkpoints are mounted.
const MODELS: &str = "/models";
/// Where a function finds its certificate.
const IDENTITY: &str = "/identity";
/// Where fetched checkpoints are kept.
const CACHE: &str = "/cache";

/// How a function finds the checkpoint.
#[derive(Debug, Clone)]
pub(super) struct ModelAccess {
    /// `--model` and what belongs to it.
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
                let folder = if path.is_empty() { MODELS.to_owned() } else { format!("{MODELS}/{path}") };
                let volume = claim_volume("models", &claim, true);
                (vec!["--model".to_owned(), folder], volume, mount("models", MODELS, true))
            }
            ModelSource::Hub { repository } => {
                let revision = model.revision.as_deref().unwrap_or("main");
                let arguments = fetching(format!("hf://{repository}@{revision}"));
                (arguments, cache_volume(model), mount(CACHE_VOLUME, CACHE, false))
            }
            ModelSource::Url { url } => {
                (fetching(url), cache_volume(model), mount(CACHE_VOLUME, CACHE, false))
            }
        };
        if fetched {
            // Arguments, since the environment comes from a Secret of the user.
            arguments.extend(["--allow-source".to_owned(), sources.egress.to_string()]);
        }
        if model.ambient_credentials {
            arguments.push("--ambient-credentials".to_owned());
        }
        // As the tools of both worlds name it.
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

fn fetching(url: String) -> Vec<String> {
    vec!["--model".to_owned(), url, "--model-cache".to_owned(), CACHE.to_owned()]
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

/// The one container of a pod.
pub(super) struct Program<'a> {
    pub(super) name: &'a str,
    pub(super) image: &'a str,
    pub(super) pull_policy: &'a str,
    pub(super) command: &'a str,
    pub(super) arguments: Vec<String>,
    pub(super) resources: BTreeMap<String, Quantity>,
}

/// A pod of `program`, which reads `model`, under the restricted pod security standard.
pub(super) fn pod_spec(program: Program<'_>, model: &ModelAccess, template: &PodTemplate) -> PodSpec {
    let container = Container {
        name: program.name.to_owned(),
        image: Some(program.image.to_owned()),
        image_pull_policy: Some(program.pull_policy.to_owned()),
        command: Some(vec![program.command.to_owned()]),
        args: Some(program.arguments),
        env: non_empty(model.environment.clone()),
        env_from: non_empty(model.secrets.clone()),
        // Equal, so that the pod is of the Guaranteed class: it is evicted last, and what was planned
        // is what there is.
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
        // The last words of a function that fails stand in the pod's status.
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
            // A cache is written, a claim with a checkpoint is not.
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

/// Gives a function of `spec` the certificate in `secret`; it does not start before that is there.
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

/// CPU and memory of a container that works as main functions do, and their GPUs.
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

/// CPU and memory of a container.
pub(super) fn resources(cpu: Quantity, memory: Quantity) -> BTreeMap<String, Quantity> {
    BTreeMap::from([("cpu".to_owned(), cpu), ("memory".to_owned(), memory)])
}

/// A probe of a path at the port for probes.
pub(super) fn probe(path: &str, pace: ProbeTiming) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String(HEALTH.to_owned()),
            ..HTTPGetAction::default()
        }),
        ..pace.probe()
    }
}

/// Seconds that a container has to end after probes have said that it hangs: not those of a drain.
const HUNG_GRACE_SECONDS: i64 = 10;

/// A probe whose failure ends the container.
pub(super) fn ending_container(probe: Probe) -> Probe {
    Probe { termination_grace_period_seconds: Some(HUNG_GRACE_SECONDS), ..probe }
}

/// How often a probe is made, and how many failures count.
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
