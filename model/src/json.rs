//! Small JSON files, read with a bound.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::CheckpointError;

/// The largest JSON file that is read. A safetensors header may be as long, and no config comes near.
pub(crate) const JSON_LIMIT: u64 = 100_000_000;

/// The whole file, or `None` where there is none.
pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, CheckpointError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CheckpointError::io(path, error)),
    };
    let mut bytes = Vec::new();
    file.take(JSON_LIMIT + 1).read_to_end(&mut bytes).map_err(|error| CheckpointError::io(path, error))?;
    if bytes.len() as u64 > JSON_LIMIT {
        return Err(CheckpointError::json(path, None, format!("it is larger than {JSON_LIMIT} bytes")));
    }
    Ok(Some(bytes))
}

/// Parses an object. The parser refuses more than 128 levels of nesting.
pub(crate) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, CheckpointError> {
    let (field, message) = match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => return Ok(object),
        Ok(_) => (None, "it must hold one JSON object".to_owned()),
        // Python writes NaN and Infinity, which are no JSON: say whose value it is.
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

/// The object in a file, or `None` where there is no file.
pub(crate) fn object_if_present(path: &Path) -> Result<Option<Map<String, Value>>, CheckpointError> {
    match read_optional(path)? {
        Some(bytes) => parse_object(path, &bytes).map(Some),
        None => Ok(None),
    }
}
