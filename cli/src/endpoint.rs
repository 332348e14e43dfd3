//! HTTP client of a gateway, with limits of time and size.

use crate::exit::CliError;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::net::IpAddr;
use std::time::Duration;

/// Gateway at a URL, with the API key for it.
pub(crate) struct GatewayEndpoint {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
    api_key: Option<String>,
}

impl GatewayEndpoint {
    pub(crate) fn new(url: &str, api_key: Option<&str>) -> Self {
        Self {
            client: Client::builder(TokioExecutor::new()).build_http(),
            url: url.trim_end_matches('/').to_owned(),
            api_key: api_key.filter(|key| !key.is_empty()).map(str::to_owned),
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Reports if the gateway is on this machine. Only then do its process ids refer to local processes.
    pub(crate) fn is_local(&self) -> bool {
        let host = self.url.parse::<axum::http::Uri>().ok().and_then(|uri| uri.host().map(str::to_owned));
        let host = host.unwrap_or_default();
        let ip = host.trim_matches(['[', ']']).parse::<IpAddr>();
        host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
    }

    /// Returns an error about a failed request for `path`.
    pub(crate) fn request_error(&self, path: &str, problem: &dyn std::fmt::Display) -> CliError {
        CliError {
            field: Some("--endpoint".to_owned()),
            ..CliError::runtime(format!("cannot read {}{path}: {problem}", self.url))
        }
    }

    /// Fetches the body at `path`, of at most `max_bytes`, within `timeout`.
    pub(crate) async fn get(
        &self,
        path: &str,
        max_bytes: usize,
        timeout: Duration,
    ) -> Result<Bytes, CliError> {
        let failed = |problem: &dyn std::fmt::Display| self.request_error(path, problem);
        let mut request = axum::http::Request::get(format!("{}{path}", self.url));
        if let Some(key) = &self.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.body(Full::default()).map_err(|error| failed(&error))?;
        let response = async {
            let response = self.client.request(request).await.map_err(|error| match error.is_connect() {
                true => failed(&"connection failed; see `remoe ps` for the endpoints on this machine"),
                false => failed(&error),
            })?;
            let status = response.status();
            let body = Limited::new(response.into_body(), max_bytes)
                .collect()
                .await
                .map_err(|error| failed(&error))?;
            Ok::<_, CliError>((status, body.to_bytes()))
        };
        let (status, body) = tokio::time::timeout(timeout, response)
            .await
            .map_err(|_late| failed(&format!("no answer within {} s", timeout.as_secs_f64())))??;
        if !status.is_success() {
            return Err(failed(&format!("{status}: {}", String::from_utf8_lossy(&body).trim())));
        }
        Ok(body)
    }
}
