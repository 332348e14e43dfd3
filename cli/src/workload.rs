//! Workload that a plan is made for: lengths, concurrency and arrivals of requests.

use crate::exit::CliError;
use crate::files::{file_error, read};
use crate::resource::{self, spec_error};
use clap::Args;
use remoe_hardware::number_schema;
use remoe_model::Inspection;
use remoe_planner::{Arrivals, FieldError, Request};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::json;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// Default tokens of a typical prompt: a paragraph.
const DEFAULT_INPUT: u64 = 128;
/// Default tokens of a typical answer: a few paragraphs.
const DEFAULT_OUTPUT: u64 = 200;
/// Default tokens of the longest prompt.
const DEFAULT_MAX_INPUT: u64 = 4096;
/// Default tokens of the longest answer.
const DEFAULT_MAX_OUTPUT: u64 = 1024;
/// Default number of concurrent requests.
const DEFAULT_CONCURRENCY: u32 = 8;
/// Limit of concurrent requests of one main function.
const MAX_CONCURRENCY: u32 = 256;
/// Limit of token counts. This and the following limits are those of the planner, in the units of the file.
const MAX_TOKENS: u64 = 1_000_000_000_000;
const PER_HOUR: RangeInclusive<f64> = 1e-9..=1e12;
const BURST: RangeInclusive<f64> = 1.0..=65_536.0;
/// Limit of idle windows, in seconds.
const MAX_IDLE_SECONDS: f64 = 1e9;
/// Limit of the number of recorded requests.
const MAX_RECORDED: usize = 100_000;
/// Limit of the times of recorded requests, in seconds.
const MAX_RECORDED_SECONDS: f64 = 1e15;

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
    #[arg(long, value_name = "N", help_heading = "Planning", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CONCURRENCY)))]
    pub(crate) concurrency: Option<u32>,
}

/// Requests to plan for; the names are those of the custom resource.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Workload {
    /// Tokens of a typical prompt; 128 where absent.
    #[schemars(range(min = 1, max = MAX_TOKENS))]
    typical_input_tokens: Option<u64>,
    /// Tokens of a typical answer; 200 where absent.
    #[schemars(range(min = 1, max = MAX_TOKENS))]
    typical_output_tokens: Option<u64>,
    /// Tokens of the longest prompt that must fit, at least `typicalInputTokens`; 4,096 or the rest of the context where
    /// absent.
    #[schemars(range(min = 1, max = MAX_TOKENS))]
    max_input_tokens: Option<u64>,
    /// Tokens of the longest answer that must fit, at least `typicalOutputTokens`; 1,024 or a quarter of the context where
    /// absent.
    #[schemars(range(min = 1, max = MAX_TOKENS))]
    max_output_tokens: Option<u64>,
    /// Number of requests that run at once; 8 where absent.
    #[schemars(range(min = 1, max = MAX_CONCURRENCY))]
    concurrency: Option<u32>,
    /// Arrivals of requests. Where absent, costs are those of requests one after another.
    arrivals: Option<ArrivalsForm>,
    /// Idle window of the MoEDeployment that contains the workload. Not a field of the file.
    #[serde(skip)]
    idle_window: Option<Duration>,
}

/// Arrivals of requests: at random (`perHour`), or as they were recorded (`recordedSeconds`).
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(rename = "Arrivals")]
#[schemars(extend("oneOf" = [{"required": ["perHour"]}, {"required": ["recordedSeconds"]}]))]
struct ArrivalsForm {
    /// Requests per hour that come at random.
    #[serde(default, deserialize_with = "decimal")]
    #[schemars(schema_with = "per_hour_schema")]
    per_hour: Option<f64>,
    /// Number of requests that come together, in the mean; 1 where absent.
    #[serde(default, deserialize_with = "decimal")]
    #[schemars(schema_with = "burst_schema")]
    burst: Option<f64>,
    /// Seconds without requests after which everything ends; never where absent.
    #[schemars(range(min = 0.0, max = MAX_IDLE_SECONDS))]
    idle_seconds: Option<f64>,
    /// Seconds without a request that uses its experts after which a group may end by itself; never where absent.
    #[schemars(range(min = 0.0, max = MAX_IDLE_SECONDS))]
    remote_idle_seconds: Option<f64>,
    /// Times of recorded requests in seconds, ascending.
    #[schemars(length(min = 2, max = MAX_RECORDED), inner(range(min = 0.0, max = MAX_RECORDED_SECONDS)))]
    recorded_seconds: Option<Vec<f64>>,
    /// Standard deviation of prompts' lengths over their mean.
    input_variation: Option<f64>,
    /// Standard deviation of output tokens over their mean.
    output_variation: Option<f64>,
}

fn per_hour_schema(_: &mut SchemaGenerator) -> Schema {
    number_schema(json!({"minimum": PER_HOUR.start(), "maximum": PER_HOUR.end()}))
}

fn burst_schema(_: &mut SchemaGenerator) -> Schema {
    number_schema(json!({"minimum": BURST.start(), "maximum": BURST.end()}))
}

/// Deserialises a number, also from a string, as in the custom resource.
fn decimal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a number such as 20 or \"20\"")]
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

impl Workload {
    /// Parses a workload in YAML or JSON, or `spec.workload` of a MoEDeployment.
    fn from_yaml(text: &str) -> Result<Self, FieldError> {
        let Some(resource) = resource::parse_resource(text)? else { return Self::parse_fields(text) };
        let parsed = Self::parse_fields(&resource.section("workload")?);
        let workload = parsed.map_err(|error| spec_error("workload", error))?;
        Ok(Self { idle_window: resource.spec.idle_window(), ..workload })
    }

    fn parse_fields(text: &str) -> Result<Self, FieldError> {
        let workload: Self = serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text))
            .map_err(|error| {
                let path = error.path().to_string();
                FieldError::unreadable(&path, &error.into_inner().to_string())
            })?;
        workload.check()?;
        Ok(workload)
    }

    /// Checks all figures, so that errors are in the units of the file instead of the planner's.
    fn check(&self) -> Result<(), FieldError> {
        let typical_input = self.typical_input_tokens;
        let typical_output = self.typical_output_tokens;
        for (field, tokens, typical) in [
            ("typicalInputTokens", typical_input, None),
            ("typicalOutputTokens", typical_output, None),
            ("maxInputTokens", self.max_input_tokens, Some(typical_input.unwrap_or(DEFAULT_INPUT))),
            ("maxOutputTokens", self.max_output_tokens, Some(typical_output.unwrap_or(DEFAULT_OUTPUT))),
        ] {
            let Some(tokens) = tokens else { continue };
            if !(1..=MAX_TOKENS).contains(&tokens) {
                let message = format!("is {tokens}, expected 1 to {:e} tokens", MAX_TOKENS as f64);
                return Err(field_error(field, message));
            }
            if let Some(typical) = typical.filter(|typical| tokens < *typical) {
                let message =
                    format!("is {tokens}, expected at least the typical {typical} tokens; raise it");
                return Err(field_error(field, message));
            }
        }
        if let Some(stated) = self.concurrency.filter(|stated| !(1..=MAX_CONCURRENCY).contains(stated)) {
            let message = format!("is {stated}, expected 1 to {MAX_CONCURRENCY} requests at once");
            return Err(field_error("concurrency", message));
        }
        self.arrivals.as_ref().map_or(Ok(()), ArrivalsForm::check)
    }
}

impl ArrivalsForm {
    fn check(&self) -> Result<(), FieldError> {
        if self.per_hour.is_some() == self.recorded_seconds.is_some() {
            let message = "is invalid: expected either perHour (requests per hour) or recordedSeconds (times of \
                           requests in seconds)";
            return Err(field_error("arrivals", message));
        }
        check_range("arrivals.perHour", self.per_hour, PER_HOUR, "requests per hour")?;
        check_range("arrivals.burst", self.burst, BURST, "requests")?;
        check_range("arrivals.idleSeconds", self.idle_seconds, 0.0..=MAX_IDLE_SECONDS, "seconds")?;
        check_range(
            "arrivals.remoteIdleSeconds",
            self.remote_idle_seconds,
            0.0..=MAX_IDLE_SECONDS,
            "seconds",
        )?;
        let Some(times) = &self.recorded_seconds else { return Ok(()) };
        let field = "arrivals.recordedSeconds";
        if !(2..=MAX_RECORDED).contains(&times.len()) {
            return Err(field_error(
                field,
                format!("has {} times, expected 2 to {MAX_RECORDED}", times.len()),
            ));
        }
        for (index, time) in times.iter().enumerate() {
            check_range(&format!("{field}[{index}]"), Some(*time), 0.0..=MAX_RECORDED_SECONDS, "seconds")?;
        }
        if let Some(index) = times.windows(2).position(|pair| pair[1] < pair[0]) {
            let message = format!("is {} after {}; list times ascending", times[index + 1], times[index]);
            return Err(field_error(&format!("{field}[{}]", index + 1), message));
        }
        match times.first() == times.last() {
            true => {
                Err(field_error(field, "has only one time, expected at least 2 different times".to_owned()))
            }
            false => Ok(()),
        }
    }
}

/// Checks a file of `--workload`.
pub(crate) fn check(text: &str) -> Result<(), FieldError> {
    Workload::from_yaml(text).map(drop)
}

fn field_error(field: &str, message: impl Into<String>) -> FieldError {
    FieldError { field: field.to_owned(), message: message.into() }
}

fn check_range(
    field: &str,
    stated: Option<f64>,
    range: RangeInclusive<f64>,
    unit: &str,
) -> Result<(), FieldError> {
    let Some(value) = stated.filter(|value| !range.contains(value)) else { return Ok(()) };
    // Formats large and small numbers as powers of ten.
    let bound = |bound: f64| match bound {
        value if value == 0.0 || (1e-5..1e6).contains(&value) => value.to_string(),
        value => format!("{value:e}"),
    };
    let (min, max) = (bound(*range.start()), bound(*range.end()));
    Err(field_error(field, format!("is {value}, expected {unit} from {min} to {max}")))
}

impl WorkloadArgs {
    fn read(&self) -> Result<Workload, CliError> {
        match &self.workload {
            None => Ok(Workload::default()),
            Some(path) => {
                let text = read("--workload", path)?;
                Workload::from_yaml(&text).map_err(|error| file_error("--workload", path, &error))
            }
        }
    }

    /// Returns the arrivals of requests, if the workload states them. `idle` is the idle window if neither the workload nor
    /// its MoEDeployment states one.
    pub(crate) fn arrivals(&self, idle: Option<Duration>) -> Result<Option<Arrivals>, CliError> {
        let Workload { arrivals, idle_window, .. } = self.read()?;
        let Some(form) = arrivals else { return Ok(None) };
        Ok(Some(Arrivals {
            per_second: form.per_hour.unwrap_or(0.0) / 3600.0,
            burst: form.burst.unwrap_or(1.0),
            recorded_seconds: form.recorded_seconds,
            idle_seconds: match form.idle_seconds {
                Some(seconds) => Some(seconds),
                None => idle.or(idle_window).map(|idle| idle.as_secs_f64()),
            },
            input_variation: form.input_variation.unwrap_or(0.0),
            output_variation: form.output_variation.unwrap_or(0.0),
        }))
    }

    /// Returns the idle window of a group in seconds, if the workload states one.
    pub(crate) fn remote_idle_seconds(&self) -> Result<Option<f64>, CliError> {
        Ok(self.read()?.arrivals.and_then(|form| form.remote_idle_seconds))
    }

    /// Returns the requests to plan for. `concurrency` overrides that of the workload.
    pub(crate) fn request(&self, model: &Inspection, concurrency: Option<u32>) -> Result<Request, CliError> {
        let workload = self.read()?;
        let context = model.served_context() as u64;
        let typical_input = workload.typical_input_tokens.unwrap_or(DEFAULT_INPUT);
        let typical_output = workload.typical_output_tokens.unwrap_or(DEFAULT_OUTPUT);
        let max_output =
            workload.max_output_tokens.unwrap_or(DEFAULT_MAX_OUTPUT.min(context / 4).max(typical_output));
        let max_input = workload
            .max_input_tokens
            .unwrap_or(DEFAULT_MAX_INPUT.min(context.saturating_sub(max_output)).max(typical_input));
        let stated = workload.concurrency.unwrap_or(DEFAULT_CONCURRENCY);
        Ok(Request {
            input_tokens: typical_input as f64,
            // The prefill computes the first output token.
            output_tokens: (typical_output - 1) as f64,
            max_input_tokens: Some(max_input as f64),
            max_output_tokens: Some(max_output as f64),
            concurrency: concurrency.unwrap_or(stated),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn invalid_workload_is_refused_in_units_of_the_file() {
        for (text, message) in [
            (
                "arrivals: {perHour: -1}",
                "arrivals.perHour is -1, expected requests per hour from 1e-9 to 1e12",
            ),
            ("arrivals: {perHour: 0}", "arrivals.perHour is 0, expected requests per hour from"),
            ("arrivals: {perHour: .nan}", "arrivals.perHour is NaN, expected requests per hour from"),
            (
                "arrivals: {perHour: \"many\"}",
                "arrivals.perHour is invalid: expected a decimal number, got \"many\"",
            ),
            (
                "arrivals: {perHour: [1]}",
                "arrivals.perHour is invalid: expected a number such as 20 or \"20\"",
            ),
            (
                "arrivals: {perhour: 1}",
                "arrivals.perhour is an unknown field (line 1 column 12); did you mean `perHour`?",
            ),
            (
                "arrivals: {perHour: 1, burst: 0.5}",
                "arrivals.burst is 0.5, expected requests from 1 to 65536",
            ),
            ("arrivals: {perHour: 1, perHour: 2}", "arrivals.perHour is stated twice; keep one"),
            (
                "arrivals: {perHour: 1, idleSeconds: -60}",
                "arrivals.idleSeconds is -60, expected seconds from 0 to 1e9",
            ),
            (
                "arrivals: {recordedSeconds: [2, 1]}",
                "arrivals.recordedSeconds[1] is 1 after 2; list times ascending",
            ),
            ("arrivals: {recordedSeconds: [2, 2]}", "arrivals.recordedSeconds has only one time"),
            ("arrivals: {burst: 2}", "arrivals is invalid: expected either perHour"),
            ("typicalInputTokens: 0", "typicalInputTokens is 0, expected 1 to 1e12 tokens"),
            (
                "maxOutputTokens: 100",
                "maxOutputTokens is 100, expected at least the typical 200 tokens; raise it",
            ),
            ("concurrency: 1000", "concurrency is 1000, expected 1 to 256 requests at once"),
            ("typicalInput: 3", "typicalInput is an unknown field; did you mean `typicalInputTokens`?"),
        ] {
            let error = Workload::from_yaml(text).unwrap_err().to_string();
            assert!(error.starts_with(message), "{text}: {error}");
        }
        Workload::from_yaml("arrivals: {perHour: \"600\", burst: 2}\nmaxInputTokens: 128").unwrap();
    }
}
