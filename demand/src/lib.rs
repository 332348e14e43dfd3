//! `MoEDemand`: what the gateways and the operator tell each other about one deployment.
//!
//! The operator writes the spec: whether functions run, and where. Each gateway writes one entry of the status: what it
//! holds, what runs, and what it has taken note of. Nobody else writes either.

// The schema macros write helper types as public as the ones that they describe.
#![allow(unreachable_pub)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{CustomResource, KubeSchema};
use remoe_sleep::Phase;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Entries of a status, at most: gateways that live, and some that died.
pub const MOST_GATEWAYS: usize = 256;

/// Pods of functions whose cost gateways are told, at most: the object has to stay small.
pub const MOST_FUNCTIONS: usize = 1024;

/// What labels the Leases of gateways, and no other Lease.
pub const LEASE_LABEL: (&str, &str) = ("app.kubernetes.io/component", "gateway");
/// The label that has the name of the release: several may stand side by side in one namespace.
pub const RELEASE_LABEL: &str = "app.kubernetes.io/instance";
/// The annotation of a gateway's Lease that says who it can show main functions to be; without it, it shows nothing.
pub const SHOWN_ANNOTATION: &str = "remoe.dev/identity";
/// Seconds after which a gateway that did not renew its Lease is dead for the operator. It holds requests before that.
pub const LEASE_SECONDS: u32 = 15;

/// What the operator tells gateways about a deployment.
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
    doc = "What gateways and the operator tell each other about the MoEDeployment of the same name. The operator makes it and writes its spec; each gateway writes its own entry of the status.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".spec.phase"),
    printcolumn(name = "Wakes", type_ = "integer", json_path = ".spec.wakes"),
    printcolumn(name = "Since", type_ = "date", json_path = ".spec.since")
)]
#[serde(rename_all = "camelCase")]
pub struct MoEDemandSpec {
    /// The model's name in the HTTP interface.
    #[schemars(length(max = 253))]
    pub served_name: String,
    /// Positions of its context; 0: not known yet.
    #[serde(default)]
    pub context_length: u32,
    /// Whether functions run.
    pub phase: DemandPhase,
    /// Grows with every change of the phase: what gateways acknowledge.
    pub turn: u64,
    /// When the phase began.
    pub since: MicroTime,
    /// How often functions were started because somebody asked.
    #[serde(default)]
    pub wakes: u64,
    /// The latest wake whose timeline an event has told.
    #[serde(default)]
    pub wake_told: u64,
    /// Whether functions end when nobody asks: only then gateways write their entries.
    #[serde(default)]
    pub sleeps: bool,
    /// Whether there are more or fewer functions as load changes: gateways say what it is while there is any.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follows_load: bool,
    /// Main functions that have an address and are not asked to end. Gateways see for themselves which of them answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub mains: Vec<MainFunction>,
    /// Pods of functions that have a node, those that end included, and what they cost: gateways keep the books.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub functions: Vec<FunctionPod>,
    /// How each remote function is, where they sleep by themselves while main functions run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub groups: Vec<GroupDemand>,
    /// What gateways are to find out about requests, so that plans follow them; absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<PredictionOrder>,
}

/// Whether a remote function runs beside main functions.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupDemand {
    /// Its name: that of a layer or a group of the plan.
    #[schemars(length(max = 64))]
    pub name: String,
    /// What its pods consist of: of another one of this name nothing is known.
    #[schemars(length(max = 64))]
    pub identity: String,
    /// Nobody has used its experts for a while: it has no pods, and main functions load the experts where they are needed.
    #[serde(default)]
    pub asleep: bool,
    /// Which experts it has, `LAYER:FIRST-LAST,..`: while it sleeps or starts main functions say nothing of them. Empty where
    /// they are too many for the object.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 65536))]
    pub experts: String,
    /// Since when that is so.
    pub since: MicroTime,
    /// So many windows pass without use before it sleeps: it was woken again and again.
    pub stretch: u32,
    /// It was awake for a whole window and nobody used it: it wakes for those that use it, and not for predictions.
    #[serde(default)]
    pub doubted: bool,
}

/// What gateways are to find out about requests.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PredictionOrder {
    /// Fingerprint of the model: main functions with another one are not asked.
    #[schemars(length(max = 128))]
    pub model: String,
    /// Seconds between two revisions of the plan: what requests use is said some times in them.
    pub every_seconds: u32,
    /// Nothing is remembered of single requests.
    #[serde(default)]
    pub counts_only: bool,
    /// Tokens of a typical answer, where no answer has been seen.
    pub output_tokens: u32,
}

/// Where a deployment is between awake and asleep.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DemandPhase {
    /// Requests go to main functions.
    Active,
    /// Functions run; gateways hold newcomers and acknowledge that they do.
    Draining,
    /// No function runs.
    Asleep,
    /// Functions start.
    #[default]
    Waking,
}

impl From<DemandPhase> for Phase {
    fn from(phase: DemandPhase) -> Self {
        match phase {
            DemandPhase::Active => Self::Active,
            DemandPhase::Draining => Self::Draining,
            DemandPhase::Asleep => Self::Asleep,
            DemandPhase::Waking => Self::Waking,
        }
    }
}

impl From<Phase> for DemandPhase {
    fn from(phase: Phase) -> Self {
        match phase {
            Phase::Active => Self::Active,
            Phase::Draining => Self::Draining,
            Phase::Asleep => Self::Asleep,
            Phase::Waking => Self::Waking,
        }
    }
}

/// A main function that gateways may send requests to once it answers.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MainFunction {
    /// The identity of its pod.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// The name of its pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// Where it speaks HTTP, as host:port.
    #[schemars(length(max = 64))]
    pub address: String,
    /// Who it is, as its certificate has to name it; absent: it speaks in plaintext, to anybody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub identity: Option<String>,
    /// Requests that it has at the same time.
    pub room: u32,
}

/// A pod of a function, and what it costs.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionPod {
    /// The identity of the pod.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// Its name.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// main, group-N or layer-N.
    #[schemars(length(max = 64))]
    pub tier: String,
    /// Where main functions reach a remote one, as host:port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub address: Option<String>,
    /// How often its container was started again: it counts its work anew then.
    #[serde(default)]
    pub restarts: u32,
    /// Nano-dollars an hour, by what the pod reserves and spec.pricing of its deployment.
    pub rate: u64,
    /// Bytes of memory that the pod reserves.
    #[serde(default)]
    pub memory: u64,
    /// It costs while it works, and not while it exists.
    #[serde(default)]
    pub per_work: bool,
    /// Since when it has a node.
    pub started: MicroTime,
    /// Since when it has been ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<MicroTime>,
    /// Since when it ends while others serve in its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<MicroTime>,
}

/// What gateways say.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoEDemandStatus {
    /// An entry for each gateway.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub gateways: Vec<GatewayDemand>,
}

/// What one gateway says.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayDemand {
    /// The identity of its pod.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// The name of its pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// Requests that it holds.
    pub waiting: u32,
    /// Requests that main functions have from it.
    pub in_flight: u32,
    /// The newest turn that it has taken note of. Of one that says Draining: it sends no newcomer on since then, and
    /// `inFlight` counts all that it had sent on before.
    pub acknowledged: u64,
    /// Nano-dollars that the requests that it answered since it started would have cost more with all experts in the
    /// main functions; negative where they would have cost less.
    #[serde(default)]
    pub saved: i64,
    /// When it last had a request.
    pub last_active: MicroTime,
    /// Grows with every entry that it writes.
    pub sequence: u64,
    /// Which experts its requests use, where it was told to find that out and knows anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mix: Option<RequestMix>,
    /// How long its requests took, where functions follow load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<RequestLoad>,
    /// Where the time went of the first request that it had an answer for after a wake, of the latest such wake.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake: Option<WakeTimeline>,
}

/// Where the time to the first token of a request went that waited for a wake, in microseconds. The parts follow each other.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WakeTimeline {
    /// Which wake it was, by the wakes of the spec.
    pub wake: u64,
    /// Until it was decided to wake the functions.
    pub decide_us: u64,
    /// Until a main function had an address.
    pub schedule_us: u64,
    /// Until its port was open.
    pub start_us: u64,
    /// Until it took requests.
    pub load_us: u64,
    /// Until it had the request.
    pub ready_us: u64,
    /// Until the first token.
    pub first_us: u64,
}

impl WakeTimeline {
    /// Its parts in their order, with their names.
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

    /// All of them together.
    #[must_use]
    pub fn total_us(&self) -> u64 {
        self.parts().into_iter().fold(0, |sum, (_, part)| sum.saturating_add(part))
    }
}

/// How long requests of one gateway took.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestLoad {
    /// When that was so, by the gateway's clock.
    pub at: MicroTime,
    /// Milliseconds that its requests have waited or been worked on since it started, all together.
    pub occupied_ms: u64,
}

/// Characters of the shares in a [`RequestMix`], at most.
pub const MOST_SHARES: usize = 8 << 10;

/// Which experts requests of one gateway use, or are expected to.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestMix {
    /// Whose requests.
    pub of: MixOf,
    /// Fingerprint of the model that they are requests to.
    #[schemars(length(max = 128))]
    pub model: String,
    /// Requests that it is of; of those that were answered older ones count for less than one.
    pub requests: u32,
    /// Tokens that it is of, likewise.
    pub tokens: u64,
    /// Shares of each layer's experts, as remoe-predictor writes them.
    #[schemars(length(max = 8192))]
    pub shares: String,
}

/// Whose requests a mix is of.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MixOf {
    /// Those that wait for functions: what they are expected to use.
    Waiting,
    /// Those that were answered of late: what they used.
    Answered,
}

impl MoEDemand {
    /// The entries of gateways; none where nobody has written any.
    #[must_use]
    pub fn gateways(&self) -> &[GatewayDemand] {
        self.status.as_ref().map_or(&[], |status| &status.gateways)
    }
}
