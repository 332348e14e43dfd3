//! Replanning on expert usage.

use crate::demand::MixOf;
use crate::duration::Duration;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Replanning on expert usage, which gateways observe and predict. Without gateways, plans assume that requests use
/// all experts alike.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PredictionSpec {
    /// `Auto`: a wake is planned for the waiting requests, and while functions serve, a plan that saves enough takes
    /// over. `Never`: keep the plan.
    #[serde(default)]
    pub replan: Replan,
    /// Minimum time between two plans while functions serve, such as 10m.
    #[serde(default = "ten_minutes")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('10s')").message("must be 10s or longer"))]
    pub interval: Duration,
    /// `None`: gateways keep a prompt vector and the expert usage of each request, by tenant. `CountsOnly`: they keep
    /// sums over requests only.
    #[serde(default)]
    pub privacy: Privacy,
}

/// Replanning.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Replan {
    /// Replan on expert usage.
    #[default]
    Auto,
    /// Keep the plan.
    Never,
}

/// Privacy of the training history.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Privacy {
    /// Keeps everything but the text of requests.
    #[default]
    None,
    /// Keeps sums over requests only.
    CountsOnly,
}

impl PredictionSpec {
    /// Returns whether all fields have their defaults.
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for PredictionSpec {
    fn default() -> Self {
        Self { replan: Replan::default(), interval: ten_minutes(), privacy: Privacy::default() }
    }
}

fn ten_minutes() -> Duration {
    std::time::Duration::from_secs(600).into()
}

/// Expert usage expected by a plan.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedPrediction {
    /// Revision number. Among plans for one spec, the one with the largest number runs.
    pub revision: u32,
    /// Source of the usage: waiting or answered requests.
    pub of: MixOf,
    /// Number of requests. Older answered requests have less weight.
    pub requests: u32,
    /// Shares of each layer's experts, in the encoding of remoe-predictor.
    #[schemars(length(max = 8192))]
    pub shares: String,
}
