//! Identity of a file's version.

use serde::{Deserialize, Serialize};

/// Version of a file, as its source identifies it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Length in bytes.
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) etag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) last_modified: Option<String>,
}

impl Identity {
    /// Describes the difference from `other`. Returns `None` for the same version.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        let or_none = |text: &Option<String>| text.as_deref().unwrap_or("none").to_owned();
        if self.size != other.size {
            Some(format!("{} bytes before, {} now", self.size, other.size))
        } else if self.etag != other.etag {
            Some(format!("ETag {} before, {} now", or_none(&self.etag), or_none(&other.etag)))
        } else if self.etag.is_none() && self.last_modified != other.last_modified {
            let (before, now) = (or_none(&self.last_modified), or_none(&other.last_modified));
            Some(format!("modified {before} before, {now} now"))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_size_then_etag_then_date() {
        let identity = |size, etag: Option<&str>, date: Option<&str>| Identity {
            size,
            etag: etag.map(str::to_owned),
            last_modified: date.map(str::to_owned),
        };
        let known = identity(1, Some("a"), Some("monday"));
        // Replicas of a web server can have different dates for the same version.
        assert_eq!(known.difference(&identity(1, Some("a"), Some("tuesday"))), None);
        for other in [identity(2, Some("a"), None), identity(1, Some("b"), None), identity(1, None, None)] {
            assert!(known.difference(&other).is_some(), "{other:?}");
        }
        let dated = identity(1, None, Some("monday"));
        assert!(dated.difference(&identity(1, None, Some("tuesday"))).is_some());
    }
}
