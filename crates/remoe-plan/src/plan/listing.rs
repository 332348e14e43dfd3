//! Text form of the experts of several layers. `0:0-7,1:8,10` denotes experts 0 to 7 of layer 0, and experts 8 and 10 of
//! layer 1.

use serde::Serializer;

/// Message of a listing that cannot be parsed.
pub struct ListingError(pub String);

/// Formats the experts of each layer, runs of ids as ranges.
pub fn format(experts: &[Vec<u32>]) -> String {
    let mut parts = Vec::new();
    for (layer, experts) in experts.iter().enumerate() {
        let mut prefix = format!("{layer}:");
        for run in experts.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
            let (first, last) = (run[0], run[run.len() - 1]);
            parts.push(match first == last {
                true => format!("{prefix}{first}"),
                false => format!("{prefix}{first}-{last}"),
            });
            prefix.clear();
        }
    }
    parts.join(",")
}

/// Serializes the experts of each layer in the text form.
pub fn serialize<S: Serializer>(experts: &[Vec<u32>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format(experts))
}

/// Parses the output of [`format`]; `experts` is the number of experts of each layer. The result is ascending. Layers are
/// named by `ids` if there are as many of these as layers, otherwise by position.
pub fn parse(text: &str, experts: &[usize], ids: &[u32]) -> Result<Vec<Vec<u32>>, ListingError> {
    let position = |layer: usize| match ids.len() == experts.len() {
        true => ids.iter().position(|id| *id as usize == layer),
        false => (layer < experts.len()).then_some(layer),
    };
    let mut read: Vec<Vec<u32>> = vec![Vec::new(); experts.len()];
    let mut current = None;
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let shown: String = part.chars().take(100).collect();
        let invalid = |why: String| ListingError(format!("{shown:?} {why}"));
        let invalid_form = || {
            let expected = "LAYER:ID, LAYER:FIRST-LAST, or a further ID of the same layer";
            invalid(format!("is invalid, expected {expected}"))
        };
        let range = match part.split_once(':') {
            Some((layer, range)) => {
                current = Some(layer.trim().parse::<usize>().map_err(|_| invalid_form())?);
                range
            }
            None => part,
        };
        let layer = current.ok_or_else(invalid_form)?;
        let Some((layer, most)) = position(layer).and_then(|at| Some((at, experts.get(at)?))) else {
            let named = match ids.len() == experts.len() {
                true => format!("expected one of {ids:?}"),
                false => format!("expected 0 to {}", experts.len() - 1),
            };
            return Err(invalid(format!("names layer {layer}, {named}")));
        };
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let id = |digits: &str| digits.trim().parse::<u32>().map_err(|_| invalid_form());
        let (first, last) = (id(first)?, id(last)?);
        if first > last || last as usize >= *most {
            let message = format!("is invalid, expected a range of the layer's experts 0 to {}", most - 1);
            return Err(invalid(message));
        }
        if read[layer].iter().any(|known| (first..=last).contains(known)) {
            return Err(invalid("lists an expert twice".to_owned()));
        }
        read[layer].extend(first..=last);
    }
    read.iter_mut().for_each(|layer| layer.sort_unstable());
    Ok(read)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn formatted_listings_parse_to_the_same_experts() {
        let experts = vec![vec![0, 1, 2, 7], vec![], vec![3]];
        let text = format(&experts);
        assert_eq!(text, "0:0-2,7,2:3");
        assert_eq!(parse(&text, &[8, 8, 8], &[]).ok().unwrap(), experts);
        assert_eq!(parse("", &[1], &[]).ok().unwrap(), vec![Vec::<u32>::new()]);
    }

    #[test]
    fn layers_can_be_named_by_id() {
        assert_eq!(parse("3:1,7:0", &[8, 8], &[3, 7]).ok().unwrap(), vec![vec![1], vec![0]]);
        assert!(parse("0:1", &[8, 8], &[3, 7]).err().unwrap().0.contains("[3, 7]"));
    }

    #[test]
    fn invalid_listings_are_reported() {
        for (text, why) in [
            ("3", "expected LAYER:ID"),
            ("0:a", "expected LAYER:ID"),
            ("9:1", "layer 9, expected 0 to 1"),
            ("0:8", "experts 0 to 7"),
            ("0:5-4", "experts 0 to 7"),
            ("0:1-3,2", "twice"),
            ("0:0-4294967295", "experts 0 to 7"),
        ] {
            let error = parse(text, &[8, 8], &[]).err().unwrap().0;
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
