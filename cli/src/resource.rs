//! MoEDeployments in files, as a cluster takes them.

mod part;

pub(crate) use part::{in_spec, part_of_spec};

use crate::exit::CliError;
use crate::files::{in_file, read};
use remoe_planner::FieldError;
use remoe_process::parse_duration;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_yaml::Value;
use std::fmt::{Display, Formatter};
use std::path::Path;

pub(crate) const KIND: &str = "MoEDeployment";
const API_VERSION: &str = "remoe.dev/v1alpha1";
/// Limits of latency by default, as in a cluster.
pub(crate) const TTFT: &str = "10s";
pub(crate) const TPOT: &str = "150ms";
/// Time between two plans that follow requests, by default.
pub(crate) const REPLAN_INTERVAL: &str = "10m";
/// Idle window of a resource that scales to zero, by default.
pub(crate) const IDLE_WINDOW: &str = "10m";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Resource {
    api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    pub(crate) metadata: Metadata,
    pub(crate) spec: Spec,
    #[serde(rename = "status")]
    _status: Option<IgnoredAny>,
}

#[derive(Deserialize)]
pub(crate) struct Metadata {
    pub(crate) name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Spec {
    pub(crate) model: ModelSpec,
    pub(crate) served_name: Option<String>,
    pub(crate) mode: Option<Value>,
    pub(crate) accepted_plan: Option<Value>,
    #[serde(default)]
    pub(crate) scaling: ScalingSpec,
    pub(crate) replicas: Option<Value>,
    #[serde(default)]
    pub(crate) slo: SloSpec,
    pub(crate) workload: Option<Value>,
    #[serde(default)]
    pub(crate) main: MainSpec,
    #[serde(default)]
    pub(crate) remote_experts: RemoteExpertsSpec,
    pub(crate) pricing: Option<Value>,
    pub(crate) rollout: Option<Value>,
    pub(crate) prediction: Option<PredictionSpec>,
    pub(crate) profile: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PredictionSpec {
    #[serde(default)]
    pub(crate) replan: Replan,
    pub(crate) interval: Option<String>,
    #[serde(default)]
    pub(crate) privacy: Privacy,
}

#[derive(Default, PartialEq, Deserialize)]
pub(crate) enum Replan {
    #[default]
    Auto,
    Never,
}

#[derive(Default, PartialEq, Deserialize)]
pub(crate) enum Privacy {
    #[default]
    None,
    CountsOnly,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ModelSpec {
    pub(crate) source: String,
    pub(crate) revision: Option<String>,
    pub(crate) endpoint: Option<Value>,
    pub(crate) credentials_secret_name: Option<Value>,
    pub(crate) ambient_credentials: Option<Value>,
    pub(crate) cache_claim_name: Option<Value>,
    pub(crate) dtype: Option<String>,
    pub(crate) experts_dtype: Option<String>,
    pub(crate) dense_dtype: Option<String>,
    pub(crate) kv_cache_dtype: Option<String>,
    pub(crate) max_model_len: Option<u32>,
    pub(crate) chat_template_kwargs: Option<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ScalingSpec {
    pub(crate) min: Option<u32>,
    pub(crate) max: Option<Value>,
    pub(crate) idle_window: Option<String>,
    pub(crate) remote_idle_window: Option<String>,
    pub(crate) target_percent: Option<Value>,
    pub(crate) window: Option<Value>,
    pub(crate) remote: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SloSpec {
    pub(crate) ttft: Option<String>,
    pub(crate) tpot: Option<String>,
    pub(crate) cold_ttft: Option<String>,
    pub(crate) cold_percent: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct MainSpec {
    pub(crate) device: Option<String>,
    pub(crate) gpu: Option<Value>,
    #[serde(rename = "memoryMB")]
    pub(crate) memory_mb: Option<Range<100>>,
    pub(crate) cpu: Option<Range<500>>,
    pub(crate) template: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct RemoteExpertsSpec {
    pub(crate) mode: Option<String>,
    #[serde(rename = "memoryMB")]
    pub(crate) memory_mb: Option<Range<100>>,
    pub(crate) cpu: Option<Range<500>>,
    pub(crate) max_groups: Option<u32>,
    pub(crate) max_replicas: Option<u32>,
    #[serde(rename = "payloadLimitMB")]
    pub(crate) payload_limit_mb: Option<Value>,
    pub(crate) template: Option<Value>,
}

/// Range of sizes. `STEP` is the default step.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Range<const STEP: u32> {
    pub(crate) min: u32,
    pub(crate) max: u32,
    pub(crate) step: Option<u32>,
}

impl<const STEP: u32> Range<STEP> {
    /// Returns minimum, maximum and step.
    pub(crate) fn numbers(self) -> [f64; 3] {
        [self.min, self.max, self.step.unwrap_or(STEP)].map(f64::from)
    }
}

impl<const STEP: u32> Display for Range<STEP> {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}:{}:{}", self.min, self.max, self.step.unwrap_or(STEP))
    }
}

/// Reads the one resource of the file at `path`.
pub(crate) fn read_one(path: &Path) -> Result<Resource, CliError> {
    let text = read("--file", path)?;
    let mut found = documents(&text).map_err(|error| in_file("--file", path, &error))?;
    let document = found.pop().ok_or_else(|| wrong_resource(path, &format!("missing {KIND}")))?;
    if !found.is_empty() {
        let message = format!("expected one {KIND}, got {}; use one file for each", found.len() + 1);
        return Err(wrong_resource(path, &message));
    }
    of_document(path, document)
}

/// Reads the resource in a document of the file at `path`.
pub(crate) fn of_document(path: &Path, document: Value) -> Result<Resource, CliError> {
    let resource: Resource = serde_path_to_error::deserialize(document)
        .map_err(|error| in_file("--file", path, &unreadable_resource(error)))?;
    if resource.api_version != API_VERSION {
        let message = format!("apiVersion is {}, expected {API_VERSION}", resource.api_version);
        return Err(wrong_resource(path, &message));
    }
    Ok(resource)
}

/// Returns an error about the resource in the file at `path`.
pub(crate) fn wrong_resource(path: &Path, message: &str) -> CliError {
    in_file("--file", path, &message)
}

/// Returns an error about `field` of the resource in the file at `path`.
pub(crate) fn wrong_field(path: &Path, field: &str, why: &dyn std::fmt::Display) -> CliError {
    CliError { field: Some(field.to_owned()), ..wrong_resource(path, &format!("{field}: {why}")) }
}

fn unreadable_resource(error: serde_path_to_error::Error<serde_yaml::Error>) -> FieldError {
    let path = error.path().to_string();
    FieldError::unreadable(&path, &error.into_inner().to_string())
}

/// Seconds without requests after which the one MoEDeployment that `text` is sleeps; `None` where it is none, or never
/// does.
///
/// # Errors
/// An invalid duration.
pub(crate) fn idle_window(text: &str) -> Result<Option<f64>, String> {
    let document = documents(text).ok().and_then(|mut found| found.pop());
    let scaling = document.as_ref().and_then(|document| document.get("spec")?.get("scaling"));
    let Some(scaling) = scaling.filter(|it| it.get("min").and_then(Value::as_u64) == Some(0)) else {
        return Ok(None);
    };
    let text = match scaling.get("idleWindow") {
        None => IDLE_WINDOW,
        Some(value) => {
            value.as_str().ok_or_else(|| format!("got {value:?}, expected a duration such as 10m"))?
        }
    };
    parse_duration(text).map(|window| Some(window.as_secs_f64())).map_err(|error| error.to_string())
}

/// Reports if a document of `text` is a MoEDeployment.
pub(crate) fn is_one(text: &str) -> bool {
    text.contains(KIND) && documents(text).is_ok_and(|found| !found.is_empty())
}

/// Returns the documents of kind MoEDeployment.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>, serde_yaml::Error> {
    let documents = serde_yaml::Deserializer::from_str(text).map(Value::deserialize);
    let of_kind = |value: &Value| value.get("kind").and_then(Value::as_str) == Some(KIND);
    Ok(documents.collect::<Result<Vec<_>, _>>()?.into_iter().filter(of_kind).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const RESOURCE: &str = "apiVersion: v1\nkind: ConfigMap\n---\napiVersion: remoe.dev/v1alpha1\nkind: MoEDeployment\n\
        metadata: {name: demo, namespace: x}\nspec:\n  model: {source: 'hf://a/b', revision: main, cacheClaimName: c}\n  \
        slo: {tpot: 1m30s}\n  replicas: 2\n  workload: {maxInputTokens: 10, maxOutputTokens: 10, typicalInputTokens: 5, typicalOutputTokens: 5}\n  \
        pricing: {billing: Reserved, cpuCoreHour: '0.03', memoryGBHour: \"0.004\"}\n  \
        main: {memoryMB: {min: 200, max: 400}}\n  remoteExperts: {mode: Always, cpu: {min: 250, max: 2000, step: 250}, maxGroups: 3}\n";

    #[test]
    fn parts_of_the_spec_have_numbers() {
        let prices = part_of_spec(RESOURCE, "pricing").unwrap().unwrap();
        let prices = remoe_hardware::Prices::from_yaml(&prices).unwrap();
        assert_eq!(prices.cpu_core_hour, 0.03);
        assert_eq!(part_of_spec("cpuCoreHour: 1", "pricing").unwrap(), None);
    }
}
