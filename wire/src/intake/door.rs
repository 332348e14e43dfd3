//! Who is let in.

use crate::identity::{Ends, HANDSHAKE_LIMIT, Line, Protocol, Trust};
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

/// Why a connection was not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It showed no certificate that is believed, or spoke something else.
    Handshake,
    /// It did not finish the handshake in time.
    Timeout,
    /// It is somebody else: by gRPC its requests are answered with PERMISSION_DENIED, by HTTP it is not answered.
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

/// Lets in whom a [`Trust`] names.
#[derive(Clone)]
pub struct Door {
    trust: Trust,
    refused: Arc<dyn Fn(Refusal) + Send + Sync>,
}

impl Door {
    /// Lets in whom `trust` names; `refused` hears of everybody else.
    #[must_use]
    pub fn new(trust: Trust, refused: impl Fn(Refusal) + Send + Sync + 'static) -> Self {
        Self { trust, refused: Arc::new(refused) }
    }

    /// The handshake over `stream` for `protocol`, and whether the other end is let in; none where it comes to nothing.
    pub async fn enter<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        protocol: Protocol,
        stream: S,
    ) -> Option<(Line<S>, bool)> {
        let entering = timeout(HANDSHAKE_LIMIT, self.trust.accept(protocol, stream));
        let (line, Ends { found, needed }) = match entering.await {
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
        let welcome = found == needed;
        if !welcome {
            tracing::warn!(%found, %needed, reason = "identity", "connection refused");
            (self.refused)(Refusal::Identity);
        }
        Some((line, welcome))
    }
}
