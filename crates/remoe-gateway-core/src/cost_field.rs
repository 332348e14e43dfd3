//! Field `cost` of `usage.remoe` in an answer's body. The main function writes a placeholder, which the gateway
//! replaces by the cost that it recorded. The body is searched, not parsed: the placeholder is random, so that no
//! text of a model can contain it.

use bytes::Bytes;
use remoe_billing::RequestCost;

/// Text of the field before the placeholder.
const FIELD_START: &str = r#","cost":""#;
/// Number of matching placeholder digits that cannot be text of a model: eight hexadecimal digits match by chance
/// once in 2^32.
const CERTAIN_DIGITS: usize = 8;

/// Search for the field in a body that arrives in pieces.
pub(crate) struct CostField {
    /// The field as main functions write it, with the comma before it.
    pattern: Box<[u8]>,
    /// Number of bytes of the pattern at the end of the body so far. They are withheld until it is clear whether the
    /// rest follows.
    matched: usize,
}

/// Piece of a body, split around the field.
#[derive(Debug, PartialEq)]
pub(crate) struct Split {
    /// Bytes before the field.
    pub(crate) before: Bytes,
    /// Bytes after the field, if the field ends in this piece.
    pub(crate) after: Option<Bytes>,
}

impl CostField {
    /// Looks for the field with `placeholder`, which needs no escapes in JSON.
    pub(crate) fn new(placeholder: &str) -> Self {
        Self { pattern: format!(r#"{FIELD_START}{placeholder}""#).into_bytes().into(), matched: 0 }
    }

    /// Takes the next bytes of the body. Withholds the bytes of an incomplete field.
    pub(crate) fn take(&mut self, data: Bytes) -> Split {
        let withheld = self.matched;
        for (index, &byte) in data.iter().enumerate() {
            // The comma occurs only at the start of the pattern, so a new match can only begin with this byte.
            let first = usize::from(self.pattern.first() == Some(&byte));
            let is_next = self.pattern.get(self.matched) == Some(&byte);
            self.matched = if is_next { self.matched + 1 } else { first };
            if self.matched == self.pattern.len() {
                self.matched = 0;
                let end = index + 1;
                let before = match end.checked_sub(self.pattern.len()) {
                    Some(start) => self.withheld_then(withheld, data.slice(..start)),
                    // The field began in an earlier piece.
                    None => Bytes::new(),
                };
                return Split { before, after: Some(data.slice(end..)) };
            }
        }
        let before = match data.len().checked_sub(self.matched) {
            Some(end) => self.withheld_then(withheld, data.slice(..end)),
            None => Bytes::new(),
        };
        Split { before, after: None }
    }

    /// Returns the field with its placeholder.
    pub(crate) fn pattern(&self) -> &[u8] {
        &self.pattern
    }

    /// Returns `data` with the field for `cost` in place of the placeholder, if `data` contains it.
    pub(crate) fn completed(&self, data: Bytes, cost: Option<&RequestCost>) -> Bytes {
        match data.windows(self.pattern.len()).position(|bytes| *bytes == *self.pattern) {
            Some(start) => {
                [&data[..start], &cost_field(cost), &data[start + self.pattern.len()..]].concat().into()
            }
            None => data,
        }
    }

    /// Returns whether the beginning of a field is withheld.
    pub(crate) fn is_withheld(&self) -> bool {
        self.matched > 0
    }

    /// Returns the withheld bytes of a body that ends here. If they are certainly the beginning of the field, returns
    /// nothing.
    pub(crate) fn release(&mut self) -> Bytes {
        let withheld = std::mem::take(&mut self.matched);
        if withheld >= FIELD_START.len() + CERTAIN_DIGITS {
            return Bytes::new();
        }
        self.withheld_then(withheld, Bytes::new())
    }

    /// Returns the first `withheld` bytes of the pattern, which was not completed, followed by `data`.
    fn withheld_then(&self, withheld: usize, data: Bytes) -> Bytes {
        match self.pattern.get(..withheld) {
            Some(begin) if withheld > 0 => [begin, &data[..]].concat().into(),
            _ => data,
        }
    }
}

/// Returns the field for `cost`. Without a cost, returns nothing, which leaves the field out.
pub(crate) fn cost_field(cost: Option<&RequestCost>) -> Bytes {
    let json = cost.and_then(|cost| serde_json::to_string(cost).ok());
    json.map(|json| format!(r#","cost":{json}"#).into()).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Passes `text` in pieces of these sizes, with `replacement` in place of the field. Returns the result, and
    /// whether the field was found.
    fn replace_field(text: &[u8], sizes: &[usize], replacement: &[u8]) -> (Vec<u8>, bool) {
        let mut field = CostField::new("0f");
        let (mut output, mut is_found) = (Vec::new(), false);
        let mut rest = text;
        let mut sizes = sizes.iter().cycle();
        while !rest.is_empty() {
            let (piece, more) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            rest = more;
            let Split { before, after } = field.take(Bytes::copy_from_slice(piece));
            output.extend_from_slice(&before);
            if let Some(after) = after {
                is_found = true;
                output.extend_from_slice(replacement);
                output.extend_from_slice(&after);
                output.extend_from_slice(rest);
                break;
            }
        }
        output.extend_from_slice(&field.release());
        (output, is_found)
    }

    #[test]
    fn field_is_left_out_of_json_without_cost() {
        let body = br#"{"usage":{"remoe":{"a":1,"cost":"0f"}}}"#;
        let (output, is_found) = replace_field(body, &[7], &cost_field(None));
        assert_eq!(
            (String::from_utf8(output).unwrap().as_str(), is_found),
            (r#"{"usage":{"remoe":{"a":1}}}"#, true)
        );
    }

    #[test]
    fn body_that_ends_within_the_field_has_no_placeholder() {
        let placeholder = "0123456789abcdef";
        let body = format!(r#"{{"a":1,"cost":"{placeholder}""#);
        for end in 6..body.len() {
            let mut field = CostField::new(placeholder);
            let mut output = field.take(Bytes::copy_from_slice(&body.as_bytes()[..end])).before.to_vec();
            output.extend_from_slice(&field.release());
            let digits = end.saturating_sub(6 + FIELD_START.len());
            let expected_length = if digits >= CERTAIN_DIGITS { 6 } else { end };
            assert_eq!(String::from_utf8(output).unwrap(), body[..expected_length], "{end}");
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
            let (output, is_found) = replace_field(text.as_bytes(), &sizes, b"!");
            // The text before may form a field with what follows it.
            let expected = text.replacen(r#","cost":"0f""#, "!", 1);
            prop_assert_eq!(String::from_utf8(output).unwrap(), expected.clone());
            prop_assert_eq!(is_found, expected != text);
        }
    }
}
