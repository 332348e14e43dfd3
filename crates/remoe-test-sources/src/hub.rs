//! Test server with the hub's API for fetching: a repository's description, and its files at a commit. Large files are
//! on a second server, at signed URLs.

use crate::Server;
use crate::content::Content;
use axum::Router;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Options of the repository.
#[derive(Debug, Clone)]
pub struct HubOptions {
    /// Organisation and name.
    pub repository: String,
    /// Commit of the branch `main`.
    pub commit: String,
    /// Token that requests must have. `None`: no token is required.
    pub token: Option<String>,
    /// Size in bytes from which files are in large file storage.
    pub large_from: u64,
    /// The stated SHA-256 of large files is wrong.
    pub wrong_checksums: bool,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self {
            repository: "org/model".to_owned(),
            commit: "0123456789abcdef0123456789abcdef01234567".to_owned(),
            token: None,
            large_from: 16 << 10,
            wrong_checksums: false,
        }
    }
}

/// Hub server with one repository.
#[derive(Debug)]
pub struct Hub {
    server: Server,
    _storage: Server,
    state: Arc<HubState>,
}

#[derive(Debug)]
struct HubState {
    options: HubOptions,
    content: Arc<Content>,
    storage: String,
    /// Requests per signature of a URL.
    signed: Mutex<BTreeMap<String, usize>>,
    /// Requests to the storage server that leaked the token.
    leaked: Mutex<usize>,
    described: Mutex<usize>,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    /// Starts the hub and its storage server. Port 0 selects a free one.
    ///
    /// # Errors
    /// The address is in use.
    pub async fn start(listen: SocketAddr, content: Arc<Content>, options: HubOptions) -> io::Result<Self> {
        let any = SocketAddr::new(listen.ip(), 0);
        // Bound first, because the state of both servers contains the storage's address.
        let listener = tokio::net::TcpListener::bind(any).await?;
        let address = listener.local_addr()?;
        let state = Arc::new(HubState {
            options,
            content,
            storage: format!("http://{address}"),
            signed: Mutex::default(),
            leaked: Mutex::default(),
            described: Mutex::default(),
        });
        let storage = Router::new().route("/{name}", get(get_stored)).with_state(Arc::clone(&state));
        let task = tokio::spawn(async move {
            // Serves until the task is aborted.
            let _ended = axum::serve(listener, storage).await;
        });
        let router = Router::new()
            .route("/api/models/{organisation}/{name}/revision/{revision}", get(get_description))
            .route("/{organisation}/{name}/resolve/{revision}/{file}", get(get_file))
            .with_state(Arc::clone(&state));
        let server = Server::start(listen, router).await?;
        Ok(Self { server, _storage: Server { address, task }, state })
    }

    /// Returns the value for HF_ENDPOINT.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.server.url()
    }

    /// Returns the value for `--model`.
    #[must_use]
    pub fn model(&self) -> String {
        format!("hf://{}", self.state.options.repository)
    }

    /// Returns the number of requests that leaked the token to the storage server.
    #[must_use]
    pub fn leaked(&self) -> usize {
        *locked(&self.state.leaked)
    }

    /// Returns the number of requests for the repository's description.
    #[must_use]
    pub fn described(&self) -> usize {
        *locked(&self.state.described)
    }
}

impl HubState {
    /// Returns an error response for a wrong token or another repository.
    fn refusal(&self, repository: &str, headers: &HeaderMap) -> Option<Response> {
        let authorization = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let wanted = self.options.token.as_ref().map(|token| format!("Bearer {token}"));
        if wanted.is_some() && authorization != wanted.as_deref() {
            let message = [("x-error-message", "Invalid username or password.")];
            return Some((StatusCode::UNAUTHORIZED, message).into_response());
        }
        (repository != self.options.repository).then(|| {
            let headers = [("x-error-code", "RepoNotFound"), ("x-error-message", "Repository not found")];
            (StatusCode::NOT_FOUND, headers).into_response()
        })
    }
}

async fn get_description(
    State(state): State<Arc<HubState>>,
    Path((organisation, name, revision)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Response {
    *locked(&state.described) += 1;
    if let Some(failure) = state.content.failure() {
        return failure;
    }
    if let Some(refusal) = state.refusal(&format!("{organisation}/{name}"), &headers) {
        return refusal;
    }
    if revision != "main" && revision != state.options.commit {
        let headers = [("x-error-code", "RevisionNotFound"), ("x-error-message", "Invalid rev id")];
        return (StatusCode::NOT_FOUND, headers).into_response();
    }
    let siblings: Vec<_> =
        state.content.names().into_iter().map(|name| json!({ "rfilename": name })).collect();
    axum::Json(json!({ "sha": state.options.commit, "siblings": siblings })).into_response()
}

async fn get_file(
    State(state): State<Arc<HubState>>,
    Path((organisation, name, revision, file)): Path<(String, String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    if let Some(refusal) = state.refusal(&format!("{organisation}/{name}"), &headers) {
        return refusal;
    }
    if revision != state.options.commit {
        return StatusCode::NOT_FOUND.into_response();
    }
    let Some((opened, size)) = state.content.open(&file) else {
        return (StatusCode::NOT_FOUND, [("x-error-code", "EntryNotFound")]).into_response();
    };
    if size < state.options.large_from {
        return state
            .content
            .failure()
            .unwrap_or_else(|| state.content.respond(&file, &method, &headers, true));
    }
    let signature = {
        let mut signed = locked(&state.signed);
        let signature = format!("s{}", signed.len());
        signed.insert(signature.clone(), 0);
        signature
    };
    let mut hash = Sha256::new();
    let mut reader = io::BufReader::new(opened);
    if io::copy(&mut reader, &mut HashWriter(&mut hash)).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    if state.options.wrong_checksums {
        hash.update(b"wrong");
    }
    let mut etag = String::from("\"");
    hash.finalize().iter().for_each(|byte| {
        // Writing to a string cannot fail.
        let _written = write!(etag, "{byte:02x}");
    });
    etag.push('"');
    let location = format!("{}/{file}?signature={signature}", state.storage);
    let mut response_headers = HeaderMap::new();
    for (name, text) in [("location", location), ("x-linked-etag", etag), ("x-linked-size", size.to_string())]
    {
        response_headers.extend(
            HeaderValue::from_str(&text).ok().map(|value| (http::HeaderName::from_static(name), value)),
        );
    }
    (StatusCode::FOUND, response_headers).into_response()
}

struct HashWriter<'a>(&'a mut Sha256);

impl io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn get_stored(
    State(state): State<Arc<HubState>>,
    Path(file): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    if headers.contains_key(header::AUTHORIZATION) {
        *locked(&state.leaked) += 1;
    }
    let uses = {
        let mut signed = locked(&state.signed);
        query.get("signature").and_then(|signature| signed.get_mut(signature)).map(|uses| {
            *uses += 1;
            *uses
        })
    };
    let limit = state.content.faults().uses_of_signed_urls;
    if uses.is_none_or(|uses| limit > 0 && uses > limit) {
        return (StatusCode::FORBIDDEN, "<Error><Code>AccessDenied</Code></Error>").into_response();
    }
    state.content.failure().unwrap_or_else(|| state.content.respond(&file, &method, &headers, true))
}
