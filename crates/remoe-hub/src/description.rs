//! Request for the description of a hub repository: the commit of a revision, and its files.

use crate::egress_client::CheckedClient;
use crate::error::FetchError;
use crate::response::{failure, is_redirect, no_response, redirect};
use crate::source::{Description, HubServer};
use crate::timeouts::{Attempts, FailedAttempt, FetchTimeouts, SourceActivity};
use http::{Method, StatusCode};
use reqwest::Request;

/// Size limit of a description in bytes. Repositories may have thousands of files.
const DESCRIPTION_BYTES_LIMIT: usize = 16 << 20;
/// Redirects that are followed. The hub redirects from the old names of repositories.
const REDIRECT_LIMIT: usize = 3;

const ADVICE: &str = "set HF_TOKEN to a token that may read this repository; without a token, the hub also denies \
                      access to repositories that do not exist";

/// Requests the commit and the files of a `revision`, with retries. `location` names it in messages.
///
/// # Errors
/// The revision does not exist, the credentials are refused, or the hub does not respond.
pub(crate) async fn fetch_description(
    http: &CheckedClient,
    server: &HubServer,
    repository: &str,
    revision: &str,
    location: &str,
    timeouts: FetchTimeouts,
) -> Result<Description, FetchError> {
    let mut attempts = Attempts::new(timeouts, &SourceActivity::new());
    loop {
        match fetch_once(http, server, repository, revision, location).await {
            Ok(description) => return Ok(description),
            Err(failed) => attempts.pause(failed).await?,
        }
    }
}

async fn fetch_once(
    http: &CheckedClient,
    server: &HubServer,
    repository: &str,
    revision: &str,
    location: &str,
) -> Result<Description, FailedAttempt> {
    let invalid = |problem: String| FetchError::InvalidResponse { location: location.to_owned(), problem };
    let origin = server.description_url(repository, revision);
    let mut url = origin.clone();
    for _ in 0..=REDIRECT_LIMIT {
        if url.origin() != origin.origin() {
            return Err(invalid("redirect to another server".to_owned()).into());
        }
        let mut request = Request::new(Method::GET, url.clone());
        *request.headers_mut() = server.credentials();
        let mut response = http.execute(request, location.to_owned()).await?;
        if is_redirect(&response) {
            url = redirect(&response, &url).map_err(invalid)?;
            continue;
        }
        if response.status() != StatusCode::OK {
            return Err(failure(location.to_owned(), ADVICE, response).await);
        }
        let mut body = Vec::new();
        while let Some(chunk) =
            response.chunk().await.map_err(|error| no_response(location.to_owned(), error))?
        {
            body.extend_from_slice(&chunk);
            if body.len() > DESCRIPTION_BYTES_LIMIT {
                return Err(invalid(format!(
                    "description too large: expected at most {DESCRIPTION_BYTES_LIMIT} bytes"
                ))
                .into());
            }
        }
        let description = serde_json::from_slice(&body);
        return description.map_err(|error| invalid(format!("invalid description: {error}")).into());
    }
    Err(invalid(format!("more than {REDIRECT_LIMIT} redirects")).into())
}
