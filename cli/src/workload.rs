//! Which requests a plan is made for.

use crate::exit::CliError;
use crate::planning::{in_file, read};
use crate::resource::{idle_window, part_of_spec};
use clap::Args;
use remoe_model::Inspection;
use remoe_planner::{Arrivals, Request};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use std::path::PathBuf;
use std::time::Duration;

/// Requests where nothing is said: a paragraph in, a few paragraphs out.
const TYPICAL_INPUT: u64 = 128;
const TYPICAL_OUTPUT: u64 = 200;
const MOST_INPUT: u64 = 4096;
const MOST_OUTPUT: u64 = 1024;
/// Requests at once where nothing is said, and at most: a main function takes no more by itself.
const TYPICAL_CONCURRENCY: u32 = 8;
const MOST_CONCURRENCY: u32 = 256;

/// Workload of the model.
#[derive(Debug, Clone, Args)]
pub(crate) struct WorkloadArgs {
    /// Workload file in YAML or JSON, or a MoEDeployment manifest with spec.workload. Optional fields:
    /// typicalInputTokens, typicalOutputTokens, maxInputTokens, maxOutputTokens, concurrency, arrivals. Fields of
    /// arrivals: perHour or recordedSeconds, burst, idleSeconds, remoteIdleSeconds
    #[arg(long, value_name = "FILE", help_heading = "Planning")]
    pub(crate) workload: Option<PathBuf>,
}

/// Number of concurrent requests.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct ConcurrencyArgs {
    /// Concurrent requests: sizes memory and threads for this many typical requests [default: that of the workload,
    /// else 8]
    #[arg(long, value_name = "N", help_heading = "Planning", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CONCURRENCY)))]
    pub(crate) concurrency: Option<u32>,
}

/// Requests as a workload file states them; the names are those of the custom resource.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Workload {
    typical_input_tokens: Option<u64>,
    typical_output_tokens: Option<u64>,
    max_input_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    concurrency: Option<u32>,
    arrivals: Option<ArrivalsForm>,
}

/// How requests come: at random, or as they were recorded.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ArrivalsForm {
    #[serde(default, deserialize_with = "decimal")]
    per_hour: Option<f64>,
    #[serde(default, deserialize_with = "decimal")]
    burst: Option<f64>,
    idle_seconds: Option<f64>,
    remote_idle_seconds: Option<f64>,
    recorded_seconds: Option<Vec<f64>>,
}

/// A number, also in a string as the custom resource has it.
fn decimal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Decimal {
        Number(f64),
        Text(String),
    }
    Option::<Decimal>::deserialize(deserializer)?
        .map(|decimal| match decimal {
            Decimal::Number(number) => Ok(number),
            Decimal::Text(text) => {
                text.parse().map_err(|_| D::Error::custom(format!("expected a decimal number, got {text:?}")))
            }
        })
        .transpose()
}

impl WorkloadArgs {
    fn read(&self) -> Result<Workload, CliError> {
        match &self.workload {
            None => Ok(Workload::default()),
            Some(path) => {
                let text = read("--workload", path)?;
                let text = part_of_spec(&text, "workload").unwrap_or(text);
                serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(&text))
                    .map_err(|error| in_file("--workload", path, &error))
            }
        }
    }

    /// When requests come, where the workload says so. Functions end after `idle` without any, where a MoEDeployment
    /// or the workload says nothing else.
    pub(crate) fn arrivals(&self, idle: Option<Duration>) -> Result<Option<Arrivals>, CliError> {
        let Some(form) = self.read()?.arrivals else { return Ok(None) };
        if form.per_hour.is_some() == form.recorded_seconds.is_some() {
            let message = "invalid arrivals in --workload: expected either perHour (requests per hour) or \
                           recordedSeconds (times of requests)";
            return Err(CliError::arguments("--workload", message));
        }
        Ok(Some(Arrivals {
            per_second: form.per_hour.unwrap_or(0.0) / 3600.0,
            burst: form.burst.unwrap_or(1.0),
            recorded_seconds: form.recorded_seconds,
            idle_seconds: match form.idle_seconds {
                Some(seconds) => Some(seconds),
                None => idle.map(|idle| idle.as_secs_f64()).or(self.idle_window()?),
            },
        }))
    }

    /// Without a request that uses any of its experts for so many seconds a group may end by itself, where the workload
    /// says so.
    pub(crate) fn remote_idle_seconds(&self) -> Result<Option<f64>, CliError> {
        Ok(self.read()?.arrivals.and_then(|form| form.remote_idle_seconds))
    }

    /// Seconds after which the functions of the MoEDeployment that says the workload sleep, where it is one and they do.
    fn idle_window(&self) -> Result<Option<f64>, CliError> {
        let Some(path) = &self.workload else { return Ok(None) };
        idle_window(&read("--workload", path)?).map_err(|text| CliError {
            path: Some(path.clone()),
            ..CliError::arguments(
                "--workload",
                format!("{}: spec.scaling.idleWindow is {text}, expected a time such as 10m", path.display()),
            )
        })
    }

    /// The requests to plan for; `concurrency` of them at once, where that is said.
    pub(crate) fn request(&self, model: &Inspection, concurrency: Option<u32>) -> Result<Request, CliError> {
        let workload = self.read()?;
        let context = model.served_context() as u64;
        let typical_input = workload.typical_input_tokens.unwrap_or(TYPICAL_INPUT);
        let typical_output = workload.typical_output_tokens.unwrap_or(TYPICAL_OUTPUT);
        let most_output =
            workload.max_output_tokens.unwrap_or(MOST_OUTPUT.min(context / 4).max(typical_output));
        let most_input = workload
            .max_input_tokens
            .unwrap_or(MOST_INPUT.min(context.saturating_sub(most_output)).max(typical_input));
        if typical_input == 0 || typical_output == 0 {
            let message =
                "invalid --workload: expected typicalInputTokens and typicalOutputTokens of at least 1";
            return Err(CliError::arguments("--workload", message));
        }
        let stated = workload.concurrency.unwrap_or(TYPICAL_CONCURRENCY);
        if !(1..=MOST_CONCURRENCY).contains(&stated) {
            let message =
                format!("invalid concurrency in --workload: expected 1 to {MOST_CONCURRENCY}, got {stated}");
            return Err(CliError::arguments("--workload", message));
        }
        Ok(Request {
            input_tokens: typical_input as f64,
            // The first token comes out of the prefill.
            output_tokens: (typical_output - 1) as f64,
            max_input_tokens: Some(most_input as f64),
            max_output_tokens: Some(most_output as f64),
            concurrency: concurrency.unwrap_or(stated),
        })
    }
}
