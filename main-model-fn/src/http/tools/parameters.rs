//! Arguments that a model writes one by one: strings as they are, other values as JSON or in Python's syntax.

use serde_json::Value;

/// Set of JSON types that a schema allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Types(u8);

/// Most schemas that are examined for the types of one argument.
const MAX_SCHEMAS: usize = 64;

impl Types {
    const STRING: Self = Self(1);
    const NUMBER: Self = Self(2);
    const BOOLEAN: Self = Self(4);
    const NULL: Self = Self(8);
    const OBJECT: Self = Self(16);
    const ARRAY: Self = Self(32);
    const ANY: Self = Self(63);

    /// Returns the types of the argument `key` of a function with these `parameters`; all types if they do not say.
    pub(super) fn of(parameters: Option<&Value>, key: &str) -> Self {
        let found = parameters.and_then(|root| Some((root, root.get("properties")?.get(key)?)));
        found.map_or(Self::ANY, |(root, schema)| Self::allowed(schema, root, &mut { MAX_SCHEMAS }))
    }

    /// Reports if only strings are allowed.
    pub(super) fn is_string(self) -> bool {
        self == Self::STRING
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    fn union(types: impl Iterator<Item = Self>) -> Self {
        Self(types.fold(0, |all, one| all | one.0))
    }

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "number" | "integer" => Self::NUMBER,
            "boolean" => Self::BOOLEAN,
            "null" => Self::NULL,
            "object" => Self::OBJECT,
            "array" => Self::ARRAY,
            _ => Self::ANY,
        }
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::String(_) => Self::STRING,
            Value::Number(_) => Self::NUMBER,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Null => Self::NULL,
            Value::Object(_) => Self::OBJECT,
            Value::Array(_) => Self::ARRAY,
        }
    }

    /// Returns the types that `schema` allows; its references point into `root`. Examines at most `left` schemas.
    fn allowed(schema: &Value, root: &Value, left: &mut usize) -> Self {
        // References may form cycles, and alternatives may refer to each other.
        if *left == 0 {
            return Self::ANY;
        }
        *left -= 1;
        let mut of = |schema: &Value| Self::allowed(schema, root, left);
        if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
            let target = target.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
            return target.map_or(Self::ANY, of);
        }
        let mut types = Self::ANY;
        match schema.get("type") {
            Some(Value::String(name)) => types = Self::named(name),
            Some(Value::Array(names)) => {
                types = Self::union(names.iter().filter_map(Value::as_str).map(Self::named));
            }
            _ => (),
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(alternatives)) = schema.get(key) {
                types.0 &= Self::union(alternatives.iter().map(&mut of)).0;
            }
        }
        if let Some(Value::Array(parts)) = schema.get("allOf") {
            types.0 &= parts.iter().map(&mut of).fold(Self::ANY.0, |all, one| all & one.0);
        }
        if let Some(Value::Array(values)) = schema.get("enum") {
            types.0 &= Self::union(values.iter().map(Self::of_value)).0;
        }
        if let Some(value) = schema.get("const") {
            types.0 &= Self::of_value(value).0;
        }
        if types.0 == 0 { Self::ANY } else { types }
    }

    /// Converts `text` to JSON by these types.
    pub(super) fn json(self, text: &str) -> String {
        let quoted = || Value::from(text).to_string();
        if self.is_string() {
            return quoted();
        }
        let trimmed = text.trim();
        let written = match trimmed {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            other => other,
        };
        let value: Option<Value> = serde_json::from_str(written).ok();
        match value {
            // A string may be written with quotation marks.
            Some(Value::String(_)) if self.has(Self::STRING) => quoted(),
            Some(value) if self.has(Self::of_value(&value)) || !self.has(Self::STRING) => written.to_owned(),
            _ => quoted(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Types;
    use serde_json::json;

    #[test]
    fn schema_that_refers_to_itself_takes_bounded_work() {
        let alternatives = vec![json!({"$ref": "#/properties/x"}); 1000];
        let parameters = json!({"properties": {"x": {"anyOf": alternatives}}});
        assert_eq!(Types::of(Some(&parameters), "x").json("5"), "5");
    }

    #[test]
    fn values_are_read_by_the_types_of_their_schema() {
        let parameters = json!({
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "flag": {"type": "boolean"},
                "list": {"type": "array"},
                "either": {"type": ["string", "integer"]},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "level": {"enum": ["1", "2"]},
                "place": {"$ref": "#/$defs/place"},
                "free": {},
            },
            "$defs": {"place": {"type": "object"}},
        });
        for (key, text, json) in [
            ("text", "5", r#""5""#),
            ("text", " a\n\"b\" ", r#"" a\n\"b\" ""#),
            ("count", " 5 ", "5"),
            ("count", "1e2", "1e2"),
            ("count", "many", r#""many""#),
            ("flag", "True", "true"),
            ("flag", "false", "false"),
            ("list", "[1, {\"a\": null}]", "[1, {\"a\": null}]"),
            ("either", "5", "5"),
            ("either", "five", r#""five""#),
            ("maybe", "None", "null"),
            ("maybe", "5", r#""5""#),
            ("level", "1", r#""1""#),
            ("place", "{\"x\": 1}", "{\"x\": 1}"),
            ("free", "5", "5"),
            ("free", "a b", r#""a b""#),
            ("free", "\"a\"", r#""\"a\"""#),
            ("unknown", "[1", r#""[1""#),
        ] {
            assert_eq!(Types::of(Some(&parameters), key).json(text), json, "{key}: {text}");
        }
    }
}
