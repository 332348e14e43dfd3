//! Admission of connections by identity.

use crate::identity::{HANDSHAKE_LIMIT, MaybeTlsStream, PeerIdentities, Protocol, PublicCertificate, Trust};
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// Reason why a connection was not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It showed no trusted certificate, or spoke another protocol.
    Handshake,
    /// It did not finish the handshake in time.
    Timeout,
    /// It has another identity: by gRPC its requests are answered with PERMISSION_DENIED, by HTTP it is not answered.
    Identity,
}

impl Refusal {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Handshake, Self::Timeout, Self::Identity];

    /// For metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Timeout => "timeout",
            Self::Identity => "identity",
        }
    }
}

/// Handshake of the connections of a server.
#[derive(Clone)]
pub struct TlsHandshake {
    guard: HandshakePolicy,
    refused: Arc<dyn Fn(Refusal) + Send + Sync>,
}

/// Rule for who is let in.
#[derive(Clone)]
enum HandshakePolicy {
    /// Whom a [`Trust`] names.
    Named(Trust),
    /// All clients that speak TLS.
    Public(Arc<PublicCertificate>),
}

impl TlsHandshake {
    /// Lets in whom `trust` names; `refused` hears of everybody else.
    #[must_use]
    pub fn new(trust: Trust, refused: impl Fn(Refusal) + Send + Sync + 'static) -> Self {
        Self { guard: HandshakePolicy::Named(trust), refused: Arc::new(refused) }
    }

    /// Lets in all clients that speak TLS, and shows them `certificate`.
    #[must_use]
    pub fn public(certificate: Arc<PublicCertificate>) -> Self {
        Self { guard: HandshakePolicy::Public(certificate), refused: Arc::new(|_| ()) }
    }

    /// The handshake over `stream` for `protocol`, and whether the other end is let in; none where it comes to nothing.
    pub async fn enter<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        protocol: Protocol,
        stream: S,
    ) -> Option<(MaybeTlsStream<S>, bool)> {
        let entering = async {
            Ok::<_, io::Error>(match &self.guard {
                HandshakePolicy::Named(trust) => {
                    let (line, ends) = trust.accept(protocol, stream).await?;
                    (line, Some(ends))
                }
                HandshakePolicy::Public(certificate) => (certificate.accept(stream).await?, None),
            })
        };
        let (line, ends) = match timeout(HANDSHAKE_LIMIT, entering).await {
            Ok(Ok(accepted)) => accepted,
            // It left, as who only asks whether a port is open does.
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return None,
            Ok(Err(error)) => {
                tracing::debug!(%error, reason = "handshake", "connection refused");
                (self.refused)(Refusal::Handshake);
                return None;
            }
            Err(_elapsed) => {
                (self.refused)(Refusal::Timeout);
                return None;
            }
        };
        let Some(PeerIdentities { found, needed }) = ends else { return Some((line, true)) };
        let welcome = found == needed;
        if !welcome {
            tracing::warn!(%found, %needed, reason = "identity", "connection refused");
            (self.refused)(Refusal::Identity);
        }
        Some((line, welcome))
    }
}
