//! Test server with the S3 API for fetching: signed `GetObject` and `HeadObject`.

use crate::Server;
use crate::content::Content;
use crate::signature::{SigningKey, check_signature};
use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode, Uri};
use percent_encoding::percent_decode_str;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

/// Options of the bucket, and the access key that may read it.
#[derive(Debug, Clone)]
pub struct S3Options {
    /// Name of the bucket.
    pub bucket: String,
    /// Prefix of all keys, without a slash at either end.
    pub prefix: String,
    /// AWS_ACCESS_KEY_ID.
    pub key_id: String,
    /// AWS_SECRET_ACCESS_KEY.
    pub secret: String,
    /// AWS_REGION.
    pub region: String,
    /// The access key may not list the bucket: requests for missing objects get 403.
    pub no_listing: bool,
}

impl Default for S3Options {
    fn default() -> Self {
        Self {
            bucket: "models".to_owned(),
            prefix: "some/model v1".to_owned(),
            key_id: "test-key".to_owned(),
            secret: "test-secret".to_owned(),
            region: "eu-central-1".to_owned(),
            no_listing: false,
        }
    }
}

/// S3 server with one bucket.
#[derive(Debug)]
pub struct S3 {
    server: Server,
    state: Arc<S3State>,
}

#[derive(Debug)]
struct S3State {
    options: S3Options,
    content: Arc<Content>,
}

impl S3 {
    /// Starts the server. Port 0 selects a free one.
    ///
    /// # Errors
    /// The address is in use.
    pub async fn start(listen: SocketAddr, content: Arc<Content>, options: S3Options) -> io::Result<Self> {
        let state = Arc::new(S3State { options, content });
        let router = Router::new().fallback(get_object).with_state(Arc::clone(&state));
        Ok(Self { server: Server::start(listen, router).await?, state })
    }

    /// Returns the value for AWS_ENDPOINT_URL.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.server.url()
    }

    /// Returns the value for `--model`.
    #[must_use]
    pub fn model(&self) -> String {
        format!("s3://{}/{}", self.state.options.bucket, self.state.options.prefix)
    }

    /// Returns the environment variables of a client with the access key.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let S3Options { key_id, secret, region, .. } = &self.state.options;
        vec![
            ("AWS_ENDPOINT_URL", self.endpoint()),
            ("AWS_ACCESS_KEY_ID", key_id.clone()),
            ("AWS_SECRET_ACCESS_KEY", secret.clone()),
            ("AWS_REGION", region.clone()),
        ]
    }
}

async fn get_object(
    State(state): State<Arc<S3State>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let S3State { options, content } = &*state;
    let key = SigningKey { id: &options.key_id, secret: &options.secret, region: &options.region };
    if let Err(reason) = check_signature(key, &method, &uri, &headers) {
        return error_response(StatusCode::FORBIDDEN, &format!("{reason:?}"));
    }
    if let Some(failure) = content.failure() {
        return failure;
    }
    let path = percent_decode_str(uri.path()).decode_utf8_lossy().into_owned();
    let Some(key) = path.strip_prefix(&format!("/{}/", options.bucket)) else {
        return error_response(StatusCode::NOT_FOUND, "NoSuchBucket");
    };
    let name = key.strip_prefix(&format!("{}/", options.prefix)).unwrap_or_default();
    if content.open(name).is_none() {
        return if options.no_listing {
            error_response(StatusCode::FORBIDDEN, "AccessDenied")
        } else {
            error_response(StatusCode::NOT_FOUND, "NoSuchKey")
        };
    }
    content.respond(name, &method, &headers, true)
}

fn error_response(status: StatusCode, code: &str) -> Response {
    let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{code}.</Message></Error>");
    (status, [("content-type", "application/xml")], body).into_response()
}
