//! Verification of AWS Signature Version 4
//! (<https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html>).

use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, Method, Uri};
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// S3 error code of a refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignatureError {
    AccessDenied,
    InvalidAccessKeyId,
    SignatureDoesNotMatch,
    AuthorizationHeaderMalformed,
}

/// Access key and region with which requests must be signed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SigningKey<'a> {
    pub(crate) id: &'a str,
    pub(crate) secret: &'a str,
    pub(crate) region: &'a str,
}

/// Checks the signature of a request without a body.
pub(crate) fn check_signature(
    key: SigningKey<'_>,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<(), SignatureError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let authorization = text("authorization").ok_or(SignatureError::AccessDenied)?;
    let fields = authorization
        .strip_prefix("AWS4-HMAC-SHA256 ")
        .ok_or(SignatureError::AuthorizationHeaderMalformed)?;
    let field = |name: &str| {
        let mut parts = fields.split(',').filter_map(|part| part.trim().split_once('='));
        parts.find(|(found, _)| *found == name).map(|(_, value)| value)
    };
    let malformed = SignatureError::AuthorizationHeaderMalformed;
    let credential = field("Credential").ok_or(malformed)?;
    let signed_headers = field("SignedHeaders").ok_or(malformed)?;
    let signature = field("Signature").ok_or(malformed)?;
    let mut scope = credential.splitn(2, '/');
    if scope.next() != Some(key.id) {
        return Err(SignatureError::InvalidAccessKeyId);
    }
    let scope = scope.next().unwrap_or_default();
    let timestamp = text("x-amz-date").ok_or(SignatureError::AccessDenied)?;
    let day = timestamp.get(..8).ok_or(malformed)?;
    if scope != format!("{day}/{}/s3/aws4_request", key.region) {
        return Err(malformed);
    }
    if !signed_headers.split(';').any(|name| name == "host") {
        return Err(SignatureError::SignatureDoesNotMatch);
    }
    let mut canonical_request = format!("{method}\n{}\n{}\n", uri.path(), uri.query().unwrap_or_default());
    for name in signed_headers.split(';') {
        canonical_request.push_str(&format!("{name}:{}\n", text(name).unwrap_or_default().trim()));
    }
    let payload = text("x-amz-content-sha256").unwrap_or_default();
    canonical_request.push_str(&format!("\n{signed_headers}\n{payload}"));
    let digest = hex(&Sha256::digest(canonical_request.as_bytes()));
    let string_to_sign = format!("AWS4-HMAC-SHA256\n{timestamp}\n{scope}\n{digest}");
    let mut secret = format!("AWS4{}", key.secret).into_bytes();
    for part in [day, key.region, "s3", "aws4_request"] {
        secret = mac(&secret, part).ok_or(malformed)?;
    }
    let expected = mac(&secret, &string_to_sign).map(|bytes| hex(&bytes));
    if expected.as_deref() == Some(signature) { Ok(()) } else { Err(SignatureError::SignatureDoesNotMatch) }
}

fn mac(key: &[u8], text: &str) -> Option<Vec<u8>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
    mac.update(text.as_bytes());
    Some(mac.finalize().into_bytes().to_vec())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _written = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The example "GET Object" of Amazon's documentation.
    #[test]
    fn documented_example_signature_is_accepted() {
        let key = SigningKey {
            id: "AKIAIOSFODNN7EXAMPLE",
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            region: "us-east-1",
        };
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "examplebucket.s3.amazonaws.com"),
            ("range", "bytes=0-9"),
            ("x-amz-content-sha256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            ("x-amz-date", "20130524T000000Z"),
            (
                "authorization",
                "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            ),
        ] {
            headers.insert(name, value.parse().unwrap());
        }
        let uri: Uri = "/test.txt".parse().unwrap();
        assert_eq!(check_signature(key, &Method::GET, &uri, &headers), Ok(()));
        let other = SigningKey { secret: "another", ..key };
        assert_eq!(
            check_signature(other, &Method::GET, &uri, &headers),
            Err(SignatureError::SignatureDoesNotMatch)
        );
        headers.insert("range", "bytes=0-8".parse().unwrap());
        assert_eq!(
            check_signature(key, &Method::GET, &uri, &headers),
            Err(SignatureError::SignatureDoesNotMatch)
        );
    }
}
