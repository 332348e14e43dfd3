//! Sources of files: the URL of each file, and the credentials for it.

mod hub;
mod s3;
mod web;

pub(crate) use hub::{Description, Hub, HubServer, is_commit};
pub(crate) use s3::S3;
pub(crate) use web::Web;

use crate::error::FetchError;
use http::HeaderMap;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::Url;
use std::collections::BTreeSet;
use std::fmt;

/// Characters that are percent-encoded in paths: all but the unreserved ones and `/`, as S3 signs paths.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// Source of a model's files.
#[derive(Debug)]
pub(crate) enum Source {
    Hub(Hub),
    S3(S3),
    Web(Web),
}

impl Source {
    /// Returns the URL of the file `name`.
    pub(crate) fn url(&self, name: &str) -> Url {
        match self {
            Self::Hub(hub) => hub.url(name),
            Self::S3(s3) => s3.url(name),
            Self::Web(web) => web.url(name),
        }
    }

    /// Returns the authentication headers of a request for `url`, which must be at the source itself.
    ///
    /// # Errors
    /// The credentials cannot be obtained.
    pub(crate) async fn credentials(
        &self,
        method: &http::Method,
        url: &Url,
    ) -> Result<HeaderMap, FetchError> {
        match self {
            Self::Hub(hub) => Ok(hub.credentials()),
            Self::S3(s3) => s3.credentials(method, url).await,
            Self::Web(_) => Ok(HeaderMap::new()),
        }
    }

    /// Returns the remedy that the message about a refused request ends with.
    pub(crate) fn advice(&self) -> &'static str {
        match self {
            Self::Hub(_) => {
                "set HF_TOKEN to a token that may read this repository, and accept its conditions, if any"
            }
            Self::S3(_) => {
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION, the permissions of \
                 the key, and the clock; the role of the machine or pod is used with --ambient-credentials only"
            }
            Self::Web(_) => "credentials for web servers are not supported",
        }
    }

    /// Returns the names of all files, for a source that lists them and whose files never change.
    pub(crate) fn pinned(&self) -> Option<&BTreeSet<String>> {
        match self {
            Self::Hub(hub) => Some(&hub.files),
            Self::S3(_) | Self::Web(_) => None,
        }
    }

    /// Reports if 403 can also mean that a file does not exist. S3 returns 404 only if the credentials may list the
    /// bucket.
    pub(crate) fn hides_missing(&self) -> bool {
        matches!(self, Self::S3(_))
    }

    /// Reports if the source states the SHA-256 of a file only in the response to `HEAD`.
    pub(crate) fn states_checksums_on_head(&self) -> bool {
        matches!(self, Self::S3(_))
    }
}

/// Text that `Debug` does not print.
#[derive(Clone)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("***")
    }
}

/// Percent-encodes a path.
fn encoded(path: &str) -> String {
    utf8_percent_encode(path, PATH).to_string()
}

/// Returns the value of an environment variable. An empty one counts as not set.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Parses the URL in the environment variable `name`, without a trailing slash.
fn url_variable(name: &str) -> Result<Option<Url>, FetchError> {
    let Some(text) = variable(name) else {
        return Ok(None);
    };
    // The message must not repeat the URL, which may contain a password.
    let invalid = |problem: &str| FetchError::Settings { what: name.to_owned(), problem: problem.to_owned() };
    let url =
        Url::parse(text.trim_end_matches('/')).map_err(|error| invalid(&format!("invalid URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") || url.query().is_some() || !url.username().is_empty() {
        return Err(invalid("expected an http:// or https:// URL without user and query"));
    }
    Ok(Some(url))
}

/// Appends an encoded `path` to the path of `base`.
fn below(base: &Url, path: &str) -> Url {
    let mut url = base.clone();
    url.set_path(&format!("{}/{path}", base.path().trim_end_matches('/')));
    url
}
