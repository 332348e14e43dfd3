//! What the operator says about a deployment.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// A deployment as the operator sees it.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoEDeploymentStatus {
    /// The generation of the spec that this is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Ready, Planned, Progressing, Degraded and Active.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// Where clients of this cluster reach the HTTP interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// What is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelStatus>,
    /// Hash of the plan that runs: MoEPlan `<name>-<hash>` has its numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Hash of the plan that would run under the present spec, where it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proposed_plan: Option<String>,
    /// Hash of the plan that did not become ready in time under the present spec, and for which the one that
    /// served before runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_plan: Option<String>,
    /// Functions that are ready, of those that the plan has, as 3/4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub functions: Option<String>,
    /// Share of the cost that the plan saves against all experts in the main functions; n/a while it
    /// stands on a prior, or where it costs more, as mode Always may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saving: Option<String>,
    /// Whether remote experts pay here, in one sentence: what the cheapest way to serve is, and what the cheapest one with
    /// or without them is. Absent while the plan stands on a prior.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// What the pods of its functions cost now, an hour, by what they reserve and spec.pricing; $0 while it sleeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_per_hour: Option<String>,
    /// What the requests that the gateways answered since they started would have cost more with all experts in the main
    /// functions; absent where nobody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<String>,
    /// Main functions that exist.
    #[serde(default)]
    pub replicas: u32,
    /// When functions last became ready or ceased to be, or another plan or spec came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_progress_time: Option<Time>,
    /// Label selector of the main functions' pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
}

/// The checkpoint that is served.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// As in the spec.
    pub source: String,
    /// The commit that the revision of an hf:// source was when the model was inspected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Identity of the weights.
    pub digest: String,
}

/// The conditions of a deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionType {
    /// The endpoint answers.
    Ready,
    /// There is a plan for the present spec.
    Planned,
    /// What runs is being brought to what is planned.
    Progressing,
    /// Something is wrong that a person may have to mend.
    Degraded,
    /// Functions run.
    Active,
}

impl ConditionType {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Self; 5] = [Self::Ready, Self::Planned, Self::Progressing, Self::Degraded, Self::Active];

    /// As it stands in the resource.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Planned => "Planned",
            Self::Progressing => "Progressing",
            Self::Degraded => "Degraded",
            Self::Active => "Active",
        }
    }
}

impl MoEDeploymentStatus {
    /// The condition of a type, where it was ever stated.
    pub fn condition(&self, of: ConditionType) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == of.name())
    }
}
