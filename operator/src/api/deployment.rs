//! `MoEDeployment`: a model, what it may cost, and how fast it must be.

use super::prediction::PredictionSpec;
use super::scaling::ScalingSpec;
use super::sizes::{CpuRange, MemoryRange};
use super::status::MoEDeploymentStatus;
use super::workload::WorkloadSpec;
use k8s_openapi::api::core::v1::{Affinity, Toleration};
use kube::core::Duration;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A Mixture-of-Experts model as an OpenAI-compatible HTTP endpoint.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "remoe.dev",
    version = "v1alpha1",
    kind = "MoEDeployment",
    plural = "moedeployments",
    singular = "moedeployment",
    shortname = "moed",
    category = "moe",
    namespaced,
    status = "MoEDeploymentStatus",
    derive = "PartialEq",
    doc = "A Mixture-of-Experts model as an OpenAI-compatible HTTP endpoint: the non-expert modules and frequent experts in main functions, the other experts in remote functions, at the lowest cost that keeps the latency promises.",
    scale(
        spec_replicas_path = ".spec.scaling.min",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Plan", type_ = "string", json_path = ".status.plan"),
    printcolumn(name = "Functions", type_ = "string", json_path = ".status.functions"),
    printcolumn(name = "$/h", type_ = "string", json_path = ".status.costPerHour"),
    printcolumn(name = "Saving", type_ = "string", json_path = ".status.saving"),
    printcolumn(name = "Saved", type_ = "string", json_path = ".status.saved"),
    printcolumn(name = "URL", type_ = "string", json_path = ".status.url"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = "1"
    ),
    printcolumn(name = "Verdict", type_ = "string", json_path = ".status.verdict", priority = "1"),
    validation = Rule::new("self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("the name must be a DNS label that starts with a letter, of at most 40 characters: functions and services are named after it")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.acceptedPlan) || self.mode == 'Advisory'")
        .message("acceptedPlan needs mode Advisory: in mode Active every plan is adopted")
        .field_path(".acceptedPlan"),
    validation = Rule::new("self.main.device != 'cuda' || (has(self.pricing.gpuHour) && has(self.pricing.gpuMemoryMB))")
        .message("main.device cuda needs pricing.gpuHour and pricing.gpuMemoryMB")
        .field_path(".pricing"),
    validation = Rule::new("has(self.main.cpu) == has(self.remoteExperts.cpu)")
        .message("main.cpu and remoteExperts.cpu stand together: vCPUs are sold apart from memory, or with it")
        .field_path(".remoteExperts.cpu"),
    validation = Rule::new("!(has(self.slo.coldTtft) || has(self.slo.coldPercent)) || (has(self.workload) && has(self.workload.arrivals))")
        .message("slo.coldTtft and slo.coldPercent need workload.arrivals: without them nobody knows how many requests find functions asleep")
        .field_path(".slo"),
    validation = Rule::new("!has(self.replicas) || (self.scaling.min == 1 && (!has(self.scaling.max) || self.scaling.max == 1) && !has(self.scaling.remote))")
        .message("replicas and scaling exclude each other: scaling says how many functions run")
        .field_path(".replicas")
)]
pub struct MoEDeploymentSpec {
    /// What is served.
    pub model: ModelSpec,
    /// The model's name in the HTTP interface; the name of this resource where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub served_name: Option<String>,
    /// Active: every plan is adopted. Advisory: plans are published, and adopted when `acceptedPlan`
    /// names them.
    #[serde(default)]
    pub mode: Mode,
    /// The plan to adopt in mode Advisory: the hash that status.proposedPlan shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-f]{10}$"), length(max = 10))]
    pub accepted_plan: Option<String>,
    /// How many main functions run, each with the whole non-expert part of the model, and when none does.
    /// Remote functions serve all of them.
    #[serde(default)]
    pub scaling: ScalingSpec,
    /// Main functions that always run, in place of `scaling`, which says more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub replicas: Option<u32>,
    /// Latency promises, of the typical request.
    #[serde(default)]
    pub slo: SloSpec,
    /// Sizes of requests; derived from the model's context where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<WorkloadSpec>,
    /// The main functions.
    #[serde(default)]
    pub main: MainSpec,
    /// The functions that hold the experts that main functions do not.
    #[serde(default)]
    pub remote_experts: RemoteExpertsSpec,
    /// What the cluster's resources cost.
    #[serde(default)]
    pub pricing: PricingSpec,
    /// How one revision follows another.
    #[serde(default, skip_serializing_if = "RolloutSpec::is_empty")]
    pub rollout: RolloutSpec,
    /// How plans follow what requests use.
    #[serde(default, skip_serializing_if = "PredictionSpec::is_default")]
    pub prediction: PredictionSpec,
    /// Measured figures of this hardware. Where absent, a profiler pod measures them while the model
    /// already serves on a conservative prior.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileSpec>,
}

/// Where the weights come from.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.revision) || self.source.startsWith('hf://')")
        .message("revision belongs to hf:// sources only").field_path(".revision"),
    validation = Rule::new("!has(self.endpoint) || self.source.startsWith('s3://') || self.source.startsWith('hf://')")
        .message("endpoint belongs to s3:// and hf:// sources only").field_path(".endpoint"),
    validation = Rule::new("!has(self.credentialsSecretName) || !self.source.startsWith('pvc://')")
        .message("a claim needs no credentials").field_path(".credentialsSecretName"),
    validation = Rule::new("!has(self.cacheClaimName) || !self.source.startsWith('pvc://')")
        .message("a claim needs no cache").field_path(".cacheClaimName")
)]
pub struct ModelSpec {
    /// `hf://organisation/name`, `s3://bucket/prefix`, `https://host/path`, or `pvc://claim/path` for a
    /// folder of a PersistentVolumeClaim in this namespace.
    #[schemars(
        length(min = 1, max = 1024),
        regex(
            pattern = "^(hf://[^/@\\s]+/[^/@\\s]+|s3://[^/\\s]+(/\\S*)?|https://[^/\\s]+(/\\S*)?|pvc://[a-z0-9][-a-z0-9.]*(/[^\\s]*)?)$"
        )
    )]
    pub source: String,
    /// Branch, tag or commit of an hf:// source; `main` where absent. The commit is pinned in the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 255), regex(pattern = "^[A-Za-z0-9][-A-Za-z0-9._/]*$"))]
    pub revision: Option<String>,
    /// URL of an S3-compatible store, or of a mirror of the hub; the public one where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), regex(pattern = "^https?://\\S+$"))]
    pub endpoint: Option<String>,
    /// Secret of this namespace whose keys become environment variables of the functions: HF_TOKEN, or
    /// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub credentials_secret_name: Option<String>,
    /// PersistentVolumeClaim of this namespace that keeps what was fetched; where absent, every function
    /// fetches what it hosts into a volume of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub cache_claim_name: Option<String>,
    /// What is computed in; the checkpoint's own where absent (float32 for float16).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<ComputeDtype>,
    /// What routed experts are quantised to as they are loaded, in the main function and in remote ones, or `fp8` where
    /// they are stored so and stay so; they become what is computed in where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_dtype: Option<ExpertsDtype>,
    /// What the main function keeps its other weights as: attention, dense layers, shared experts, the embedding and the head. Where
    /// absent they become int8 beside quantised experts on CPUs, and are what is computed in otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_dtype: Option<DenseDtype>,
    /// Positions of a text, prompt and answer together, at most: fewer than the model serves otherwise, or more than the
    /// training of its longrope had, which rotates every position as in long texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub max_model_len: Option<u32>,
}

/// What experts are quantised to, as integers with a scale of 2 bytes for every 32 weights, or stay.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsDtype {
    /// 8 bits a weight.
    Int8,
    /// 4 bits a weight.
    Int4,
    /// 4 bits a weight, as gpt-oss is published; experts of other checkpoints are rounded to it.
    Mxfp4,
    /// 8 bits a weight, as DeepSeek-V3 is published; nothing is rounded, and experts that are stored otherwise are refused.
    Fp8,
}

impl From<ExpertsDtype> for remoe_model::ExpertsDtype {
    fn from(dtype: ExpertsDtype) -> Self {
        match dtype {
            ExpertsDtype::Int8 => Self::Int8,
            ExpertsDtype::Int4 => Self::Int4,
            ExpertsDtype::Mxfp4 => Self::Mxfp4,
            ExpertsDtype::Fp8 => Self::Fp8,
        }
    }
}

/// What weights outside of routed experts are kept as.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DenseDtype {
    /// 8 bits a weight, on CPUs.
    Int8,
    /// 4 bits a weight, on CPUs.
    Int4,
    /// As they are computed in bfloat16.
    Bfloat16,
    /// As they are computed in float32.
    Float32,
}

impl From<DenseDtype> for remoe_model::DenseDtype {
    fn from(dtype: DenseDtype) -> Self {
        match dtype {
            DenseDtype::Int8 => Self::Int8,
            DenseDtype::Int4 => Self::Int4,
            DenseDtype::Bfloat16 => Self::Bfloat16,
            DenseDtype::Float32 => Self::Float32,
        }
    }
}

/// What is computed in.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// 16 bits.
    Bfloat16,
    /// 32 bits.
    Float32,
}

impl ComputeDtype {
    /// As the functions' command lines write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bfloat16 => "bfloat16",
            Self::Float32 => "float32",
        }
    }
}

/// Who decides about plans.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// The operator.
    #[default]
    Active,
    /// The user.
    Advisory,
}

/// Latency promises, cold start included.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SloSpec {
    /// Time to first token, such as 10s.
    #[serde(default = "default_ttft")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) > duration('0s')").message("must be longer than 0s"))]
    pub ttft: Duration,
    /// Time per output token, such as 150ms.
    #[serde(default = "default_tpot")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) > duration('0s')").message("must be longer than 0s"))]
    pub tpot: Duration,
    /// Time to first token of a request that finds all functions asleep, such as 30s; no limit where absent. Needs
    /// workload.arrivals, and counts where scaling.min is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) > duration('0s')").message("must be longer than 0s"))]
    pub cold_ttft: Option<Duration>,
    /// Requests that may find functions asleep, in percent, as a decimal number such as "2.5"; no limit where absent.
    /// Needs workload.arrivals, and counts where scaling.min is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    #[x_kube(validation = Rule::new("double(self) <= 100.0").message("must be at most 100"))]
    pub cold_percent: Option<String>,
}

/// The main functions.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(self.device == 'cuda') == has(self.gpu)")
        .message("gpu stands if and only if device is cuda").field_path(".gpu")
)]
pub struct MainSpec {
    /// What computes the non-expert part.
    #[serde(default)]
    pub device: Device,
    /// The GPUs of each main function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSpec>,
    /// Memory of the experts in a main function, in MB of 1,000,000 bytes; 1,000 MB come with one vCPU,
    /// unless `cpu` says otherwise. On the CPU the container has, on top, what the non-expert part takes.
    #[serde(rename = "memoryMB", default = "main_memory")]
    pub memory_mb: MemoryRange,
    /// vCPUs of a main function in millicores, where they are to be chosen apart from its memory. Stands
    /// together with `remoteExperts.cpu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuRange>,
    /// Where main functions run.
    #[serde(default, skip_serializing_if = "PodTemplate::is_empty")]
    pub template: PodTemplate,
}

/// What computes the non-expert part of the model.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The CPUs of the main function.
    #[default]
    Cpu,
    /// Its GPU.
    Cuda,
}

impl Device {
    /// As the functions' command lines write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// GPUs of one main function.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuSpec {
    /// The extended resource that the node's device plug-in offers.
    #[serde(default = "nvidia_gpu")]
    #[schemars(length(min = 3, max = 317), regex(pattern = "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"))]
    pub resource: String,
    /// How many.
    #[serde(default = "one_gpu")]
    #[schemars(range(min = 1, max = 64))]
    pub count: u32,
}

/// Where the pods of a function run.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodTemplate {
    /// RuntimeClass of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub runtime_class_name: Option<String>,
    /// PriorityClass of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
    /// ServiceAccount of the pods; its token is not mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub service_account_name: Option<String>,
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that the pods tolerate, beside those of nodes that are not ready or not reachable, which
    /// every function tolerates for five minutes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub tolerations: Vec<Toleration>,
    /// Affinity of the pods; in place of the operator's own, which prefers nodes of the main functions
    /// for remote ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
}

impl PodTemplate {
    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The functions that hold the experts that main functions do not.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoteExpertsSpec {
    /// Auto: where it is cheaper. Always: in every layer with more experts than a token uses. Never: all
    /// experts are in the main functions.
    #[serde(default)]
    pub mode: RemoteMode,
    /// Memory of a remote function, in MB of 1,000,000 bytes; 1,000 MB come with one vCPU, unless `cpu`
    /// says otherwise.
    #[serde(rename = "memoryMB", default = "remote_memory")]
    pub memory_mb: MemoryRange,
    /// vCPUs of a remote function in millicores, where they are to be chosen apart from its memory. Stands
    /// together with `main.cpu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuRange>,
    /// Groups of remote functions, at most. The functions of a group are alike and host a part of every
    /// layer's remote experts, so that all groups work on every layer.
    #[serde(default = "max_groups")]
    #[schemars(range(min = 1, max = 64))]
    pub max_groups: u32,
    /// Replicas of a remote function, at most.
    #[serde(default = "max_replicas")]
    #[schemars(range(min = 1, max = 64))]
    pub max_replicas: u32,
    /// Tokens of one invocation, at most, in MB; no limit where absent. For platforms that limit the
    /// size of a request.
    #[serde(rename = "payloadLimitMB", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub payload_limit_mb: Option<u32>,
    /// Where remote functions run.
    #[serde(default, skip_serializing_if = "PodTemplate::is_empty")]
    pub template: PodTemplate,
}

/// Whether experts may be remote.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemoteMode {
    /// Where it is cheaper.
    #[default]
    Auto,
    /// In every layer with more experts than a token uses.
    Always,
    /// Nowhere.
    Never,
}

/// What the cluster's resources cost, in dollars, as decimal numbers in strings.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.gpuHour) == has(self.gpuMemoryMB)")
        .message("gpuHour and gpuMemoryMB stand together").field_path(".gpuHour")
)]
pub struct PricingSpec {
    /// Reserved: remote functions cost as long as they exist, as on a plain cluster. Invocation: they
    /// cost while they work.
    #[serde(default)]
    pub billing: Billing,
    /// One vCPU for one hour.
    #[serde(default = "default_cpu_hour")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    pub cpu_core_hour: String,
    /// 1,000,000,000 bytes of memory for one hour.
    #[serde(rename = "memoryGBHour", default = "default_memory_hour")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    pub memory_gb_hour: String,
    /// One whole GPU for one hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    pub gpu_hour: Option<String>,
    /// Memory of one GPU, in MB of 1,000,000 bytes.
    #[serde(rename = "gpuMemoryMB", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 10_000_000))]
    pub gpu_memory_mb: Option<u32>,
}

/// What remote functions are billed for.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Billing {
    /// The time for which they exist.
    #[default]
    Reserved,
    /// The time in which they work.
    Invocation,
}

/// How one revision follows another.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutSpec {
    /// Surge: new main functions start beside those that serve, which end when the new ones have taken over.
    /// Recreate: those that serve end first, when the remote functions of the new revision are ready; for
    /// devices of which there is no second one. Where absent: Recreate with device cuda, else Surge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<RolloutStrategy>,
}

/// What becomes of main functions that serve when others are to follow them.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RolloutStrategy {
    /// They serve until the others do.
    Surge,
    /// They end before the others start.
    Recreate,
}

impl RolloutSpec {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl MoEDeploymentSpec {
    /// How one revision follows another, where nothing is said too.
    pub fn strategy(&self) -> RolloutStrategy {
        self.rollout.strategy.unwrap_or(match self.main.device {
            Device::Cuda => RolloutStrategy::Recreate,
            Device::Cpu => RolloutStrategy::Surge,
        })
    }

    /// Main functions that run while the deployment is awake, whatever the load.
    pub fn main_functions(&self) -> u32 {
        self.replicas.unwrap_or_else(|| self.scaling.least())
    }

    /// Whether there are more functions where there is more load.
    pub fn follows_load(&self) -> bool {
        self.replicas.is_none() && self.scaling.follows_load()
    }

    /// Without requests for so long it sleeps; none: never.
    pub fn idle_window(&self) -> Option<std::time::Duration> {
        let may_sleep = self.replicas.is_none() && self.scaling.min == 0;
        may_sleep.then(|| self.scaling.idle_window.into())
    }
}

/// Measured figures of the hardware.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileSpec {
    /// ConfigMap of this namespace with what `remoe profile --json` printed, under the key profile.json.
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub config_map_name: String,
}

impl Default for SloSpec {
    fn default() -> Self {
        Self { ttft: default_ttft(), tpot: default_tpot(), cold_ttft: None, cold_percent: None }
    }
}

impl Default for MainSpec {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            gpu: None,
            memory_mb: main_memory(),
            cpu: None,
            template: PodTemplate::default(),
        }
    }
}

impl Default for RemoteExpertsSpec {
    fn default() -> Self {
        Self {
            mode: RemoteMode::Auto,
            memory_mb: remote_memory(),
            cpu: None,
            max_groups: max_groups(),
            max_replicas: max_replicas(),
            payload_limit_mb: None,
            template: PodTemplate::default(),
        }
    }
}

impl Default for PricingSpec {
    fn default() -> Self {
        Self {
            billing: Billing::Reserved,
            cpu_core_hour: default_cpu_hour(),
            memory_gb_hour: default_memory_hour(),
            gpu_hour: None,
            gpu_memory_mb: None,
        }
    }
}

fn one_gpu() -> u32 {
    1
}

fn nvidia_gpu() -> String {
    "nvidia.com/gpu".to_owned()
}

fn default_ttft() -> Duration {
    std::time::Duration::from_secs(10).into()
}

fn default_tpot() -> Duration {
    std::time::Duration::from_millis(150).into()
}

fn main_memory() -> MemoryRange {
    MemoryRange { min: 1_000, max: 40_000, step: 100 }
}

fn remote_memory() -> MemoryRange {
    MemoryRange { min: 200, max: 5_000, step: 100 }
}

fn max_groups() -> u32 {
    16
}

fn max_replicas() -> u32 {
    4
}

fn default_cpu_hour() -> String {
    "0.03".to_owned()
}

fn default_memory_hour() -> String {
    "0.004".to_owned()
}
