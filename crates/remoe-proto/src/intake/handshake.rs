//! Admission of connections by identity.

use crate::identity::{HANDSHAKE_LIMIT, MaybeTlsStream, PeerIdentities, Protocol, PublicCertificate, Trust};
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// Reason that a connection was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionRefusal {
    /// The client had no trusted certificate or used another protocol.
    Handshake,
    /// The handshake timed out.
    Timeout,
    /// The client has another identity. Its gRPC requests are answered with PERMISSION_DENIED; its HTTP requests get
    /// no answer.
    Identity,
}

impl ConnectionRefusal {
    /// All reasons.
    pub const ALL: [Self; 3] = [Self::Handshake, Self::Timeout, Self::Identity];

    /// Returns the label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Timeout => "timeout",
            Self::Identity => "identity",
        }
    }
}

/// TLS handshake of a server's connections.
#[derive(Clone)]
pub struct TlsHandshake {
    policy: HandshakePolicy,
    on_refusal: Arc<dyn Fn(ConnectionRefusal) + Send + Sync>,
}

/// Clients that are accepted.
#[derive(Clone)]
enum HandshakePolicy {
    /// Only the peer that a [`Trust`] names.
    Named(Trust),
    /// All clients that use TLS.
    Public(Arc<PublicCertificate>),
}

impl TlsHandshake {
    /// Accepts only the peer that `trust` names. Calls `on_refusal` for each rejected connection.
    #[must_use]
    pub fn new(trust: Trust, on_refusal: impl Fn(ConnectionRefusal) + Send + Sync + 'static) -> Self {
        Self { policy: HandshakePolicy::Named(trust), on_refusal: Arc::new(on_refusal) }
    }

    /// Accepts all clients that use TLS and presents `certificate` to them.
    #[must_use]
    pub fn public(certificate: Arc<PublicCertificate>) -> Self {
        Self { policy: HandshakePolicy::Public(certificate), on_refusal: Arc::new(|_| ()) }
    }

    /// Performs the handshake over `stream` for `protocol`. Returns the connection, and true if the client is
    /// accepted. Returns `None` if the handshake fails.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        protocol: Protocol,
        stream: S,
    ) -> Option<(MaybeTlsStream<S>, bool)> {
        let handshake = async {
            Ok::<_, io::Error>(match &self.policy {
                HandshakePolicy::Named(trust) => {
                    let (stream, identities) = trust.accept(protocol, stream).await?;
                    (stream, Some(identities))
                }
                HandshakePolicy::Public(certificate) => (certificate.accept(stream).await?, None),
            })
        };
        let (stream, identities) = match timeout(HANDSHAKE_LIMIT, handshake).await {
            Ok(Ok(accepted)) => accepted,
            // The client closed the connection, as TCP probes do.
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return None,
            Ok(Err(error)) => {
                tracing::debug!(%error, reason = "handshake", "connection refused");
                (self.on_refusal)(ConnectionRefusal::Handshake);
                return None;
            }
            Err(_elapsed) => {
                (self.on_refusal)(ConnectionRefusal::Timeout);
                return None;
            }
        };
        let Some(PeerIdentities { found, needed }) = identities else { return Some((stream, true)) };
        let is_allowed = found == needed;
        if !is_allowed {
            tracing::warn!(%found, %needed, reason = "identity", "connection refused");
            (self.on_refusal)(ConnectionRefusal::Identity);
        }
        Some((stream, is_allowed))
    }
}
