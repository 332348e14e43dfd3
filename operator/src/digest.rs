//! Short hashes of values, for names and comparisons.

use serde::Serialize;
use sha2::{Digest, Sha256};

/// Hexadecimal digits of a hash: 40 bits distinguish the few revisions of one deployment.
const HASH_DIGITS: usize = 10;

/// Returns the hash of `value` as canonical JSON. It is stable across restarts and versions that serialise the value
/// alike.
///
/// # Errors
/// The value cannot be written as JSON.
pub(crate) fn digest(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut canonical = serde_json::to_value(value)?;
    // The hash does not depend on the order of fields in the source.
    canonical.sort_all_objects();
    Ok(short_hash(&serde_json::to_vec(&canonical)?))
}

/// Returns the hash of `bytes`.
pub(crate) fn short_hash(bytes: &[u8]) -> String {
    let mut text: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    text.truncate(HASH_DIGITS);
    text
}
