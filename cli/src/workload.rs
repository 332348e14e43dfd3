//! Which requests a plan is made for.

use crate::exit::CliError;
use crate::files::{in_file, read};
use crate::resource::{self, in_spec};
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

/// Requests where nothing is said: a paragraph in, a few paragraphs out.
const TYPICAL_INPUT: u64 = 128;
const TYPICAL_OUTPUT: u64 = 200;
const MOST_INPUT: u64 = 4096;
const MOST_OUTPUT: u64 = 1024;
/// Requests at once where nothing is said, and at most: a main function takes no more by itself.
const TYPICAL_CONCURRENCY: u32 = 8;
const MOST_CONCURRENCY: u32 = 256;
/// Figures of a workload, at most: what the planner takes, in the units of the file.
const MOST_TOKENS: u64 = 1_000_000_000_000;
const PER_HOUR: RangeInclusive<f64> = 1e-9..=1e12;
const BURST: RangeInclusive<f64> = 1.0..=65_536.0;
/// Seconds of idle windows.
const MOST_IDLE: f64 = 1e9;
/// Times of recorded requests: how many, and the last one in seconds.
const MOST_RECORDED: usize = 100_000;
const LATEST: f64 = 1e15;

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

/// Requests to plan for; the names are those of the custom resource.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Workload {
    /// Tokens of a typical prompt; 128 where absent.
    #[schemars(range(min = 1, max = MOST_TOKENS))]
    typical_input_tokens: Option<u64>,
    /// Tokens of a typical answer; 200 where absent.
    #[schemars(range(min = 1, max = MOST_TOKENS))]
    typical_output_tokens: Option<u64>,
    /// Tokens of the longest prompt that must fit, at least `typicalInputTokens`; 4,096 or the rest of the context where
    /// absent.
    #[schemars(range(min = 1, max = MOST_TOKENS))]
    max_input_tokens: Option<u64>,
    /// Tokens of the longest answer that must fit, at least `typicalOutputTokens`; 1,024 or a quarter of the context where
    /// absent.
    #[schemars(range(min = 1, max = MOST_TOKENS))]
    max_output_tokens: Option<u64>,
    /// Number of requests that run at once; 8 where absent.
    #[schemars(range(min = 1, max = MOST_CONCURRENCY))]
    concurrency: Option<u32>,
    /// Arrivals of requests. Where absent, costs are those of requests one after another.
    arrivals: Option<ArrivalsForm>,
    /// Time without requests after which the MoEDeployment that has this workload sleeps, if it does.
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
    #[schemars(range(min = 0.0, max = MOST_IDLE))]
    idle_seconds: Option<f64>,
    /// Seconds without a request that uses its experts after which a group may end by itself; never where absent.
    #[schemars(range(min = 0.0, max = MOST_IDLE))]
    remote_idle_seconds: Option<f64>,
    /// Times of recorded requests in seconds, ascending.
    #[schemars(length(min = 2, max = MOST_RECORDED), inner(range(min = 0.0, max = LATEST)))]
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

/// A number, also in a string as the custom resource has it.
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
    /// Reads a workload in YAML or JSON, or that of a MoEDeployment.
    fn from_yaml(text: &str) -> Result<Self, FieldError> {
        let Some(resource) = resource::of_text(text)? else { return Self::of_yaml(text) };
        let read = Self::of_yaml(&resource.part("workload")?);
        let workload = read.map_err(|error| in_spec("workload", error))?;
        Ok(Self { idle_window: resource.spec.idle_window(), ..workload })
    }

    fn of_yaml(text: &str) -> Result<Self, FieldError> {
        let workload: Self = serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(text))
            .map_err(|error| {
                let path = error.path().to_string();
                FieldError::unreadable(&path, &error.into_inner().to_string())
            })?;
        workload.check()?;
        Ok(workload)
    }

    /// Checks every figure in the unit of the file: the planner knows them in its own.
    fn check(&self) -> Result<(), FieldError> {
        let typical_input = self.typical_input_tokens;
        let typical_output = self.typical_output_tokens;
        for (field, tokens, typical) in [
            ("typicalInputTokens", typical_input, None),
            ("typicalOutputTokens", typical_output, None),
            ("maxInputTokens", self.max_input_tokens, Some(typical_input.unwrap_or(TYPICAL_INPUT))),
            ("maxOutputTokens", self.max_output_tokens, Some(typical_output.unwrap_or(TYPICAL_OUTPUT))),
        ] {
            let Some(tokens) = tokens else { continue };
            if !(1..=MOST_TOKENS).contains(&tokens) {
                let message = format!("is {tokens}, expected 1 to {:e} tokens", MOST_TOKENS as f64);
                return Err(wrong(field, message));
            }
            if let Some(typical) = typical.filter(|typical| tokens < *typical) {
                let message =
                    format!("is {tokens}, expected at least the typical {typical} tokens; raise it");
                return Err(wrong(field, message));
            }
        }
        if let Some(stated) = self.concurrency.filter(|stated| !(1..=MOST_CONCURRENCY).contains(stated)) {
            let message = format!("is {stated}, expected 1 to {MOST_CONCURRENCY} requests at once");
            return Err(wrong("concurrency", message));
        }
        self.arrivals.as_ref().map_or(Ok(()), ArrivalsForm::check)
    }
}

impl ArrivalsForm {
    fn check(&self) -> Result<(), FieldError> {
        if self.per_hour.is_some() == self.recorded_seconds.is_some() {
            let message = "is invalid: expected either perHour (requests per hour) or recordedSeconds (times of \
                           requests in seconds)";
            return Err(wrong("arrivals", message));
        }
        within("arrivals.perHour", self.per_hour, PER_HOUR, "requests per hour")?;
        within("arrivals.burst", self.burst, BURST, "requests")?;
        within("arrivals.idleSeconds", self.idle_seconds, 0.0..=MOST_IDLE, "seconds")?;
        within("arrivals.remoteIdleSeconds", self.remote_idle_seconds, 0.0..=MOST_IDLE, "seconds")?;
        let Some(times) = &self.recorded_seconds else { return Ok(()) };
        let field = "arrivals.recordedSeconds";
        if !(2..=MOST_RECORDED).contains(&times.len()) {
            return Err(wrong(field, format!("has {} times, expected 2 to {MOST_RECORDED}", times.len())));
        }
        for (index, time) in times.iter().enumerate() {
            within(&format!("{field}[{index}]"), Some(*time), 0.0..=LATEST, "seconds")?;
        }
        if let Some(index) = times.windows(2).position(|pair| pair[1] < pair[0]) {
            let message = format!("is {} after {}; list times ascending", times[index + 1], times[index]);
            return Err(wrong(&format!("{field}[{}]", index + 1), message));
        }
        match times.first() == times.last() {
            true => Err(wrong(field, "has only one time, expected at least 2 different times".to_owned())),
            false => Ok(()),
        }
    }
}

/// Checks a file of `--workload`.
pub(crate) fn check(text: &str) -> Result<(), FieldError> {
    Workload::from_yaml(text).map(drop)
}

fn wrong(field: &str, message: impl Into<String>) -> FieldError {
    FieldError { field: field.to_owned(), message: message.into() }
}

fn within(
    field: &str,
    stated: Option<f64>,
    range: RangeInclusive<f64>,
    unit: &str,
) -> Result<(), FieldError> {
    let Some(value) = stated.filter(|value| !range.contains(value)) else { return Ok(()) };
    // Powers of ten where digits would have to be counted.
    let bound = |bound: f64| match bound {
        plain if plain == 0.0 || (1e-5..1e6).contains(&plain) => plain.to_string(),
        long => format!("{long:e}"),
    };
    let (least, most) = (bound(*range.start()), bound(*range.end()));
    Err(wrong(field, format!("is {value}, expected {unit} from {least} to {most}")))
}

impl WorkloadArgs {
    fn read(&self) -> Result<Workload, CliError> {
        match &self.workload {
            None => Ok(Workload::default()),
            Some(path) => {
                let text = read("--workload", path)?;
                Workload::from_yaml(&text).map_err(|error| in_file("--workload", path, &error))
            }
        }
    }

    /// When requests come, where the workload says so. Functions end after `idle` without any, where a MoEDeployment
    /// or the workload says nothing else.
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

    /// Without a request that uses any of its experts for so many seconds a group may end by itself, where the workload
    /// says so.
    pub(crate) fn remote_idle_seconds(&self) -> Result<Option<f64>, CliError> {
        Ok(self.read()?.arrivals.and_then(|form| form.remote_idle_seconds))
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
        let stated = workload.concurrency.unwrap_or(TYPICAL_CONCURRENCY);
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn workload_with_a_wrong_figure_is_told_as_it_was_written() {
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
