//! Short hashes of values, for names and comparisons.

use serde::Serialize;
use sha2::{Digest, Sha256};

/// Hexadecimal digits of a hash: 40 bits tell the few revisions of one deployment apart.
const DIGITS: usize = 10;

/// The hash of `value` as JSON. Equal for equal values, also over restarts and versions of this program
/// that write the value alike.
///
/// # Errors
/// The value cannot be written as JSON.
pub(crate) fn digest(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut canonical = serde_json::to_value(value)?;
    // The order of fields in the source does not matter.
    canonical.sort_all_objects();
    Ok(short_hash(&serde_json::to_vec(&canonical)?))
}

/// The hash of `bytes`.
pub(crate) fn short_hash(bytes: &[u8]) -> String {
    let mut text: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    text.truncate(DIGITS);
    text
}
