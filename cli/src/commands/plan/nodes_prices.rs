//! Age of prices in a node list, and comparison with the price of an API provider.

use remoe_hardware::{Commitment, ListedNode, NodeList, date_of};
use remoe_planner::{NodesAnswer, Rental};
use serde::Serialize;
use std::collections::BTreeSet;
use std::str::FromStr;

/// Age of a price in days above which a warning is printed.
const MAX_PRICE_AGE_DAYS: i32 = 180;
/// Limit of a price, in dollars per million tokens.
const MAX_PER_MILLION: f64 = 1e6;

/// Prices of an API provider, in dollars per million tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct ApiPrice {
    input_per_million: f64,
    output_per_million: f64,
}

/// Cost of the requests at an API provider.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct ApiCost {
    #[serde(flatten)]
    price: ApiPrice,
    /// Dollars per hour for the stated arrivals, or for the requests that the nodes serve at full load.
    pub(super) dollars_per_hour: f64,
    /// Requests per hour at which the API costs as much as the cheapest nodes.
    pub(super) break_even_requests_per_hour: Option<f64>,
    /// Requests per hour that the nodes serve at full load.
    pub(super) most_requests_per_hour: f64,
}

impl FromStr for ApiPrice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected two prices such as 0.22/0.88, got `{text}`");
        let price = |text: &str| {
            let price = text.trim().trim_start_matches('$').parse::<f64>().ok();
            price.filter(|price| (0.0..=MAX_PER_MILLION).contains(price)).ok_or_else(expected)
        };
        let (input, output) = text.split_once('/').ok_or_else(expected)?;
        Ok(Self { input_per_million: price(input)?, output_per_million: price(output)? })
    }
}

impl ApiPrice {
    /// Computes the cost of the requests of `rental` at the provider, compared with the nodes of `answer`.
    pub(super) fn cost(self, rental: &Rental, answer: &NodesAnswer) -> ApiCost {
        let request = &rental.request;
        let output = request.output_tokens + 1.0;
        let dollars_per_request =
            (request.input_tokens * self.input_per_million + output * self.output_per_million) / 1e6;
        let full_load_per_second =
            answer.expected.map_or(0.0, |expected| expected.full_load_tokens_per_second / output);
        let per_second = answer.requests_per_second.unwrap_or(full_load_per_second);
        ApiCost {
            price: self,
            dollars_per_hour: 3600.0 * per_second * dollars_per_request,
            break_even_requests_per_hour: answer
                .dollars_per_hour
                .filter(|_| dollars_per_request > 0.0)
                .map(|dollars| dollars / dollars_per_request),
            most_requests_per_hour: 3600.0 * full_load_per_second,
        }
    }
}

/// Current date, as days since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Today(i32);

impl Today {
    /// Returns the current date in UTC.
    pub(super) fn now() -> Self {
        Self(days_since_1970(jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date()))
    }

    /// Returns the days since `date`. Returns `None` for an invalid date.
    fn days_since(self, date: &str) -> Option<i32> {
        let (year, month, day) = date_of(date)?;
        let date = jiff::civil::Date::new(
            i16::try_from(year).ok()?,
            i8::try_from(month).ok()?,
            i8::try_from(day.min(28)).ok()?,
        );
        Some(self.0 - days_since_1970(date.ok()?))
    }
}

fn days_since_1970(date: jiff::civil::Date) -> i32 {
    (date - jiff::civil::date(1970, 1, 1)).get_days()
}

/// Warns about prices that are older than [`MAX_PRICE_AGE_DAYS`]: of the list, and of the nodes in `answer`.
pub(super) fn price_warnings(
    list: &NodeList,
    commitment: Commitment,
    answer: &NodesAnswer,
    today: Today,
) -> Vec<String> {
    let age_if_old = |date: &str| today.days_since(date).filter(|days| *days > MAX_PRICE_AGE_DAYS);
    let mut warnings = Vec::new();
    if let Some((date, days)) = list.date.as_ref().and_then(|date| Some((date, age_if_old(date)?))) {
        warnings.push(format!(
            "prices of this node list are {days} days old (from {date}); check them before you buy"
        ));
    }
    let rivals = answer.verdict.rivals.iter().flat_map(|rival| &rival.nodes);
    let rented: BTreeSet<(&str, bool)> =
        rivals.map(|node| (node.shape.trim_end_matches(" (spot)"), node.spot)).collect();
    for (name, spot) in rented {
        let Some(node) = list.nodes.iter().find(|node| node.name == name) else { continue };
        let (kind, source) = price_source(node, spot, commitment);
        let Some(source) = source.and_then(|source| list.sources.get(source)) else { continue };
        if let Some(days) = age_if_old(&source.date) {
            warnings.push(format!("the {kind} price of {name} is {days} days old (from {})", source.date));
        }
    }
    warnings
}

fn price_source(node: &ListedNode, spot: bool, commitment: Commitment) -> (&'static str, Option<&String>) {
    match (spot && node.spot_per_hour.is_some(), node.committed_per_hour(commitment)) {
        (true, _) => ("spot", node.spot_source.as_ref()),
        (false, Some(_)) => ("committed", node.committed_source.as_ref()),
        (false, None) => ("on-demand", node.price_source.as_ref()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_price_parses_two_prices() {
        let price = |text: &str| text.parse::<ApiPrice>();
        let expected = ApiPrice { input_per_million: 0.22, output_per_million: 0.88 };
        assert_eq!(price("0.22/0.88"), Ok(expected));
        assert_eq!(price("$0.22 / $0.88"), Ok(expected));
        for text in ["", "1", "1/", "a/b", "-1/1", "1/nan", "1/2/3", "1/1e9"] {
            assert!(price(text).is_err(), "{text}");
        }
    }

    #[test]
    fn today_counts_days_since_a_date() {
        let today = Today(days_since_1970(jiff::civil::date(2026, 3, 1)));
        assert_eq!(today.days_since("2026-02-28"), Some(1));
        assert_eq!(today.days_since("2026-02"), Some(28));
        assert_eq!(today.days_since("2025"), Some(424));
        assert_eq!(today.days_since("soon"), None);
    }
}
