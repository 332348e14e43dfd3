//! Correction of a profile by the measured latencies of served requests.
//!
//! A profile is measured once on an idle machine, and production may be slower or faster. Each response reports the
//! expected and the measured latency of both phases ([`TimeRatios`]). The factor of a phase is the median of
//! measured / expected, so that up to half of the responses may be outliers (requests that queued, a busy machine). It is
//! clamped, and it is 1 if there are too few responses.

use crate::profile::{Profile, STEP_ROWS};
use remoe_planner::CpuProfile;
use serde::{Deserialize, Serialize};

/// Responses below which the factor of a phase is 1.
const MIN_RESPONSES: usize = 10;
/// Smallest and largest factor.
const BOUNDS: (f64, f64) = (0.5, 2.0);
/// Tokens of one expert from which its times are scaled by the prefill factor; at one token, the decode factor holds.
const MIN_PREFILL_TOKENS: f64 = 8.0;

/// Expected and measured times of one response.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeRatios {
    /// Times of the prefill; `None` unless the response reports both, or if a part of the prompt was cached.
    pub prefill: Option<TimeRatio>,
    /// Times of a decode step; `None` unless the response reports both.
    pub decode: Option<TimeRatio>,
}

/// An expected time and the measured one, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeRatio {
    expected: f64,
    measured: f64,
}

/// Factors by which times differ from a profile's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TimeFactors {
    /// Factor of prefills.
    pub prefill: TimeFactor,
    /// Factor of decode steps.
    pub decode: TimeFactor,
}

/// Factor by which the times of one phase differ from a profile's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TimeFactor {
    /// Multiplier of the profile's times; 1 if too few responses report both times.
    pub factor: f64,
    /// Median of measured / expected before clamping; `None` if too few responses report both times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub median: Option<f64>,
    /// Number of responses that report both times.
    pub pairs: usize,
}

/// The fields of `usage.remoe` of a response that are read here.
#[derive(Deserialize)]
struct MeasuredResponse {
    plan: PlanLatencies,
    /// Seconds of computing the prompt, without queueing.
    prefill_s: Option<f64>,
}

/// Latencies of a request that its plan predicted, and the measured ones.
#[derive(Deserialize)]
struct PlanLatencies {
    expected: Latencies,
    measured: Latencies,
}

/// Seconds to the first token, and per token after it.
#[derive(Deserialize)]
struct Latencies {
    ttft_s: f64,
    tpot_s: f64,
}

impl TimeRatio {
    /// Pairs the two times; `None` unless both are positive and finite.
    #[must_use]
    pub fn new(expected: f64, measured: f64) -> Option<Self> {
        let is_positive = |seconds: f64| seconds > 0.0 && seconds.is_finite();
        (is_positive(expected) && is_positive(measured)).then_some(Self { expected, measured })
    }
}

impl TimeRatios {
    /// Reads the times of responses, one response per line: a whole response or an event of a stream (`data: ..`) with
    /// `usage.remoe`, that object alone, or its `plan`. Lines without these fields are skipped. The prefill of a prompt
    /// that was partly cached is not counted.
    ///
    /// # Errors
    /// The number of the first line that is not JSON or has invalid times, and the reason.
    pub fn read(text: &str) -> Result<Vec<Self>, String> {
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let lines = lines.map(|(number, line)| (number, line.strip_prefix("data:").unwrap_or(line).trim()));
        let mut pairs = Vec::new();
        for (number, line) in lines.filter(|(_, line)| !line.is_empty() && *line != "[DONE]") {
            let invalid =
                |error: serde_json::Error| format!("line {number}: expected an answer with figures: {error}");
            let value: serde_json::Value = serde_json::from_str(line).map_err(invalid)?;
            let cached = value.pointer("/usage/prompt_tokens_details/cached_tokens");
            let is_cached = cached.and_then(serde_json::Value::as_u64).is_some_and(|tokens| tokens > 0);
            let response = match value.pointer("/usage/remoe").unwrap_or(&value) {
                figures if figures.get("plan").is_some() => serde_json::from_value(figures.clone()),
                plan if plan.get("expected").is_some() => serde_json::from_value(plan.clone())
                    .map(|plan| MeasuredResponse { plan, prefill_s: None }),
                _ => continue,
            };
            let MeasuredResponse { plan: PlanLatencies { expected, measured }, prefill_s } =
                response.map_err(invalid)?;
            let prefill = TimeRatio::new(expected.ttft_s, prefill_s.unwrap_or(measured.ttft_s));
            pairs.push(Self {
                prefill: prefill.filter(|_| !is_cached),
                decode: TimeRatio::new(expected.tpot_s, measured.tpot_s),
            });
        }
        Ok(pairs)
    }
}

impl TimeFactors {
    /// Computes the factors from the times of `pairs`.
    #[must_use]
    pub fn of(pairs: &[TimeRatios]) -> Self {
        Self {
            prefill: TimeFactor::of(pairs.iter().filter_map(|pair| pair.prefill)),
            decode: TimeFactor::of(pairs.iter().filter_map(|pair| pair.decode)),
        }
    }

    /// Copies `profile` with its times scaled by the factors.
    ///
    /// The decode factor scales an expert's time for one token, the other layers' for up to [`STEP_ROWS`] requests, calls,
    /// context, and decode steps on a device. The prefill factor scales an expert's time for 8 tokens and more, the other
    /// layers' for more rows, the bandwidth to remote functions, moves to a device and prefills on it. Between 1 and 8
    /// tokens, an expert's factor is interpolated.
    #[must_use]
    pub fn applied(&self, profile: &Profile) -> Profile {
        let (prefill, decode) = (self.prefill.factor, self.decode.factor);
        let mut profile = profile.clone();
        for table in std::iter::once(&mut profile.expert_seconds).chain(&mut profile.remote_expert_seconds) {
            scale(table, |tokens| {
                let place = (tokens.max(1.0).ln() / MIN_PREFILL_TOKENS.ln()).min(1.0);
                decode.powf(1.0 - place) * prefill.powf(place)
            });
        }
        scale(
            &mut profile.nonexpert_seconds,
            |tokens| if tokens <= STEP_ROWS as f64 { decode } else { prefill },
        );
        if let Some(device) = &mut profile.device {
            device.prefill_seconds = device.prefill_seconds.scaled(prefill);
            device.swap_seconds = device.swap_seconds.scaled(prefill);
            device.decode_seconds *= decode;
            device.context_seconds_per_token *= decode;
        }
        let context = profile.context_seconds.iter_mut().flat_map(|table| &mut table.seconds).flatten();
        context.for_each(|seconds| *seconds *= decode);
        let transport = &mut profile.transport;
        transport.invoke_seconds *= decode;
        transport.send_seconds *= decode;
        transport.main_cpu_seconds *= decode;
        transport.function_cpu_seconds *= decode;
        transport.bytes_per_second = (transport.bytes_per_second / prefill).max(1.0);
        profile
    }
}

impl TimeFactor {
    /// Computes the factor of one phase from its `ratios`.
    fn of(ratios: impl Iterator<Item = TimeRatio>) -> Self {
        let mut ratios: Vec<f64> = ratios.map(|ratio| ratio.measured / ratio.expected).collect();
        ratios.sort_by(f64::total_cmp);
        let pairs = ratios.len();
        let middle = ratios.get(pairs.saturating_sub(1) / 2).zip(ratios.get(pairs / 2));
        let median =
            middle.filter(|_| pairs >= MIN_RESPONSES).map(|(one, other)| f64::midpoint(*one, *other));
        Self { factor: median.map_or(1.0, |median| median.clamp(BOUNDS.0, BOUNDS.1)), median, pairs }
    }

    /// Describes the factor in English, for reports.
    #[must_use]
    pub fn in_words(&self) -> String {
        match self.median {
            None => {
                format!("the profiled time (expected at least {MIN_RESPONSES} answers, got {})", self.pairs)
            }
            Some(median) if median == self.factor => {
                format!("{:.2} times the profile ({} answers)", self.factor, self.pairs)
            }
            Some(median) => format!(
                "{:.2} times the profile (clamped from {median:.2}, {} answers); run `remoe profile` again",
                self.factor, self.pairs
            ),
        }
    }
}

/// Multiplies each row of `table` by `factor` of the row's tokens.
fn scale(table: &mut CpuProfile, factor: impl Fn(f64) -> f64) {
    for (tokens, row) in table.tokens.iter().zip(&mut table.seconds) {
        row.iter_mut().for_each(|seconds| *seconds *= factor(*tokens));
    }
}
