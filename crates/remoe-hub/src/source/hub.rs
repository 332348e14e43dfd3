//! A commit of a repository of the Hugging Face hub, or of a server that speaks its protocol
//! (<https://huggingface.co/docs/hub/api>).

use super::{Secret, below, encoded, url_variable, variable};
use crate::error::FetchError;
use http::{HeaderMap, HeaderValue, header};
use reqwest::Url;
use serde::Deserialize;
use std::collections::BTreeSet;

const ENDPOINT: &str = "https://huggingface.co";

/// A server and what it is shown.
#[derive(Debug, Clone)]
pub(crate) struct HubServer {
    endpoint: Url,
    token: Option<Secret>,
}

#[derive(Debug)]
pub(crate) struct Hub {
    server: HubServer,
    repository: String,
    /// A commit: what it holds never changes.
    pub(crate) commit: String,
    /// The names of its files.
    pub(crate) files: BTreeSet<String>,
}

/// The part of a repository's description that is read.
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
    /// The server of HF_ENDPOINT, else the hub itself, with the token of HF_TOKEN.
    pub(crate) fn from_environment() -> Result<Self, FetchError> {
        let what = || "HF_TOKEN".to_owned();
        let token = variable("HF_TOKEN").map(|token| Secret(token.trim().to_owned()));
        if token.as_ref().is_some_and(|token| bearer(token).is_none()) {
            let problem = "invalid characters in the token".to_owned();
            return Err(FetchError::Settings { what: what(), problem });
        }
        let endpoint = match url_variable("HF_ENDPOINT")? {
            Some(endpoint) => endpoint,
            None => Url::parse(ENDPOINT)
                .map_err(|error| FetchError::Settings { what: what(), problem: error.to_string() })?,
        };
        Ok(Self { endpoint, token })
    }

    /// The server's part of a repository's identity.
    pub(crate) fn endpoint(&self) -> &str {
        self.endpoint.as_str()
    }

    /// Where `revision` of `repository` is described.
    pub(crate) fn description_url(&self, repository: &str, revision: &str) -> Url {
        // A slash in the name of a branch belongs to the name.
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
    /// The repository as `description` has it.
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

    /// The repository at a commit that is known to hold `files`.
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

/// Reports if `revision` is a full commit, which no push can move.
pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
