//! Number of functions, scale to zero, and autoscaling.

use crate::duration::Duration;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Number of main functions, scale to zero, and autoscaling.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.max) || self.min <= self.max")
    .message("must be at least min")
    .field_path(".max"))]
pub struct ScalingSpec {
    /// Minimum number of main functions; `kubectl scale` sets it. 0: scale to zero after `idleWindow` without
    /// requests; the next request wakes the functions.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 64))]
    pub min: u32,
    /// Maximum number of main functions. Load decides the number between `min` (at least 1) and this. Requires
    /// gateways. Default: no autoscaling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub max: Option<u32>,
    /// Time without requests before scaling to zero, with `min` 0; such as 10m.
    #[serde(default = "ten_minutes")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) > duration('0s')").message("must be longer than 0s"))]
    pub idle_window: Duration,
    /// Time without use of its experts before a remote function sleeps while main functions run; such as 1m. A use
    /// of its experts wakes it; until then main functions load them. Requires gateways. Default: remote functions end
    /// with main functions only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s')").message("must be 1s or longer"))]
    pub remote_idle_window: Option<Duration>,
    /// Target utilisation of a function for autoscaling, in percent.
    #[serde(default = "seventy")]
    #[schemars(range(min = 10, max = 100))]
    pub target_percent: u32,
    /// Averaging window of the load, such as 60s. If load calls for twice the replicas, a tenth of the window counts.
    /// After a scale-up no replica of that function ends for this long.
    #[serde(default = "minute")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('5s') && duration(self) <= duration('1h')")
        .message("must be from 5s to 1h"))]
    pub window: Duration,
    /// Autoscaling of remote functions beyond the plan's replicas. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteScalingSpec>,
}

/// Autoscaling of remote functions.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoteScalingSpec {
    /// Maximum number of replicas of one remote function.
    #[schemars(range(min = 1, max = 64))]
    pub max: u32,
    /// Maximum memory of all replicas beyond those of the plan, in MB of 1,000,000 bytes. Default: no limit.
    #[serde(rename = "memoryMB", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000_000))]
    pub memory_mb: Option<u32>,
}

impl ScalingSpec {
    /// Returns the minimum number of main functions while the deployment is awake.
    pub fn least(&self) -> u32 {
        self.min.max(1)
    }

    /// Returns the maximum number of main functions.
    pub fn most(&self) -> u32 {
        self.max.map_or(self.least(), |most| most.max(self.least()))
    }

    /// Returns whether autoscaling is enabled.
    pub fn follows_load(&self) -> bool {
        self.most() > self.least() || self.remote.is_some()
    }
}

impl Default for ScalingSpec {
    fn default() -> Self {
        Self {
            min: one(),
            max: None,
            idle_window: ten_minutes(),
            remote_idle_window: None,
            target_percent: seventy(),
            window: minute(),
            remote: None,
        }
    }
}

fn one() -> u32 {
    1
}

fn seventy() -> u32 {
    70
}

fn minute() -> Duration {
    std::time::Duration::from_secs(60).into()
}

fn ten_minutes() -> Duration {
    std::time::Duration::from_secs(600).into()
}
