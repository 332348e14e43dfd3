//! Requests to sources: the URL of each file, and the credentials that go with it.

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

/// All but the characters that no scheme encodes: S3 signs paths in this form.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// A place that files come from.
#[derive(Debug)]
pub(crate) enum Source {
    Hub(Hub),
    S3(S3),
    Web(Web),
}

impl Source {
    /// Where the file `name` is.
    pub(crate) fn url(&self, name: &str) -> Url {
        match self {
            Self::Hub(hub) => hub.url(name),
            Self::S3(s3) => s3.url(name),
            Self::Web(web) => web.url(name),
        }
    }

    /// The headers that a request for `url`, which is at the source itself, needs.
    ///
    /// # Errors
    /// There are no credentials to be had.
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

    /// Where a user who is refused should look.
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

    /// Returns the names of all files, if the source lists them and they never change.
    pub(crate) fn pinned(&self) -> Option<&BTreeSet<String>> {
        match self {
            Self::Hub(hub) => Some(&hub.files),
            Self::S3(_) | Self::Web(_) => None,
        }
    }

    /// Reports if a refused file may as well not exist: S3 tells the two apart only for credentials that may list the
    /// bucket.
    pub(crate) fn hides_missing(&self) -> bool {
        matches!(self, Self::S3(_))
    }

    /// Reports if the SHA-256 of a file is requested with HEAD.
    pub(crate) fn states_checksums_on_head(&self) -> bool {
        matches!(self, Self::S3(_))
    }
}

/// A text that is never printed.
#[derive(Clone)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("***")
    }
}

/// `path` with everything encoded that must be.
fn encoded(path: &str) -> String {
    utf8_percent_encode(path, PATH).to_string()
}

/// The value of an environment variable; an empty one is none.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The URL in the environment variable `name`, without a slash at the end.
fn url_variable(name: &str) -> Result<Option<Url>, FetchError> {
    let Some(text) = variable(name) else {
        return Ok(None);
    };
    // The text is not repeated: a URL can hold a password.
    let wrong = |problem: &str| FetchError::Settings { what: name.to_owned(), problem: problem.to_owned() };
    let url =
        Url::parse(text.trim_end_matches('/')).map_err(|error| wrong(&format!("invalid URL: {error}")))?;
    if !matches!(url.scheme(), "http" | "https") || url.query().is_some() || !url.username().is_empty() {
        return Err(wrong("expected an http:// or https:// URL without user and query"));
    }
    Ok(Some(url))
}

/// `base` with `path`, which is encoded, below its own.
fn below(base: &Url, path: &str) -> Url {
    let mut url = base.clone();
    url.set_path(&format!("{}/{path}", base.path().trim_end_matches('/')));
    url
}
