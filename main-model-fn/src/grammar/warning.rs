//! Warnings about keywords of a schema that are accepted but not enforced.

/// Most warnings of one schema; further ones are counted.
const MAX_KEPT: usize = 8;

/// Keywords of a schema that are not enforced, each with its first position.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Warnings {
    /// Pointers to schemas, and the keyword that is not enforced there.
    first: Vec<(String, String)>,
    /// Number of further warnings.
    more: usize,
}

impl Warnings {
    /// Adds `what` of the schema at the pointer `path`, unless it was added before.
    pub(super) fn add(&mut self, path: &str, what: String) {
        match &self.first {
            first if first.iter().any(|(_, known)| *known == what) => (),
            first if first.len() < MAX_KEPT => self.first.push((path.to_owned(), what)),
            _ => self.more += 1,
        }
    }

    /// Returns sentences about the schema in the request field `field`.
    pub(crate) fn sentences(&self, field: &str) -> Vec<String> {
        let placed = self.first.iter().map(|(path, what)| match path.is_empty() {
            true => format!("{field}: {what}"),
            false => format!("{field} at {path}: {what}"),
        });
        let more = (self.more > 0).then(|| format!("{field}: {} more", self.more));
        placed.chain(more).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::{accepts, compiler};
    use super::super::{Source, Whitespace};
    use serde_json::{Value, json};

    fn source(schema: Value) -> Source {
        Source::json(Some(schema), Whitespace::default()).unwrap()
    }

    #[tokio::test]
    async fn unknown_formats_and_unique_items_are_annotations() {
        let account = json!({"type": "string", "format": "iban", "maxLength": 3});
        let schema = json!({
            "type": "object",
            "properties": {
                "a/b": account, "c": account, "d": {"type": "array", "items": {"type": "null"}, "uniqueItems": true},
                "e": {"type": "string", "format": "date"}, "f": {"type": "integer", "format": "int128"},
            },
            "required": ["a/b", "c", "d", "e", "f"],
        });
        let source = source(schema);
        assert_eq!(
            source.warnings("f"),
            [
                "f at /properties/a~1b: unknown format \"iban\" is not enforced",
                "f at /properties/d: `uniqueItems` is not enforced",
            ]
        );
        let grammar = compiler().compile(source, "f").await.unwrap();
        let answer = |text: &str, date: &str| {
            format!(r#"{{"a/b": "{text}", "c": "", "d": [null, null], "e": "{date}", "f": 1}}"#)
        };
        assert!(accepts(&grammar, &answer("xyz", "2026-01-31")));
        assert!(
            !accepts(&grammar, &answer("wxyz", "2026-01-31")) && !accepts(&grammar, &answer("xyz", "today"))
        );
    }

    #[test]
    fn warnings_of_the_root_name_the_field_alone() {
        let warnings = source(json!({"type": "string", "format": "iri"})).warnings("guided_json");
        assert_eq!(warnings, ["guided_json: unknown format \"iri\" is not enforced"]);
        assert!(source(json!({"uniqueItems": false, "format": "uuid"})).warnings("f").is_empty());
    }

    #[test]
    fn warnings_beyond_the_first_are_counted() {
        let formats: Vec<Value> = (0..20).map(|index| json!({"format": format!("f{index}")})).collect();
        let warnings = source(json!({"anyOf": formats})).warnings("f");
        assert_eq!((warnings.len(), warnings.last().map(String::as_str)), (9, Some("f: 12 more")));
        let long = source(json!({"format": "x".repeat(100_000)})).warnings("f");
        assert!(long[0].len() < 300, "{long:?}");
    }
}
