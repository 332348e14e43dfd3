//! `MoEPlan`: one revision of a plan with the numbers it stands on.

use super::deployment::{ComputeDtype, DenseDtype, Device, ExpertsDtype};
use super::prediction::PlannedPrediction;
use super::workload::WorkloadSpec;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Groups of one plan, at most.
pub const MAX_GROUPS: usize = 64;
/// Functions that are alike, at most.
pub const MAX_REPLICAS: u32 = 64;

/// One revision of a deployment's plan. Named by its content, and never changed.
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
    doc = "One revision of a MoEDeployment's plan: where every expert lives, with how much memory and how many replicas, and what that is expected to cost. Written by the operator, never changed, named by its content: what is where and how large. How many functions are alike, and what is expected of them, are no part of the name.",
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
    validation = Rule::new("self.spec == oldSelf.spec").message("a plan is never changed: another plan is another MoEPlan")
)]
#[serde(rename_all = "camelCase")]
pub struct MoEPlanSpec {
    /// The MoEDeployment that it is a plan of.
    #[schemars(length(max = 63))]
    pub deployment: String,
    /// Hash of everything that it was made from.
    #[schemars(length(max = 64))]
    pub inputs: String,
    /// What is served.
    pub model: PlannedModel,
    /// What computes the non-expert part.
    pub device: Device,
    /// Which figures of the hardware it was made with.
    pub profile: ProfileSource,
    /// Sizes of requests that it was made for.
    pub workload: WorkloadSpec,
    /// The main functions.
    pub main: MainPlan,
    /// The remote functions, where each layer has one of its own: an entry per layer that has remote
    /// experts.
    #[schemars(length(max = 512))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub remote: Vec<RemotePlan>,
    /// The remote functions, where each hosts experts of several layers; `remote` is empty then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub groups: Vec<GroupPlan>,
    /// What it is expected to cost, and how fast it is expected to be.
    pub numbers: PlanNumbers,
    /// Some of these numbers for people, with units.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shown: Option<ShownNumbers>,
    /// Whether remote experts pay here; absent where it stands on a prior.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<PlanVerdict>,
    /// Limits that the prior says cannot be kept. A measured profile will tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub warning: Option<String>,
    /// What requests were expected to use; all experts alike where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<PlannedPrediction>,
    /// What it was made from, as JSON: the model's shape, the figures of the hardware and what was asked
    /// for. From it main functions are told what requests are expected to take; absent where that would take
    /// more than 64 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 65_536))]
    pub basis: Option<String>,
}

/// A checkpoint, with all that a function needs to find it.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedModel {
    /// As in the deployment's spec.
    #[schemars(length(max = 1024))]
    pub source: String,
    /// The commit of an hf:// source.
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
    /// Claim that keeps what was fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub cache_claim_name: Option<String>,
    /// What is computed in.
    pub dtype: ComputeDtype,
    /// What routed experts are quantised to, where they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_dtype: Option<ExpertsDtype>,
    /// What the main function keeps its other weights as, where the spec says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_dtype: Option<DenseDtype>,
    /// Positions of a text at most, where the spec says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub max_model_len: Option<u32>,
    /// Identity of the weights.
    #[schemars(length(max = 128))]
    pub digest: String,
}

impl PlannedModel {
    /// What functions are told about the types to compute in, as flags and their values.
    pub fn precision(&self) -> Vec<String> {
        let mut arguments = vec!["--dtype".to_owned(), self.dtype.name().to_owned()];
        if let Some(experts) = self.experts_dtype {
            let experts = remoe_model::ExpertsDtype::from(experts);
            arguments.extend(["--experts-dtype".to_owned(), experts.name().to_owned()]);
        }
        arguments
    }

    /// The same for programs that hold the rest of the model as well.
    pub fn precision_of_all(&self) -> Vec<String> {
        let mut arguments = self.precision();
        if let Some(dense) = self.dense_dtype {
            let dense = remoe_model::DenseDtype::from(dense);
            arguments.extend(["--dense-dtype".to_owned(), dense.name().to_owned()]);
        }
        arguments
    }
}

/// Which figures of the hardware a plan was made with.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProfileSource {
    /// The operator's conservative ones, for hardware that nobody has measured yet.
    Prior,
    /// Those of a profiler pod.
    Measured,
    /// Those that the spec names.
    Supplied,
}

/// The main functions of a plan.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MainPlan {
    /// Memory for experts, in MB of 1,000,000 bytes; 1,000 MB come with one vCPU where cpuMillicores is
    /// absent.
    #[serde(rename = "memoryMB")]
    #[schemars(range(max = 1_000_000_000))]
    pub memory_mb: u32,
    /// vCPUs in millicores, where they were chosen apart from memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub cpu_millicores: Option<u32>,
    /// Memory of the container, in MB: on the CPU the non-expert part lives there too.
    #[serde(rename = "limitMB")]
    #[schemars(range(max = 1_000_000_000))]
    pub limit_mb: u32,
    /// Memory for keys and values, in bytes.
    #[schemars(range(max = 1_000_000_000_000_000_u64))]
    pub kv_cache_bytes: u64,
    /// Memory for experts that are loaded because no remote function answers, in bytes.
    #[schemars(range(max = 1_000_000_000_000_000_u64))]
    pub fallback_bytes: u64,
}

/// The remote function of one layer.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemotePlan {
    /// The model's layer id.
    #[schemars(range(max = 65_536))]
    pub layer: u32,
    /// The remote experts, with ranges, as 4-6,9.
    #[schemars(length(max = 4096))]
    pub experts: String,
    /// Memory of each replica, in MB of 1,000,000 bytes; 1,000 MB come with one vCPU.
    #[serde(rename = "memoryMB")]
    #[schemars(range(max = 1_000_000_000))]
    pub memory_mb: u32,
    /// Replicas, each with all of these experts.
    #[schemars(range(min = 1, max = 64))]
    pub replicas: u32,
}

/// Remote functions that are alike and host experts of several layers.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupPlan {
    /// The experts by the model's layer ids, with ranges: 1:0-7,2:8 is experts 0 to 7 of layer 1 and
    /// expert 8 of layer 2. No other group has any of them.
    #[schemars(length(max = 65_536))]
    pub experts: String,
    /// Memory of each replica, in MB of 1,000,000 bytes; 1,000 MB come with one vCPU where cpuMillicores
    /// is absent.
    #[serde(rename = "memoryMB")]
    #[schemars(range(max = 1_000_000_000))]
    pub memory_mb: u32,
    /// vCPUs of each replica in millicores, where they were chosen apart from memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub cpu_millicores: Option<u32>,
    /// Replicas, each with all of these experts.
    #[schemars(range(min = 1, max = 64))]
    pub replicas: u32,
}

/// What a plan is expected to cost, and how fast it is expected to be, for the typical request.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanNumbers {
    /// How fast it is.
    pub times: PlanTimes,
    /// What it costs.
    pub costs: PlanCosts,
    /// What other ways of serving would cost, in dollars.
    pub baselines: PerBaseline,
    /// Shares of those costs that it saves; negative where it costs more.
    pub savings: PerBaseline,
}

/// Numbers of the typical request as they are printed: three digits and a unit.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShownNumbers {
    /// Time to the first token, as 37.8 ms.
    #[schemars(length(max = 32))]
    pub ttft: String,
    /// Time per output token, as 2.41 ms.
    #[schemars(length(max = 32))]
    pub tpot: String,
    /// Cost of a million requests, as $2.20.
    #[schemars(length(max = 32))]
    pub cost_of_million: String,
    /// What hosts the remote experts, as 4 groups or 3 layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub remote: Option<String>,
}

/// Characters of a verdict's sentence.
pub const MAX_VERDICT: usize = 512;

/// Who is cheapest, and whether that has remote experts.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanVerdict {
    /// Whether the cheapest way that keeps every limit has remote experts.
    pub pays: bool,
    /// The same in plain words, with figures.
    #[schemars(length(max = 512))]
    pub sentence: String,
    /// The cheapest way that keeps every limit; absent where none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cheapest: Option<WayCost>,
    /// The cheapest one of the other kind: without remote experts where that has them, and with them where it has none;
    /// absent where none keeps every limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rival: Option<WayCost>,
}

/// A way to serve a model, and what it costs.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WayCost {
    /// Which.
    pub way: ServingWay,
    /// Dollars of the typical request.
    pub cost: f64,
}

/// A way to serve a model.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServingWay {
    /// Remote experts in groups that each hold a part of every layer.
    Sliced,
    /// Remote experts in a function per layer.
    Layers,
    /// All experts beside the main function, on CPUs.
    Mix,
    /// Everything on CPUs.
    Cpu,
    /// Everything on the GPU.
    Gpu,
    /// Experts in host memory, moved to the GPU when they are used.
    Fetch,
}

/// Times of the typical request, in seconds.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanTimes {
    /// To the first token, cold start included.
    pub ttft_seconds: f64,
    /// Per output token.
    pub tpot_seconds: f64,
    /// Of the prompt.
    pub prefill_seconds: f64,
    /// Of all further tokens.
    pub decode_seconds: f64,
}

/// Cost of the typical request, in dollars.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanCosts {
    /// Of the main function.
    pub main: f64,
    /// Of the remote functions.
    pub remote: f64,
    /// Of both.
    pub total: f64,
}

/// One figure per other way of serving the same request; absent where the inputs are missing or no size
/// holds the model.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PerBaseline {
    /// All experts in the main function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mix: Option<f64>,
    /// Everything on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<f64>,
    /// Everything on the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<f64>,
    /// Ideal offloading: experts in host memory, on the GPU exactly when they are needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch: Option<f64>,
}
