//! Text form of expert sets, for command lines: `1:6-7,2:0,5-7` means experts 6 and 7 of layer 1, and experts 0, 5, 6
//! and 7 of layer 2.

use crate::v1::LayerExperts;
use std::collections::{BTreeMap, BTreeSet};

/// Error of an invalid listing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid expert listing {part:?}: {problem}")]
pub struct ListingError {
    /// First characters of the invalid part between commas.
    pub part: String,
    problem: &'static str,
}

/// Largest id, more than any model has: a range must not exhaust memory.
const MAX_ID: u32 = 1 << 16;

/// Largest number of experts over all layers, more than any model has: all ranges together must not exhaust memory.
const MAX_EXPERTS: usize = 1 << 18;

/// Length of the invalid part in an error, in characters.
const MAX_QUOTED_CHARS: usize = 100;

/// Formats `layers`, with ranges.
pub fn format_listing(layers: &[LayerExperts]) -> String {
    let mut parts = Vec::new();
    for layer in layers {
        let mut prefix = format!("{}:", layer.layer);
        for run in layer.experts.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
            let (first, last) = (run[0], run[run.len() - 1]);
            parts.push(if first == last {
                format!("{prefix}{first}")
            } else {
                format!("{prefix}{first}-{last}")
            });
            prefix.clear();
        }
    }
    parts.join(",")
}

/// Parses a listing. Layers and experts are returned ascending.
///
/// # Errors
/// A part is malformed or lists an expert twice.
pub fn parse_listing(text: &str) -> Result<Vec<LayerExperts>, ListingError> {
    let mut layers: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let mut current = None;
    let mut listed = 0_usize;
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let invalid = |problem| ListingError { part: part.chars().take(MAX_QUOTED_CHARS).collect(), problem };
        let malformed = || invalid("expected LAYER:ID, LAYER:FIRST-LAST, or a further ID of the same layer");
        let number = |digits: &str| digits.trim().parse::<u32>().ok().filter(|&id| id <= MAX_ID);
        let range = match part.split_once(':') {
            Some((layer, range)) => {
                current = Some(number(layer).ok_or_else(malformed)?);
                range
            }
            None => part,
        };
        let layer = current.ok_or_else(malformed)?;
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (number(first).ok_or_else(malformed)?, number(last).ok_or_else(malformed)?);
        if first > last {
            return Err(malformed());
        }
        listed += (last - first) as usize + 1;
        if listed > MAX_EXPERTS {
            return Err(invalid("too many experts, expected at most 262144"));
        }
        let experts = layers.entry(layer).or_default();
        if experts.range(first..=last).next().is_some() {
            return Err(invalid("duplicate expert"));
        }
        experts.extend(first..=last);
    }
    Ok(layers
        .into_iter()
        .map(|(layer, experts)| LayerExperts { layer, experts: experts.into_iter().collect() })
        .collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn layer(layer: u32, experts: &[u32]) -> LayerExperts {
        LayerExperts { layer, experts: experts.to_vec() }
    }

    #[test]
    fn formatted_listing_parses_back() {
        let layers = vec![layer(1, &[6, 7]), layer(2, &[0, 5, 6, 7]), layer(9, &[3])];
        let text = format_listing(&layers);
        assert_eq!(text, "1:6-7,2:0,5-7,9:3");
        assert_eq!(parse_listing(&text).unwrap(), layers);
        assert_eq!(parse_listing("").unwrap(), vec![]);
        assert_eq!(parse_listing(" 1: 6 - 7, 2:0,5-7 ,9:3").unwrap(), layers);
    }

    #[test]
    fn total_of_ranges_is_bounded() {
        let listing = |layers: u32| {
            let parts: Vec<String> = (0..layers).map(|layer| format!("{layer}:0-65535")).collect();
            parse_listing(&parts.join(","))
        };
        assert_eq!(listing(4).unwrap().len(), 4);
        let error = listing(5).unwrap_err();
        assert_eq!(error.part, "4:0-65535");
        assert!(error.to_string().contains("262144"), "{error}");
    }

    #[test]
    fn error_quotes_the_beginning_of_a_long_part() {
        let error = parse_listing(&"é".repeat(10_000)).unwrap_err();
        assert_eq!(error.part, "é".repeat(100));
    }

    #[test]
    fn error_names_the_invalid_part() {
        for (text, part) in [
            ("4", "4"),
            ("1:a", "1:a"),
            ("1:2,x-3", "x-3"),
            ("1:7-2", "1:7-2"),
            ("1:0-4000000000", "1:0-4000000000"),
            ("1:0-3,7,2", "2"),
        ] {
            assert_eq!(parse_listing(text).unwrap_err().part, part);
        }
    }
}
