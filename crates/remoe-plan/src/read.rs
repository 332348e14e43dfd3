//! Reading of files: strict for files of users, tolerant for files that another version of the programs wrote.

use crate::error::FieldError;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_path_to_error::Segment;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

/// Maximum number of unknown fields that are dropped.
const MAX_UNKNOWN_FIELDS: usize = 64;

/// Reads JSON strictly, for files of users.
pub fn from_json<T: DeserializeOwned>(text: &str) -> Result<T, FieldError> {
    let mut parser = serde_json::Deserializer::from_str(text);
    let read = serde_path_to_error::deserialize(&mut parser).map_err(FieldError::from_json)?;
    parser.end().map_err(|error| FieldError::new("", format!("invalid JSON: {error}")))?;
    Ok(read)
}

/// Reads JSON that another version of the programs may have written. Drops unknown fields.
///
/// For files and messages of programs. Files of users are read strictly.
///
/// # Errors
/// The first field that is missing, of the wrong type or stated twice.
pub fn of_any_version<T: DeserializeOwned>(text: &str) -> Result<T, FieldError> {
    let mut error = match from_json(text) {
        Err(error) if error.is_unknown_field() => error,
        read => return read,
    };
    let mut tree: Value =
        serde_json::from_str(text).map_err(|error| FieldError::unreadable("", &error.to_string()))?;
    for _ in 0..MAX_UNKNOWN_FIELDS {
        match serde_path_to_error::deserialize(&tree) {
            Ok(read) => return Ok(read),
            Err(unread) => {
                let path: Vec<Segment> = unread.path().iter().cloned().collect();
                error = FieldError::from_json(unread);
                if !error.is_unknown_field() {
                    break;
                }
                remove(&mut tree, &path);
            }
        }
    }
    Err(error)
}

/// Removes the field at `path` from every element of the lists that it leads through.
fn remove(tree: &mut Value, path: &[Segment]) {
    match (tree, path) {
        (Value::Object(fields), [Segment::Map { key }]) => {
            fields.shift_remove(key);
        }
        (Value::Object(fields), [Segment::Map { key }, rest @ ..]) => {
            fields.get_mut(key).into_iter().for_each(|field| remove(field, rest));
        }
        (Value::Array(items), [Segment::Seq { .. }, rest @ ..]) => {
            items.iter_mut().for_each(|item| remove(item, rest));
        }
        _ => {}
    }
}

/// A part of a file that nothing reads: any JSON in which no object states a field twice.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct IgnoredJson;

impl JsonSchema for IgnoredJson {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Unread".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"description": "Not read."})
    }
}

impl<'de> Deserialize<'de> for IgnoredJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for IgnoredJson {
    type Value = Self;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self, A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = fields.next_key::<String>()? {
            if let Some(name) = names.replace(name) {
                return Err(A::Error::custom(format_args!("duplicate field `{name}`")));
            }
            fields.next_value::<Self>()?;
        }
        Ok(self)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        inner: Vec<Inner>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        seconds: f64,
    }

    #[test]
    fn other_version_has_more_fields_they_are_dropped() {
        let text =
            r#"{"inner": [{"seconds": 1, "new": {}}, {"newer": 1, "seconds": 2, "new": 3}], "newest": []}"#;
        let read: Outer = of_any_version(text).unwrap();
        assert_eq!(read, Outer { inner: vec![Inner { seconds: 1.0 }, Inner { seconds: 2.0 }] });
        assert_eq!(from_json::<Outer>(text).unwrap_err().field, "inner[0].new");
    }

    #[test]
    fn other_version_with_a_wrong_value_is_refused() {
        let error = of_any_version::<Outer>(r#"{"new": 1, "inner": [{"seconds": "long"}]}"#).unwrap_err();
        assert_eq!(error.field, "inner[0].seconds");
        let error = of_any_version::<Outer>(r#"{"new": 1, "inner": [{}]}"#).unwrap_err();
        assert_eq!(error.to_string(), "inner[0].seconds is missing; add it");
    }

    #[test]
    fn unread_part_with_a_duplicate_field_is_refused() {
        serde_json::from_str::<IgnoredJson>(r#"[1, -1, 0.5, "a", null, true, {"a": 1, "b": {"a": 2}}]"#)
            .unwrap();
        let error = serde_json::from_str::<IgnoredJson>(r#"{"a": [{"b": 1, "b": 1}]}"#).unwrap_err();
        assert!(error.to_string().contains("duplicate field `b`"), "{error}");
    }
}
