//! Metrics pages of functions.

use crate::deadline::{SOON, until};
use crate::http;
use std::net::SocketAddr;

/// Metrics page of a function at one moment.
#[derive(Debug, Clone)]
pub struct MetricsPage(String);

impl MetricsPage {
    /// Reads `/metrics` at `address`.
    pub async fn read(address: SocketAddr) -> Self {
        let response = http::get(address, "/metrics").await;
        assert_eq!(response.status, 200, "GET /metrics");
        Self(response.body)
    }

    /// Waits until `series` has `value` at `address`.
    pub async fn settle(address: SocketAddr, series: &str, value: u64) {
        let what = format!("{series} {value}");
        until(SOON, &what, async || (Self::read(address).await.value(series) == value).then_some(())).await;
    }

    /// Returns the problems that `promtool check metrics` would report: names must use base units, exactly counters
    /// end with `_total`, and every name has a help text and a type.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        const UNITS: [&str; 17] = [
            "milliseconds",
            "microseconds",
            "nanoseconds",
            "minutes",
            "hours",
            "days",
            "kilobytes",
            "megabytes",
            "gigabytes",
            "kibibytes",
            "mebibytes",
            "gibibytes",
            "bits",
            "percent",
            "celsius_degrees",
            "ms",
            "us",
        ];
        const TYPES: [&str; 4] = ["counter", "gauge", "histogram", "summary"];
        let mut problems = Vec::new();
        let described = |what: &str| -> Vec<(&str, &str)> {
            let lines = self.0.lines().filter_map(|line| line.strip_prefix(what));
            lines.filter_map(|line| line.split_once(' ')).collect()
        };
        let (helps, types) = (described("# HELP "), described("# TYPE "));
        for sample in self.0.lines().filter(|line| !line.starts_with('#')) {
            let name = sample.split(['{', ' ']).next().unwrap_or_default();
            let part = |end: &str| name.strip_suffix(end).unwrap_or(name);
            let is = |wanted: &str| [name, part("_bucket"), part("_sum"), part("_count")].contains(&wanted);
            if !types.iter().any(|(name, _)| is(name)) {
                problems.push(format!("{name} has no type"));
            }
        }
        for (name, kind) in types {
            if helps.iter().filter(|(other, help)| *other == name && !help.is_empty()).count() != 1 {
                problems.push(format!("{name} has no help, or several"));
            }
            if (kind == "counter") != name.ends_with("_total") {
                problems.push(format!("{name} is a {kind}"));
            }
            if name.chars().any(|c| c != '_' && !c.is_ascii_lowercase() && !c.is_ascii_digit()) {
                problems.push(format!("{name} is not in lower case, or reserved"));
            }
            for word in name.split('_') {
                if UNITS.contains(&word) || TYPES.contains(&word) {
                    problems.push(format!("{name} has `{word}` in it"));
                }
            }
            if kind != "histogram" && ["_bucket", "_sum", "_count"].iter().any(|end| name.ends_with(end)) {
                problems.push(format!("{name} ends like a part of a histogram"));
            }
        }
        problems
    }

    /// Returns the value of a series, which is named as on the page, such as `name{label="value"}`. Returns 0 if it
    /// is absent.
    #[must_use]
    pub fn value(&self, series: &str) -> u64 {
        let mut lines = self.0.lines().filter_map(|line| line.rsplit_once(' '));
        let value = lines.find(|(name, _)| *name == series).map_or("0", |(_, value)| value);
        value.parse::<f64>().unwrap_or_else(|error| panic!("{series} is {value:?}: {error}")) as u64
    }
}
