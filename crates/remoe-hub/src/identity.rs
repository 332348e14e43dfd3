//! Versions of files.

use serde::{Deserialize, Serialize};

/// A version of a file, as its source tells it apart from others.
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
    /// Describes the difference from `other`, if that is another version.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        let shown = |text: &Option<String>| text.as_deref().unwrap_or("none").to_owned();
        if self.size != other.size {
            Some(format!("{} bytes before, {} now", self.size, other.size))
        } else if self.etag != other.etag {
            Some(format!("ETag {} before, {} now", shown(&self.etag), shown(&other.etag)))
        } else if self.etag.is_none() && self.last_modified != other.last_modified {
            let (before, now) = (shown(&self.last_modified), shown(&other.last_modified));
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
    fn versions_differ_by_what_is_known_of_them() {
        let identity = |size, etag: Option<&str>, date: Option<&str>| Identity {
            size,
            etag: etag.map(str::to_owned),
            last_modified: date.map(str::to_owned),
        };
        let known = identity(1, Some("a"), Some("monday"));
        // Servers of one cluster can have written the same version at different times.
        assert_eq!(known.difference(&identity(1, Some("a"), Some("tuesday"))), None);
        for other in [identity(2, Some("a"), None), identity(1, Some("b"), None), identity(1, None, None)] {
            assert!(known.difference(&other).is_some(), "{other:?}");
        }
        let dated = identity(1, None, Some("monday"));
        assert!(dated.difference(&identity(1, None, Some("tuesday"))).is_some());
    }
}
