//! How plans follow what requests use.

use kube::KubeSchema;
use kube::core::Duration;
use remoe_demand::MixOf;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How plans follow what requests use. Gateways find that out; without them plans are made for requests that use all
/// experts alike.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PredictionSpec {
    /// Auto: functions that wake are placed for those who wait, and while they serve another plan takes over where it
    /// saves enough. Never: plans stay as they are.
    #[serde(default)]
    pub replan: Replan,
    /// Between two plans while functions serve, at least; such as 10m.
    #[serde(default = "ten_minutes")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('10s')").message("must be 10s or longer"))]
    pub interval: Duration,
    /// None: gateways remember of each request a vector of its prompt and what it used, by tenant. CountsOnly: nothing is
    /// remembered of single requests.
    #[serde(default)]
    pub privacy: Privacy,
}

/// Whether plans follow.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Replan {
    /// They do.
    #[default]
    Auto,
    /// They stay.
    Never,
}

/// What is not remembered.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Privacy {
    /// The text alone.
    #[default]
    None,
    /// Anything but sums over requests.
    CountsOnly,
}

impl PredictionSpec {
    /// Whether it says nothing.
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

/// What requests were expected to use when a plan was made.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedPrediction {
    /// Grows from plan to plan of a deployment: of those for the same spec the one with the largest runs.
    pub revision: u32,
    /// Whose requests they were.
    pub of: MixOf,
    /// How many; of those that were answered older ones count for less than one.
    pub requests: u32,
    /// Shares of each layer's experts, as remoe-predictor writes them.
    #[schemars(length(max = 8192))]
    pub shares: String,
}
