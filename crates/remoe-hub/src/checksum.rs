//! SHA-256 checksums of whole files, as sources state them.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::HeaderMap;
use sha2::{Digest, Sha256};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Size of the read buffer in bytes.
const READ_BYTES: usize = 1 << 20;

/// A SHA-256 checksum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sha256Sum([u8; 32]);

impl Sha256Sum {
    /// Parses the checksum that the hub states for a file in large file storage. Other files have a git id, which is
    /// not a SHA-256 and gives `None`.
    pub(crate) fn from_hub(headers: &HeaderMap) -> Option<Self> {
        let etag = headers.get("x-linked-etag")?.to_str().ok()?;
        Self::from_hex(etag.trim_matches('"'))
    }

    /// Parses the checksum that S3 states for a whole object. A composite checksum of its parts gives `None`.
    pub(crate) fn from_s3(headers: &HeaderMap) -> Option<Self> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        if text("x-amz-checksum-type").is_some_and(|kind| kind != "FULL_OBJECT") {
            return None;
        }
        let bytes = BASE64_STANDARD.decode(text("x-amz-checksum-sha256")?).ok()?;
        bytes.try_into().ok().map(Self)
    }

    /// Parses 64 hexadecimal digits.
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let pairs = text.as_bytes().as_chunks::<2>();
        if !pairs.1.is_empty() {
            return None;
        }
        let bytes: Option<Vec<u8>> =
            pairs.0.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
        bytes?.try_into().ok().map(Self)
    }

    /// Computes the checksum of bytes.
    pub(crate) fn of(text: impl AsRef<[u8]>) -> Self {
        Self(Sha256::digest(text.as_ref()).into())
    }

    /// Computes the checksum of the first `size` bytes of a file.
    pub(crate) fn of_file(file: &File, size: u64) -> io::Result<Self> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; READ_BYTES];
        let mut at = 0;
        while at < size {
            let length = READ_BYTES.min(usize::try_from(size - at).unwrap_or(READ_BYTES));
            let target = buffer.get_mut(..length).unwrap_or_default();
            file.read_exact_at(target, at)?;
            hash.update(&*target);
            at += length as u64;
        }
        Ok(Self(hash.finalize().into()))
    }
}

impl fmt::Display for Sha256Sum {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256Sum {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Sha256Sum({self})")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_hub_and_s3_parse() {
        let sum = Sha256Sum::of("abc");
        assert_eq!(Sha256Sum::from_hex(&sum.to_string()), Some(sum));
        let headers = |pairs: &[(&'static str, &str)]| {
            pairs
                .iter()
                .map(|(name, text)| (http::HeaderName::from_static(name), text.parse().unwrap()))
                .collect()
        };
        let linked: HeaderMap = headers(&[("x-linked-etag", &format!("\"{sum}\""))]);
        assert_eq!(Sha256Sum::from_hub(&linked), Some(sum));
        // A git id.
        let small: HeaderMap = headers(&[("x-linked-etag", "\"0123456789abcdef0123456789abcdef01234567\"")]);
        assert_eq!(Sha256Sum::from_hub(&small), None);
        let encoded = BASE64_STANDARD.encode(sum.0);
        let s3 = |kind: &str| headers(&[("x-amz-checksum-sha256", &encoded), ("x-amz-checksum-type", kind)]);
        assert_eq!(Sha256Sum::from_s3(&s3("FULL_OBJECT")), Some(sum));
        assert_eq!(Sha256Sum::from_s3(&s3("COMPOSITE")), None);
    }

    #[test]
    fn checksum_of_file_equals_that_of_its_bytes() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes = vec![7; READ_BYTES + 100];
        io::Write::write_all(&mut file, &bytes).unwrap();
        assert_eq!(Sha256Sum::of_file(&file, bytes.len() as u64).unwrap(), Sha256Sum::of(&bytes));
    }
}
