//! Connections to main functions: in plaintext, or within TLS to exactly one of them.
//!
//! The identity that must answer is in the URI of a request, in the part by which clients pool connections: a
//! connection that was made for one function is never used for another, wherever that is reached.

use axum::http::Uri;
use axum::http::uri::{InvalidUri, Scheme};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use remoe_proto::identity::{Counterpart, Identity, Keyring, MaybeTlsStream, Protocol, Trust};
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tower_service::Service;

/// Prefix of a process's identity. A URI has the rest before its address, with colons for slashes.
const SCHEME: &str = "spiffe://";

/// Returns the URI of `target` at the function at `address`, which must have `identity`. Without one, any process may
/// answer there, in plaintext.
///
/// # Errors
/// `target` is invalid.
pub fn uri(address: SocketAddr, identity: Option<&Identity>, target: &str) -> Result<Uri, InvalidUri> {
    match identity {
        None => format!("http://{address}{target}"),
        Some(identity) => {
            let name = identity.to_string().replacen(SCHEME, "", 1).replace('/', ":");
            format!("https://{name}@{address}{target}")
        }
    }
    .parse()
}

/// Connects to what [`uri`] names.
#[derive(Debug, Clone)]
pub struct Connector {
    tcp: HttpConnector,
    keyring: Option<Arc<Keyring>>,
}

impl Connector {
    /// Shows what is in `keyring`, without which a function that must prove its identity cannot be reached. Connections
    /// are made within `limit`, not counting their handshakes.
    #[must_use]
    pub fn new(keyring: Option<Arc<Keyring>>, limit: Duration) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        // Single tokens are small packets; they must not wait for each other.
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(limit));
        Self { tcp, keyring }
    }

    /// Returns the identity that must answer at `uri`; none: any process may, in plaintext.
    fn trust(&self, uri: &Uri) -> io::Result<Option<Trust>> {
        if uri.scheme() != Some(&Scheme::HTTPS) {
            return Ok(None);
        }
        let no_identity =
            || io::Error::new(io::ErrorKind::InvalidInput, format!("missing identity in {uri}"));
        let authority = uri.authority().map(|authority| authority.as_str());
        let (name, _) = authority.and_then(|authority| authority.split_once('@')).ok_or_else(no_identity)?;
        let identity: Identity =
            format!("{SCHEME}{}", name.replace(':', "/")).parse().map_err(io::Error::other)?;
        let missing = || {
            io::Error::other(format!(
                "cannot connect to {identity}: it requires a client certificate; set --identity-dir"
            ))
        };
        let keyring = self.keyring.clone().ok_or_else(missing)?;
        Ok(Some(Trust { keyring, peer: Counterpart::Named(identity) }))
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<MaybeTlsStream<TcpStream>>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let trust = self.trust(&uri);
        let connecting = self.tcp.call(uri);
        Box::pin(async move {
            let trust = trust?;
            let stream = connecting.await?.into_inner();
            Ok(TokioIo::new(match trust {
                None => MaybeTlsStream::Plain(stream),
                Some(trust) => trust.connect_for(Protocol::Http, stream).await?,
            }))
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn main_of(deployment: &str) -> Identity {
        Identity::Main { namespace: "models".to_owned(), deployment: deployment.to_owned() }
    }

    #[test]
    fn a_uri_says_where_a_function_is_and_who() {
        for address in ["10.0.0.1:8000", "[fd00::1]:8000"] {
            let address: SocketAddr = address.parse().unwrap();
            let open = uri(address, None, "/health").unwrap();
            assert_eq!(open.to_string(), format!("http://{address}/health"));
            let one = uri(address, Some(&main_of("0a1b-2c")), "/v1/models?a=b").unwrap();
            assert_eq!(one.authority().unwrap().as_str(), format!("remoe:models:0a1b-2c:main@{address}"));
            let parts = (one.host(), one.port_u16(), one.path_and_query().unwrap().as_str());
            assert_eq!(parts, (open.host(), Some(8000), "/v1/models?a=b"));
            let other = uri(address, Some(&main_of("other")), "/").unwrap();
            assert!(one.authority() != other.authority() && one.authority() != open.authority());
        }
    }

    #[test]
    fn server_with_required_identity_needs_a_certificate() {
        let connector = Connector::new(None, Duration::from_secs(1));
        let address = "10.0.0.1:8000".parse().unwrap();
        assert!(connector.trust(&uri(address, None, "/").unwrap()).unwrap().is_none());
        let refused = connector.trust(&uri(address, Some(&main_of("uid")), "/").unwrap()).unwrap_err();
        assert!(refused.to_string().contains("spiffe://remoe/models/uid/main"), "{refused}");
        for anonymous in ["https://10.0.0.1:8000/", "https://main@10.0.0.1:8000/"] {
            assert!(connector.trust(&anonymous.parse().unwrap()).is_err(), "{anonymous}");
        }
    }
}
