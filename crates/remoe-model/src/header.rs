//! Parses the header of a safetensors file: eight bytes of length, JSON, then the tensors' bytes without gaps
//! (<https://github.com/huggingface/safetensors>).

use std::fmt;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::CheckpointError;
use crate::json::JSON_LIMIT;
use crate::store::StoredFile;

/// Upper bound of a checkpoint's tensors: twice as many as a few hundred layers with a few hundred experts of three
/// matrices with scales have. A header of legal length could list far more.
pub const TENSOR_LIMIT: usize = 1 << 18;

/// A tensor in the header. Offsets are positions in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeaderEntry {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// The tensors of a file in the order of their bytes, and the bytes of the header.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) bytes: Vec<u8>,
    pub(crate) entries: Vec<HeaderEntry>,
}

/// Reads and checks the header of an open file. Reads no tensor.
pub(crate) fn read(path: &Path, file: &dyn StoredFile) -> Result<Header, CheckpointError> {
    read_with(path, |target, offset| file.read_exact_at(target, offset), file.size())
}

/// Name, dtype, shape and byte range of a tensor.
type TableRow = (String, String, Vec<u64>, Range<u64>);

/// Parses the header of a file that begins with `start` and is `file_bytes` long. For `fuzz/`, which has no files.
#[doc(hidden)]
pub fn tensor_table(start: &[u8], file_bytes: u64) -> Result<Vec<TableRow>, CheckpointError> {
    let read_at = |target: &mut [u8], offset: u64| {
        let from = usize::try_from(offset).ok().and_then(|offset| start.get(offset..)?.get(..target.len()));
        from.map(|from| target.copy_from_slice(from)).ok_or_else(|| ErrorKind::UnexpectedEof.into())
    };
    let header = read_with(Path::new("model.safetensors"), read_at, file_bytes)?;
    Ok(header
        .entries
        .into_iter()
        .map(|entry| (entry.name, entry.dtype.to_owned(), entry.shape, entry.start..entry.end))
        .collect())
}

fn read_with(
    path: &Path,
    read_at: impl Fn(&mut [u8], u64) -> io::Result<()>,
    file_bytes: u64,
) -> Result<Header, CheckpointError> {
    let mut prefix = [0; 8];
    if file_bytes < 8 {
        return Err(CheckpointError::header(
            path,
            format!("it has {file_bytes} bytes, expected a safetensors file with a header length of 8 bytes"),
        ));
    }
    read_at(&mut prefix, 0).map_err(|error| CheckpointError::io(path, error))?;
    let length = u64::from_le_bytes(prefix);
    if length > JSON_LIMIT {
        return Err(CheckpointError::header(
            path,
            format!("its header length is {length}, expected at most {JSON_LIMIT} bytes"),
        ));
    }
    let data_start = 8 + length;
    if data_start > file_bytes {
        return Err(CheckpointError::header(
            path,
            format!(
                "its header length is {length}, but the file has only {file_bytes} bytes; download it again"
            ),
        ));
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    read_at(&mut bytes, 8).map_err(|error| CheckpointError::io(path, error))?;
    let entries = parse(path, &bytes, data_start, file_bytes)?;
    Ok(Header { bytes, entries })
}

/// Parses a header's JSON and checks it against the length of the file.
fn parse(
    path: &Path,
    bytes: &[u8],
    data_start: u64,
    file_bytes: u64,
) -> Result<Vec<HeaderEntry>, CheckpointError> {
    // The parser refuses more than 128 levels of nesting.
    let RawHeader(raw) = serde_json::from_slice(bytes)
        .map_err(|error| CheckpointError::header(path, format!("invalid header: {error}")))?;
    let mut entries = Vec::with_capacity(raw.len());
    for (name, raw) in raw {
        entries.push(check_entry(path, name, raw, data_start, file_bytes)?);
    }
    entries.sort_by_key(|entry| (entry.start, entry.end));
    let mut expected_start = data_start;
    for entry in &entries {
        if entry.start != expected_start {
            let problem = if entry.start < expected_start {
                "overlaps the tensor before"
            } else {
                "leaves a gap before"
            };
            return Err(CheckpointError::tensor(
                path,
                &entry.name,
                format!(
                    "its data_offsets [{}, {}] {problem} it, expected to start at {}",
                    entry.start - data_start,
                    entry.end - data_start,
                    expected_start - data_start
                ),
            ));
        }
        expected_start = entry.end;
    }
    if expected_start != file_bytes {
        return Err(CheckpointError::header(
            path,
            format!("its header describes {expected_start} bytes, the file has {file_bytes}"),
        ));
    }
    let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(CheckpointError::tensor(path, pair[0], "duplicate name in the header"));
    }
    Ok(entries)
}

/// Checks the offsets, dtype and shape of a tensor.
fn check_entry(
    path: &Path,
    name: String,
    raw: RawEntry,
    data_start: u64,
    file_bytes: u64,
) -> Result<HeaderEntry, CheckpointError> {
    let invalid = |message: String| Err(CheckpointError::tensor(path, &name, message));
    let [begin, end] = raw.data_offsets;
    let data_bytes = file_bytes - data_start;
    if begin > end || end > data_bytes {
        return invalid(format!(
            "its data_offsets [{begin}, {end}] are outside the {data_bytes} bytes of data; the file is truncated or its header is wrong"
        ));
    }
    let Some((dtype, bits)) = element_type(&raw.dtype) else {
        return invalid(format!("unknown dtype `{}`", raw.dtype));
    };
    let total_bits = raw.shape.iter().try_fold(bits, |product, size| product.checked_mul(*size));
    if total_bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8) != Some(end - begin) {
        return invalid(format!(
            "shape {:?} of {} does not take the {} bytes of its data_offsets",
            raw.shape,
            raw.dtype,
            end - begin
        ));
    }
    Ok(HeaderEntry { name, dtype, shape: raw.shape, start: data_start + begin, end: data_start + end })
}

/// Element types of safetensors 0.8, with the bits of an element.
const ELEMENT_TYPES: [(&str, u64); 22] = [
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("BOOL", 8),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("I64", 64),
    ("U64", 64),
    ("F64", 64),
    ("C64", 64),
];

fn element_type(name: &str) -> Option<(&'static str, u64)> {
    ELEMENT_TYPES.into_iter().find(|(known, _)| *known == name)
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's JSON object as a list, because a map would hide duplicate names.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if entries.len() == TENSOR_LIMIT {
                        let message = format!("expected at most {TENSOR_LIMIT} tensors");
                        return Err(serde::de::Error::custom(message));
                    }
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the bytes, parsing ends with a header or an error.
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300), extra in 0u64..100) {
            let length = bytes.len() as u64 + 8;
            let _ = parse(Path::new("x"), &bytes, length, length + extra);
        }

        /// Any entry that is accepted lies inside the file and has the length of its shape.
        #[test]
        fn accepted_entries_are_consistent(
            tensors in proptest::collection::vec((0u64..5, 0u64..9, 0u64..60, 0u64..60), 0..4),
            data in 0u64..120,
        ) {
            let entries: Vec<String> = tensors
                .iter()
                .enumerate()
                .map(|(i, (a, b, begin, end))| {
                    format!(r#""t{i}":{{"dtype":"BF16","shape":[{a},{b}],"data_offsets":[{begin},{end}]}}"#)
                })
                .collect();
            let json = format!("{{{}}}", entries.join(","));
            let start = 8 + json.len() as u64;
            if let Ok(entries) = parse(Path::new("x"), json.as_bytes(), start, start + data) {
                let total: u64 = entries.iter().map(|e| e.end - e.start).sum();
                prop_assert_eq!(total, data);
                for entry in entries {
                    prop_assert_eq!(entry.shape.iter().product::<u64>() * 2, entry.end - entry.start);
                    prop_assert!(entry.end <= start + data);
                }
            }
        }
    }
}
