//! Reads and parses small JSON files, up to a size limit.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::CheckpointError;
use crate::json_constants::replace_constants;
use crate::store::{Store, read_fully_at};

/// Largest JSON file that is read: the limit of a safetensors header, far above the length of any config.
pub(crate) const JSON_LIMIT: u64 = 100_000_000;

/// Reads the file `name`, or returns `None` if it does not exist.
pub(crate) fn read_optional(store: &dyn Store, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
    let path = store.root().join(name);
    let failed = |error| CheckpointError::io(&path, error);
    let Some(file) = store.open(name).map_err(failed)? else {
        return Ok(None);
    };
    if file.size() > JSON_LIMIT {
        return Err(CheckpointError::json(&path, None, format!("expected at most {JSON_LIMIT} bytes")));
    }
    let mut bytes = vec![0; file.size() as usize];
    // The file may have been truncated meanwhile. The parser then reports what is left.
    let read = read_fully_at(&*file, &mut bytes, 0).map_err(failed)?;
    bytes.truncate(read);
    Ok(Some(bytes))
}

/// Parses a JSON object. Python's `NaN` and `Infinity` become strings that [`Fields`](crate::fields::Fields) recognises.
/// The parser refuses more than 128 levels of nesting.
pub(crate) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, CheckpointError> {
    // Python's constants are rare: texts without them are parsed only once.
    let parsed = serde_json::from_slice(bytes).or_else(|error| match replace_constants(bytes) {
        Cow::Owned(replaced) => serde_json::from_slice(&replaced),
        Cow::Borrowed(_) => Err(error),
    });
    let (field, message) = match parsed {
        Ok(Value::Object(object)) => return Ok(object),
        Ok(_) => (None, "expected one JSON object".to_owned()),
        Err(error) => (field_before(bytes, &error), error.to_string()),
    };
    let message = match &field {
        Some(field) => format!("{message} (at field `{field}`)"),
        None => message,
    };
    Err(CheckpointError::json(path, field, message))
}

/// Returns the last `"name":` before the position at which the parser stopped.
fn field_before(bytes: &[u8], error: &serde_json::Error) -> Option<String> {
    let line = error.line().checked_sub(1)?;
    let lines = bytes.split(|byte| *byte == b'\n').take(line);
    let start: usize = lines.map(|line| line.len() + 1).sum();
    let before = bytes.get(..bytes.len().min(start + error.column()))?;
    let colon = before.iter().rposition(|byte| *byte == b':')?;
    let name = before.get(..colon)?.trim_ascii_end().strip_suffix(b"\"")?;
    let open = name.iter().rposition(|byte| *byte == b'"')?;
    let name = str::from_utf8(name.get(open + 1..)?).ok()?;
    (name.len() <= 100).then(|| name.to_owned())
}

/// Parses the object in the file `name`, or returns `None` if the file does not exist.
pub(crate) fn object_if_present(
    store: &dyn Store,
    name: &str,
) -> Result<Option<Map<String, Value>>, CheckpointError> {
    match read_optional(store, name)? {
        Some(bytes) => parse_object(&store.root().join(name), &bytes).map(Some),
        None => Ok(None),
    }
}
