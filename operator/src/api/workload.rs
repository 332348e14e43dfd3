//! What requests a deployment is to serve.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Sizes of requests and how many there are. Times and cost are planned for the typical one, memory for the
/// largest and for those that run at once.
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
    /// Requests that run at once in one main function. Keys and values have room for the largest request
    /// or for so many typical ones, whichever is more.
    #[serde(default = "default_concurrency")]
    #[schemars(range(min = 1, max = 256))]
    pub concurrency: u32,
    /// How requests come; plans count on no particular rate where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrivals: Option<ArrivalsSpec>,
}

/// How requests come, as decimal numbers in strings.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ArrivalsSpec {
    /// Requests in an hour, in the mean.
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be above 0"))]
    pub per_hour: String,
    /// Requests that come together, in the mean.
    #[serde(default = "one_request")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[0-9]+(\\.[0-9]+)?$"))]
    #[x_kube(validation = Rule::new("double(self) >= 1.0").message("must be at least 1"))]
    pub burst: String,
}

/// Requests at once where nothing is said.
pub(crate) fn default_concurrency() -> u32 {
    8
}

fn one_request() -> String {
    "1".to_owned()
}
