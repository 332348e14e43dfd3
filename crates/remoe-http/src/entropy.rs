//! Random numbers: ids, and seeds of requests without one.

use std::hash::{BuildHasher, RandomState};

/// 64 bits from the keys that the standard library draws for its hash maps. Not for secrets.
pub fn random_u64() -> u64 {
    RandomState::new().hash_one(())
}

/// 128 random bits in hexadecimal digits.
pub fn random_id() -> String {
    format!("{:016x}{:016x}", random_u64(), random_u64())
}
