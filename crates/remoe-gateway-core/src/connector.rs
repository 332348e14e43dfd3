//! Connections to main functions: in plaintext, or within TLS to exactly one of them.
//!
//! The URI of a request has the identity that must answer in its authority, by which the HTTP client pools
//! connections. So a connection to one function is never used for another, even at the same address.

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

/// Scheme of identities. The authority of a URI has the rest of the identity before the address, with colons for
/// slashes.
const SCHEME: &str = "spiffe://";

/// Returns the URI of `target` at the function at `address`, which must prove `identity`. Without `identity`, any
/// process may answer there, in plaintext.
///
/// # Errors
/// `target` is invalid.
pub fn function_uri(
    address: SocketAddr,
    identity: Option<&Identity>,
    target: &str,
) -> Result<Uri, InvalidUri> {
    match identity {
        None => format!("http://{address}{target}"),
        Some(identity) => {
            let name = identity.to_string().replacen(SCHEME, "", 1).replace('/', ":");
            format!("https://{name}@{address}{target}")
        }
    }
    .parse()
}

/// Connects to functions by the URIs of [`function_uri`].
#[derive(Debug, Clone)]
pub struct Connector {
    tcp: HttpConnector,
    keyring: Option<Arc<Keyring>>,
}

impl Connector {
    /// Presents the certificate in `keyring`, which functions that prove their identity require. TCP connections must
    /// be made within `timeout`; TLS handshakes are not counted.
    #[must_use]
    pub fn new(keyring: Option<Arc<Keyring>>, timeout: Duration) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        // Tokens are small packets, which must not wait for each other.
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(timeout));
        Self { tcp, keyring }
    }

    /// Returns the identity that must answer at `uri`; `None`: any process may, in plaintext.
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
        let no_certificate = || {
            io::Error::other(format!(
                "cannot connect to {identity}: it requires a client certificate; set --identity-dir"
            ))
        };
        let keyring = self.keyring.clone().ok_or_else(no_certificate)?;
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
    fn uri_has_address_and_identity_of_a_function() {
        for address in ["10.0.0.1:8000", "[fd00::1]:8000"] {
            let address: SocketAddr = address.parse().unwrap();
            let open = function_uri(address, None, "/health").unwrap();
            assert_eq!(open.to_string(), format!("http://{address}/health"));
            let one = function_uri(address, Some(&main_of("0a1b-2c")), "/v1/models?a=b").unwrap();
            assert_eq!(one.authority().unwrap().as_str(), format!("remoe:models:0a1b-2c:main@{address}"));
            let parts = (one.host(), one.port_u16(), one.path_and_query().unwrap().as_str());
            assert_eq!(parts, (open.host(), Some(8000), "/v1/models?a=b"));
            let other = function_uri(address, Some(&main_of("other")), "/").unwrap();
            assert!(one.authority() != other.authority() && one.authority() != open.authority());
        }
    }

    #[test]
    fn server_with_required_identity_needs_a_certificate() {
        let connector = Connector::new(None, Duration::from_secs(1));
        let address = "10.0.0.1:8000".parse().unwrap();
        assert!(connector.trust(&function_uri(address, None, "/").unwrap()).unwrap().is_none());
        let refused =
            connector.trust(&function_uri(address, Some(&main_of("uid")), "/").unwrap()).unwrap_err();
        assert!(refused.to_string().contains("spiffe://remoe/models/uid/main"), "{refused}");
        for anonymous in ["https://10.0.0.1:8000/", "https://main@10.0.0.1:8000/"] {
            assert!(connector.trust(&anonymous.parse().unwrap()).is_err(), "{anonymous}");
        }
    }
}
