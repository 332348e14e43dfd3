//! Parts of the time to first token, and figures of a request for its gateway.
//!
//! A gateway sends the parts before this function in the header `x-remoe-timing`. The part in this function, until the
//! first token, is `first`. All parts are returned in `Server-Timing` and in `usage.remoe.timing`.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use remoe_billing::{Rates, ReportedCost, Share};
use remoe_http::internal_headers::{ACTIVATIONS, COST_PLACEHOLDER, RATES, REPORTED_COST, TIMING, TOKENS};
use remoe_predictor::Activations;
use serde::Serialize;
use std::time::{Duration, Instant};

pub(super) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// Most bytes of the trailers. A client that gets more than 16 KiB of trailers rejects the whole answer, so expert counts
/// are left out first, then the smallest shares of the cost.
const MAX_TRAILER_BYTES: usize = 14 << 10;

/// Longest placeholder for the cost in bytes.
const MAX_PLACEHOLDER_BYTES: usize = 64;

/// Parts of the time to first token in milliseconds, one after the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Timing {
    /// Time until the decision on what to run for the request; without a cold start, the wait in the gateway.
    decide: f64,
    /// Time until the first function was started.
    schedule: f64,
    /// Time until all functions accepted connections.
    start: f64,
    /// Time until weights were loaded and the placement was in force.
    load: f64,
    /// Time until the gateway sent the request to this function.
    ready: f64,
    /// Time until the first token.
    first: f64,
}

/// Measurements of a request from its arrival, and what its gateway asked for.
#[derive(Debug, Clone)]
pub(super) struct Timeline {
    arrived: Instant,
    /// Parts before the arrival, if a gateway sent them.
    parts_before: Option<Timing>,
    rates: Option<Rates>,
    cost_placeholder: Option<Box<str>>,
    wants_activations: bool,
    first_token: Option<Duration>,
}

impl Timeline {
    /// Starts the measurement of a request that arrived with `headers`.
    pub(super) fn begin(headers: &HeaderMap) -> Self {
        let parts_before = headers.get(TIMING).and_then(|value| value.to_str().ok()).map(parse_timing);
        let rates = headers.get(RATES).and_then(|value| value.to_str().ok()?.parse().ok());
        let placeholder = headers.get(COST_PLACEHOLDER).and_then(|value| value.to_str().ok());
        let cost_placeholder = placeholder.filter(|text| text.len() <= MAX_PLACEHOLDER_BYTES).map(Box::from);
        let wants_activations = headers.contains_key(ACTIVATIONS);
        let arrived = Instant::now();
        Self { arrived, parts_before, rates, cost_placeholder, wants_activations, first_token: None }
    }

    /// Returns how long the request waited in a gateway.
    pub(super) fn waited_in_gateway(&self) -> Duration {
        let waited =
            self.parts_before.map_or(0.0, |Timing { decide, schedule, start, load, ready, .. }| {
                decide + schedule + start + load + ready
            });
        Duration::try_from_secs_f64(waited / 1e3).unwrap_or_default()
    }

    /// Records a token; the first one ends the time to first token.
    pub(super) fn record_token(&mut self) {
        self.first_token.get_or_insert_with(|| self.arrived.elapsed());
    }

    /// Returns the parts of the time to first token; `None` without a gateway's parts or before the first token.
    pub(super) fn timing(&self) -> Option<Timing> {
        Some(Timing { first: self.first_token?.as_secs_f64() * 1e3, ..self.parts_before? })
    }

    /// Returns the functions' rates; `None` if no gateway sent them.
    pub(super) fn rates(&self) -> Option<&Rates> {
        self.rates.as_ref()
    }

    /// Returns the text that stands for the cost until the gateway replaces it; `None` if no gateway does.
    pub(super) fn cost_placeholder(&self) -> Option<&str> {
        self.cost_placeholder.as_deref()
    }

    /// Reports if the request came from a gateway that wants the parts.
    pub(super) fn is_from_gateway(&self) -> bool {
        self.parts_before.is_some()
    }

    /// Reports if the gateway wants the counts of used experts.
    pub(super) fn wants_activations(&self) -> bool {
        self.is_from_gateway() && self.wants_activations
    }

    /// Returns the headers or trailers for the gateway at the end of an answer; empty without a gateway.
    pub(super) fn gateway_headers(
        &self,
        prompt_tokens: usize,
        completion_tokens: usize,
        cost: Option<&ReportedCost>,
        activations: Option<&Activations>,
    ) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if !self.is_from_gateway() {
            return headers;
        }
        if let Some(timing) = self.timing().and_then(|timing| HeaderValue::from_str(&timing.render()).ok()) {
            headers.insert(SERVER_TIMING, timing);
        }
        if let Ok(tokens) = HeaderValue::from_str(&format!("{prompt_tokens}, {completion_tokens}")) {
            headers.insert(TOKENS, tokens);
        }
        let used: usize = headers.iter().map(|(name, value)| line_bytes(name, value.len())).sum();
        let left = MAX_TRAILER_BYTES.saturating_sub(used + line_bytes(&REPORTED_COST, 0));
        let cost = cost.and_then(|cost| cost_json_within(cost, left));
        if let Some(cost) = cost.and_then(|cost| HeaderValue::from_str(&cost).ok()) {
            headers.insert(REPORTED_COST, cost);
        }
        // The counts of the largest models are too long, also with the costs of many functions.
        let text = activations.and_then(Activations::to_text);
        let text = text.and_then(|text| HeaderValue::from_str(&text).ok());
        let used: usize = headers.iter().map(|(name, value)| line_bytes(name, value.len())).sum();
        let fits = |text: &HeaderValue| used + line_bytes(&ACTIVATIONS, text.len()) <= MAX_TRAILER_BYTES;
        if let Some(text) = text.filter(fits) {
            headers.insert(ACTIVATIONS, text);
        }
        headers
    }
}

impl Timing {
    /// Formats the parts as `Server-Timing`.
    fn render(&self) -> String {
        let Self { decide, schedule, start, load, ready, first } = self;
        format!(
            "decide;dur={decide:.3}, schedule;dur={schedule:.3}, start;dur={start:.3}, load;dur={load:.3}, \
             ready;dur={ready:.3}, first;dur={first:.3}"
        )
    }
}

/// Returns the bytes of a header line whose value has `value_bytes` bytes.
fn line_bytes(name: &HeaderName, value_bytes: usize) -> usize {
    name.as_str().len() + ": \r\n".len() + value_bytes
}

/// Formats `cost` as JSON of at most `max_bytes` bytes. Leaves out the smallest shares if it is longer.
fn cost_json_within(cost: &ReportedCost, max_bytes: usize) -> Option<String> {
    let text = serde_json::to_string(cost).ok()?;
    if text.len() <= max_bytes {
        return Some(text);
    }
    let mut cost = cost.clone();
    let total = |share: &Share| share.cost.prefill.saturating_add(share.cost.decode);
    let mut smallest: Vec<(u64, String)> =
        cost.shares.iter().map(|(name, share)| (total(share), name.clone())).collect();
    smallest.sort_unstable();
    smallest.into_iter().find_map(|(_, name)| {
        cost.shares.remove(&name);
        serde_json::to_string(&cost).ok().filter(|text| text.len() <= max_bytes)
    })
}

/// Parses `name;dur=1.5, ..`; ignores unknown names.
fn parse_timing(text: &str) -> Timing {
    let mut timing = Timing::default();
    for part in text.split(',') {
        let Some((name, value)) = part.trim().split_once(";dur=") else { continue };
        let Ok(value) = value.parse::<f64>() else { continue };
        let part = match name {
            "decide" => &mut timing.decide,
            "schedule" => &mut timing.schedule,
            "start" => &mut timing.start,
            "load" => &mut timing.load,
            "ready" => &mut timing.ready,
            _ => continue,
        };
        *part = if value.is_finite() { value.max(0.0) } else { 0.0 };
    }
    timing
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn oversized_expert_counts_are_left_out_of_response_headers() {
        let mut headers = HeaderMap::new();
        headers.insert(TIMING, HeaderValue::from_static("load;dur=7.25"));
        headers.insert(ACTIVATIONS, HeaderValue::from_static("counts"));
        let mut timeline = Timeline::begin(&headers);
        timeline.record_token();
        let (mut activations, mut number) = (Activations::new(64, 128), 1_u64);
        let mut selected = vec![[(0, 1.0); 8]; 64];
        for _ in 0..3000 {
            for (expert, _) in selected.iter_mut().flatten() {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *expert = (number >> 57) as u32;
            }
            activations.count(remoe_predictor::Phase::Prefill, selected.iter().map(|layer| &layer[..]));
        }
        let activation_bytes = activations.to_text().unwrap().len();
        assert!((8 << 10..12 << 10).contains(&activation_bytes), "{activation_bytes}");
        let share = |port| (format!("10.0.0.1:{port}"), remoe_billing::Share::default());
        let cost = |functions| ReportedCost {
            shares: (0..functions).map(share).collect(),
            ..ReportedCost::default()
        };
        assert!(timeline.gateway_headers(1, 2, Some(&cost(2)), Some(&activations)).contains_key(ACTIVATIONS));
        let bytes = |headers: &HeaderMap| -> usize {
            headers.iter().map(|(name, value)| line_bytes(name, value.len())).sum()
        };
        let many = timeline.gateway_headers(1, 2, Some(&cost(64)), Some(&activations));
        assert!(many.contains_key(REPORTED_COST) && !many.contains_key(ACTIVATIONS));
        assert!(bytes(&many) <= MAX_TRAILER_BYTES);

        // If not all functions fit, the most expensive ones are reported.
        let mut all = cost(400);
        for (number, share) in all.shares.values_mut().enumerate() {
            share.cost.decode = number as u64;
        }
        let most = timeline.gateway_headers(1, 2, Some(&all), Some(&activations));
        assert!(bytes(&most) <= MAX_TRAILER_BYTES && bytes(&most) > MAX_TRAILER_BYTES - 300);
        let reported: ReportedCost = serde_json::from_slice(most[REPORTED_COST].as_bytes()).unwrap();
        let least = reported.shares.values().map(|share| share.cost.decode).min().unwrap();
        assert_eq!(reported.shares.len() as u64, 400 - least);
    }

    #[test]
    fn timing_parts_are_parsed_and_formatted() {
        let timing = parse_timing(
            "decide;dur=1.5, schedule;dur=x, start;dur=-2, load;dur=inf, other;dur=3,, ready;dur=4",
        );
        assert_eq!(timing, Timing { decide: 1.5, ready: 4.0, ..Timing::default() });
        let text = Timing { first: 9.0, ..timing }.render();
        assert_eq!(parse_timing(&text), timing, "`first` is measured by this function");
    }

    #[test]
    fn only_gateways_get_the_headers() {
        let mut headers = HeaderMap::new();
        let mut timeline = Timeline::begin(&headers);
        timeline.record_token();
        assert!(timeline.gateway_headers(1, 2, None, None).is_empty() && timeline.timing().is_none());
        headers.insert(TIMING, HeaderValue::from_static("load;dur=7.25"));
        let mut timeline = Timeline::begin(&headers);
        assert_eq!(timeline.gateway_headers(1, 2, None, None).len(), 1, "no parts before the first token");
        timeline.record_token();
        let headers = timeline.gateway_headers(1, 2, None, None);
        assert_eq!(headers[TOKENS], "1, 2");
        let timing = headers[SERVER_TIMING].to_str().unwrap();
        assert!(timing.contains("load;dur=7.250, ready;dur=0.000, first;dur=0."));
    }
}
