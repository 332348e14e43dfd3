//! Factors from what plans expected of requests and what those took: a profile is measured once, on a machine that did
//! nothing else, and what serves day by day is slower or quicker in ways that it cannot know.
//!
//! Each answer says both times of both phases ([`TimeRatios`]). The median of the ratios of a phase is its factor: half of the
//! answers may be as far off as they like (requests that waited for others, machines that were busy) without moving it.
//! It is bounded, and counts only where there are enough answers.

use crate::profile::{Profile, STEP_ROWS};
use remoe_planner::CpuProfile;
use serde::{Deserialize, Serialize};

/// Answers that a factor takes, at least.
const LEAST_PAIRS: usize = 10;
/// No factor is smaller or larger.
const BOUNDS: (f64, f64) = (0.5, 2.0);
/// Tokens of one expert from which times are those of prefills; at one token they are those of decode steps.
const PREFILL_TOKENS: f64 = 8.0;

/// Seconds of one answer, as expected and as they were.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeRatios {
    /// The prefill; none where the answer does not say both times.
    pub prefill: Option<Ratio>,
    /// A decode step.
    pub decode: Option<Ratio>,
}

/// Seconds that were expected, and that it took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio {
    expected: f64,
    measured: f64,
}

/// By how much the times of each phase differ from the profile's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Factors {
    /// Factor of prefills.
    pub prefill: Factor,
    /// Factor of decode steps.
    pub decode: Factor,
}

/// By how much times differ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Factor {
    /// Multiplier for the times of the profile; 1 if too few answers state both times.
    pub factor: f64,
    /// The median ratio of measured and expected times, before it is bounded; absent if too few answers state both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub median: Option<f64>,
    /// Answers that said both times.
    pub pairs: usize,
}

/// The parts of an answer with figures that are read here.
#[derive(Deserialize)]
struct MeasuredResponse {
    plan: Plan,
    /// Computing the prompt, without waiting for a turn.
    prefill_s: Option<f64>,
}

#[derive(Deserialize)]
struct Plan {
    expected: Times,
    measured: Times,
}

#[derive(Deserialize)]
struct Times {
    ttft_s: f64,
    tpot_s: f64,
}

impl Ratio {
    /// Returns the ratio; `None` unless both times are positive and finite.
    #[must_use]
    pub fn new(expected: f64, measured: f64) -> Option<Self> {
        let is_time = |seconds: f64| seconds > 0.0 && seconds.is_finite();
        (is_time(expected) && is_time(measured)).then_some(Self { expected, measured })
    }
}

impl TimeRatios {
    /// Reads answers, one a line: whole ones or events of a stream (`data: ..`) with `usage.remoe`, that object alone, or
    /// its `plan`. Lines without figures, as streams have, are passed over. A prompt of which a part was cached says
    /// nothing about prefills.
    ///
    /// # Errors
    /// The first line that is no JSON, or whose figures are none, by its number.
    pub fn read(text: &str) -> Result<Vec<Self>, String> {
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let lines = lines.map(|(number, line)| (number, line.strip_prefix("data:").unwrap_or(line).trim()));
        let mut pairs = Vec::new();
        for (number, line) in lines.filter(|(_, line)| !line.is_empty() && *line != "[DONE]") {
            let wrong =
                |error: serde_json::Error| format!("line {number}: expected an answer with figures: {error}");
            let value: serde_json::Value = serde_json::from_str(line).map_err(wrong)?;
            let cached = value.pointer("/usage/prompt_tokens_details/cached_tokens");
            let is_cached = cached.and_then(serde_json::Value::as_u64).is_some_and(|tokens| tokens > 0);
            let said = match value.pointer("/usage/remoe").unwrap_or(&value) {
                figures if figures.get("plan").is_some() => serde_json::from_value(figures.clone()),
                plan if plan.get("expected").is_some() => serde_json::from_value(plan.clone())
                    .map(|plan| MeasuredResponse { plan, prefill_s: None }),
                _ => continue,
            };
            let MeasuredResponse { plan: Plan { expected, measured }, prefill_s } = said.map_err(wrong)?;
            let prefill = Ratio::new(expected.ttft_s, prefill_s.unwrap_or(measured.ttft_s));
            pairs.push(Self {
                prefill: prefill.filter(|_| !is_cached),
                decode: Ratio::new(expected.tpot_s, measured.tpot_s),
            });
        }
        Ok(pairs)
    }
}

impl Factors {
    /// Computes the factors from `pairs`.
    #[must_use]
    pub fn of(pairs: &[TimeRatios]) -> Self {
        Self {
            prefill: Factor::of(pairs.iter().filter_map(|pair| pair.prefill)),
            decode: Factor::of(pairs.iter().filter_map(|pair| pair.decode)),
        }
    }

    /// `profile` with times that are so much longer or shorter. What an expert takes for one token, everything else for
    /// up to [`STEP_ROWS`] requests, calls, context and decode steps on a device go by the factor of decode steps; what
    /// an expert takes for 8 tokens and more, everything else for more, the bandwidth to remote functions, moves to a
    /// device and prefills on it by that of prefills; what lies between by what lies between.
    #[must_use]
    pub fn applied(&self, profile: &Profile) -> Profile {
        let (prefill, decode) = (self.prefill.factor, self.decode.factor);
        let mut profile = profile.clone();
        for table in std::iter::once(&mut profile.expert_seconds).chain(&mut profile.remote_expert_seconds) {
            scale(table, |tokens| {
                let place = (tokens.max(1.0).ln() / PREFILL_TOKENS.ln()).min(1.0);
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

impl Factor {
    fn of(ratios: impl Iterator<Item = Ratio>) -> Self {
        let mut ratios: Vec<f64> = ratios.map(|ratio| ratio.measured / ratio.expected).collect();
        ratios.sort_by(f64::total_cmp);
        let pairs = ratios.len();
        let middle = ratios.get(pairs.saturating_sub(1) / 2).zip(ratios.get(pairs / 2));
        let median = middle.filter(|_| pairs >= LEAST_PAIRS).map(|(one, other)| f64::midpoint(*one, *other));
        Self { factor: median.map_or(1.0, |median| median.clamp(BOUNDS.0, BOUNDS.1)), median, pairs }
    }

    /// In words.
    #[must_use]
    pub fn in_words(&self) -> String {
        match self.median {
            None => {
                format!("the profiled time (expected at least {LEAST_PAIRS} answers, got {})", self.pairs)
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

/// Each row by the factor of its tokens.
fn scale(table: &mut CpuProfile, factor: impl Fn(f64) -> f64) {
    for (tokens, row) in table.tokens.iter().zip(&mut table.seconds) {
        row.iter_mut().for_each(|seconds| *seconds *= factor(*tokens));
    }
}
