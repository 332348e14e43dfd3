//! Small JSON files, read with a bound.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::CheckpointError;
use crate::json_constants::without_constants;
use crate::store::{Store, read_fully_at};

/// The largest JSON file that is read. A safetensors header may be as long, and no config comes near.
pub(crate) const JSON_LIMIT: u64 = 100_000_000;

/// The whole file `name`, or `None` where there is none.
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
    // A file that is being written can have become shorter; what is there then is judged by its parser.
    let read = read_fully_at(&*file, &mut bytes, 0).map_err(failed)?;
    bytes.truncate(read);
    Ok(Some(bytes))
}

/// Parses an object, with Python's `NaN` and `Infinity` as [`Fields`](crate::fields::Fields) know them. The parser refuses
/// more than 128 levels of nesting.
pub(crate) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, CheckpointError> {
    // Constants of Python are rare: texts without them are read once.
    let parsed = serde_json::from_slice(bytes).or_else(|error| match without_constants(bytes) {
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

/// The last `"name":` before the place where the parser stopped.
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

/// The object in the file `name`, or `None` where there is no file.
pub(crate) fn object_if_present(
    store: &dyn Store,
    name: &str,
) -> Result<Option<Map<String, Value>>, CheckpointError> {
    match read_optional(store, name)? {
        Some(bytes) => parse_object(&store.root().join(name), &bytes).map(Some),
        None => Ok(None),
    }
}
