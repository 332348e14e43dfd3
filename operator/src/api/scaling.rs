//! How many functions run, and when none does.

use kube::KubeSchema;
use kube::core::Duration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How many main functions run, when none does, and how functions follow load.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.max) || self.min <= self.max")
    .message("must be at least min: without it there are min main functions whatever the load")
    .field_path(".max"))]
pub struct ScalingSpec {
    /// Main functions that always run; `kubectl scale` sets it. 0: all functions end when nobody has asked for
    /// `idleWindow`, and start when somebody asks.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 64))]
    pub min: u32,
    /// Main functions at most: beyond `min`, or one where that is 0, as many run as there is load for. Gateways tell how
    /// much there is: without them there are no more, nor where this is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub max: Option<u32>,
    /// Without requests for so long functions end, where `min` is 0; such as 10m.
    #[serde(default = "ten_minutes")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) > duration('0s')").message("must be longer than 0s"))]
    pub idle_window: Duration,
    /// Without use of its experts for so long a remote function ends while main functions run, which load them where they are
    /// needed; it starts again when they are. Such as 1m; they end with main functions only where absent. Gateways remember
    /// which sleep: without them none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s')").message("must be 1s or longer"))]
    pub remote_idle_window: Option<Duration>,
    /// The share of what a function can do that it is to do, in percent, where functions follow load.
    #[serde(default = "seventy")]
    #[schemars(range(min = 10, max = 100))]
    pub target_percent: u32,
    /// Load is averaged over so long, and over a tenth of it where it grows to twice what functions are there for; no
    /// replica of a function ends for so long after another of it was started. Such as 60s.
    #[serde(default = "minute")]
    #[schemars(length(min = 2, max = 32))]
    #[x_kube(validation = Rule::new("duration(self) >= duration('5s') && duration(self) <= duration('1h')")
        .message("must be from 5s to 1h"))]
    pub window: Duration,
    /// Remote functions beyond those of the plan, where load asks for them; none where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteScalingSpec>,
}

/// How remote functions follow load.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemoteScalingSpec {
    /// Replicas of one remote function, at most.
    #[schemars(range(min = 1, max = 64))]
    pub max: u32,
    /// Memory of all replicas beyond those of the plan, at most, in MB of 1,000,000 bytes; no limit where absent.
    #[serde(rename = "memoryMB", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000_000))]
    pub memory_mb: Option<u32>,
}

impl ScalingSpec {
    /// Main functions that run whenever any does.
    pub fn least(&self) -> u32 {
        self.min.max(1)
    }

    /// Main functions at most.
    pub fn most(&self) -> u32 {
        self.max.map_or(self.least(), |most| most.max(self.least()))
    }

    /// Whether there are more functions where there is more load.
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
