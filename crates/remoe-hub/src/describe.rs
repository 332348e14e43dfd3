//! Descriptions of repository revisions, from the hub.

use crate::answer::{failure, is_redirect, redirect, unanswered};
use crate::checked_client::CheckedClient;
use crate::error::FetchError;
use crate::source::{Description, HubServer};
use crate::timeouts::{Attempts, Failed, FetchTimeouts, SourceActivity};
use http::{Method, StatusCode};
use reqwest::Request;

/// Longest description that is read: some repositories have many files.
const LIMIT: usize = 16 << 20;
/// Redirects that are followed: repositories are renamed.
const REDIRECTS: usize = 3;

const ADVICE: &str = "set HF_TOKEN to a token that may read this repository; without a token, the hub also denies \
                      access to repositories that do not exist";

/// Asks for the commit that `revision` of `repository` is, and for its files. `place` is what messages
/// call it.
///
/// # Errors
/// There is no such revision, the credentials are refused, or the hub does not answer.
pub(crate) async fn describe(
    http: &CheckedClient,
    server: &HubServer,
    repository: &str,
    revision: &str,
    place: &str,
    patience: FetchTimeouts,
) -> Result<Description, FetchError> {
    let mut attempts = Attempts::new(patience, &SourceActivity::new());
    loop {
        match attempt(http, server, repository, revision, place).await {
            Ok(description) => return Ok(description),
            Err(failed) => attempts.pause(failed).await?,
        }
    }
}

async fn attempt(
    http: &CheckedClient,
    server: &HubServer,
    repository: &str,
    revision: &str,
    place: &str,
) -> Result<Description, Failed> {
    let answer = |problem: String| FetchError::Answer { place: place.to_owned(), problem };
    let origin = server.description_url(repository, revision);
    let mut url = origin.clone();
    for _ in 0..=REDIRECTS {
        if url.origin() != origin.origin() {
            return Err(answer("redirect to another server".to_owned()).into());
        }
        let mut request = Request::new(Method::GET, url.clone());
        *request.headers_mut() = server.credentials();
        let mut response = http.execute(request, place.to_owned()).await?;
        if is_redirect(&response) {
            url = redirect(&response, &url).map_err(answer)?;
            continue;
        }
        if response.status() != StatusCode::OK {
            return Err(failure(place.to_owned(), ADVICE, response).await);
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| unanswered(place.to_owned(), error))? {
            body.extend_from_slice(&chunk);
            if body.len() > LIMIT {
                return Err(answer(format!("description too large: expected at most {LIMIT} bytes")).into());
            }
        }
        let description = serde_json::from_slice(&body);
        return description.map_err(|error| answer(format!("invalid description: {error}")).into());
    }
    Err(answer(format!("more than {REDIRECTS} redirects")).into())
}
