//! Location of a model, in the form of `--model`.

use reqwest::Url;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// Location of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelLocation {
    /// Local folder.
    Folder(PathBuf),
    /// Repository of the Hugging Face hub.
    Hub {
        /// Organisation and name.
        repository: String,
        /// Commit, branch or tag. `None` is the branch `main`.
        revision: Option<String>,
    },
    /// Prefix of an S3 bucket.
    S3 {
        /// Name of the bucket.
        bucket: String,
        /// Prefix of all keys, without a slash at either end. Empty for the bucket itself.
        prefix: String,
    },
    /// Folder of a web server.
    Web {
        /// URL of the folder, with a slash at the end.
        url: Url,
    },
}

/// Error of a text that is not a valid location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{problem}; expected a folder, hf://organisation/name[@revision], s3://bucket/prefix or https://host/path"
)]
pub struct LocationError {
    problem: String,
}

impl ModelLocation {
    /// Returns the default name of the model: the last part of its location.
    #[must_use]
    pub fn name(&self) -> String {
        let last = |path: &str| path.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned();
        let name = match self {
            Self::Folder(path) => {
                // A folder given as `.` has a name only in its absolute form.
                let path = path.canonicalize().unwrap_or_else(|_| path.clone());
                path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
            }
            Self::Hub { repository, .. } => last(repository),
            Self::S3 { bucket, prefix } if prefix.is_empty() => bucket.clone(),
            Self::S3 { prefix, .. } => last(prefix),
            Self::Web { url } => last(url.path()),
        };
        if name.is_empty() { "model".to_owned() } else { name }
    }

    /// Converts a folder whose path is `organisation/name` to the hub repository of that name.
    #[must_use]
    pub fn on_hub(&self) -> Option<Self> {
        let Self::Folder(path) = self else { return None };
        Self::parse(&format!("hf://{}", path.to_str()?)).ok()
    }

    /// Formats the location for a command line. Folders need not be UTF-8.
    #[must_use]
    pub fn to_os_string(&self) -> OsString {
        match self {
            Self::Folder(path) => path.clone().into(),
            location => location.to_string().into(),
        }
    }

    fn parse(text: &str) -> Result<Self, LocationError> {
        let invalid = |problem: &str| LocationError { problem: problem.to_owned() };
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(Self::Folder(text.into()));
        };
        match scheme {
            "hf" => {
                let (repository, revision) = match rest.split_once('@') {
                    Some((_, "")) => return Err(invalid("missing revision after @")),
                    Some((repository, revision)) => (repository, Some(revision.to_owned())),
                    None => (rest, None),
                };
                match repository.split('/').collect::<Vec<_>>()[..] {
                    [organisation, name] if is_hub_name(organisation) && is_hub_name(name) => {
                        Ok(Self::Hub { repository: repository.to_owned(), revision })
                    }
                    _ => Err(invalid("missing organisation or model name")),
                }
            }
            "s3" => {
                let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                let is_allowed =
                    |character: char| character.is_ascii_alphanumeric() || ".-_".contains(character);
                if bucket.is_empty() || !bucket.chars().all(is_allowed) {
                    return Err(invalid("missing bucket name"));
                }
                Ok(Self::S3 { bucket: bucket.to_owned(), prefix: prefix.trim_matches('/').to_owned() })
            }
            "http" | "https" => {
                let mut url = Url::parse(text).map_err(|error| invalid(&format!("invalid URL: {error}")))?;
                if !url.username().is_empty() || url.password().is_some() {
                    // The message must not repeat the URL, which contains a password.
                    let problem = "invalid URL: expected no user and no password".to_owned();
                    return Err(LocationError { problem });
                }
                if url.query().is_some() || url.fragment().is_some() {
                    let problem = "invalid URL: expected no query and no fragment".to_owned();
                    return Err(LocationError { problem });
                }
                if !url.path().ends_with('/') {
                    url.set_path(&format!("{}/", url.path()));
                }
                Ok(Self::Web { url })
            }
            _ => Err(invalid("unknown scheme")),
        }
    }
}

fn is_hub_name(name: &str) -> bool {
    let is_allowed = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
    !name.is_empty() && name != "." && name != ".." && name.chars().all(is_allowed)
}

impl TryFrom<OsString> for ModelLocation {
    type Error = LocationError;

    fn try_from(text: OsString) -> Result<Self, LocationError> {
        match text.to_str() {
            Some(text) => Self::parse(text),
            // Not UTF-8: this is a path, because URLs are ASCII.
            None => Ok(Self::Folder(text.into())),
        }
    }
}

impl std::str::FromStr for ModelLocation {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        Self::parse(text)
    }
}

impl fmt::Display for ModelLocation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => path.display().fmt(formatter),
            Self::Hub { repository, revision: None } => write!(formatter, "hf://{repository}"),
            Self::Hub { repository, revision: Some(revision) } => {
                write!(formatter, "hf://{repository}@{revision}")
            }
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(formatter, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(formatter, "s3://{bucket}/{prefix}"),
            Self::Web { url } => formatter.write_str(url.as_str().trim_end_matches('/')),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn folder_named_like_repository_converts_to_hub() {
        let on_hub = |text: &str| text.parse::<ModelLocation>().unwrap().on_hub().map(|hub| hub.to_string());
        assert_eq!(on_hub("allenai/OLMoE-1B-7B-0924").as_deref(), Some("hf://allenai/OLMoE-1B-7B-0924"));
        for elsewhere in ["folder", "./a/b/c", "/a/b", "s3://bucket/a", "hf://a/b"] {
            assert_eq!(on_hub(elsewhere), None, "{elsewhere}");
        }
    }

    #[test]
    fn locations_round_trip_and_have_names() {
        for (text, name) in [
            ("hf://org/model", "model"),
            ("hf://org/model@refs/pr/1", "model"),
            ("s3://bucket/a/b", "b"),
            ("s3://bucket", "bucket"),
            ("https://host/a/b", "b"),
            ("http://host:81", "model"),
            ("some/folder", "folder"),
        ] {
            let location: ModelLocation = text.parse().unwrap();
            assert_eq!((location.to_string().as_str(), location.name().as_str()), (text, name));
        }
        let slashes: ModelLocation = "s3://bucket//a/b/".parse().unwrap();
        assert_eq!(slashes.to_string(), "s3://bucket/a/b");
    }

    #[test]
    fn invalid_locations_are_refused() {
        for wrong in [
            "hf://model",
            "hf://a/b/c",
            "hf://a/../c",
            "hf://a/..",
            "hf://a/b@",
            "s3://",
            "s3:///x",
            "https:///",
            "ftp://a/b",
            "https://host/a?b=c",
        ] {
            assert!(wrong.parse::<ModelLocation>().is_err(), "{wrong}");
        }
        let secret = "https://user:hunter2@host/a".parse::<ModelLocation>().unwrap_err();
        assert!(!secret.to_string().contains("hunter2"), "{secret}");
    }
}
