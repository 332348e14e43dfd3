//! Client of one source: sends a range request, follows redirects, and checks the response.

use crate::checksum::Sha256Sum;
use crate::egress_client::CheckedClient;
use crate::error::FetchError;
use crate::identity::Identity;
use crate::progress;
use crate::response::{
    content_length, content_range, describe, error_text, failure, is_expired, is_redirect, redirect,
};
use crate::source::Source;
use crate::timeouts::{FailedAttempt, RetryDecision};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use reqwest::{Response, Url};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Redirects that are followed for one request.
const REDIRECT_LIMIT: usize = 5;
/// Size limit, in bytes, of a file from a server without range requests.
pub(crate) const WHOLE_FILE_BYTES_LIMIT: u64 = 16 << 20;

/// Condition on the version of a requested file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum VersionCondition<'a> {
    /// Any version.
    Any,
    /// This version. Another one is an error.
    Same(&'a Identity),
    /// Another version than the given one, which is cached already.
    Changed(&'a Identity),
}

/// Successful response to a range request.
#[derive(Debug)]
pub(crate) enum RangeResponse {
    Bytes(Box<RangeBody>),
    /// The file still has the cached version.
    Unchanged,
    /// The file does not exist.
    Absent(FetchError),
}

/// Response whose body is still to be received.
#[derive(Debug)]
pub(crate) struct RangeBody {
    /// Range of the file that the body contains, in bytes.
    pub(crate) range: Range<u64>,
    pub(crate) identity: Identity,
    pub(crate) sha256: Option<Sha256Sum>,
    /// Response with the body. `None` for an empty file.
    pub(crate) response: Option<Response>,
}

/// Client of one source.
#[derive(Debug)]
pub(crate) struct SourceClient {
    http: CheckedClient,
    pub(crate) source: Source,
    root: PathBuf,
    /// Redirect target of each file's bytes, kept until it expires.
    targets: Mutex<HashMap<String, Url>>,
    /// Set after the message that the source ignores range requests.
    reported_whole_files: AtomicBool,
}

/// Formats the message about a source that ignores range requests.
fn whole_files_message(root: &Path) -> String {
    format!(
        "fetch: {} lacks range requests (206): files are fetched whole, again for each part that is read, and only up \
         to {} MiB; use another server",
        root.display(),
        WHOLE_FILE_BYTES_LIMIT >> 20
    )
}

impl SourceClient {
    /// Creates a client of `source`. `root` is the source's location in messages.
    pub(crate) fn new(http: CheckedClient, source: Source, root: PathBuf) -> Self {
        Self { http, source, root, targets: Mutex::default(), reported_whole_files: AtomicBool::new(false) }
    }

    /// Returns a file's location for messages.
    pub(crate) fn location(&self, name: &str) -> String {
        self.root.join(name).display().to_string()
    }

    /// Returns the source's location for messages.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Requests the bytes `range` of a file, without retries.
    pub(crate) async fn get(
        &self,
        name: &str,
        range: Range<u64>,
        condition: VersionCondition<'_>,
    ) -> Result<RangeResponse, FailedAttempt> {
        let location = self.location(name);
        let mut headers = HeaderMap::new();
        let last = range.end.saturating_sub(1);
        headers.insert(header::RANGE, header_value(&format!("bytes={}-{last}", range.start), &location)?);
        self.set_condition(&mut headers, condition, &location)?;
        let SourceResponse { response, sha256 } = self.send(Method::GET, name, &headers).await?;
        let invalid = |problem: String| FetchError::InvalidResponse { location: location.clone(), problem };
        if response.headers().get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity") {
            return Err(invalid("unexpected compressed body".to_owned()).into());
        }
        let (received, size) = match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let (received, size) = content_range(response.headers())
                    .ok_or_else(|| invalid("206 without a valid Content-Range".to_owned()))?;
                if received.start != range.start || received.end > range.end {
                    return Err(invalid(format!("expected bytes {range:?}, got {received:?}")).into());
                }
                (received, size)
            }
            StatusCode::OK => {
                let size = content_length(response.headers())
                    .filter(|size| *size <= WHOLE_FILE_BYTES_LIMIT)
                    .ok_or_else(|| FetchError::NoRanges {
                        location: location.clone(),
                        limit: WHOLE_FILE_BYTES_LIMIT,
                    })?;
                let is_more = size > range.end - range.start || range.start > 0;
                if is_more && !self.reported_whole_files.swap(true, Ordering::Relaxed) {
                    progress::print_line(&whole_files_message(&self.root));
                }
                (0..size, size)
            }
            StatusCode::NOT_MODIFIED if matches!(condition, VersionCondition::Changed(_)) => {
                return Ok(RangeResponse::Unchanged);
            }
            StatusCode::RANGE_NOT_SATISFIABLE
                if range.start == 0
                    && matches!(condition, VersionCondition::Any | VersionCondition::Changed(_)) =>
            {
                // An empty file has no satisfiable range.
                (0..0, 0)
            }
            StatusCode::PRECONDITION_FAILED | StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(FetchError::Changed { location, change: describe(&response) }.into());
            }
            StatusCode::NOT_FOUND | StatusCode::GONE => {
                let answer = error_text(response).await;
                return Ok(RangeResponse::Absent(FetchError::Missing { location, answer }));
            }
            StatusCode::FORBIDDEN if self.source.hides_missing() => {
                return Ok(RangeResponse::Absent(self.refused(location, error_text(response).await)));
            }
            _ => return Err(self.failed(location, response).await),
        };
        let identity = self.identity(size, response.headers());
        if let VersionCondition::Same(known) = condition
            && let Some(change) = known.difference(&identity)
        {
            return Err(FetchError::Changed { location, change }.into());
        }
        let response = Some(response).filter(|_| !received.is_empty());
        Ok(RangeResponse::Bytes(Box::new(RangeBody { range: received, identity, sha256, response })))
    }

    /// Requests a file's SHA-256, from a source that states it only in the response to `HEAD`.
    pub(crate) async fn checksum(&self, name: &str) -> Result<Option<Sha256Sum>, FailedAttempt> {
        let SourceResponse { response, .. } = self.send(Method::HEAD, name, &HeaderMap::new()).await?;
        match response.status() {
            StatusCode::OK => Ok(Sha256Sum::from_s3(response.headers())),
            _ => Err(self.failed(self.location(name), response).await),
        }
    }

    /// Adds conditional headers for the version, if the source's files can change and it identifies versions.
    fn set_condition(
        &self,
        headers: &mut HeaderMap,
        condition: VersionCondition<'_>,
        location: &str,
    ) -> Result<(), FetchError> {
        if self.source.pinned().is_some() {
            return Ok(());
        }
        // `If-Match` requires a strong ETag (RFC 9110, section 13.1.1).
        let strong = |etag: &&String| !etag.starts_with("W/");
        let (name, text) = match condition {
            VersionCondition::Any => return Ok(()),
            VersionCondition::Same(known) => match (known.etag.as_ref().filter(strong), &known.last_modified)
            {
                (Some(etag), _) => (header::IF_MATCH, etag),
                (None, Some(date)) => (header::IF_UNMODIFIED_SINCE, date),
                (None, None) => return Ok(()),
            },
            VersionCondition::Changed(known) => match (&known.etag, &known.last_modified) {
                (Some(etag), _) => (header::IF_NONE_MATCH, etag),
                (None, Some(date)) => (header::IF_MODIFIED_SINCE, date),
                (None, None) => return Ok(()),
            },
        };
        headers.insert(name, header_value(text, location)?);
        Ok(())
    }

    fn identity(&self, size: u64, headers: &HeaderMap) -> Identity {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        match self.source.pinned() {
            // The commit determines the version. ETag and date depend on the storage server that responds.
            Some(_) => Identity { size, etag: None, last_modified: None },
            None => Identity { size, etag: text(header::ETAG), last_modified: text(header::LAST_MODIFIED) },
        }
    }

    /// Sends a request for the file `name`, and follows redirects.
    async fn send(
        &self,
        method: Method,
        name: &str,
        headers: &HeaderMap,
    ) -> Result<SourceResponse, FailedAttempt> {
        let target = self.targets().get(name).cloned();
        if let Some(target) = target {
            let response = self.send_to(&method, &target, headers, name).await?;
            if !is_expired(response.status()) {
                return Ok(SourceResponse { response, sha256: None });
            }
            // The signed URL has expired: requests another one from the source.
            self.targets().remove(name);
        }
        let origin = self.source.url(name);
        let mut url = origin.clone();
        let mut sha256 = None;
        for _ in 0..=REDIRECT_LIMIT {
            let response = self.send_to(&method, &url, headers, name).await?;
            if url.origin() == origin.origin() {
                sha256 = sha256.or_else(|| Sha256Sum::from_hub(response.headers()));
            }
            if !is_redirect(&response) {
                let is_redirected = url.origin() != origin.origin();
                if is_redirected && is_expired(response.status()) {
                    let problem = format!("{} after a redirect", describe(&response));
                    let error = FetchError::Unavailable { location: self.location(name), problem };
                    return Err(FailedAttempt { error, retry: RetryDecision::Retry(None) });
                }
                if is_redirected {
                    self.targets().insert(name.to_owned(), url);
                }
                return Ok(SourceResponse { response, sha256 });
            }
            url = redirect(&response, &url)
                .map_err(|problem| FetchError::InvalidResponse { location: self.location(name), problem })?;
        }
        let problem = format!("more than {REDIRECT_LIMIT} redirects");
        Err(FetchError::InvalidResponse { location: self.location(name), problem }.into())
    }

    /// Sends one request. Adds credentials only if `url` is at the source itself.
    async fn send_to(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        name: &str,
    ) -> Result<Response, FailedAttempt> {
        let mut request = reqwest::Request::new(method.clone(), url.clone());
        *request.headers_mut() = headers.clone();
        if url.origin() == self.source.url(name).origin() {
            request.headers_mut().extend(self.source.credentials(method, url).await?);
        }
        self.http.execute(request, self.location(name)).await
    }

    fn targets(&self) -> MutexGuard<'_, HashMap<String, Url>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, location: String, answer: String) -> FetchError {
        FetchError::Refused { location, answer, advice: self.source.advice().to_owned() }
    }

    async fn failed(&self, location: String, response: Response) -> FailedAttempt {
        failure(location, self.source.advice(), response).await
    }
}

/// Final response, and the checksum that the source stated before a redirect.
struct SourceResponse {
    response: Response,
    sha256: Option<Sha256Sum>,
}

fn header_value(text: &str, location: &str) -> Result<HeaderValue, FetchError> {
    HeaderValue::from_str(text).map_err(|error| FetchError::InvalidResponse {
        location: location.to_owned(),
        problem: format!("invalid header value: {error}"),
    })
}
