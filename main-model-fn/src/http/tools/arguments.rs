//! JSON of a tool call while it is being written.

/// Nesting of a JSON object or array that is read byte by byte.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Balance {
    depth: usize,
    in_text: bool,
    is_escaped: bool,
}

impl Balance {
    /// Returns the state within an object that has begun.
    pub(super) fn within_object() -> Self {
        Self { depth: 1, ..Self::default() }
    }

    /// Reports if the last byte was within a string.
    pub(super) fn is_in_text(&self) -> bool {
        self.in_text
    }

    /// Returns the number of bytes of `text` that belong to the value, and true if the value ends with them.
    pub(super) fn take(&mut self, text: &str) -> (usize, bool) {
        for (index, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.in_text => self.is_escaped = true,
                b'"' => self.in_text = !self.in_text,
                b'{' | b'[' if !self.in_text => self.depth += 1,
                b'}' | b']' if !self.in_text => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return (index + 1, true);
                    }
                }
                _ => (),
            }
        }
        (text.len(), false)
    }
}

/// Beginning of a call up to its arguments, in the order that models are taught.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// More text is needed.
    Partial,
    /// The call is written in another way.
    Other,
    /// Name of the function, and offset of its arguments.
    Found(String, usize),
}

impl Head {
    /// Parses `{"name": "..", "arguments": ` at the beginning of `text`.
    pub(super) fn of(text: &str) -> Self {
        let mut rest = text;
        for expected in ["{", "\"name\"", ":"] {
            match literal(rest, expected) {
                Ok(after) => rest = after,
                Err(head) => return head,
            }
        }
        rest = rest.trim_start();
        let name = match string(rest) {
            Ok((name, after)) => {
                rest = after;
                name
            }
            Err(head) => return head,
        };
        match literal(rest, ",") {
            Ok(after) => rest = after,
            Err(head) => return head,
        }
        match literal(rest, "\"arguments\"").or_else(|head| match literal(rest, "\"parameters\"") {
            Err(Self::Other) => Err(head),
            found => found,
        }) {
            Ok(after) => rest = after,
            Err(head) => return head,
        }
        match literal(rest, ":") {
            Ok(after) => rest = after.trim_start(),
            Err(head) => return head,
        }
        match rest.bytes().next() {
            None => Self::Partial,
            Some(b'{') => Self::Found(name, text.len() - rest.len()),
            Some(_) => Self::Other,
        }
    }
}

/// Returns the text behind `expected`; white space may stand before it.
fn literal<'a>(text: &'a str, expected: &str) -> Result<&'a str, Head> {
    let text = text.trim_start();
    match text.strip_prefix(expected) {
        Some(rest) => Ok(rest),
        None if expected.starts_with(text) => Err(Head::Partial),
        None => Err(Head::Other),
    }
}

/// Parses a string in quotes. Returns it with the text behind it.
fn string(text: &str) -> Result<(String, &str), Head> {
    if text.is_empty() {
        return Err(Head::Partial);
    }
    let Some(inside) = text.strip_prefix('"') else { return Err(Head::Other) };
    let mut is_escaped = false;
    let end = inside.bytes().position(|byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    });
    let Some(end) = end else { return Err(Head::Partial) };
    let (quoted, rest) = text.split_at(end + 2);
    serde_json::from_str(quoted).map(|name| (name, rest)).map_err(|_| Head::Other)
}

/// Parses a complete call with its keys in any order. Returns name and arguments; arguments may be a string of JSON.
///
/// If `is_strict`, the call must have arguments and no unknown keys.
pub(super) fn whole(text: &str, is_strict: bool) -> Option<(String, String)> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    let name = value.get("name")?.as_str()?.to_owned();
    let arguments = value.get("arguments").or_else(|| value.get("parameters"));
    let known = |key: &String| ["name", "type", "id", "arguments", "parameters"].contains(&key.as_str());
    if is_strict && (arguments.is_none() || !value.as_object()?.keys().all(known)) {
        return None;
    }
    let arguments = match arguments {
        None => "{}".to_owned(),
        Some(serde_json::Value::String(text)) => text.clone(),
        Some(arguments) => arguments.to_string(),
    };
    Some((name, arguments))
}
