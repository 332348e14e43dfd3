//! `MoEDeployment`: a model, its prices and its latency limits.

use crate::duration::Duration;
use crate::prediction::PredictionSpec;
use crate::scaling::ScalingSpec;
use crate::sizes::{CpuRange, MemoryRange};
use crate::status::MoEDeploymentStatus;
use crate::workload::WorkloadSpec;
use k8s_openapi::api::core::v1::{Affinity, Toleration};
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
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
    doc = "A Mixture-of-Experts model as an OpenAI-compatible HTTP endpoint: the non-expert modules and frequent experts in main functions, the other experts in remote functions, at the lowest cost that meets the latency limits.",
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
        .message("invalid metadata.name: expected a DNS label of at most 40 characters that starts with a letter; functions and Services are named after it")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.acceptedPlan) || self.mode == 'Advisory'")
        .message("acceptedPlan requires mode Advisory; mode Active adopts every plan")
        .field_path(".acceptedPlan"),
    validation = Rule::new("self.main.device != 'cuda' || (has(self.pricing.gpuHour) && has(self.pricing.gpuMemoryMB))")
        .message("main.device cuda requires pricing.gpuHour and pricing.gpuMemoryMB")
        .field_path(".pricing"),
    validation = Rule::new("has(self.main.cpu) == has(self.remoteExperts.cpu)")
        .message("main.cpu and remoteExperts.cpu must be set together, or neither")
        .field_path(".remoteExperts.cpu"),
    validation = Rule::new("!(has(self.slo.coldTtft) || has(self.slo.coldPercent)) || (has(self.workload) && has(self.workload.arrivals))")
        .message("slo.coldTtft and slo.coldPercent require workload.arrivals, which give the share of cold requests")
        .field_path(".slo"),
    validation = Rule::new("!has(self.replicas) || (self.scaling.min == 1 && (!has(self.scaling.max) || self.scaling.max == 1) && !has(self.scaling.remote))")
        .message("replicas and scaling are mutually exclusive; use scaling.min")
        .field_path(".replicas")
)]
pub struct MoEDeploymentSpec {
    /// The checkpoint.
    pub model: ModelSpec,
    /// Name of the model in the HTTP interface. Defaults to the name of this resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub served_name: Option<String>,
    /// `Active`: the operator adopts every plan. `Advisory`: it publishes plans and adopts the one in
    /// `acceptedPlan`.
    #[serde(default)]
    pub mode: Mode,
    /// Hash of the plan to adopt in mode Advisory, as in status.proposedPlan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-f]{10}$"), length(max = 10))]
    pub accepted_plan: Option<String>,
    /// Number of main functions, scale to zero, and autoscaling. Each main function has the whole non-expert
    /// part of the model; remote functions serve all of them.
    #[serde(default)]
    pub scaling: ScalingSpec,
    /// Fixed number of main functions. Excludes a `scaling` with another `min` than 1, a `max` above 1, or
    /// `remote`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub replicas: Option<u32>,
    /// Latency limits of the typical request, and of cold ones.
    #[serde(default)]
    pub slo: SloSpec,
    /// Sizes and rate of requests. Defaults follow from the model's context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<WorkloadSpec>,
    /// The main functions.
    #[serde(default)]
    pub main: MainSpec,
    /// Remote functions: they hold the experts that main functions do not.
    #[serde(default)]
    pub remote_experts: RemoteExpertsSpec,
    /// Prices of the cluster's resources.
    #[serde(default)]
    pub pricing: PricingSpec,
    /// Rollout of a new revision.
    #[serde(default, skip_serializing_if = "RolloutSpec::is_empty")]
    pub rollout: RolloutSpec,
    /// Replanning on expert usage.
    #[serde(default, skip_serializing_if = "PredictionSpec::is_default")]
    pub prediction: PredictionSpec,
    /// Measured hardware profile. If absent, a profiler pod measures it while the model already serves on a
    /// conservative prior.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileSpec>,
}

/// Source of the weights.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.revision) || self.source.startsWith('hf://')")
        .message("revision is valid for hf:// sources only").field_path(".revision"),
    validation = Rule::new("!has(self.endpoint) || self.source.startsWith('s3://') || self.source.startsWith('hf://')")
        .message("endpoint is valid for s3:// and hf:// sources only").field_path(".endpoint"),
    validation = Rule::new("!has(self.credentialsSecretName) || !self.source.startsWith('pvc://')")
        .message("credentialsSecretName is not valid for pvc:// sources").field_path(".credentialsSecretName"),
    validation = Rule::new("!has(self.ambientCredentials) || !self.ambientCredentials || self.source.startsWith('s3://')")
        .message("ambientCredentials is valid for s3:// sources only").field_path(".ambientCredentials"),
    validation = Rule::new("!has(self.cacheClaimName) || !self.source.startsWith('pvc://')")
        .message("cacheClaimName is not valid for pvc:// sources").field_path(".cacheClaimName")
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
    /// Branch, tag or commit of an hf:// source. Defaults to `main`. The status pins the commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 255), regex(pattern = "^[A-Za-z0-9][-A-Za-z0-9._/]*$"))]
    pub revision: Option<String>,
    /// URL of an S3-compatible store, or of a mirror of the hub. Defaults to the public one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), regex(pattern = "^https?://\\S+$"))]
    pub endpoint: Option<String>,
    /// Secret of this namespace whose keys become environment variables of the functions: HF_TOKEN, or
    /// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub credentials_secret_name: Option<String>,
    /// Use the AWS role of the pod's service account or node if the Secret has no AWS_ACCESS_KEY_ID. The cluster must
    /// allow it. Default: unsigned requests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ambient_credentials: bool,
    /// PersistentVolumeClaim of this namespace that caches fetched weights. If absent, every function fetches
    /// its weights into a volume of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub cache_claim_name: Option<String>,
    /// Compute dtype. Defaults to the dtype of the checkpoint (float32 for float16).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<ComputeDtype>,
    /// Quantisation of routed experts at load time, in all functions. `fp8` keeps experts that are stored as fp8,
    /// and rejects others. Defaults to the compute dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_dtype: Option<ExpertsDtype>,
    /// Dtype of the main function's other weights: attention, dense layers, shared experts, embedding and head.
    /// Defaults to int8 beside quantised experts on CPUs, else to the compute dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_dtype: Option<DenseDtype>,
    /// Form of the KV cache, on CPUs only. Defaults to the compute dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Maximum context length in tokens, prompt and answer together. Defaults to what the model serves. With rope
    /// type longrope, a value above the context of the training rotates every position as in long texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub max_model_len: Option<u32>,
    /// Variables of the chat template for requests that do not set them, such as enable_thinking. The template must
    /// read each of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "template_variables")]
    pub chat_template_kwargs: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Schema of an object with any fields.
fn template_variables(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "nullable": true,
        "maxProperties": 64,
        "x-kubernetes-preserve-unknown-fields": true,
    })
}

/// Quantisation of routed experts. Integers have a 2-byte scale for every 32 weights.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsDtype {
    /// 8 bits per weight.
    Int8,
    /// 4 bits per weight.
    Int4,
    /// 4 bits per weight, as in gpt-oss. Experts of other checkpoints are rounded.
    Mxfp4,
    /// 8 bits per weight, as in DeepSeek-V3. Nothing is rounded; experts stored otherwise are rejected.
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

/// Form of the KV cache.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvCacheDtype {
    /// 8 bits per element, and a 2-byte scale for every 64 of a head.
    Int8,
}

impl From<KvCacheDtype> for remoe_model::KvCacheDtype {
    fn from(KvCacheDtype::Int8: KvCacheDtype) -> Self {
        Self::Int8
    }
}

/// Dtype of the weights outside of routed experts.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DenseDtype {
    /// 8 bits per weight, on CPUs only.
    Int8,
    /// 4 bits per weight, on CPUs only.
    Int4,
    /// bfloat16; requires compute dtype bfloat16.
    Bfloat16,
    /// float32; requires compute dtype float32.
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

/// Compute dtype.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// 16 bits.
    Bfloat16,
    /// 32 bits.
    Float32,
}

impl ComputeDtype {
    /// Returns the value of the functions' command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bfloat16 => "bfloat16",
            Self::Float32 => "float32",
        }
    }
}

/// Adoption of plans.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// The operator adopts every plan.
    #[default]
    Active,
    /// The user adopts plans by `acceptedPlan`.
    Advisory,
}

/// Latency limits.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SloSpec {
    /// Limit of the time to first token (TTFT) of the typical request, such as 10s.
    #[serde(default = "default_ttft")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) > duration('0s')").message("must be longer than 0s"))]
    pub ttft: Duration,
    /// Limit of the time per output token (TPOT) of the typical request, such as 150ms.
    #[serde(default = "default_tpot")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) > duration('0s')").message("must be longer than 0s"))]
    pub tpot: Duration,
    /// Limit of the time to first token of a cold request, which finds functions asleep; such as 30s. Requires
    /// workload.arrivals; applies with scaling.min 0 or scaling.remoteIdleWindow. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) > duration('0s')").message("must be longer than 0s"))]
    pub cold_ttft: Option<Duration>,
    /// Maximum share of cold requests in percent, as a decimal number such as "2.5". Requires workload.arrivals;
    /// applies with scaling.min 0 or scaling.remoteIdleWindow. Default: no limit.
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
        .message("gpu must be set if and only if device is cuda").field_path(".gpu")
)]
pub struct MainSpec {
    /// Device of the non-expert part.
    #[serde(default)]
    pub device: Device,
    /// The GPUs of each main function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSpec>,
    /// Memory for experts in a main function, in MB of 1,000,000 bytes. 1,000 MB come with one vCPU unless
    /// `cpu` is set. On CPUs the container has the memory of the non-expert part on top.
    #[serde(rename = "memoryMB", default = "main_memory")]
    pub memory_mb: MemoryRange,
    /// vCPUs of a main function in millicores, chosen apart from memory. Requires `remoteExperts.cpu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuRange>,
    /// Pod template of main functions.
    #[serde(default, skip_serializing_if = "PodTemplate::is_empty")]
    pub template: PodTemplate,
}

/// Device of the non-expert part of the model.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The CPUs of the main function.
    #[default]
    Cpu,
    /// The GPU of the main function.
    Cuda,
}

impl Device {
    /// Returns the value of the functions' command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// GPUs of one main function.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.count == 1").message(remoe_model::ONE_GPU).field_path(".count")
)]
pub struct GpuSpec {
    /// The extended resource that the node's device plug-in offers.
    #[serde(default = "nvidia_gpu")]
    #[schemars(length(min = 3, max = 317), regex(pattern = "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"))]
    pub resource: String,
    /// Number of GPUs: 1, since the layers of a model are not divided over several.
    #[serde(default = "one_gpu")]
    #[schemars(range(min = 1, max = 64))]
    pub count: u32,
}

/// Scheduling of the pods of a function.
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
    /// ServiceAccount of the pods. Its token is not mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub service_account_name: Option<String>,
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub node_selector: BTreeMap<String, String>,
    /// Tolerations of the pods. Every function also tolerates nodes that are not ready or not reachable for five
    /// minutes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub tolerations: Vec<Toleration>,
    /// Affinity of the pods. Replaces the operator's own, by which remote functions prefer nodes of main functions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
}

impl PodTemplate {
    /// Returns whether all fields have their defaults.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Remote functions: they hold the experts that main functions do not.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoteExpertsSpec {
    /// `Auto`: use remote experts if that is cheaper. `Always`: use them in every layer with more experts than a
    /// token uses. `Never`: keep all experts in the main functions.
    #[serde(default)]
    pub mode: RemoteMode,
    /// Memory of a remote function, in MB of 1,000,000 bytes. 1,000 MB come with one vCPU unless `cpu` is set.
    #[serde(rename = "memoryMB", default = "remote_memory")]
    pub memory_mb: MemoryRange,
    /// vCPUs of a remote function in millicores, chosen apart from memory. Requires `main.cpu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuRange>,
    /// Maximum number of remote groups. The replicas of a group are alike and host a slice of every layer's
    /// remote experts, so all groups work on every layer.
    #[serde(default = "max_groups")]
    #[schemars(range(min = 1, max = 64))]
    pub max_groups: u32,
    /// Maximum number of replicas of a remote function.
    #[serde(default = "max_replicas")]
    #[schemars(range(min = 1, max = 64))]
    pub max_replicas: u32,
    /// Maximum payload of one invocation, in MB, for platforms that limit the size of requests.
    /// Default: no limit.
    #[serde(rename = "payloadLimitMB", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub payload_limit_mb: Option<u32>,
    /// Pod template of remote functions.
    #[serde(default, skip_serializing_if = "PodTemplate::is_empty")]
    pub template: PodTemplate,
}

/// Use of remote experts.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemoteMode {
    /// Use remote experts if that is cheaper.
    #[default]
    Auto,
    /// Use remote experts in every layer with more experts than a token uses.
    Always,
    /// Keep all experts in the main functions.
    Never,
}

/// Prices of the cluster's resources, in dollars, as decimal numbers in strings.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.gpuHour) == has(self.gpuMemoryMB)")
        .message("gpuHour and gpuMemoryMB must be set together").field_path(".gpuHour")
)]
pub struct PricingSpec {
    /// `Reserved`: remote functions are billed while they exist, as on a plain cluster. `Invocation`: they are
    /// billed while they work.
    #[serde(default)]
    pub billing: Billing,
    /// Price of one vCPU for one hour, in dollars.
    #[serde(default = "default_cpu_hour")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    pub cpu_core_hour: String,
    /// Price of 1 GB (1,000,000,000 bytes) of memory for one hour, in dollars.
    #[serde(rename = "memoryGBHour", default = "default_memory_hour")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    pub memory_gb_hour: String,
    /// Price of one whole GPU for one hour, in dollars. Requires `gpuMemoryMB`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    pub gpu_hour: Option<String>,
    /// Memory of one GPU, in MB of 1,000,000 bytes. Requires `gpuHour`.
    #[serde(rename = "gpuMemoryMB", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 10_000_000))]
    pub gpu_memory_mb: Option<u32>,
}

/// Billing basis of remote functions.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Billing {
    /// Time of existence.
    #[default]
    Reserved,
    /// Time of work.
    Invocation,
}

/// Rollout of a new revision.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutSpec {
    /// `Surge`: new main functions start beside the old ones, which end after the handover. `Recreate`: old main
    /// functions end first, once the new remote functions are ready; for devices without a spare. Defaults to
    /// `Recreate` with device cuda, else to `Surge`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<RolloutStrategy>,
}

/// Rollout strategy of main functions.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RolloutStrategy {
    /// Old main functions serve until the new ones do.
    Surge,
    /// Old main functions end before the new ones start.
    Recreate,
}

impl RolloutSpec {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl MoEDeploymentSpec {
    /// Returns the rollout strategy, by default that of the device.
    pub fn strategy(&self) -> RolloutStrategy {
        self.rollout.strategy.unwrap_or(match self.main.device {
            Device::Cuda => RolloutStrategy::Recreate,
            Device::Cpu => RolloutStrategy::Surge,
        })
    }

    /// Returns the number of main functions that run while the deployment is awake, whatever the load.
    pub fn main_functions(&self) -> u32 {
        self.replicas.unwrap_or_else(|| self.scaling.least())
    }

    /// Returns whether autoscaling is enabled.
    pub fn follows_load(&self) -> bool {
        self.replicas.is_none() && self.scaling.follows_load()
    }

    /// Returns the time without requests before scaling to zero; none if the deployment never sleeps.
    pub fn idle_window(&self) -> Option<std::time::Duration> {
        let may_sleep = self.replicas.is_none() && self.scaling.min == 0;
        may_sleep.then(|| self.scaling.idle_window.into())
    }
}

/// Measured hardware profile.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileSpec {
    /// ConfigMap of this namespace with the output of `remoe profile --json` under the key profile.json.
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
