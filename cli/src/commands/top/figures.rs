//! Rates and latencies of models over the last seconds, from two readings of `/metrics`.

use remoe_gateway_core::first_label;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Rates and quantiles are those of this time.
pub(super) const WINDOW: Duration = Duration::from_secs(10);

const FINISHED: &str = "remoe_e2e_request_latency_seconds_count";
const GENERATED: &str = "remoe_generation_tokens_total";
const FIRST_TOKEN: &str = "remoe_time_to_first_token_seconds_bucket";
const MEMORY: &str = "remoe_tier_memory_bytes";

/// Counters of one model.
#[derive(Debug, Clone, Default, PartialEq)]
struct Counters {
    finished: f64,
    generated: f64,
    /// Observations up to each bound of a bucket, by the bits of the bound: positive numbers are in order.
    first_token: BTreeMap<u64, f64>,
    memory: Option<f64>,
}

/// Figures of one model. A figure that is not known is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Finished requests.
    pub(super) requests_per_second: Option<f64>,
    /// Generated tokens.
    pub(super) tokens_per_second: Option<f64>,
    pub(super) ttft_p50_s: Option<f64>,
    pub(super) ttft_p99_s: Option<f64>,
    pub(super) memory_bytes: Option<u64>,
}

/// Readings of the last [`WINDOW`].
#[derive(Default)]
pub(super) struct Readings(VecDeque<(Instant, BTreeMap<String, Counters>)>);

impl Readings {
    /// Adds the page of metrics that was read at `at`, and forgets what is older than the window.
    pub(super) fn add(&mut self, at: Instant, page: &str) {
        self.0.push_back((at, counters(page)));
        while self.0.len() > 2
            && self.0.get(1).is_some_and(|(second, _)| at.duration_since(*second) >= WINDOW)
        {
            self.0.pop_front();
        }
    }

    /// Returns the figures of `model` between its first and its last reading.
    pub(super) fn of(&self, model: &str) -> Figures {
        let mut of_model =
            self.0.iter().filter_map(|(at, models)| models.get(model).map(|counters| (*at, counters)));
        let (first, last) = (of_model.next(), of_model.next_back());
        let memory = self.0.back().and_then(|(_, models)| models.get(model)?.memory);
        let figures =
            Figures { memory_bytes: memory.map(|bytes| bytes.max(0.0) as u64), ..Figures::default() };
        let (Some((begin, first)), Some((end, last))) = (first, last) else { return figures };
        let seconds = end.duration_since(begin).as_secs_f64();
        if seconds <= 0.0 {
            return figures;
        }
        // A main function that was started again counts from 0.
        let since = |now: f64, before: f64| if now < before { now } else { now - before };
        let before = |bound: &u64| first.first_token.get(bound).copied().unwrap_or(0.0);
        let is_new = last.first_token.iter().any(|(bound, count)| *count < before(bound));
        let buckets = last.first_token.iter().map(|(bound, count)| {
            (f64::from_bits(*bound), if is_new { *count } else { count - before(bound) })
        });
        let buckets: Vec<_> = buckets.collect();
        Figures {
            requests_per_second: Some(since(last.finished, first.finished) / seconds),
            tokens_per_second: Some(since(last.generated, first.generated) / seconds),
            ttft_p50_s: quantile(&buckets, 0.5),
            ttft_p99_s: quantile(&buckets, 0.99),
            ..figures
        }
    }
}

/// Returns a quantile of a histogram of cumulative counts, linear within a bucket. Above the last finite bound it is that
/// bound.
fn quantile(buckets: &[(f64, f64)], quantile: f64) -> Option<f64> {
    let all = buckets.last().map(|(_, count)| *count).filter(|all| *all > 0.0)?;
    let rank = quantile * all;
    let (mut lower, mut below) = (0.0, 0.0);
    for (bound, count) in buckets {
        if *count >= rank {
            let within = if *count > below { (rank - below) / (count - below) } else { 1.0 };
            return Some(if bound.is_finite() { lower + (bound - lower) * within } else { lower });
        }
        (lower, below) = (*bound, *count);
    }
    None
}

/// Adds up the samples of each model, of which several main functions have one each.
fn counters(page: &str) -> BTreeMap<String, Counters> {
    let mut models: BTreeMap<String, Counters> = BTreeMap::new();
    for (name, labels, value) in page.lines().filter_map(sample) {
        let Some(model) = labels.get("model") else { continue };
        let counters = match name {
            FINISHED | GENERATED | FIRST_TOKEN | MEMORY => models.entry(model.clone()).or_default(),
            _ => continue,
        };
        match name {
            FINISHED => counters.finished += value,
            GENERATED => counters.generated += value,
            FIRST_TOKEN => {
                let bound = labels.get("le").and_then(|bound| bound.parse::<f64>().ok());
                if let Some(bound) = bound.filter(|bound| *bound >= 0.0) {
                    *counters.first_token.entry(bound.to_bits()).or_default() += value;
                }
            }
            _ => *counters.memory.get_or_insert_default() += value,
        }
    }
    models
}

/// Parses a line of Prometheus' text format: name, labels and value.
fn sample(line: &str) -> Option<(&str, BTreeMap<&str, String>, f64)> {
    let (name, rest) = line.split_at_checked(line.find(['{', ' '])?)?;
    let mut labels = BTreeMap::new();
    let mut rest = match rest.strip_prefix('{') {
        Some(rest) => rest,
        None => return Some((name, labels, finite(rest)?)),
    };
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(value) = rest.strip_prefix('}') {
            return Some((name, labels, finite(value)?));
        }
        let (label, value, behind) = first_label(rest)?;
        labels.insert(label, value);
        rest = behind;
    }
}

fn finite(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse::<f64>().ok().filter(|value| value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of a model with `finished` requests, half of which had their first token within 0.1 s.
    fn page(model: &str, finished: u32, tokens: u32) -> String {
        format!(
            "# TYPE remoe_generation_tokens_total counter\n\
             remoe_generation_tokens_total{{model=\"{model}\"}} {tokens}\n\
             remoe_e2e_request_latency_seconds_count{{model=\"{model}\"}} {finished}\n\
             remoe_time_to_first_token_seconds_bucket{{model=\"{model}\",le=\"0.1\"}} {}\n\
             remoe_time_to_first_token_seconds_bucket{{model=\"{model}\",le=\"0.5\"}} {finished}\n\
             remoe_time_to_first_token_seconds_bucket{{model=\"{model}\",le=\"+Inf\"}} {finished}\n\
             remoe_tier_memory_bytes{{model=\"{model}\",tier=\"main\"}} 1000\n\
             remoe_tier_memory_bytes{{model=\"{model}\",tier=\"group-1\"}} 24\n",
            finished / 2,
        )
    }

    #[test]
    fn figures_are_those_between_two_readings() {
        let begin = Instant::now();
        let mut readings = Readings::default();
        readings.add(begin, &page("m", 100, 1000));
        assert_eq!(readings.of("m"), Figures { memory_bytes: Some(1024), ..Figures::default() });
        readings.add(begin + Duration::from_secs(2), &page("m", 120, 1600));
        let figures = readings.of("m");
        assert_eq!((figures.requests_per_second, figures.tokens_per_second), (Some(10.0), Some(300.0)));
        // Of 20 requests, 10 are within 0.1 s and 10 within 0.1 to 0.5 s.
        assert_eq!(figures.ttft_p50_s, Some(0.1));
        assert!(figures.ttft_p99_s.is_some_and(|p99| (p99 - 0.492).abs() < 1e-9), "{figures:?}");
        assert_eq!(readings.of("another"), Figures::default());
    }

    #[test]
    fn counters_that_began_anew_count_from_zero() {
        let begin = Instant::now();
        let mut readings = Readings::default();
        readings.add(begin, &page("m", 100, 1000));
        readings.add(begin + Duration::from_secs(1), &page("m", 4, 10));
        let figures = readings.of("m");
        assert_eq!((figures.requests_per_second, figures.tokens_per_second), (Some(4.0), Some(10.0)));
        assert_eq!(figures.ttft_p50_s, Some(0.1));
    }

    #[test]
    fn readings_older_than_the_window_are_forgotten() {
        let begin = Instant::now();
        let mut readings = Readings::default();
        for second in 0..30_u32 {
            // Requests come in the first five seconds.
            let finished = 10 * second.min(5);
            readings.add(begin + Duration::from_secs(second.into()), &page("m", finished, 0));
        }
        assert_eq!(readings.of("m").requests_per_second, Some(0.0));
        assert_eq!(readings.of("m").ttft_p50_s, None, "no requests, no latency");
        assert!(readings.0.len() <= 12);
    }

    #[test]
    fn main_functions_of_a_model_are_added_up() {
        let begin = Instant::now();
        let mut readings = Readings::default();
        let both = |finished| page("a \\\"m\\\"", finished, 0).repeat(2);
        readings.add(begin, &both(0));
        readings.add(begin + Duration::from_secs(1), &both(3));
        assert_eq!(readings.of("a \"m\"").requests_per_second, Some(6.0));
    }

    #[test]
    fn latency_beyond_all_bounds_is_the_last_bound() {
        assert_eq!(quantile(&[(0.1, 0.0), (0.5, 1.0), (f64::INFINITY, 4.0)], 0.99), Some(0.5));
        assert_eq!(quantile(&[(0.1, 0.0), (f64::INFINITY, 0.0)], 0.5), None);
    }

    #[test]
    fn lines_that_are_no_samples_are_left_out() {
        for line in ["", "# HELP a A.", "a", "a{b=\"c", "a{b} 1", "a{b=\"\\", "a NaN", "a{b=\"c\"}"] {
            assert_eq!(sample(line), None, "{line}");
        }
    }
}
