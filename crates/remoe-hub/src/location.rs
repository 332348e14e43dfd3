//! Where a model is, as `--model` writes it.

use reqwest::Url;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// A place of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelLocation {
    /// A folder of this machine.
    Folder(PathBuf),
    /// A repository of the Hugging Face hub.
    Hub {
        /// Organisation and name.
        repository: String,
        /// A commit, branch or tag; the branch `main` where none is named.
        revision: Option<String>,
    },
    /// Objects of an S3 bucket.
    S3 {
        /// The bucket.
        bucket: String,
        /// Prefix of all keys, without a slash at either end. Empty for the bucket itself.
        prefix: String,
    },
    /// A folder of a web server.
    Web {
        /// URL of the folder, with a slash at the end.
        url: Url,
    },
}

/// A text that is not a valid location.
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

    /// Returns the repository of the hub that this folder has the name of: `organisation/name`.
    #[must_use]
    pub fn on_hub(&self) -> Option<Self> {
        let Self::Folder(path) = self else { return None };
        Self::parse(&format!("hf://{}", path.to_str()?)).ok()
    }

    /// As it is written on a command line.
    #[must_use]
    pub fn to_os_string(&self) -> OsString {
        match self {
            Self::Folder(path) => path.clone().into(),
            location => location.to_string().into(),
        }
    }

    fn parse(text: &str) -> Result<Self, LocationError> {
        let wrong = |problem: &str| LocationError { problem: problem.to_owned() };
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(Self::Folder(text.into()));
        };
        match scheme {
            "hf" => {
                let (repository, revision) = match rest.split_once('@') {
                    Some((_, "")) => return Err(wrong("missing revision after @")),
                    Some((repository, revision)) => (repository, Some(revision.to_owned())),
                    None => (rest, None),
                };
                match repository.split('/').collect::<Vec<_>>()[..] {
                    [organisation, name] if is_hub_name(organisation) && is_hub_name(name) => {
                        Ok(Self::Hub { repository: repository.to_owned(), revision })
                    }
                    _ => Err(wrong("missing organisation or model name")),
                }
            }
            "s3" => {
                let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                let named = |character: char| character.is_ascii_alphanumeric() || ".-_".contains(character);
                if bucket.is_empty() || !bucket.chars().all(named) {
                    return Err(wrong("missing bucket name"));
                }
                Ok(Self::S3 { bucket: bucket.to_owned(), prefix: prefix.trim_matches('/').to_owned() })
            }
            "http" | "https" => {
                let mut url = Url::parse(text).map_err(|error| wrong(&format!("invalid URL: {error}")))?;
                if !url.username().is_empty() || url.password().is_some() {
                    // Not repeated: it holds a password.
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
            _ => Err(wrong("unknown scheme")),
        }
    }
}

fn is_hub_name(name: &str) -> bool {
    let named = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
    !name.is_empty() && name != "." && name != ".." && name.chars().all(named)
}

impl TryFrom<OsString> for ModelLocation {
    type Error = LocationError;

    fn try_from(text: OsString) -> Result<Self, LocationError> {
        match text.to_str() {
            Some(text) => Self::parse(text),
            // Paths need not be UTF-8, URLs are.
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
    fn folder_named_as_a_repository_is_found_on_the_hub() {
        let on_hub = |text: &str| text.parse::<ModelLocation>().unwrap().on_hub().map(|hub| hub.to_string());
        assert_eq!(on_hub("allenai/OLMoE-1B-7B-0924").as_deref(), Some("hf://allenai/OLMoE-1B-7B-0924"));
        for elsewhere in ["folder", "./a/b/c", "/a/b", "s3://bucket/a", "hf://a/b"] {
            assert_eq!(on_hub(elsewhere), None, "{elsewhere}");
        }
    }

    #[test]
    fn places_keep_their_form() {
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
    fn what_names_no_place_is_refused() {
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
