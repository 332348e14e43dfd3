//! `MoEDemand`: the exchange between the gateways and the operator about one deployment.
//!
//! The operator writes the spec: whether functions run, and where. Each gateway writes one entry of the status: the
//! requests that it holds and forwards, and the phase that it acknowledges.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{CustomResource, KubeSchema};
use remoe_autoscale::scale_to_zero::ScalingPhase;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of entries of a status: gateways that live, and some that died.
pub const MOST_GATEWAYS: usize = 256;

/// Maximum number of pods of functions in the spec, with their cost: the object has to stay small.
pub const MOST_FUNCTIONS: usize = 1024;

/// Label of the Leases of gateways, and of no other Lease.
pub const LEASE_LABEL: (&str, &str) = ("app.kubernetes.io/component", "gateway");
/// Label with the name of the release: several releases may share a namespace.
pub const RELEASE_LABEL: &str = "app.kubernetes.io/instance";
/// Annotation of a gateway's Lease with the identity in its certificate. Absent if the gateway has none.
pub const SHOWN_ANNOTATION: &str = "remoe.dev/identity";
/// Seconds without a renewal of its Lease after which the operator considers a gateway dead. The gateway holds all
/// requests back before that.
pub const LEASE_SECONDS: u32 = 15;

/// Returns the name that users see of `function`, as labels, pods and [`GroupDemand`] have it: `group-0` for `g0`,
/// `layer-3` for `l3`, else `main`.
#[must_use]
pub fn tier(function: &str) -> String {
    let numbered = |letter: char| function.strip_prefix(letter).filter(|rest| rest.parse::<u32>().is_ok());
    match (numbered('g'), numbered('l')) {
        (Some(group), _) => format!("group-{group}"),
        (_, Some(layer)) => format!("layer-{layer}"),
        _ => "main".to_owned(),
    }
}

/// Desired state that the operator gives to gateways.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "remoe.dev",
    version = "v1alpha1",
    kind = "MoEDemand",
    plural = "moedemands",
    singular = "moedemand",
    category = "moe",
    namespaced,
    status = "MoEDemandStatus",
    derive = "PartialEq",
    doc = "Exchange between the operator and the gateways about the MoEDeployment of the same name. The operator creates it and writes the spec; each gateway writes one entry of the status.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".spec.phase"),
    printcolumn(name = "Wakes", type_ = "integer", json_path = ".spec.wakes"),
    printcolumn(name = "Since", type_ = "date", json_path = ".spec.since")
)]
#[serde(rename_all = "camelCase")]
pub struct MoEDemandSpec {
    /// Name of the model in the HTTP interface.
    #[schemars(length(max = 253))]
    pub served_name: String,
    /// Context length of the model in tokens. 0 until it is known.
    #[serde(default)]
    pub context_length: u32,
    /// Phase of the deployment: `Active`, `Draining`, `Asleep` or `Waking`.
    pub phase: DemandPhase,
    /// Sequence number of the phase. Gateways acknowledge it.
    pub turn: u64,
    /// Start of the phase.
    pub since: MicroTime,
    /// Number of wakes.
    #[serde(default)]
    pub wakes: u64,
    /// Latest wake whose timeline an event has reported.
    #[serde(default)]
    pub wake_told: u64,
    /// Planning of the latest wake. Absent if the plan of that wake was made for other requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planning: Option<WakePlanning>,
    /// Scale to zero is enabled: gateways report waiting and running requests.
    #[serde(default)]
    pub sleeps: bool,
    /// Autoscaling is enabled: gateways report load.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows_load: bool,
    /// Main functions that have an address and are not to end. Gateways probe which of them answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub mains: Vec<MainFunction>,
    /// Pods of functions that have a node, those that end included, with their cost. Gateways record the cost in their
    /// ledgers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub functions: Vec<FunctionPod>,
    /// State of each remote function, if they can sleep while main functions run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub groups: Vec<GroupDemand>,
    /// Expert usage prediction that gateways run. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<PredictionOrder>,
}

/// State of one remote function.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupDemand {
    /// Name of the layer or group in the plan.
    #[schemars(length(max = 64))]
    pub name: String,
    /// Hash of its pod template. The state is that of this template only.
    #[schemars(length(max = 64))]
    pub identity: String,
    /// The function sleeps: it has no pods, and main functions load its experts on demand.
    #[serde(default)]
    pub asleep: bool,
    /// Experts of the function, `LAYER:FIRST-LAST,..`. Main functions do not report them while it sleeps or starts.
    /// Empty if the list is too long for the object.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 65536))]
    pub experts: String,
    /// Start of this state.
    pub since: MicroTime,
    /// Number of idle windows before it sleeps. Grows with frequent wakes.
    pub stretch: u32,
    /// Wakes on use only, not on predictions: its experts were not used during the previous time awake.
    #[serde(default)]
    pub doubted: bool,
}

/// Expert usage prediction that gateways run.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PredictionOrder {
    /// Fingerprint of the model. Gateways skip main functions with another one.
    #[schemars(length(max = 128))]
    pub model: String,
    /// Minimum seconds between two plans. Gateways report expert usage several times in them.
    pub every_seconds: u32,
    /// Gateways keep sums over requests only.
    #[serde(default)]
    pub counts_only: bool,
    /// Typical answer length in tokens, until answers are observed.
    pub output_tokens: u32,
}

/// Phase between awake and asleep.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DemandPhase {
    /// Requests go to main functions.
    Active,
    /// Functions run; gateways queue new requests and acknowledge it.
    Draining,
    /// No function runs.
    Asleep,
    /// Functions start.
    #[default]
    Waking,
}

impl From<DemandPhase> for ScalingPhase {
    fn from(phase: DemandPhase) -> Self {
        match phase {
            DemandPhase::Active => Self::Active,
            DemandPhase::Draining => Self::Draining,
            DemandPhase::Asleep => Self::Asleep,
            DemandPhase::Waking => Self::Waking,
        }
    }
}

impl From<ScalingPhase> for DemandPhase {
    fn from(phase: ScalingPhase) -> Self {
        match phase {
            ScalingPhase::Active => Self::Active,
            ScalingPhase::Draining => Self::Draining,
            ScalingPhase::Asleep => Self::Asleep,
            ScalingPhase::Waking => Self::Waking,
        }
    }
}

/// A main function that gateways may call once it answers.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MainFunction {
    /// UID of its pod.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// Name of its pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// HTTP address, host:port.
    #[schemars(length(max = 64))]
    pub address: String,
    /// SPIFFE identity that its certificate must have. Absent: plaintext, without authentication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub identity: Option<String>,
    /// Maximum number of concurrent requests.
    pub room: u32,
}

/// A pod of a function, and its cost.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionPod {
    /// UID of the pod.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// Name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// Tier: `main`, `group-N` or `layer-N`.
    #[schemars(length(max = 64))]
    pub tier: String,
    /// gRPC address of a remote function, host:port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub address: Option<String>,
    /// Restarts of its container. Work counters start at 0 after each.
    #[serde(default)]
    pub restarts: u32,
    /// Nano-dollars per hour, by the requests of the pod and spec.pricing of its deployment.
    pub rate: u64,
    /// Memory that the pod requests, in bytes.
    #[serde(default)]
    pub memory: u64,
    /// Billed while it works, not while it exists.
    #[serde(default)]
    pub per_work: bool,
    /// Time of scheduling to a node.
    pub started: MicroTime,
    /// Time of readiness.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<MicroTime>,
    /// Time since which it is being replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<MicroTime>,
}

/// Reports of gateways.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoEDemandStatus {
    /// One entry for each gateway.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub gateways: Vec<GatewayDemand>,
}

/// Report of one gateway.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayDemand {
    /// UID of its pod.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// Name of its pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// Number of requests that it queues.
    pub waiting: u32,
    /// Number of requests that it has forwarded to main functions and that are not finished.
    pub in_flight: u32,
    /// Newest acknowledged `turn`. If that is of phase Draining, the gateway forwards no new requests since then, and
    /// `inFlight` counts all that it had forwarded before.
    pub acknowledged: u64,
    /// Savings in nano-dollars on the requests that it answered since it started, against all experts in the main
    /// functions. Negative if they cost more.
    #[serde(default)]
    pub saved: i64,
    /// Time of its last request.
    pub last_active: MicroTime,
    /// Sequence number of the entry. Grows with every write.
    pub sequence: u64,
    /// Expert usage of its requests. Absent without prediction, or if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mix: Option<RequestMix>,
    /// Load, if autoscaling is enabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<RequestLoad>,
    /// Timeline of the first request that it answered after the latest wake.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake: Option<WakeTimeline>,
}

/// Timeline of a cold request, from its arrival to its first token, in microseconds. The parts are consecutive.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WakeTimeline {
    /// Number of the wake, as in `wakes` of the spec.
    pub wake: u64,
    /// Part `decide`: until the wake was decided.
    pub decide_us: u64,
    /// Part `schedule`: until a main function had an address.
    pub schedule_us: u64,
    /// Part `start`: until its port was open.
    pub start_us: u64,
    /// Part `load`: until it accepted requests.
    pub load_us: u64,
    /// Part `ready`: until it had the request.
    pub ready_us: u64,
    /// Part `first`: until the first token.
    pub first_us: u64,
}

impl WakeTimeline {
    /// Returns the parts in their order, with their names.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, u64); 6] {
        [
            ("decide", self.decide_us),
            ("schedule", self.schedule_us),
            ("start", self.start_us),
            ("load", self.load_us),
            ("ready", self.ready_us),
            ("first", self.first_us),
        ]
    }

    /// Returns the sum of all parts.
    #[must_use]
    pub fn total_us(&self) -> u64 {
        self.parts().into_iter().fold(0, |sum, (_, part)| sum.saturating_add(part))
    }
}

/// Durations of the planning of a wake, in microseconds. Planning runs beside the parts of [`WakeTimeline`].
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WakePlanning {
    /// Number of the wake, as in `wakes` of the spec.
    pub wake: u64,
    /// Prediction of the waiting requests' expert usage, by the slowest gateway.
    pub predict_us: u64,
    /// Pre-allocation of the main function.
    pub preallocate_us: u64,
    /// From the question for a plan to its answer. 0 until then.
    #[serde(default)]
    pub plan_us: u64,
    /// Partition of experts over the functions of that plan.
    #[serde(default)]
    pub partition_us: u64,
}

impl WakePlanning {
    /// Returns the steps in their order, with their names.
    #[must_use]
    pub fn steps(&self) -> [(&'static str, u64); 4] {
        [
            ("predict", self.predict_us),
            ("preallocate", self.preallocate_us),
            ("plan", self.plan_us),
            ("partition", self.partition_us),
        ]
    }
}

/// Load of one gateway.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestLoad {
    /// Time of the measurement, by the gateway's clock.
    pub at: MicroTime,
    /// Summed time that its requests have waited or run since it started, in milliseconds.
    pub occupied_ms: u64,
}

/// Maximum characters of the shares in a [`RequestMix`].
pub const MOST_SHARES: usize = 8 << 10;

/// Expert usage of one gateway's requests, observed or predicted.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestMix {
    /// Source of the usage: waiting or answered requests.
    pub of: MixOf,
    /// Fingerprint of the model.
    #[schemars(length(max = 128))]
    pub model: String,
    /// Number of requests. Older answered requests have less weight.
    pub requests: u32,
    /// Number of tokens, with the same weights.
    pub tokens: u64,
    /// Shares of each layer's experts, in the encoding of remoe-predictor.
    #[schemars(length(max = 8192))]
    pub shares: String,
    /// Duration of the prediction, in microseconds. 0 of answered requests.
    #[serde(default)]
    pub predicted_us: u64,
}

/// Source of a usage mix.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MixOf {
    /// Waiting requests: predicted usage.
    Waiting,
    /// Recently answered requests with their observed usage, and running ones with their predicted usage.
    Answered,
}

impl MoEDemand {
    /// Returns the entries of gateways.
    #[must_use]
    pub fn gateways(&self) -> &[GatewayDemand] {
        self.status.as_ref().map_or(&[], |status| &status.gateways)
    }
}
