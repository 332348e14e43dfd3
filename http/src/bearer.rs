//! Bearer keys.

use axum::http::{HeaderMap, header};

/// The key that a request presents as `Authorization: Bearer KEY`.
pub fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

/// Compares in a time that depends on the presented key's length only.
pub fn same(presented: &[u8], key: &[u8]) -> bool {
    let mut difference = u8::from(presented.len() != key.len());
    let expected = key.iter().copied().chain(std::iter::repeat(0));
    for (a, b) in presented.iter().zip(expected) {
        difference |= std::hint::black_box(a ^ b);
    }
    std::hint::black_box(difference) == 0
}
