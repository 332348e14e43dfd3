//! Test web server.

use crate::Server;
use crate::content::Content;
use axum::Router;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::get;
use http::{HeaderMap, Method};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

/// Web server with the files of a folder below `/models/`.
#[derive(Debug)]
pub struct Web {
    server: Server,
}

impl Web {
    /// Starts the server. Port 0 selects a free one.
    ///
    /// # Errors
    /// The address is in use.
    pub async fn start(listen: SocketAddr, content: Arc<Content>) -> io::Result<Self> {
        let router = Router::new().route("/models/{name}", get(get_file)).with_state(content);
        Ok(Self { server: Server::start(listen, router).await? })
    }

    /// Returns the value for `--model`.
    #[must_use]
    pub fn model(&self) -> String {
        format!("{}/models", self.server.url())
    }
}

async fn get_file(
    State(content): State<Arc<Content>>,
    Path(name): Path<String>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    content.failure().unwrap_or_else(|| content.respond(&name, &method, &headers, true))
}
