//! Where the time to the first token went, and what a gateway is told of a request.
//!
//! A gateway says with `x-remoe-timing` which parts are over when the request comes; what follows until
//! the first token is `first`. The parts are told as `Server-Timing` and in `usage.remoe.timing`.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use remoe_billing::{Rates, ReportedCost, Share};
use remoe_http::internal_headers::{
    ACTIVATIONS, COST_PLACEHOLDER, RATES, REPORTED_COST, TIMING as GIVEN, TOKENS,
};
use remoe_predictor::Activations;
use serde::Serialize;
use std::time::{Duration, Instant};

pub(super) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// Bytes of what is told after an answer. A client that gets more than 16 KiB of trailers takes the whole answer for
/// broken, so that counts of experts are left out first, and then the smallest shares of its cost.
const MAX_TOLD: usize = 14 << 10;

/// Bytes of a placeholder for the cost.
const MAX_PLACEHOLDER: usize = 64;

/// The parts of the time to the first token, in milliseconds, one after the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Timing {
    /// Until it was decided what is to run for the request; without a cold start, its wait in the gateway.
    decide: f64,
    /// Until the first function was started.
    schedule: f64,
    /// Until all of them listened.
    start: f64,
    /// Until weights were loaded and the placement was in force.
    load: f64,
    /// Until the request was handed over.
    ready: f64,
    /// Until the first token.
    first: f64,
}

/// Measures a request from its arrival.
#[derive(Debug, Clone)]
pub(super) struct Timeline {
    arrived: Instant,
    given: Option<Timing>,
    rates: Option<Rates>,
    cost_placeholder: Option<Box<str>>,
    wants_activations: bool,
    first: Option<Duration>,
}

impl Timeline {
    /// A request that has just come with `headers`.
    pub(super) fn begin(headers: &HeaderMap) -> Self {
        let given = headers.get(GIVEN).and_then(|value| value.to_str().ok()).map(read);
        let rates = headers.get(RATES).and_then(|value| value.to_str().ok()?.parse().ok());
        let placeholder = headers.get(COST_PLACEHOLDER).and_then(|value| value.to_str().ok());
        let cost_placeholder = placeholder.filter(|text| text.len() <= MAX_PLACEHOLDER).map(Box::from);
        let wants_activations = headers.contains_key(ACTIVATIONS);
        Self { arrived: Instant::now(), given, rates, cost_placeholder, wants_activations, first: None }
    }

    /// How long the request has waited in a gateway.
    pub(super) fn waited(&self) -> Duration {
        let waited = self.given.map_or(0.0, |Timing { decide, schedule, start, load, ready, .. }| {
            decide + schedule + start + load + ready
        });
        Duration::try_from_secs_f64(waited / 1e3).unwrap_or_default()
    }

    /// A token has come.
    pub(super) fn token(&mut self) {
        self.first.get_or_insert_with(|| self.arrived.elapsed());
    }

    /// Returns the parts; `None` if no gateway says what was before, or before the first token.
    pub(super) fn timing(&self) -> Option<Timing> {
        Some(Timing { first: self.first?.as_secs_f64() * 1e3, ..self.given? })
    }

    /// Returns what functions cost; `None` if no gateway says.
    pub(super) fn rates(&self) -> Option<&Rates> {
        self.rates.as_ref()
    }

    /// Text that stands for the cost until the gateway has booked it; `None` where no gateway does.
    pub(super) fn cost_placeholder(&self) -> Option<&str> {
        self.cost_placeholder.as_deref()
    }

    /// Reports if a gateway waits for the parts.
    pub(super) fn is_asked(&self) -> bool {
        self.given.is_some()
    }

    /// Reports if a gateway wants to know which experts were used.
    pub(super) fn wants_activations(&self) -> bool {
        self.is_asked() && self.wants_activations
    }

    /// Returns the headers that a gateway gets at the end.
    pub(super) fn headers(
        &self,
        prompt_tokens: usize,
        completion_tokens: usize,
        cost: Option<&ReportedCost>,
        activations: Option<&Activations>,
    ) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if !self.is_asked() {
            return headers;
        }
        if let Some(timing) = self.timing().and_then(|timing| HeaderValue::from_str(&timing.render()).ok()) {
            headers.insert(SERVER_TIMING, timing);
        }
        if let Ok(tokens) = HeaderValue::from_str(&format!("{prompt_tokens}, {completion_tokens}")) {
            headers.insert(TOKENS, tokens);
        }
        let said: usize = headers.iter().map(|(name, value)| line(name, value.len())).sum();
        let told =
            cost.and_then(|told| fitting(told, MAX_TOLD.saturating_sub(said + line(&REPORTED_COST, 0))));
        if let Some(told) = told.and_then(|told| HeaderValue::from_str(&told).ok()) {
            headers.insert(REPORTED_COST, told);
        }
        // Of the largest models they are too long to be told, and beside the costs of many functions.
        let text = activations.and_then(Activations::to_text);
        let text = text.and_then(|text| HeaderValue::from_str(&text).ok());
        let said: usize = headers.iter().map(|(name, value)| line(name, value.len())).sum();
        if let Some(text) = text.filter(|text| said + line(&ACTIVATIONS, text.len()) <= MAX_TOLD) {
            headers.insert(ACTIVATIONS, text);
        }
        headers
    }
}

impl Timing {
    fn render(&self) -> String {
        let Self { decide, schedule, start, load, ready, first } = self;
        format!(
            "decide;dur={decide:.3}, schedule;dur={schedule:.3}, start;dur={start:.3}, load;dur={load:.3}, \
             ready;dur={ready:.3}, first;dur={first:.3}"
        )
    }
}

/// Bytes of a header with a value of so many as it is sent.
fn line(name: &HeaderName, value: usize) -> usize {
    name.as_str().len() + ": \r\n".len() + value
}

/// `told` as JSON of at most `room` bytes, without the smallest shares where all of them take more.
fn fitting(told: &ReportedCost, room: usize) -> Option<String> {
    let text = serde_json::to_string(told).ok()?;
    if text.len() <= room {
        return Some(text);
    }
    let mut told = told.clone();
    let total = |share: &Share| share.cost.prefill.saturating_add(share.cost.decode);
    let mut smallest: Vec<(u64, String)> =
        told.shares.iter().map(|(name, share)| (total(share), name.clone())).collect();
    smallest.sort_unstable();
    smallest.into_iter().find_map(|(_, name)| {
        told.shares.remove(&name);
        serde_json::to_string(&told).ok().filter(|text| text.len() <= room)
    })
}

/// `name;dur=1.5, ..`: names that are not known are left out.
fn read(text: &str) -> Timing {
    let mut timing = Timing::default();
    for part in text.split(',') {
        let Some((name, value)) = part.trim().split_once(";dur=") else { continue };
        let Ok(value) = value.parse::<f64>() else { continue };
        let place = match name {
            "decide" => &mut timing.decide,
            "schedule" => &mut timing.schedule,
            "start" => &mut timing.start,
            "load" => &mut timing.load,
            "ready" => &mut timing.ready,
            _ => continue,
        };
        *place = if value.is_finite() { value.max(0.0) } else { 0.0 };
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
        headers.insert(GIVEN, HeaderValue::from_static("load;dur=7.25"));
        headers.insert(ACTIVATIONS, HeaderValue::from_static("counts"));
        let mut line = Timeline::begin(&headers);
        line.token();
        let (mut activations, mut number) = (Activations::new(64, 128), 1_u64);
        let mut selected = vec![[(0, 1.0); 8]; 64];
        for _ in 0..3000 {
            for (expert, _) in selected.iter_mut().flatten() {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *expert = (number >> 57) as u32;
            }
            activations.count(remoe_predictor::Phase::Prefill, selected.iter().map(|layer| &layer[..]));
        }
        let told_of_experts = activations.to_text().unwrap().len();
        assert!((8 << 10..12 << 10).contains(&told_of_experts), "{told_of_experts}");
        let share = |port| (format!("10.0.0.1:{port}"), remoe_billing::Share::default());
        let told = |functions| ReportedCost {
            shares: (0..functions).map(share).collect(),
            ..ReportedCost::default()
        };
        assert!(line.headers(1, 2, Some(&told(2)), Some(&activations)).contains_key(ACTIVATIONS));
        let bytes = |headers: &HeaderMap| -> usize {
            headers.iter().map(|(name, value)| super::line(name, value.len())).sum()
        };
        let many = line.headers(1, 2, Some(&told(64)), Some(&activations));
        assert!(many.contains_key(REPORTED_COST) && !many.contains_key(ACTIVATIONS));
        assert!(bytes(&many) <= MAX_TOLD);

        // Of more functions than can be told of those that cost most.
        let mut all = told(400);
        for (number, share) in all.shares.values_mut().enumerate() {
            share.cost.decode = number as u64;
        }
        let most = line.headers(1, 2, Some(&all), Some(&activations));
        assert!(bytes(&most) <= MAX_TOLD && bytes(&most) > MAX_TOLD - 300);
        let told: ReportedCost = serde_json::from_slice(most[REPORTED_COST].as_bytes()).unwrap();
        let least = told.shares.values().map(|share| share.cost.decode).min().unwrap();
        assert_eq!(told.shares.len() as u64, 400 - least);
    }

    #[test]
    fn parts_are_read_and_written() {
        let timing =
            read("decide;dur=1.5, schedule;dur=x, start;dur=-2, load;dur=inf, other;dur=3,, ready;dur=4");
        assert_eq!(timing, Timing { decide: 1.5, ready: 4.0, ..Timing::default() });
        assert_eq!(read(&Timing { first: 9.0, ..timing }.render()), timing, "what is first is measured here");
    }

    #[test]
    fn only_who_asks_is_told() {
        let mut headers = HeaderMap::new();
        let mut line = Timeline::begin(&headers);
        line.token();
        assert!(line.headers(1, 2, None, None).is_empty() && line.timing().is_none());
        headers.insert(GIVEN, HeaderValue::from_static("load;dur=7.25"));
        let mut line = Timeline::begin(&headers);
        assert_eq!(line.headers(1, 2, None, None).len(), 1, "no token, no parts");
        line.token();
        let told = line.headers(1, 2, None, None);
        assert_eq!(told[TOKENS], "1, 2");
        assert!(
            told[SERVER_TIMING].to_str().unwrap().contains("load;dur=7.250, ready;dur=0.000, first;dur=0.")
        );
    }
}
