//! The field `cost` of `usage.remoe` in an answer's body. The main function writes a placeholder, because only the gateway
//! knows what it books. Nothing of the body is parsed: the placeholder is random, so that no text of a model can hold it.

use bytes::Bytes;
use remoe_billing::RequestCost;

/// Beginning of the field before the placeholder.
const NAME: &str = r#","cost":""#;
/// Bytes of the placeholder after which it is no text of a model: one in four thousand million has eight hexadecimal
/// digits by chance.
const CERTAIN: usize = 8;

/// Search for the field in a body that comes in pieces.
pub(crate) struct CostField {
    /// The field as main functions write it, with the comma before it.
    pattern: Box<[u8]>,
    /// Bytes of the pattern that have come so far. They are withheld until more have come.
    matched: usize,
}

/// A piece of a body around the field.
#[derive(Debug, PartialEq)]
pub(crate) struct Split {
    /// Bytes before the field.
    pub(crate) before: Bytes,
    /// Bytes behind the field, if the field ends in this piece.
    pub(crate) after: Option<Bytes>,
}

impl CostField {
    /// Looks for the field with `placeholder`, which needs no escapes in JSON.
    pub(crate) fn new(placeholder: &str) -> Self {
        Self { pattern: format!(r#"{NAME}{placeholder}""#).into_bytes().into(), matched: 0 }
    }

    /// Takes the next bytes of the body. Of an incomplete field nothing is returned until more has come.
    pub(crate) fn take(&mut self, data: Bytes) -> Split {
        let withheld = self.matched;
        for (at, &byte) in data.iter().enumerate() {
            // The comma is nowhere else in the pattern: a match that fails can only begin with this byte.
            let first = usize::from(self.pattern.first() == Some(&byte));
            let goes_on = self.pattern.get(self.matched) == Some(&byte);
            self.matched = if goes_on { self.matched + 1 } else { first };
            if self.matched == self.pattern.len() {
                self.matched = 0;
                let end = at + 1;
                let before = match end.checked_sub(self.pattern.len()) {
                    Some(start) => self.joined(withheld, data.slice(..start)),
                    // It began with what is withheld.
                    None => Bytes::new(),
                };
                return Split { before, after: Some(data.slice(end..)) };
            }
        }
        let before = match data.len().checked_sub(self.matched) {
            Some(end) => self.joined(withheld, data.slice(..end)),
            None => Bytes::new(),
        };
        Split { before, after: None }
    }

    /// Returns the field with its placeholder.
    pub(crate) fn pattern(&self) -> &[u8] {
        &self.pattern
    }

    /// Returns `data` with the field for `cost` in place of the placeholder, where that is.
    pub(crate) fn completed(&self, data: Bytes, cost: Option<&RequestCost>) -> Bytes {
        match data.windows(self.pattern.len()).position(|bytes| *bytes == *self.pattern) {
            Some(at) => [&data[..at], &cost_field(cost), &data[at + self.pattern.len()..]].concat().into(),
            None => data,
        }
    }

    /// Returns whether the beginning of a field is withheld.
    pub(crate) fn is_withheld(&self) -> bool {
        self.matched > 0
    }

    /// Returns the withheld bytes of a body that ends here; nothing where they are the beginning of the field.
    pub(crate) fn release(&mut self) -> Bytes {
        let withheld = std::mem::take(&mut self.matched);
        if withheld >= NAME.len() + CERTAIN {
            return Bytes::new();
        }
        self.joined(withheld, Bytes::new())
    }

    /// The first `withheld` bytes of the pattern, which turned out to be none, and `data`.
    fn joined(&self, withheld: usize, data: Bytes) -> Bytes {
        match self.pattern.get(..withheld) {
            Some(begin) if withheld > 0 => [begin, &data[..]].concat().into(),
            _ => data,
        }
    }
}

/// Returns the field for `cost`; empty if there is none, which leaves the field out.
pub(crate) fn cost_field(cost: Option<&RequestCost>) -> Bytes {
    let json = cost.and_then(|cost| serde_json::to_string(cost).ok());
    json.map(|json| format!(r#","cost":{json}"#).into()).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns what leaves of `text` in pieces of these sizes, with `with` in the field's place, and whether the field was found.
    fn passed(text: &[u8], sizes: &[usize], with: &[u8]) -> (Vec<u8>, bool) {
        let mut field = CostField::new("0f");
        let (mut left, mut is_found) = (Vec::new(), false);
        let mut rest = text;
        let mut sizes = sizes.iter().cycle();
        while !rest.is_empty() {
            let (piece, more) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            rest = more;
            let Split { before, after } = field.take(Bytes::copy_from_slice(piece));
            left.extend_from_slice(&before);
            if let Some(after) = after {
                is_found = true;
                left.extend_from_slice(with);
                left.extend_from_slice(&after);
                left.extend_from_slice(rest);
                break;
            }
        }
        left.extend_from_slice(&field.release());
        (left, is_found)
    }

    #[test]
    fn field_is_left_out_of_json_without_cost() {
        let body = br#"{"usage":{"remoe":{"a":1,"cost":"0f"}}}"#;
        let (left, is_found) = passed(body, &[7], &cost_field(None));
        assert_eq!(
            (String::from_utf8(left).unwrap().as_str(), is_found),
            (r#"{"usage":{"remoe":{"a":1}}}"#, true)
        );
    }

    #[test]
    fn body_that_ends_within_the_field_has_no_placeholder() {
        let placeholder = "0123456789abcdef";
        let whole = format!(r#"{{"a":1,"cost":"{placeholder}""#);
        for end in 6..whole.len() {
            let mut field = CostField::new(placeholder);
            let mut left = field.take(Bytes::copy_from_slice(&whole.as_bytes()[..end])).before.to_vec();
            left.extend_from_slice(&field.release());
            let digits = end.saturating_sub(6 + NAME.len());
            let kept = if digits >= CERTAIN { 6 } else { end };
            assert_eq!(String::from_utf8(left).unwrap(), whole[..kept], "{end}");
        }
    }

    #[test]
    fn field_has_all_parts_of_the_cost() {
        let rivals = [("mix".to_owned(), 9)].into();
        let cost = RequestCost { total: 5, main: 2, remote: 3, prefill: 1, decode: 4, rivals };
        let json = r#","cost":{"total":5,"main":2,"remote":3,"prefill":1,"decode":4,"rivals":{"mix":9}}"#;
        assert_eq!(cost_field(Some(&cost)), json);
    }

    proptest! {
        #[test]
        fn field_is_replaced_in_any_pieces(
            // Beginnings of fields are frequent.
            before in r#"(,"cost":"0?|,"c|,|x|"|,,"cost":"1f"){0,12}"#,
            after in r#"[,"x]{0,20}"#,
            has_field: bool,
            sizes in proptest::collection::vec(1_usize..12, 1..6),
        ) {
            let field = if has_field { r#","cost":"0f""# } else { "" };
            let text = format!("{before}{field}{after}");
            let (left, is_found) = passed(text.as_bytes(), &sizes, b"!");
            // A beginning in front may become a field with what follows it.
            let expected = text.replacen(r#","cost":"0f""#, "!", 1);
            prop_assert_eq!(String::from_utf8(left).unwrap(), expected.clone());
            prop_assert_eq!(is_found, expected != text);
        }
    }
}
