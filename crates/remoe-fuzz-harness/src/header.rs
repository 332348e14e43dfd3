//! Target: the header of a safetensors file, checked against the length of the file.
//!
//! Input: a byte that selects the stated lengths, a number of eight bytes for them, and the header's JSON.

use crate::{check_error, fixtures, memory};
use remoe_model::tensor_table;
use serde_json::{Map, Value, json};

/// Memory limit per byte of JSON: `[0,` in a shape becomes eight bytes in a list that doubles, and an entry of about
/// sixty bytes has four allocations.
const BYTES_PER_INPUT_BYTE: usize = 64;
const BASE_BYTES: usize = 64 << 10;
/// Limit of the stated header length, in bytes. A header is read as a whole before it is parsed.
const HEADER_BYTES_LIMIT: u64 = 100_000_000;

pub fn run(data: &[u8]) {
    let Some((&[mode, ref number @ ..], json)) = data.split_first_chunk::<9>() else {
        return;
    };
    let number = u64::from_le_bytes(*number);
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json);
    let data_start = file.len() as u64;
    // A file of the length that its header describes, a file of any length, or a header of any stated length.
    let (length, header_length) = match mode % 4 {
        0 => (data_start.saturating_add(data_bytes(json)), 0),
        1 => (data_start.wrapping_add(number), 0),
        2 => (number, 0),
        _ => {
            file[..8].copy_from_slice(&number.to_le_bytes());
            (data_start.saturating_add(number), number.min(HEADER_BYTES_LIMIT) as usize)
        }
    };
    let limit = BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len() + header_length;
    match memory::with_limit(limit, || tensor_table(&file, length)) {
        Err(error) => check_error(&error.to_string()),
        Ok(table) => check_table(&table, u64::from_le_bytes(file[..8].try_into().unwrap()) + 8, length),
    }
}

fn check_table(table: &[(String, String, Vec<u64>, std::ops::Range<u64>)], data_start: u64, length: u64) {
    let mut offset = data_start;
    let mut written = Map::new();
    for (name, dtype, shape, byte_range) in table {
        assert_eq!(byte_range.start, offset, "no gap, no overlap");
        assert!(byte_range.end >= byte_range.start && byte_range.end <= length);
        let elements: u128 = shape.iter().map(|size| u128::from(*size)).product();
        let bits = dtype.bytes().filter(u8::is_ascii_digit).count();
        assert!(dtype == "BOOL" || bits > 0, "a type without a size: {dtype}");
        let bytes = u128::from(byte_range.end - byte_range.start);
        assert!(elements * 4 <= bytes * 8 && bytes <= elements * 8, "{dtype} {shape:?} in {bytes} bytes");
        offset = byte_range.end;
        let entry = json!({
            "dtype": dtype, "shape": shape,
            "data_offsets": [byte_range.start - data_start, byte_range.end - data_start],
        });
        assert!(written.insert(name.clone(), entry).is_none(), "{name} is there twice");
    }
    assert_eq!(offset, length, "the tensors are the whole file");

    // Writing and reading the header again gives equal tensors.
    let json = Value::Object(written).to_string();
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    let start = file.len() as u64;
    let second = tensor_table(&file, start + (length - data_start)).expect("it is accepted again");
    assert_eq!(second.len(), table.len());
    // Empty tensors share an offset, so that their order is not determined.
    let facts = |(name, dtype, shape, byte_range): &(String, String, Vec<u64>, std::ops::Range<u64>),
                 start| {
        (name.clone(), dtype.clone(), shape.clone(), byte_range.start - start, byte_range.end - start)
    };
    let mut first: Vec<_> = table.iter().map(|entry| facts(entry, data_start)).collect();
    let mut second: Vec<_> = second.iter().map(|entry| facts(entry, start)).collect();
    first.sort();
    second.sort();
    assert_eq!(first, second);
}

/// Returns the length of the tensor data that a header describes, in bytes.
pub(crate) fn data_bytes(json: &[u8]) -> u64 {
    let Ok(Value::Object(map)) = serde_json::from_slice(json) else {
        return 0;
    };
    map.values().filter_map(|entry| entry.get("data_offsets")?.get(1)?.as_u64()).max().unwrap_or(0)
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for folder in fixtures::checkpoints() {
        let file = fixtures::read(folder.join("model.safetensors"));
        let Some((length, rest)) = file.split_first_chunk::<8>() else {
            continue;
        };
        let length = u64::from_le_bytes(*length) as usize;
        let map: Map<String, Value> = serde_json::from_slice(&rest[..length]).expect("a fixture is right");
        // Only the first tensors, because short inputs are fuzzed more deeply.
        for count in [2, 5, 9] {
            let part: Map<String, Value> =
                map.iter().take(count).map(|(k, v)| (k.clone(), v.clone())).collect();
            let json = Value::Object(part).to_string();
            let data = data_bytes(json.as_bytes());
            for (mode, number) in [(0, 0), (1, data), (2, 9 + json.len() as u64), (3, json.len() as u64)] {
                let mut seed = vec![mode];
                seed.extend_from_slice(&number.to_le_bytes());
                seed.extend_from_slice(json.as_bytes());
                seeds.push(seed);
            }
        }
    }
    for json in [
        r#"{"a":{"dtype":"BOOL","shape":[],"data_offsets":[0,1]},"b":{"dtype":"F4","shape":[2,0],"data_offsets":[1,1]}}"#,
        r#"{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]},"b":{"dtype":"C64","shape":[1,1],"data_offsets":[3,11]}}"#,
        r#"{"__metadata__":{"x":"y"},"a":{"dtype":"I64","shape":[18446744073709551615,18446744073709551615],"data_offsets":[0,8]}}"#,
        "{}",
    ] {
        seeds.push([&[0; 9], json.as_bytes()].concat());
    }
    let long_text = fixtures::long_text();
    let sizes = format!("[{}1]", "1,".repeat(1000));
    for (name, dtype, shape, end) in [
        (&*long_text, "U8", "[2]", 1),
        ("a", &*long_text, "[1]", 1),
        ("a", "U8", &*sizes, 2),
        (&*long_text, "U8", "[1]", 9),
    ] {
        let json = format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
        seeds.push([&[0; 9], json.as_bytes()].concat());
        seeds.push([&[1, 1, 0, 0, 0, 0, 0, 0, 0], json.as_bytes()].concat());
    }
    seeds.push([&[0; 9], format!(r#"{{"a":"{long_text}"}}"#).as_bytes()].concat());
    seeds
}
