//! Random numbers, for ids and for seeds of requests that state none.

use std::hash::{BuildHasher, RandomState};

/// Returns 64 random bits, derived from the keys that the standard library draws for hash maps. Not for secrets.
pub fn random_u64() -> u64 {
    RandomState::new().hash_one(())
}

/// Returns 128 random bits as 32 hexadecimal digits.
pub fn random_id() -> String {
    format!("{:016x}{:016x}", random_u64(), random_u64())
}
