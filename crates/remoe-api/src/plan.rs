//! `MoEPlan`: one plan of a deployment, with its expected figures.

use crate::deployment::{ComputeDtype, DenseDtype, Device, ExpertsDtype, KvCacheDtype};
use crate::prediction::PlannedPrediction;
use crate::workload::WorkloadSpec;
use kube::{CustomResource, KubeSchema};
use remoe_proto::parse_listing;
use remoe_proto::v1::LayerExperts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of groups of one plan.
pub const MAX_GROUPS: usize = 64;
/// Maximum number of replicas of a function.
pub const MAX_REPLICAS: u32 = 64;

/// One plan of a deployment. Immutable, and named by its content.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "remoe.dev",
    version = "v1alpha1",
    kind = "MoEPlan",
    plural = "moeplans",
    singular = "moeplan",
    shortname = "moep",
    category = "moe",
    namespaced,
    derive = "PartialEq",
    doc = "One plan of a MoEDeployment: placement of every expert, sizes, replicas and expected cost. Written by the operator, immutable, and named by a hash of inputs, placement and sizes (not of replicas and expected figures).",
    printcolumn(name = "Deployment", type_ = "string", json_path = ".spec.deployment"),
    printcolumn(name = "Profile", type_ = "string", json_path = ".spec.profile"),
    printcolumn(name = "Main MB", type_ = "integer", json_path = ".spec.main.memoryMB"),
    printcolumn(name = "TTFT", type_ = "string", json_path = ".spec.shown.ttft"),
    printcolumn(name = "TPOT", type_ = "string", json_path = ".spec.shown.tpot"),
    printcolumn(name = "Cost of 1M", type_ = "string", json_path = ".spec.shown.costOfMillion"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "For", type_ = "string", json_path = ".spec.prediction.of", priority = "1"),
    printcolumn(name = "Remote", type_ = "string", json_path = ".spec.shown.remote", priority = "1"),
    printcolumn(name = "Pays", type_ = "boolean", json_path = ".spec.verdict.pays", priority = "1"),
    printcolumn(
        name = "Main Millicores",
        type_ = "integer",
        json_path = ".spec.main.cpuMillicores",
        priority = "1"
    ),
    validation = Rule::new("self.spec == oldSelf.spec").message("spec is immutable; a changed plan is a new MoEPlan")
)]
#[serde(rename_all = "camelCase")]
pub struct MoEPlanSpec {
    /// Name of the MoEDeployment.
    #[schemars(length(max = 63))]
    pub deployment: String,
    /// Hash of the inputs.
    #[schemars(length(max = 64))]
    pub inputs: String,
    /// The checkpoint.
    pub model: PlannedModel,
    /// Device of the non-expert part.
    pub device: Device,
    /// Source of the hardware profile: `Prior`, `Measured` by a profiler pod, or `Supplied` by the spec.
    pub profile: ProfileSource,
    /// Sizes and rate of requests that the plan is made for.
    pub workload: WorkloadSpec,
    /// The main functions.
    pub main: MainPlan,
    /// Remote functions by layer: one entry per layer with remote experts. Empty if `groups` is set.
    #[schemars(length(max = 512))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub remote: Vec<RemotePlan>,
    /// Remote groups, each with experts of several layers. If set, `remote` is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub groups: Vec<GroupPlan>,
    /// Expected cost and latency.
    pub numbers: PlanNumbers,
    /// Some of these figures with units, as `kubectl get` prints them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shown: Option<ShownNumbers>,
    /// Verdict on remote experts. Absent on a prior profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<PlanVerdict>,
    /// Limits that the plan does not meet on the prior profile. A measured profile decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub warning: Option<String>,
    /// Expected expert usage. If absent, all experts are used alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<PlannedPrediction>,
    /// Inputs of the plan as JSON: shape of the model, hardware profile, and the wishes of the spec. The operator
    /// derives from it the expected times and costs that it sends to main functions. Absent above 64 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 65_536))]
    pub basis: Option<String>,
}

/// A checkpoint, with all that a function needs to fetch and load it.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedModel {
    /// Source, as in the spec.
    #[schemars(length(max = 1024))]
    pub source: String,
    /// Commit of an hf:// source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 255))]
    pub revision: Option<String>,
    /// URL of an S3-compatible store, or of a mirror of the hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub endpoint: Option<String>,
    /// Secret with credentials for the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub credentials_secret_name: Option<String>,
    /// Use the AWS role of the pod's service account or node if the Secret has no keys.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ambient_credentials: bool,
    /// PersistentVolumeClaim that caches fetched weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub cache_claim_name: Option<String>,
    /// Compute dtype.
    pub dtype: ComputeDtype,
    /// Quantisation of routed experts, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_dtype: Option<ExpertsDtype>,
    /// Dtype of the other weights, if set in the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_dtype: Option<DenseDtype>,
    /// Form of the KV cache, if set in the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Maximum context length in tokens, if set in the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub max_model_len: Option<u32>,
    /// Identity of the weights.
    #[schemars(length(max = 128))]
    pub digest: String,
}

impl PlannedModel {
    /// Returns the flags of functions for dtypes, with their values.
    pub fn precision(&self) -> Vec<String> {
        let mut arguments = vec!["--dtype".to_owned(), self.dtype.name().to_owned()];
        if let Some(experts) = self.experts_dtype {
            let experts = remoe_model::ExpertsDtype::from(experts);
            arguments.extend(["--experts-dtype".to_owned(), experts.name().to_owned()]);
        }
        arguments
    }

    /// Returns these flags for programs that also hold the other weights.
    pub fn precision_of_all(&self) -> Vec<String> {
        let mut arguments = self.precision();
        if let Some(dense) = self.dense_dtype {
            let dense = remoe_model::DenseDtype::from(dense);
            arguments.extend(["--dense-dtype".to_owned(), dense.name().to_owned()]);
        }
        arguments
    }
}

/// Source of the hardware profile of a plan.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProfileSource {
    /// The operator's conservative prior, for unmeasured hardware.
    Prior,
    /// Measured by a profiler pod.
    Measured,
    /// The profile in spec.profile.
    Supplied,
}

/// The main functions of a plan.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MainPlan {
    /// Memory for experts, in MB of 1,000,000 bytes. 1,000 MB come with one vCPU if cpuMillicores is absent.
    #[serde(rename = "memoryMB")]
    #[schemars(range(max = 1_000_000_000))]
    pub memory_mb: u32,
    /// vCPUs in millicores, if chosen apart from memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub cpu_millicores: Option<u32>,
    /// Memory of the container, in MB. On CPUs it holds the non-expert part too.
    #[serde(rename = "limitMB")]
    #[schemars(range(max = 1_000_000_000))]
    pub limit_mb: u32,
    /// Memory of the KV cache, in bytes.
    #[schemars(range(max = 1_000_000_000_000_000_u64))]
    pub kv_cache_bytes: u64,
    /// Memory of the fallback cache for experts whose remote functions do not answer, in bytes.
    #[schemars(range(max = 1_000_000_000_000_000_u64))]
    pub fallback_bytes: u64,
}

/// The remote function of one layer.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemotePlan {
    /// Layer id of the model.
    #[schemars(range(max = 65_536))]
    pub layer: u32,
    /// Remote experts with ranges, such as 4-6,9.
    #[schemars(length(max = 4096))]
    pub experts: String,
    /// Memory of each replica, in MB of 1,000,000 bytes. 1,000 MB come with one vCPU.
    #[serde(rename = "memoryMB")]
    #[schemars(range(max = 1_000_000_000))]
    pub memory_mb: u32,
    /// Number of replicas, each with all of these experts.
    #[schemars(range(min = 1, max = 64))]
    pub replicas: u32,
}

/// A group of replicas that host experts of several layers.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupPlan {
    /// Experts by layer id, with ranges: 1:0-7,2:8 is experts 0 to 7 of layer 1 and expert 8 of layer 2. Groups
    /// share no expert.
    #[schemars(length(max = 65_536))]
    pub experts: String,
    /// Memory of each replica, in MB of 1,000,000 bytes. 1,000 MB come with one vCPU if cpuMillicores is absent.
    #[serde(rename = "memoryMB")]
    #[schemars(range(max = 1_000_000_000))]
    pub memory_mb: u32,
    /// vCPUs of each replica in millicores, if chosen apart from memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub cpu_millicores: Option<u32>,
    /// Number of replicas, each with all of these experts.
    #[schemars(range(min = 1, max = 64))]
    pub replicas: u32,
}

/// Expected cost and latency of the typical request.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanNumbers {
    /// Times, in seconds.
    pub times: PlanTimes,
    /// Costs, in dollars.
    pub costs: PlanCosts,
    /// Counterfactual cost on each baseline, in dollars.
    pub baselines: PerBaseline,
    /// Share of the cost on each baseline that the plan saves. Negative if the plan costs more.
    pub savings: PerBaseline,
}

/// Figures of the typical request with three digits and a unit.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShownNumbers {
    /// Time to first token (TTFT), such as 37.8 ms.
    #[schemars(length(max = 32))]
    pub ttft: String,
    /// Time per output token (TPOT), such as 2.41 ms.
    #[schemars(length(max = 32))]
    pub tpot: String,
    /// Cost of a million requests, such as $2.20.
    #[schemars(length(max = 32))]
    pub cost_of_million: String,
    /// Hosts of the remote experts, such as `4 groups` or `3 layers`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub remote: Option<String>,
}

/// Maximum characters of a verdict's sentence.
pub const MAX_VERDICT: usize = 512;

/// Cheapest placement, and whether it has remote experts.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanVerdict {
    /// True if the cheapest placement that meets every limit has remote experts.
    pub pays: bool,
    /// The verdict as a sentence, with figures.
    #[schemars(length(max = 512))]
    pub sentence: String,
    /// Cheapest placement that meets every limit. Absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cheapest: Option<WayCost>,
    /// Cheapest placement of the other kind: without remote experts if `cheapest` has them, else with them. Absent if
    /// there is none that meets every limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rival: Option<WayCost>,
}

/// A placement and its cost.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WayCost {
    /// Placement.
    pub way: ServingWay,
    /// Cost of the typical request, in dollars.
    pub cost: f64,
}

/// A placement: a way to serve a model.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServingWay {
    /// Remote experts in groups that each hold a slice of every layer.
    Sliced,
    /// Remote experts by layer, in one function each.
    Layers,
    /// Experts on the main function's CPUs.
    Mix,
    /// Everything on CPUs.
    Cpu,
    /// Everything on the GPU.
    Gpu,
    /// Experts in host memory, fetched to the GPU on use.
    Fetch,
}

/// Times of the typical request, in seconds.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanTimes {
    /// Time to first token.
    pub ttft_seconds: f64,
    /// Time per output token.
    pub tpot_seconds: f64,
    /// Prefill time.
    pub prefill_seconds: f64,
    /// Decode time of all further tokens.
    pub decode_seconds: f64,
}

/// Cost of the typical request, in dollars.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanCosts {
    /// Cost of the main function.
    pub main: f64,
    /// Cost of the remote functions.
    pub remote: f64,
    /// Total cost.
    pub total: f64,
}

/// One figure per baseline, which serves the same request without remote experts. Absent if its inputs are missing
/// or no size holds the model.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PerBaseline {
    /// Experts on the main function's CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mix: Option<f64>,
    /// Everything on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<f64>,
    /// Everything on the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<f64>,
    /// Ideal offloading: experts in host memory, fetched to the GPU exactly when they are needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch: Option<f64>,
}

impl RemotePlan {
    /// Remote experts of the layer.
    ///
    /// # Errors
    /// The listing cannot be read.
    pub fn experts(&self) -> Result<LayerExperts, String> {
        let listing = format!("{}:{}", self.layer, self.experts);
        let layers = parse_listing(&listing).map_err(|error| error.to_string())?;
        match <[LayerExperts; 1]>::try_from(layers) {
            Ok([set]) if set.layer == self.layer => Ok(set),
            Ok(_) | Err(_) => {
                Err(format!("invalid expert list {listing:?}: expected experts of layer {} only", self.layer))
            }
        }
    }
}

impl GroupPlan {
    /// Experts of each layer.
    ///
    /// # Errors
    /// The listing cannot be read.
    pub fn experts(&self) -> Result<Vec<LayerExperts>, String> {
        parse_listing(&self.experts).map_err(|error| error.to_string())
    }
}
