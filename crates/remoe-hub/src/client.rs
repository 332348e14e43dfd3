//! One request: sent where redirects lead, its answer checked.

use crate::answer::{
    content_length, content_range, describe, error_text, failure, is_lost, is_redirect, redirect,
};
use crate::checked_client::CheckedClient;
use crate::checksum::Sha256Sum;
use crate::error::FetchError;
use crate::identity::Identity;
use crate::progress;
use crate::source::Source;
use crate::timeouts::{Failed, RetryDecision};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use reqwest::{Response, Url};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Redirects that are followed for one request.
const REDIRECTS: usize = 5;
/// The longest file that is taken from a server that does not send ranges.
pub(crate) const WHOLE_FILE: u64 = 16 << 20;

/// Version that an answer must be about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Condition<'a> {
    /// Any version.
    Any,
    /// This version; another one is an error.
    Same(&'a Identity),
    /// Another version than this one, which is there already.
    Other(&'a Identity),
}

/// An answer to a request for bytes.
#[derive(Debug)]
pub(crate) enum Reply {
    Bytes(Box<Bytes>),
    /// The version is the one that is there already.
    Unchanged,
    /// There is no such file.
    Absent(FetchError),
}

/// Bytes on their way.
#[derive(Debug)]
pub(crate) struct Bytes {
    /// Range of the file that the bytes are.
    pub(crate) range: Range<u64>,
    pub(crate) identity: Identity,
    pub(crate) sha256: Option<Sha256Sum>,
    /// Body of the answer. Absent for a file without bytes.
    pub(crate) response: Option<Response>,
}

/// Client of one source.
#[derive(Debug)]
pub(crate) struct SourceClient {
    http: CheckedClient,
    pub(crate) source: Source,
    root: PathBuf,
    /// Redirect targets that the source gave for the bytes of files, kept as long as they work.
    targets: Mutex<HashMap<String, Url>>,
    /// Set once it was reported that the source sends whole files.
    tells_whole: AtomicBool,
}

/// Returns the message, printed once, for a source that ignores range requests.
fn whole_files(root: &Path) -> String {
    format!(
        "fetch: {} lacks range requests (206): files are fetched whole, again for each part that is read, and only up \
         to {} MiB; use another server",
        root.display(),
        WHOLE_FILE >> 20
    )
}

impl SourceClient {
    /// Creates a client of `source`, which messages call `root`.
    pub(crate) fn new(http: CheckedClient, source: Source, root: PathBuf) -> Self {
        Self { http, source, root, targets: Mutex::default(), tells_whole: AtomicBool::new(false) }
    }

    /// Returns the name of the file in messages.
    pub(crate) fn place(&self, name: &str) -> String {
        self.root.join(name).display().to_string()
    }

    /// Returns the name of the source in messages.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Requests the bytes `range` of a file once.
    pub(crate) async fn get(
        &self,
        name: &str,
        range: Range<u64>,
        condition: Condition<'_>,
    ) -> Result<Reply, Failed> {
        let place = self.place(name);
        let mut headers = HeaderMap::new();
        let last = range.end.saturating_sub(1);
        headers.insert(header::RANGE, value(&format!("bytes={}-{last}", range.start), &place)?);
        self.set_condition(&mut headers, condition, &place)?;
        let VerifiedResponse { response, sha256 } = self.send(Method::GET, name, &headers).await?;
        let answer = |problem: String| FetchError::Answer { place: place.clone(), problem };
        if response.headers().get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity") {
            return Err(answer("unexpected compressed body".to_owned()).into());
        }
        let (got, size) = match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let (got, size) = content_range(response.headers())
                    .ok_or_else(|| answer("206 without a valid Content-Range".to_owned()))?;
                if got.start != range.start || got.end > range.end {
                    return Err(answer(format!("expected bytes {range:?}, got {got:?}")).into());
                }
                (got, size)
            }
            StatusCode::OK => {
                let size = content_length(response.headers())
                    .filter(|size| *size <= WHOLE_FILE)
                    .ok_or_else(|| FetchError::NoRanges { place: place.clone(), limit: WHOLE_FILE })?;
                let is_more = size > range.end - range.start || range.start > 0;
                if is_more && !self.tells_whole.swap(true, Ordering::Relaxed) {
                    progress::print_line(&whole_files(&self.root));
                }
                (0..size, size)
            }
            StatusCode::NOT_MODIFIED if matches!(condition, Condition::Other(_)) => {
                return Ok(Reply::Unchanged);
            }
            StatusCode::RANGE_NOT_SATISFIABLE
                if range.start == 0 && matches!(condition, Condition::Any | Condition::Other(_)) =>
            {
                // No byte can be had of an empty file.
                (0..0, 0)
            }
            StatusCode::PRECONDITION_FAILED | StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(FetchError::Changed { place, change: describe(&response) }.into());
            }
            StatusCode::NOT_FOUND | StatusCode::GONE => {
                let answer = error_text(response).await;
                return Ok(Reply::Absent(FetchError::Missing { place, answer }));
            }
            StatusCode::FORBIDDEN if self.source.hides_missing() => {
                return Ok(Reply::Absent(self.refused(place, error_text(response).await)));
            }
            _ => return Err(self.failed(place, response).await),
        };
        let identity = self.identity(size, response.headers());
        if let Condition::Same(known) = condition
            && let Some(change) = known.difference(&identity)
        {
            return Err(FetchError::Changed { place, change }.into());
        }
        let response = Some(response).filter(|_| !got.is_empty());
        Ok(Reply::Bytes(Box::new(Bytes { range: got, identity, sha256, response })))
    }

    /// The SHA-256 that the source states of a file, where it does only when it is asked for it.
    pub(crate) async fn checksum(&self, name: &str) -> Result<Option<Sha256Sum>, Failed> {
        let VerifiedResponse { response, .. } = self.send(Method::HEAD, name, &HeaderMap::new()).await?;
        match response.status() {
            StatusCode::OK => Ok(Sha256Sum::from_s3(response.headers())),
            _ => Err(self.failed(self.place(name), response).await),
        }
    }

    /// Conditions on the version, as far as the source's files can change and it names versions.
    fn set_condition(
        &self,
        headers: &mut HeaderMap,
        condition: Condition<'_>,
        place: &str,
    ) -> Result<(), FetchError> {
        if self.source.pinned().is_some() {
            return Ok(());
        }
        // A weak ETag can be compared, but not demanded.
        let strong = |etag: &&String| !etag.starts_with("W/");
        let (name, text) = match condition {
            Condition::Any => return Ok(()),
            Condition::Same(known) => match (known.etag.as_ref().filter(strong), &known.last_modified) {
                (Some(etag), _) => (header::IF_MATCH, etag),
                (None, Some(date)) => (header::IF_UNMODIFIED_SINCE, date),
                (None, None) => return Ok(()),
            },
            Condition::Other(known) => match (&known.etag, &known.last_modified) {
                (Some(etag), _) => (header::IF_NONE_MATCH, etag),
                (None, Some(date)) => (header::IF_MODIFIED_SINCE, date),
                (None, None) => return Ok(()),
            },
        };
        headers.insert(name, value(text, place)?);
        Ok(())
    }

    fn identity(&self, size: u64, headers: &HeaderMap) -> Identity {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        match self.source.pinned() {
            // The commit is the version; what serves the bytes of one file may differ from day to day.
            Some(_) => Identity { size, etag: None, last_modified: None },
            None => Identity { size, etag: text(header::ETAG), last_modified: text(header::LAST_MODIFIED) },
        }
    }

    /// Sends a request to where the bytes of `name` are.
    async fn send(
        &self,
        method: Method,
        name: &str,
        headers: &HeaderMap,
    ) -> Result<VerifiedResponse, Failed> {
        let known = self.targets().get(name).cloned();
        if let Some(target) = known {
            let response = self.send_to(&method, &target, headers, name).await?;
            if !is_lost(response.status()) {
                return Ok(VerifiedResponse { response, sha256: None });
            }
            // Signed URLs expire: ask for another one.
            self.targets().remove(name);
        }
        let origin = self.source.url(name);
        let mut url = origin.clone();
        let mut sha256 = None;
        for _ in 0..=REDIRECTS {
            let response = self.send_to(&method, &url, headers, name).await?;
            if url.origin() == origin.origin() {
                sha256 = sha256.or_else(|| Sha256Sum::from_hub(response.headers()));
            }
            if !is_redirect(&response) {
                let away = url.origin() != origin.origin();
                if away && is_lost(response.status()) {
                    let problem = format!("{} after a redirect", describe(&response));
                    let error = FetchError::Unavailable { place: self.place(name), problem };
                    return Err(Failed { error, again: RetryDecision::Soon(None) });
                }
                if away {
                    self.targets().insert(name.to_owned(), url);
                }
                return Ok(VerifiedResponse { response, sha256 });
            }
            url = redirect(&response, &url)
                .map_err(|problem| FetchError::Answer { place: self.place(name), problem })?;
        }
        let problem = format!("more than {REDIRECTS} redirects");
        Err(FetchError::Answer { place: self.place(name), problem }.into())
    }

    /// Sends one request; credentials go to the source alone.
    async fn send_to(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        name: &str,
    ) -> Result<Response, Failed> {
        let mut request = reqwest::Request::new(method.clone(), url.clone());
        *request.headers_mut() = headers.clone();
        if url.origin() == self.source.url(name).origin() {
            request.headers_mut().extend(self.source.credentials(method, url).await?);
        }
        self.http.execute(request, self.place(name)).await
    }

    fn targets(&self) -> MutexGuard<'_, HashMap<String, Url>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, place: String, answer: String) -> FetchError {
        FetchError::Refused { place, answer, advice: self.source.advice().to_owned() }
    }

    async fn failed(&self, place: String, response: Response) -> Failed {
        failure(place, self.source.advice(), response).await
    }
}

/// An answer and what was learned on the way to it.
struct VerifiedResponse {
    response: Response,
    sha256: Option<Sha256Sum>,
}

fn value(text: &str, place: &str) -> Result<HeaderValue, FetchError> {
    HeaderValue::from_str(text).map_err(|error| FetchError::Answer {
        place: place.to_owned(),
        problem: format!("invalid header value: {error}"),
    })
}
