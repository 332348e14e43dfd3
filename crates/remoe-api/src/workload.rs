//! Requests that a deployment serves.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Sizes and rate of requests. Times and cost are planned for the typical request, memory for the largest one
/// and for concurrent ones.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.typicalInputTokens <= self.maxInputTokens")
        .message("must be at most maxInputTokens").field_path(".typicalInputTokens"),
    validation = Rule::new("self.typicalOutputTokens <= self.maxOutputTokens")
        .message("must be at most maxOutputTokens").field_path(".typicalOutputTokens")
)]
pub struct WorkloadSpec {
    /// Tokens of the longest prompt.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub max_input_tokens: u32,
    /// Tokens of the longest answer.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub max_output_tokens: u32,
    /// Tokens of a typical prompt.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub typical_input_tokens: u32,
    /// Tokens of a typical answer.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub typical_output_tokens: u32,
    /// Concurrent requests in one main function. The KV cache holds the largest request, or this many typical
    /// ones, whichever is more.
    #[serde(default = "default_concurrency")]
    #[schemars(range(min = 1, max = 256))]
    pub concurrency: u32,
    /// Arrival process of requests. If absent, plans assume no rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrivals: Option<ArrivalsSpec>,
}

/// Arrival process of requests, as decimal numbers in strings.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ArrivalsSpec {
    /// Mean number of requests per hour.
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be above 0"))]
    pub per_hour: String,
    /// Mean burst size, in requests.
    #[serde(default = "one_request")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    #[x_kube(validation = Rule::new("double(self) >= 1.0").message("must be at least 1"))]
    pub burst: String,
}

/// Returns the default of `concurrency`.
pub fn default_concurrency() -> u32 {
    8
}

fn one_request() -> String {
    "1".to_owned()
}
