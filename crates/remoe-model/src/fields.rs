//! Typed access to the fields of a JSON object. Errors name the file and the field.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::CheckpointError;
use crate::json_constants::Constant;

/// Upper bound of counts and sizes. Twice the product of two of them fits 64 bits.
pub(crate) const SIZE_LIMIT: u64 = 1 << 31;

/// Upper bound of token ids in one field, because each is compared with all others.
const TOKEN_LIMIT: usize = 4096;

/// A JSON object of a file. `prefix` is the dotted name of the field that contains it.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    path: &'a Path,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, prefix: "", map }
    }

    /// Returns the object in field `name`, or `None` if it is absent, null or empty.
    pub(crate) fn object(self, name: &'a str) -> Result<Option<Self>, CheckpointError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) if map.is_empty() => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { path: self.path, prefix: name, map })),
            Some(other) => Err(self.wrong(name, other, "an object")),
        }
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map.keys().map(String::as_str)
    }

    /// Returns the value of a field, or `None` if it is absent or null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    /// Returns the name that exists, of a field that transformers has renamed. If both exist, their values must agree.
    pub(crate) fn either(&self, name: &'a str, other: &'a str) -> Result<&'a str, CheckpointError> {
        self.agree(name, other)?;
        Ok(if !self.map.contains_key(name) && self.map.contains_key(other) { other } else { name })
    }

    /// Checks that two names of one field do not have different values.
    pub(crate) fn agree(&self, name: &str, other: &str) -> Result<(), CheckpointError> {
        match (self.get(name), self.get(other)) {
            (Some(one), Some(two)) if !same(one, two) => Err(self.conflict(other, two, name, one)),
            _ => Ok(()),
        }
    }

    /// Checks that `other`, another name of the field `name`, does not contradict `value`, which was read from `name`.
    pub(crate) fn agree_on(
        &self,
        name: &str,
        value: impl Into<Value>,
        other: &str,
    ) -> Result<(), CheckpointError> {
        let value = value.into();
        match self.get(other) {
            Some(two) if !same(&value, two) => Err(self.conflict(other, two, name, &value)),
            _ => Ok(()),
        }
    }

    fn conflict(&self, other: &str, two: &Value, name: &str, one: &Value) -> CheckpointError {
        let name = self.full_name(name);
        self.error(
            other,
            format!("is {}, but {name} is {}; remove one of the two", abbreviated(two), abbreviated(one)),
        )
    }

    /// Reads a size of at least 1. Null is an error.
    pub(crate) fn size(&self, name: &str, default: usize) -> Result<usize, CheckpointError> {
        self.not_null(name)?;
        Ok(self.optional_size(name)?.unwrap_or(default))
    }

    /// Reads a size of at least 1 that has no default.
    pub(crate) fn required_size(&self, name: &str) -> Result<usize, CheckpointError> {
        self.optional_size(name)?.ok_or_else(|| self.error(name, "is missing and has no default; add it"))
    }

    /// Reads a size of at least 1, if it is given.
    pub(crate) fn optional_size(&self, name: &str) -> Result<Option<usize>, CheckpointError> {
        match self.optional_count(name)? {
            Some(0) => Err(self.error(name, "is 0, expected at least 1")),
            other => Ok(other),
        }
    }

    /// Reads a count, which may be 0. Null is an error.
    pub(crate) fn count(&self, name: &str, default: usize) -> Result<usize, CheckpointError> {
        self.not_null(name)?;
        Ok(self.optional_count(name)?.unwrap_or(default))
    }

    pub(crate) fn optional_count(&self, name: &str) -> Result<Option<usize>, CheckpointError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let count = value.as_u64().ok_or_else(|| self.wrong(name, value, "an integer, not negative"))?;
        if count > SIZE_LIMIT {
            return Err(self.error(name, format!("is {count}, expected at most {SIZE_LIMIT}")));
        }
        usize::try_from(count)
            .map(Some)
            .map_err(|_| self.error(name, format!("is {count}, too large for this machine")))
    }

    /// Reads a finite number. Null is an error.
    pub(crate) fn number(&self, name: &str, default: f64) -> Result<f64, CheckpointError> {
        self.not_null(name)?;
        Ok(self.optional_number(name)?.unwrap_or(default))
    }

    pub(crate) fn optional_number(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_f64()
            .filter(|number| number.is_finite())
            .map(Some)
            .ok_or_else(|| self.wrong(name, value, "a finite number"))
    }

    /// Reads a finite upper bound. Infinity means none.
    pub(crate) fn optional_limit(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        match self.get(name).and_then(Constant::from_value) {
            Some(Constant::Infinity) => Ok(None),
            _ => self.optional_number(name),
        }
    }

    /// Reads a finite number above 0, if it is given.
    pub(crate) fn optional_positive(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        match self.optional_number(name)? {
            Some(number) if number <= 0.0 => {
                Err(self.error(name, format!("is {number}, expected a number above 0")))
            }
            other => Ok(other),
        }
    }

    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool, CheckpointError> {
        self.not_null(name)?;
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(name, other, "true or false")),
        }
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, CheckpointError> {
        match self.get(name) {
            None => Ok(None),
            Some(value @ Value::String(text)) if Constant::from_value(value).is_none() => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, other, "a string")),
        }
    }

    pub(crate) fn list(&self, name: &str) -> Result<Option<&'a [Value]>, CheckpointError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(name, other, "a list")),
        }
    }

    /// Reads token ids: one, a list, or none. Ids outside of the vocabulary are dropped, since the model cannot produce
    /// them (transformers warns about them).
    pub(crate) fn token_ids(&self, name: &str, vocab: usize) -> Result<Vec<u32>, CheckpointError> {
        let values = match self.get(name) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        if values.len() > TOKEN_LIMIT {
            return Err(
                self.error(name, format!("lists {} token ids, expected at most {TOKEN_LIMIT}", values.len()))
            );
        }
        let mut ids = Vec::with_capacity(values.len());
        for value in values {
            let id = value.as_i64().ok_or_else(|| self.wrong(name, value, "a token id or a list of them"))?;
            if let Ok(id) = u32::try_from(id)
                && (id as usize) < vocab
                && !ids.contains(&id)
            {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    /// Refuses a field that is neither absent nor null.
    pub(crate) fn refuse(&self, name: &str, why: &str) -> Result<(), CheckpointError> {
        match self.get(name) {
            None => Ok(()),
            Some(_) => Err(self.unsupported(name, why)),
        }
    }

    fn not_null(&self, name: &str) -> Result<(), CheckpointError> {
        if self.is_null(name) {
            return Err(self.error(name, "is null; give it a value, or omit it"));
        }
        Ok(())
    }

    fn wrong(&self, name: &str, value: &Value, expected: &str) -> CheckpointError {
        self.error(name, format!("is {}, expected {expected}", abbreviated(value)))
    }

    pub(crate) fn error(&self, name: &str, message: impl Into<String>) -> CheckpointError {
        CheckpointError::field_value(self.path, self.full_name(name), message)
    }

    pub(crate) fn unsupported(&self, name: &str, message: impl Into<String>) -> CheckpointError {
        CheckpointError::unsupported(self.path, self.full_name(name), message)
    }

    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}.{name}", self.prefix) }
    }
}

/// Formats a value for a message, truncated to 80 characters.
pub(crate) fn abbreviated(value: &Value) -> String {
    let mut shown =
        Constant::from_value(value).map_or_else(|| value.to_string(), |constant| constant.name().to_owned());
    if let Some((end, _)) = shown.char_indices().nth(80) {
        shown.truncate(end);
        shown.push('…');
    }
    shown
}

/// Reports if two values are equal. The numbers 4 and 4.0 are.
pub(crate) fn same(one: &Value, two: &Value) -> bool {
    match one {
        Value::Number(_) => one.as_f64().is_some_and(|number| same_number(two, number)),
        Value::Array(list) => two.as_array().is_some_and(|other| {
            list.len() == other.len() && list.iter().zip(other).all(|(a, b)| same(a, b))
        }),
        _ => one == two,
    }
}

/// Reports if a value equals a number.
pub(crate) fn same_number(value: &Value, number: f64) -> bool {
    value.as_f64() == Some(number)
}
