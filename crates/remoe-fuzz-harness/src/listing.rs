//! Target: expert listings of command lines, such as `1:6-7,2:0,5-7`.

use crate::{check_error, fixtures, memory};
use remoe_proto::{format_listing, parse_listing};

/// Fixed part of the memory limit: the largest listing, as a tree and as lists.
const BASE_BYTES: usize = 8 << 20;
const BYTES_PER_INPUT_BYTE: usize = 64;

pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || parse_listing(&text)) {
        Err(error) => check_error(&error.to_string()),
        Ok(layers) => {
            assert!(layers.is_sorted_by_key(|set| set.layer));
            assert!(layers.iter().all(|set| set.experts.windows(2).all(|pair| pair[0] < pair[1])));
            let written = format_listing(&layers);
            assert_eq!(parse_listing(&written).as_ref(), Ok(&layers), "{written:.200}");
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    // Narrow ranges reach the same code as wide ones in less time.
    let many: Vec<String> = (0..300).map(|layer| format!("{layer}:0-7")).collect();
    [
        "1:6-7,2:0,5-7",
        "0:0-255, 3:1,2 ,65536:4",
        "2:5,1:3-1",
        "1:1,1:1-2,0:3,,",
        "a:1",
        &many.join(","),
        &fixtures::long_text(),
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}
