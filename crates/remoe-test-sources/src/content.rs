//! Files of a folder that servers send, with counters and injected faults.

use crate::faults::Faults;
use crate::ranges::{RequestedRange, requested_range};
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes per chunk of a body.
const CHUNK_BYTES: u64 = 64 << 10;
/// Time that sent bytes are given to leave before the connection breaks.
const FLUSH_TIME: Duration = Duration::from_millis(20);
/// `Last-Modified` of all files.
const DATE: &str = "Wed, 21 Oct 2015 07:28:00 GMT";

/// Counters of the responses for one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransferCount {
    /// Number of requests.
    pub requests: usize,
    /// Bytes of the sent bodies.
    pub bytes: u64,
    /// Requested byte ranges, in the order of the requests.
    pub ranges: Vec<Range<u64>>,
}

/// Files of a folder, with counters and faults.
#[derive(Debug)]
pub struct Content {
    folder: PathBuf,
    faults: Mutex<Faults>,
    counted: Mutex<BTreeMap<String, TransferCount>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Content {
    /// Creates the content from the files of `folder`.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Arc<Self> {
        Arc::new(Self { folder: folder.into(), faults: Mutex::default(), counted: Mutex::default() })
    }

    /// Changes the injected faults.
    pub fn change(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut locked(&self.faults));
    }

    /// Returns the current faults.
    #[must_use]
    pub fn faults(&self) -> Faults {
        locked(&self.faults).clone()
    }

    /// Returns the counters by file name.
    #[must_use]
    pub fn counted(&self) -> BTreeMap<String, TransferCount> {
        locked(&self.counted).clone()
    }

    /// Returns the counters by file name, and resets them.
    pub fn take_counted(&self) -> BTreeMap<String, TransferCount> {
        std::mem::take(&mut locked(&self.counted))
    }

    /// Returns the sent bytes of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        locked(&self.counted).values().map(|counted| counted.bytes).sum()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir()));
        let mut names: Vec<_> = files.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.retain(|name| !self.faults().absent.contains(name));
        names.sort_unstable();
        names
    }

    pub(crate) fn open(&self, name: &str) -> Option<(File, u64)> {
        if name.is_empty() || name.contains('/') || self.faults().absent.contains(name) {
            return None;
        }
        let file = File::open(self.folder.join(name)).ok()?;
        let size = file.metadata().ok()?.len();
        Some((file, size))
    }

    /// Returns an error response if a failure is injected.
    pub(crate) fn failure(&self) -> Option<Response> {
        let mut faults = locked(&self.faults);
        faults.failures = faults.failures.checked_sub(1)?;
        let status = StatusCode::from_u16(faults.status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        Some((status, "a fault").into_response())
    }

    /// Responds to a request for the file `name`. With `versioned`, sends and checks ETag and date.
    pub(crate) fn respond(
        self: &Arc<Self>,
        name: &str,
        method: &Method,
        request: &HeaderMap,
        versioned: bool,
    ) -> Response {
        let Some((file, size)) = self.open(name) else {
            return (StatusCode::NOT_FOUND, "no such file").into_response();
        };
        let faults = self.faults();
        let text = |name: HeaderName| request.get(name).and_then(|value| value.to_str().ok());
        let etag = format!("\"{size}-{}\"", faults.version);
        if versioned && !faults.no_validators {
            if text(header::IF_MATCH).is_some_and(|wanted| wanted != etag) {
                return StatusCode::PRECONDITION_FAILED.into_response();
            }
            if text(header::IF_NONE_MATCH) == Some(&etag) {
                return StatusCode::NOT_MODIFIED.into_response();
            }
        }
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        if versioned && !faults.no_validators {
            headers.extend(HeaderValue::from_str(&etag).ok().map(|etag| (header::ETAG, etag)));
            headers.insert(header::LAST_MODIFIED, HeaderValue::from_static(DATE));
        }
        let (status, range) = match requested_range(text(header::RANGE).filter(|_| !faults.no_ranges), size) {
            RequestedRange::Whole => (StatusCode::OK, 0..size),
            RequestedRange::Part(range) => (StatusCode::PARTIAL_CONTENT, range),
            RequestedRange::Unsatisfiable => return StatusCode::RANGE_NOT_SATISFIABLE.into_response(),
        };
        if status == StatusCode::PARTIAL_CONTENT {
            let value = format!("bytes {}-{}/{size}", range.start, range.end - 1);
            headers.extend(HeaderValue::from_str(&value).ok().map(|value| (header::CONTENT_RANGE, value)));
        }
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(range.end - range.start));
        if method == Method::HEAD {
            return (status, headers).into_response();
        }
        {
            let mut counted = locked(&self.counted);
            let counted = counted.entry(name.to_owned()).or_default();
            counted.requests += 1;
            counted.ranges.push(range.clone());
        }
        (status, headers, self.body(name, file, range)).into_response()
    }

    /// Creates a body of the bytes `range` of a file, which counts them as they are sent.
    fn body(self: &Arc<Self>, name: &str, file: File, range: Range<u64>) -> Body {
        let break_at = {
            let mut faults = locked(&self.faults);
            let break_at = faults.cut_after.filter(|_| faults.cuts > 0);
            faults.cuts = faults.cuts.saturating_sub(usize::from(break_at.is_some()));
            break_at.map_or(u64::MAX, |after| range.start + after)
        };
        let faults = self.faults();
        let (content, name, file) = (Arc::clone(self), name.to_owned(), Arc::new(file));
        Body::from_stream(stream::try_unfold(range, move |range| {
            let (content, name, file) = (Arc::clone(&content), name.clone(), Arc::clone(&file));
            async move {
                if range.is_empty() {
                    return Ok(None);
                }
                if range.start >= break_at {
                    // Lets the bytes that were sent before reach the client.
                    tokio::time::sleep(FLUSH_TIME).await;
                    return Err(io::Error::from(io::ErrorKind::ConnectionReset));
                }
                let end = range.end.min(range.start + CHUNK_BYTES).min(break_at);
                if let Some(rate) = faults.bytes_per_second {
                    let seconds = (end - range.start) as f64 / rate.max(1) as f64;
                    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
                }
                if faults.hang && range.start > 0 {
                    std::future::pending::<()>().await;
                }
                let mut chunk = vec![0; usize::try_from(end - range.start).unwrap_or(0)];
                file.read_exact_at(&mut chunk, range.start)?;
                locked(&content.counted).entry(name).or_default().bytes += end - range.start;
                Ok(Some((Bytes::from(chunk), end..range.end)))
            }
        }))
    }
}
