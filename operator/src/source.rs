//! Parses the source of a model's weights.

/// Source of a model's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ModelSource {
    /// A folder of a PersistentVolumeClaim.
    Claim {
        /// Name of the claim.
        claim: String,
        /// Folder relative to the volume; empty for the volume itself.
        path: String,
    },
    /// A repository of the Hugging Face hub.
    Hub {
        /// Organisation and name.
        repository: String,
    },
    /// A prefix of an S3 bucket, or a folder of a web server.
    Url {
        /// URL as written in the spec.
        url: String,
    },
}

/// Invalid source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid source {source_text:?}: {problem}; expected hf://organisation/name, s3://bucket/prefix, \
     https://host/path or pvc://claim/path"
)]
pub(crate) struct SourceError {
    source_text: String,
    problem: &'static str,
}

impl ModelSource {
    /// Parses `spec.model.source`.
    ///
    /// # Errors
    /// The scheme or form is unknown, or the path leads out of the claim.
    pub(crate) fn parse(text: &str) -> Result<Self, SourceError> {
        let invalid = |problem| SourceError { source_text: text.to_owned(), problem };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("missing ://"))?;
        match scheme {
            "pvc" => {
                let (claim, path) = rest.split_once('/').unwrap_or((rest, ""));
                if claim.is_empty() {
                    return Err(invalid("missing claim name"));
                }
                let parts: Vec<&str> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
                if parts.contains(&"..") {
                    return Err(invalid("path outside the claim"));
                }
                Ok(Self::Claim { claim: claim.to_owned(), path: parts.join("/") })
            }
            "hf" => match rest.split('/').collect::<Vec<_>>()[..] {
                [organisation, name] if !organisation.is_empty() && !name.is_empty() => {
                    Ok(Self::Hub { repository: rest.to_owned() })
                }
                _ => Err(invalid("invalid repository name")),
            },
            "s3" | "https" if !rest.is_empty() && !rest.starts_with('/') => {
                Ok(Self::Url { url: text.to_owned() })
            }
            "s3" | "https" => Err(invalid("missing bucket or host")),
            _ => Err(invalid("unknown scheme")),
        }
    }

    /// Returns whether pods fetch the weights over the network into a cache.
    pub(crate) fn is_fetched(&self) -> bool {
        !matches!(self, Self::Claim { .. })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn claims_name_a_folder_inside_of_them() {
        let claim = |text: &str| ModelSource::parse(text).unwrap();
        let at = |path: &str| ModelSource::Claim { claim: "models".to_owned(), path: path.to_owned() };
        assert_eq!(claim("pvc://models"), at(""));
        assert_eq!(claim("pvc://models/"), at(""));
        assert_eq!(claim("pvc://models/a//b/./c/"), at("a/b/c"));
        for invalid in ["pvc://", "pvc:///demo", "pvc://models/../other", "pvc://models/a/.."] {
            assert!(ModelSource::parse(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn fetched_sources_keep_their_form() {
        assert!(ModelSource::parse("hf://org/model").unwrap().is_fetched());
        assert!(ModelSource::parse("s3://bucket/a/b").unwrap().is_fetched());
        for invalid in ["hf://model", "hf://a/b/c", "s3://", "https:///x", "ftp://a/b", "models/demo"] {
            assert!(ModelSource::parse(invalid).is_err(), "{invalid}");
        }
    }
}
