//! Source: a commit of a repository of the Hugging Face hub, or of a server with its API
//! (<https://huggingface.co/docs/hub/api>).

use super::{Secret, below, encoded, url_variable, variable};
use crate::error::FetchError;
use http::{HeaderMap, HeaderValue, header};
use reqwest::Url;
use serde::Deserialize;
use std::collections::BTreeSet;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// Hub server, and the token for it.
#[derive(Debug, Clone)]
pub(crate) struct HubServer {
    endpoint: Url,
    token: Option<Secret>,
}

#[derive(Debug)]
pub(crate) struct Hub {
    server: HubServer,
    repository: String,
    /// Full commit hash. A commit's files never change.
    pub(crate) commit: String,
    /// Names of the commit's files.
    pub(crate) files: BTreeSet<String>,
}

/// Fields of a repository's description that are read.
#[derive(Deserialize)]
pub(crate) struct Description {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl HubServer {
    /// Creates the server of HF_ENDPOINT, by default the hub itself, with the token of HF_TOKEN.
    pub(crate) fn from_environment() -> Result<Self, FetchError> {
        let what = || "HF_TOKEN".to_owned();
        let token = variable("HF_TOKEN").map(|token| Secret(token.trim().to_owned()));
        if token.as_ref().is_some_and(|token| bearer(token).is_none()) {
            let problem = "invalid characters in the token".to_owned();
            return Err(FetchError::Settings { what: what(), problem });
        }
        let endpoint = match url_variable("HF_ENDPOINT")? {
            Some(endpoint) => endpoint,
            None => Url::parse(DEFAULT_ENDPOINT)
                .map_err(|error| FetchError::Settings { what: what(), problem: error.to_string() })?,
        };
        Ok(Self { endpoint, token })
    }

    /// Returns the server's URL, which is part of a repository's address in the cache.
    pub(crate) fn endpoint(&self) -> &str {
        self.endpoint.as_str()
    }

    /// Returns the URL of the description of a `revision`.
    pub(crate) fn description_url(&self, repository: &str, revision: &str) -> Url {
        // A branch name may contain slashes, which must not separate path segments.
        let revision = encoded(revision).replace('/', "%2F");
        below(&self.endpoint, &format!("api/models/{}/revision/{revision}", encoded(repository)))
    }

    pub(crate) fn credentials(&self) -> HeaderMap {
        let value = self.token.as_ref().and_then(bearer);
        value.map(|value| (header::AUTHORIZATION, value)).into_iter().collect()
    }
}

fn bearer(token: &Secret) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(&format!("Bearer {}", token.0)).ok()?;
    value.set_sensitive(true);
    Some(value)
}

impl Hub {
    /// Creates the source from a repository's description.
    pub(crate) fn new(
        server: HubServer,
        repository: String,
        description: Description,
    ) -> Result<Self, &'static str> {
        let files = description.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        if !is_commit(&description.sha) {
            return Err("no commit");
        }
        Ok(Self::at_commit(server, repository, description.sha, files))
    }

    /// Creates the source for a commit whose files are known.
    pub(crate) fn at_commit(
        server: HubServer,
        repository: String,
        commit: String,
        files: BTreeSet<String>,
    ) -> Self {
        Self { server, repository, commit, files }
    }

    pub(super) fn url(&self, name: &str) -> Url {
        let path = format!("{}/resolve/{}/{}", encoded(&self.repository), self.commit, encoded(name));
        below(&self.server.endpoint, &path)
    }

    pub(super) fn credentials(&self) -> HeaderMap {
        self.server.credentials()
    }
}

/// Reports if `revision` is a full commit hash, whose files never change.
pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
