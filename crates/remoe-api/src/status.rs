//! Observed state of a deployment.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Observed state of a deployment.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoEDeploymentStatus {
    /// Generation of the spec that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions Ready, Planned, Progressing, Degraded, Active and Exposed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// URL of the HTTP interface for clients inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelStatus>,
    /// Hash of the running plan, MoEPlan `<name>-<hash>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Hash of the plan for the present spec, if it is not the running one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proposed_plan: Option<String>,
    /// Hash of the plan that missed its progress deadline under the present spec. The previous plan serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_plan: Option<String>,
    /// Ready functions of the plan, such as 3/4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub functions: Option<String>,
    /// Cost saving against all experts in the main functions. n/a on a prior profile, or if the plan costs more, as
    /// with mode Always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saving: Option<String>,
    /// One sentence on whether remote experts pay: the cheapest placement with them and without them. Absent on a
    /// prior profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// Current cost per hour of the function pods, by their requests and spec.pricing. $0 while scaled to zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_per_hour: Option<String>,
    /// Savings on the requests answered since the gateways started, against all experts in the main functions. Absent
    /// if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<String>,
    /// Number of main functions.
    #[serde(default)]
    pub replicas: u32,
    /// Time of the last change of ready functions, plan or spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_progress_time: Option<Time>,
    /// Label selector of the pods of main functions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
}

/// The checkpoint that is served.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// Source, as in the spec.
    pub source: String,
    /// Commit of the hf:// revision at inspection.
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
    /// A rollout of the plan is in progress.
    Progressing,
    /// There is a fault that may need an administrator.
    Degraded,
    /// Functions run.
    Active,
    /// Clients without keys reach the endpoint, or its name can be taken.
    Exposed,
}

impl ConditionType {
    /// All conditions, in the order of the status.
    pub const ALL: [Self; 6] =
        [Self::Ready, Self::Planned, Self::Progressing, Self::Degraded, Self::Active, Self::Exposed];

    /// Returns the type in the resource.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Planned => "Planned",
            Self::Progressing => "Progressing",
            Self::Degraded => "Degraded",
            Self::Active => "Active",
            Self::Exposed => "Exposed",
        }
    }
}

impl MoEDeploymentStatus {
    /// Returns the condition of a type, if the status has it.
    pub fn condition(&self, of: ConditionType) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == of.name())
    }
}
