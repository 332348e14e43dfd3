//! API keys in request headers.

use axum::http::{HeaderMap, HeaderName, header};

/// Header in which clients of Anthropic's API present their key.
pub const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Returns the key that a request presents as `Authorization: Bearer KEY`, else as `x-api-key: KEY`.
pub fn presented_key(headers: &HeaderMap) -> Option<&[u8]> {
    bearer(headers).or_else(|| headers.get(API_KEY).map(|key| key.as_bytes().trim_ascii()))
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

/// Compares keys in constant time: the time depends only on the length of `presented`.
pub fn constant_time_eq(presented: &[u8], key: &[u8]) -> bool {
    let mut difference = u8::from(presented.len() != key.len());
    let expected = key.iter().copied().chain(std::iter::repeat(0));
    for (a, b) in presented.iter().zip(expected) {
        difference |= std::hint::black_box(a ^ b);
    }
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn bearer_key_goes_before_api_key() {
        let mut headers = HeaderMap::new();
        assert_eq!(presented_key(&headers), None);
        headers.insert(API_KEY, HeaderValue::from_static(" one "));
        assert_eq!(presented_key(&headers), Some(&b"one"[..]));
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Basic x"));
        assert_eq!(presented_key(&headers), Some(&b"one"[..]));
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("bearer two"));
        assert_eq!(presented_key(&headers), Some(&b"two"[..]));
    }
}
